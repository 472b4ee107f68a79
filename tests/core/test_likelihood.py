"""Log-densities against closed forms, by halvings; probes against the exact trace; padding, batch splits, modes of autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from seqdiff.likelihood import Likelihood, angle_grid, log_prob, rademacher
from seqdiff.path import Path
from seqdiff.types import FlowMap, as_seeds

F64 = torch.float64
PATHS = ("linear", "cosine", "edm")


@dataclass(frozen=True)
class Law:
    """Mixture of correlated Gaussians over a whole sample of D = n d numbers: covariances var_c * C with one correlation matrix C
    = Q diag(lam) Q^T. weight, var: c; mean: c D; lam: D; turn: Q."""

    weight: Tensor
    mean: Tensor
    var: Tensor
    lam: Tensor
    turn: Tensor
    shape: tuple[int, int]

    def _parts(self, y: Tensor, a: float, s: float) -> tuple[Tensor, Tensor]:
        """Of z = a x0 + s eps (... D), in the axes of C: log weight x density of each part, E[x0 | z, part]."""
        own = self.var[:, None] * self.lam
        total = a**2 * own + s**2
        mean = self.mean @ self.turn
        r = (y @ self.turn)[..., None, :] - a * mean
        log_p = self.weight.log() - 0.5 * (r**2 / total + (2 * math.pi * total).log()).sum(-1)
        return log_p, mean + a * own / total * r

    def log_density(self, z: Tensor, noise: float = 0.0) -> Tensor:
        """b k n d -> b k."""
        return self._parts(z.flatten(2).to(F64), 1.0, noise)[0].logsumexp(-1)

    def denoiser(self, path: Path):
        def denoise(z: Tensor, t: float) -> Tensor:
            log_p, x = self._parts(z.flatten(2).to(F64), path.alpha(t), path.sigma(t))
            x = (log_p.softmax(-1)[..., None] * x).sum(-2) @ self.turn.T
            return x.view(z.shape).to(z.dtype)

        return denoise

    def draw(self, b: int, k: int, seed: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        part = torch.multinomial(self.weight.float(), b * k, True, generator=g)
        eps = torch.randn(b * k, len(self.lam), generator=g, dtype=F64)
        x = self.mean[part] + self.var[part, None].sqrt() * (eps * self.lam.sqrt()) @ self.turn.T
        return x.view(b, k, *self.shape)


def law(*parts: tuple[float, float, float], shape: tuple[int, int] = (1, 1), correlation: float = 0.0) -> Law:
    """Parts (weight, mean, std), the mean with alternating sign, every pair of numbers with the same correlation."""
    size = shape[0] * shape[1]
    sign = torch.tensor([(-1.0) ** i for i in range(size)], dtype=F64)
    weight, mean, std = torch.tensor(parts, dtype=F64).T
    lam, turn = torch.linalg.eigh((1 - correlation) * torch.eye(size, dtype=F64) + correlation)
    return Law(weight, mean[:, None] * sign, std**2, lam, turn, shape)


LAWS = {
    "gaussian": law((1.0, 0.3, 0.5)),
    "correlated": law((1.0, 0.2, 0.8), shape=(2, 2), correlation=0.9),
    "mixture": law((0.3, -1.0, 0.4), (0.7, 0.8, 0.6)),
    "mixture_4d": law((0.4, -0.9, 0.3), (0.6, 0.7, 0.5), shape=(2, 2), correlation=0.6),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", LAWS)
def test_within_a_thousandth_of_the_closed_form(name, kind):
    """Of the density that is reported, at draws of the law; a hundredth at points twice as far out."""
    one, path = LAWS[name], Path(kind)
    dims = len(one.lam)
    z = torch.cat([one.draw(1, 30), 2 * one.draw(1, 10, seed=1)], 1)
    got = log_prob(one.denoiser(path), path, z, how=Likelihood(steps=32))
    assert got.dims.unique().tolist() == [dims] and got.evaluations == 4 * 32 + (kind == "edm")
    error = (got.log_prob - one.log_density(z, 0.01)).abs() / dims
    assert error[:, :30].max() < 1e-3 and error.max() < 1e-2, error.max()


@pytest.mark.parametrize("name", ["gaussian", "mixture_4d"])
def test_a_small_sigma_min_gives_the_density_of_the_data(name):
    one, path = LAWS[name], Path()
    z = one.draw(1, 30)
    got = log_prob(one.denoiser(path), path, z, how=Likelihood(steps=32, sigma_min=0.002))
    assert (got.log_prob - one.log_density(z)).abs().max() / len(one.lam) < 1e-3


@pytest.mark.parametrize("name", ["correlated", "mixture"])
def test_the_order_is_four(name):
    """By halvings, and the same flow whatever the path."""
    one, orders = LAWS[name], {}
    z = one.draw(1, 20)
    for kind, steps in (("linear", (12, 24, 48)), ("cosine", (12, 24))):
        errors = [
            (log_prob(one.denoiser(Path(kind)), Path(kind), z, how=Likelihood(steps=n)).log_prob
             - one.log_density(z, 0.01)).abs().mean().item()
            for n in steps
        ]  # fmt: skip
        orders[kind] = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    assert orders["linear"][-1] == pytest.approx(4, abs=0.3), orders
    assert orders["linear"][0] == pytest.approx(orders["cosine"][0], abs=1e-3)


@pytest.mark.parametrize("kind", ["linear", "edm"])
def test_ending_before_pure_noise_still_knows_the_mean(kind):
    """By hand: with N(0, 1) for the law there the error would be |mean| |w| / 40, here up to .07."""
    one, path = law((0.3, -1.0, 0.4), (0.7, 1.5, 0.6)), Path(kind)
    z = one.draw(1, 40)
    got = log_prob(one.denoiser(path), path, z, how=Likelihood(steps=32, sigma_max=40.0))
    assert (got.log_prob - one.log_density(z, 0.01)).abs().mean() < 1e-3
    assert got.evaluations == 129
    assert angle_grid(path, Likelihood(sigma_max=40.0))[-1] == pytest.approx(math.atan(40))
    assert angle_grid(Path("edm"), Likelihood())[-1] == pytest.approx(math.atan(80))


def test_single_precision_is_enough():
    one, path = LAWS["mixture_4d"], Path()
    z = one.draw(2, 10)
    got = log_prob(one.denoiser(path), path, z.float(), how=Likelihood(steps=32))
    assert got.log_prob.dtype == F64
    assert (got.log_prob - one.log_density(z, 0.01)).abs().max() / 4 < 1e-3


def test_candidates_differ_as_the_closed_form_says():
    """The ratio of two candidates, also by one probe: they share it, so that its error is common where the law is one Gaussian."""
    one, path = LAWS["correlated"], Path()
    z = one.draw(3, 2)
    want = one.log_density(z, 0.01).diff(dim=1)
    exact = log_prob(one.denoiser(path), path, z, how=Likelihood(steps=24)).log_prob
    torch.testing.assert_close(exact.diff(dim=1), want, rtol=0, atol=1e-3)
    how = Likelihood(steps=24, trace="rademacher")
    probed = log_prob(one.denoiser(path), path, z, seeds=as_seeds(0, 3, 1), how=how).log_prob
    torch.testing.assert_close(probed.diff(dim=1), want, rtol=0, atol=1e-3)
    assert (probed - exact).abs().max() > 0.1  # which a candidate alone shows


def test_probes_are_unbiased_and_their_variance_falls_with_their_number():
    """Against the exact trace. By hand: the error of one probe is an integral of off-diagonal terms; P probes divide the variance
    by P."""
    one, path = LAWS["mixture_4d"], Path()
    z = one.draw(1, 1).expand(400, 1, 2, 2)  # 400 items that differ in their probes alone
    how = Likelihood(steps=4, trace="rademacher")
    exact = log_prob(one.denoiser(path), path, z[:1], how=Likelihood(steps=4)).log_prob
    spread = {}
    for probes in (1, 4):
        got = log_prob(one.denoiser(path), path, z, seeds=as_seeds(3, 400, 1), how=replace(how, probes=probes))
        error = got.log_prob - exact
        assert error.mean().abs() < 4 * error.std() / 20
        spread[probes] = error.var().item()
        if probes > 1:  # and they tell it themselves
            assert got.error.square().mean().item() == pytest.approx(spread[probes], rel=0.3)
        else:
            assert torch.isnan(got.error).all()
    assert spread[1] > 1e-3 and spread[1] / spread[4] == pytest.approx(4, rel=0.3)


def test_a_diagonal_jacobian_needs_one_probe():
    one, path = law((0.3, -1.0, 0.4), (0.7, 0.8, 0.6)), Path()

    def each(z: Tensor, t: float) -> Tensor:  # the same one-dimensional law for every number of the sample
        return one.denoiser(path)(z.reshape(1, -1, 1, 1), t).view(z.shape)

    z = torch.randn(2, 3, 4, 2, dtype=F64)
    exact = log_prob(each, path, z)
    probed = log_prob(each, path, z, seeds=as_seeds(0, 2, 1), how=Likelihood(trace="rademacher"))
    torch.testing.assert_close(exact.log_prob, probed.log_prob, rtol=1e-12, atol=1e-12)
    want = one.log_density(z.reshape(1, -1, 1, 1), 0.01).view(2, 3, 8).sum(-1)
    assert (exact.log_prob - want).abs().max() / 8 < 1e-3


def test_probes_depend_on_seed_number_and_place_alone():
    seeds = as_seeds(5, 4, 1)[:, 0]
    whole = rademacher((3, 2), seeds, 4)
    assert whole.unique().tolist() == [-1, 1] and whole.shape == (4, 4, 3, 2)
    assert torch.equal(rademacher((3, 2), seeds[2:], 2), whole[:2, 2:])
    assert torch.equal(rademacher((5, 2), seeds, 1)[:, :, :3], whole[:1])
    many = rademacher((50, 4), as_seeds(0, 20, 1)[:, 0], 5).flatten()
    assert abs(many.mean().item()) < 4 / math.sqrt(len(many))


class TestPaddingAndSplits:
    """A net that mixes the real tokens of a sample."""

    path = Path()

    def denoiser(self, mask: Tensor):
        keep = mask[..., None].double()

        def denoise(z: Tensor, t: float) -> Tensor:
            mean = (z * keep).sum(2, keepdim=True) / keep.sum(2, keepdim=True)
            return torch.tanh(z) * (1 - t) + 0.3 * mean.flip(-1)

        return denoise

    @pytest.mark.parametrize("trace", ["exact", "rademacher"])
    def test_padding_enters_nothing(self, trace):
        how, seeds = Likelihood(steps=3, trace=trace, probes=2), as_seeds(1, 2, 1)
        z = torch.randn(2, 3, 4, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
        mask = torch.tensor([[[True, True, True, False]], [[True, False, False, False]]])
        a = log_prob(self.denoiser(mask), self.path, z, mask=mask, seeds=seeds, how=how)
        assert a.dims.tolist() == [[6] * 3, [2] * 3]
        wild = torch.where(mask[..., None], z, 1e3)
        b = log_prob(self.denoiser(mask), self.path, wild, mask=mask, seeds=seeds, how=how)
        assert torch.equal(a.log_prob, b.log_prob)
        short = log_prob(self.denoiser(mask[1:, :, :1]), self.path, z[1:, :, :1], seeds=seeds[1:], how=how)
        torch.testing.assert_close(a.log_prob[1:], short.log_prob, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("trace", ["exact", "rademacher"])
    def test_any_split_agrees(self, trace):
        how, seeds = Likelihood(steps=3, trace=trace, probes=2), as_seeds(1, 3, 1)
        z = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
        mask = torch.ones(3, 1, 2, dtype=torch.bool)
        whole = log_prob(self.denoiser(mask), self.path, z, seeds=seeds, how=how).log_prob
        again = log_prob(self.denoiser(mask), self.path, z, seeds=seeds, how=how).log_prob
        assert torch.equal(whole, again)
        for i in range(3):
            for j in range(4):
                one = log_prob(
                    self.denoiser(mask[:1]), self.path, z[i : i + 1, j : j + 1], seeds=seeds[i : i + 1], how=how
                )
                torch.testing.assert_close(one.log_prob[0, 0], whole[i, j], rtol=1e-5, atol=0)

    def test_masks_may_differ_by_sample(self):
        z = torch.randn(1, 2, 3, 2, dtype=F64)
        mask = torch.tensor([[[True, True, True], [True, True, False]]])
        both = log_prob(self.denoiser(mask), self.path, z, mask=mask, how=Likelihood(steps=3))
        for j, n in ((0, 3), (1, 2)):
            own = log_prob(
                self.denoiser(mask[:, j : j + 1, :n]), self.path, z[:, j : j + 1, :n], how=Likelihood(steps=3)
            )
            torch.testing.assert_close(both.log_prob[:, j], own.log_prob[:, 0], rtol=1e-12, atol=1e-12)


def test_callers_without_gradients():
    one, path = LAWS["mixture"], Path()
    z = one.draw(1, 5)
    want = log_prob(one.denoiser(path), path, z).log_prob
    with torch.no_grad():
        assert torch.equal(log_prob(one.denoiser(path), path, z).log_prob, want)
    with torch.inference_mode():
        inside = z * 1.0
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        got = log_prob(one.denoiser(path), path, inside, mask=mask).log_prob
    assert torch.equal(got, want) and not got.requires_grad and inside.is_inference()


def test_what_has_no_likelihood_is_refused():
    one, path = LAWS["gaussian"], Path()
    z = one.draw(1, 2)
    with pytest.raises(ValueError, match="a jump between two times has no trace"):
        log_prob(FlowMap(lambda z, t, s: z), path, z)
    with pytest.raises(ValueError, match="need seeds"):
        log_prob(one.denoiser(path), path, z, how=Likelihood(trace="rademacher"))
    with pytest.raises(ValueError, match="carries no gradient"):
        log_prob(torch.no_grad()(one.denoiser(path)), path, z)
    with pytest.raises(ValueError, match="path ends at sigma / alpha = 80"):
        log_prob(one.denoiser(path), Path("edm"), z, how=Likelihood(sigma_min=100.0, sigma_max=200.0))


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"steps": 0}, "steps is 0"),
        ({"probes": 0}, "probes 0"),
        ({"sigma_min": 0.0}, "has no density without noise"),
        ({"sigma_min": 2.0, "sigma_max": 1.0}, "sigma_max 1"),
    ],
)
def test_settings_are_checked_at_once(wrong, text):
    with pytest.raises(ValueError, match=text):
        Likelihood(**wrong)


def test_it_is_a_density():
    """Sums to one over a line, for a denoiser that is nobody's conditional mean: the flow's own law, which samples have."""
    path = Path()

    def denoise(z: Tensor, t: float) -> Tensor:
        return torch.tanh(2 * z) * (1 - 0.7 * t) + 0.2

    x = torch.linspace(-7, 7, 1401, dtype=F64)
    p = log_prob(denoise, path, x.view(1, -1, 1, 1), how=Likelihood(steps=48)).log_prob.exp()
    assert torch.trapezoid(p[0], x).item() == pytest.approx(1, abs=1e-3)
