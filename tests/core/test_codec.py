from __future__ import annotations

import math

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


def wide(n=20_000, std=(3.0, 2.0, 0.5, 0.1), groups=2, seed=0):
    """Independent directions, turned; group 1 is twice as wide. -> rows float64, group, the turn."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=g))[0]
    group = torch.arange(n) % groups
    u = torch.randn(n, 4, dtype=torch.float64, generator=g) * torch.tensor(std, dtype=torch.float64)
    return u * (1 + group)[:, None] @ turn + 1, group, turn


def test_density_in_the_full_space_is_that_of_the_gaussian_the_data_come_from():
    """With latents that are N(0, 1) in each group, log p(x) is that of a Gaussian, known in closed form."""
    x, group, turn = wide()
    codec = LinearCodec(4, 2, 2)
    report = codec.fit(x, group)
    assert report["residual_floored"] == 0 and bool(codec.cut_fitted)
    torch.testing.assert_close(codec.cut_std[0], torch.tensor([0.5, 0.1]), rtol=0.02, atol=0)
    torch.testing.assert_close(codec.cut_std[1], torch.tensor([1.0, 0.2]), rtol=0.02, atol=0)
    new, of, _ = wide(200, seed=0)
    new = new.float()
    z = codec.encode(new, of)
    latent = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    got = latent - codec.log_det(of) + codec.log_density_residual(new, of)
    std = torch.tensor([3.0, 2.0, 0.5, 0.1], dtype=torch.float64) * (1 + of)[:, None]
    u = (new.double() - 1) @ turn.T
    want = torch.distributions.Normal(0.0, std).log_prob(u).sum(-1)
    assert (got - want).abs().mean() < 0.1 and (got - want).mean().abs() < 0.03


def test_the_complement_is_orthonormal_and_a_decoded_sample_has_nothing_in_it():
    x, group, _ = wide(500)
    codec = LinearCodec(4, 3, 2)
    codec.fit(x, group)
    both = torch.cat([codec.basis, codec.cut_basis]).double()
    torch.testing.assert_close(both @ both.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)
    on = codec.decode(torch.randn(5, 3), torch.zeros(5, dtype=torch.long))
    want = torch.full(
        (5,), -0.5 * math.log(2 * math.pi) - codec.cut_std[0, 0].double().log().item(), dtype=torch.float64
    )
    got = codec.log_density_residual(on, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_nothing_cut_off_has_no_residual():
    x, group, _ = wide(500)
    codec = LinearCodec(4, 4, 2)
    assert torch.isnan(codec.log_density_residual(x[:3].float())).all()  # not fitted
    assert codec.fit(x, group)["residual_floored"] == 0
    assert (codec.log_density_residual(x[:3].float(), group[:3]) == 0).all()
    torch.testing.assert_close(codec.decode(codec.encode(x.float(), group), group), x.float(), rtol=0, atol=1e-4)


def test_a_direction_in_which_a_group_does_not_vary_has_a_floor_and_is_counted():
    turn = wide(4)[2]
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4).repeat(
        20, 1
    )  # uncorrelated exactly
    u = signs * torch.tensor([3.0, 2.0, 0.5, 0.1], dtype=torch.float64)
    group = torch.arange(320) // 160
    u[group == 0, 3] = 0  # the group's own last direction
    x = u @ turn + 1
    codec = LinearCodec(4, 2, 2)
    report = codec.fit(x, group)
    assert report["residual_floored"] == 1 / 4
    rms = ((0.5**2 + 0.1**2 / 2) / 2) ** 0.5
    torch.testing.assert_close(codec.cut_std, torch.tensor([[0.5, 0.01 * rms], [0.5, 0.1]]), rtol=1e-5, atol=0)
    assert torch.isfinite(codec.log_density_residual(x.float(), group)).all()


def test_data_on_the_range_have_no_density_outside_it():
    codec, x, group, _ = fitted()
    assert not bool(codec.cut_fitted) and torch.isnan(codec.log_density_residual(x[:3], group[:3])).all()


def test_a_checkpoint_without_the_residuals_law_loads_and_does_not_know_it():
    x, group, _ = wide(500)
    codec = LinearCodec(4, 2, 2)
    codec.fit(x, group)
    whole = torch.nn.Sequential(codec)
    old = {k: v for k, v in whole.state_dict().items() if ".cut_" not in k}
    other = torch.nn.Sequential(LinearCodec(4, 2, 2))
    other[0].cut_fitted.fill_(True)
    other.load_state_dict(old)
    assert set(old) == {k for k in whole.state_dict() if ".cut_" not in k}  # the caller's own dict is as it was
    assert torch.isnan(other[0].log_density_residual(x[:3].float())).all() and torch.equal(other[0].basis, codec.basis)
    other.load_state_dict(whole.state_dict())
    torch.testing.assert_close(
        other[0].log_density_residual(x.float(), group), codec.log_density_residual(x.float(), group)
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_data_without_variation_are_refused(value):
    """Every future follows constant velocity exactly: scales would be 0 and latents NaN."""
    with pytest.raises(ValueError, match="60 vectors that are all alike"):
        LinearCodec(8, 4).fit(torch.full((60, 8), value))


def test_one_group_without_variation_keeps_finite_latents():
    x, group, _ = wide(2000)
    x[group == 0] = x.mean(0)
    codec = LinearCodec(4, 2, 2)
    report = codec.fit(x, group)
    assert all(math.isfinite(v) for v in report.values())
    assert torch.isfinite(codec.encode(x.float(), group)).all() and (codec.scale > 0).all()
