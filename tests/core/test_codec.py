from __future__ import annotations

import pytest
import torch

from seqdiff.codec import LinearCodec


def fitted(n=2000, features=12, latent=4, groups=2):
    basis = torch.randn(latent, features, dtype=torch.float64)
    group = torch.arange(n) % groups
    x = torch.randn(n, latent, dtype=torch.float64) @ basis * (1 + 9 * group)[:, None] + 3
    codec = LinearCodec(features, latent, groups)
    report = codec.fit(x, group)
    return codec, x.float(), group, report


def test_round_trip_is_exact_when_the_data_lie_in_the_range():
    codec, x, group, report = fitted()
    torch.testing.assert_close(codec.decode(codec.encode(x, group), group), x, rtol=0, atol=2e-4)
    assert report["variance_kept"] == pytest.approx(1.0, abs=1e-9) and report["max_error"] < 1e-9


def test_latents_have_unit_variance_in_each_group():
    codec, x, group, _ = fitted()
    z = codec.encode(x, group)
    for g in (0, 1):
        torch.testing.assert_close(z[group == g].square().mean(0), torch.ones(4), rtol=0, atol=1e-3)


def test_truncation_reports_its_error():
    x = torch.randn(5000, 3, dtype=torch.float64) * torch.tensor([10.0, 5.0, 0.1], dtype=torch.float64)
    codec = LinearCodec(3, 2)
    report = codec.fit(x)
    assert report["rms_error"] == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert codec.residual.max().item() == pytest.approx(0.1, rel=0.05)


def test_partial_encoding_equals_the_posterior_mean_and_nothing_known_is_the_prior():
    codec, x, group, _ = fitted()
    whole = codec.encode_partial(x[:5], torch.ones(5, 12, dtype=torch.bool), group[:5], noise=1e-3)
    torch.testing.assert_close(whole, codec.encode(x[:5], group[:5]), rtol=0, atol=2e-3)
    none = codec.encode_partial(x[:5], torch.zeros(5, 12, dtype=torch.bool), group[:5])
    assert (none == 0).all()
    # by hand: x = z (unit basis, scale 2), one entry seen with noise .5 -> mean = 2 y / (4 + .25)
    one = LinearCodec(1, 1)
    one.scale.fill_(2.0)
    got = one.encode_partial(torch.tensor([[3.0]]), torch.tensor([[True]]), noise=0.5)
    assert got.item() == pytest.approx(2 * 3 / 4.25, rel=1e-6)


def test_log_det_is_the_sum_of_log_scales():
    codec, _, _, _ = fitted()
    torch.testing.assert_close(codec.log_det(torch.tensor([1])), codec.scale[1].log().sum()[None])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="latent_dim is 5"):
        LinearCodec(4, 5)
    with pytest.raises(ValueError, match="3 complete futures"):
        LinearCodec(8, 4).fit(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="not finite"):
        LinearCodec(8, 4).fit(torch.full((30, 8), torch.nan))
