"""ppo_loss in Triton, interpreted, against the published formulas in float64, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import ppo_loss as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PPO, CISPO = 0, 1
SUMS = ("count", "loss", "flat", "outside", "ratio_dev", "ratio_dev_sq", "k1", "k2", "k3", "ref_kl", "entropy")
FIELDS = ("logprobs", "old_logprobs", "advantages", "mask", "row_weights", "entropy", "ref_logprobs")


def batch(B: int, T: int, dtype: torch.dtype = torch.float32, spread: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(B, T, generator=generator).to(dtype)

    logprobs = -normal().abs() * 3
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + spread * normal(),
        "advantages": normal(),
        "mask": torch.rand(B, T, generator=generator) < 0.8,
        "row_weights": torch.rand(B, generator=generator).to(dtype),
        "entropy": normal().abs(),
        "ref_logprobs": logprobs + spread * normal(),
    }


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "objective": PPO,
        "entropy_coef": 0.01,
        "kl_coef": 0.05,
        "kl_estimator": 3,
    } | changes


def run(data: dict[str, Tensor | None], **changes: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(loss, d_logprobs, d_entropy, sums by name)."""
    loss, d_logprobs, d_entropy, sums = kernels.ppo_loss(
        *(data[name] for name in FIELDS), *settings(**changes).values()
    )
    assert sums.dtype == torch.float64
    return loss, d_logprobs, d_entropy, dict(zip(SUMS, sums, strict=True))


def formula(
    data: dict[str, Tensor | None], dtype: torch.dtype, **changes: Any
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Schulman et al. 2017 (7), Ye et al. 2020 (5), MiniMax 2025 (4), Schulman 2020 for KL; all in one dtype."""
    s = settings(**changes)
    low, high = 1 - s["clip_low"], 1 + s["clip_high"]
    x = {k: None if v is None else v if v.dtype == torch.bool else v.to(dtype) for k, v in data.items()}
    mask = x["mask"]
    weight = x["row_weights"][:, None].expand_as(mask)[mask]
    new = x["logprobs"][mask].requires_grad_()
    old, adv = x["old_logprobs"][mask], x["advantages"][mask]
    ent = None if x["entropy"] is None else x["entropy"][mask].requires_grad_()
    d = new - old
    ratio = d.exp()
    dual_flat = torch.zeros_like(mask[mask])
    if s["objective"] == CISPO:
        surrogate = -ratio.detach().clamp(max=high) * adv * new
        flat, outside = dual_flat, ratio > high
    else:
        gain = torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
        if s["dual_clip"] is not None:
            dual_flat = (adv < 0) & (ratio > s["dual_clip"])
            gain = torch.where(adv < 0, torch.maximum(gain, s["dual_clip"] * adv), gain)
        surrogate = -gain
        flat = ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low)) | dual_flat
        outside = (ratio < low) | (ratio > high)
    loss = surrogate
    ref_kl = torch.zeros_like(new)
    if ent is not None:
        loss = loss - s["entropy_coef"] * ent
    if x["ref_logprobs"] is not None:
        e = new - x["ref_logprobs"][mask]
        ref_kl = {1: e, 2: e**2 / 2, 3: torch.expm1(-e) + e}[s["kl_estimator"]]
        loss = loss + s["kl_coef"] * ref_kl
    total = (weight * loss).sum()
    total.backward()

    def unpacked(grad: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, grad)

    d_entropy = torch.zeros(0, dtype=dtype) if ent is None else unpacked(ent.grad)
    with torch.no_grad():
        terms = (
            torch.ones_like(new),
            surrogate,
            flat.to(dtype),
            outside.to(dtype),
            torch.expm1(d),
            torch.expm1(d) ** 2,
            -d,
            d**2 / 2,
            torch.expm1(d) - d,
            ref_kl,
            torch.zeros_like(new) if ent is None else ent,
        )
        sums = dict(zip(SUMS, (t.double().sum() for t in terms), strict=True))
    return total.detach(), unpacked(new.grad), d_entropy, sums


@pytest.fixture
def check(accurate: Callable[..., None]) -> Callable[..., None]:
    def check(data: dict[str, Tensor | None], **changes: Any) -> None:
        dtype = data["logprobs"].dtype
        loss, d_logprobs, d_entropy, sums = run(data, **changes)
        exact, theirs = formula(data, torch.float64, **changes), formula(data, dtype, **changes)
        # Token terms are rounded in the stat dtype, sums of them in float64: the tolerance of a sum is its terms'.
        n, eps = float(exact[3]["count"]), torch.finfo(dtype).eps
        assert abs(float(loss) - float(exact[0])) <= max(3 * abs(float(theirs[0]) - float(exact[0])), n * eps)
        accurate(d_logprobs, exact[1], theirs[1])
        accurate(d_entropy, exact[2], theirs[2])
        assert not bool(d_logprobs[~data["mask"]].any())
        for name in SUMS:
            if name in ("count", "flat", "outside"):
                assert sums[name] == exact[3][name], name
            else:
                got, want, other = (float(x[name]) for x in (sums, exact[3], theirs[3]))
                assert abs(got - want) <= max(3 * abs(other - want), n * eps), name

    return check


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("kl_estimator", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ppo(check: Callable[..., None], dtype: torch.dtype, kl_estimator: int, dual_clip: float | None) -> None:
    """3 x 700 tokens: three blocks, with the borders of rows inside them."""
    check(batch(3, 700, dtype), kl_estimator=kl_estimator, dual_clip=dual_clip)


@pytest.mark.parametrize("kl_estimator", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cispo(check: Callable[..., None], dtype: torch.dtype, kl_estimator: int) -> None:
    check(batch(3, 700, dtype), objective=CISPO, kl_estimator=kl_estimator)


@pytest.mark.parametrize("objective", [PPO, CISPO])
@pytest.mark.parametrize("left_out", [("entropy",), ("ref_logprobs",), ("entropy", "ref_logprobs")])
def test_optional_terms(check: Callable[..., None], left_out: tuple[str, ...], objective: int) -> None:
    check(batch(2, 50) | dict.fromkeys(left_out), objective=objective)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 1024), (1, 1025), (2, 2000), (1500, 1), (40, 30)])
def test_shapes(check: Callable[..., None], B: int, T: int) -> None:
    data = batch(B, T)
    data["mask"][0, 0] = True
    check(data)


@pytest.mark.parametrize("clip_high", [0.0, float("inf")])
@pytest.mark.parametrize("objective", [PPO, CISPO])
def test_clip_bounds_at_their_limits(check: Callable[..., None], objective: int, clip_high: float) -> None:
    check(batch(2, 300), objective=objective, clip_low=1.0, clip_high=clip_high)


def one_token(**values: float) -> dict[str, Tensor | None]:
    data = {
        "logprobs": -1.0,
        "old_logprobs": -1.0,
        "advantages": 1.0,
        "row_weights": 1.0,
        "entropy": None,
        "ref_logprobs": None,
    } | values
    tensors = {k: None if v is None else torch.full((1, 1), v) for k, v in data.items()}
    return tensors | {"mask": torch.ones(1, 1, dtype=torch.bool), "row_weights": torch.tensor([data["row_weights"]])}


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("advantage", [2.5, -2.5])
def test_slope_at_ratio_one(advantage: float, clip: float) -> None:
    """Not zero, even where the interval is that point alone."""
    loss, slope, _, sums = run(one_token(advantages=advantage, row_weights=0.5), clip_low=clip, clip_high=clip)
    assert loss == -0.5 * advantage
    assert slope == -0.5 * advantage
    assert sums["flat"] == sums["outside"] == sums["k3"] == sums["ratio_dev"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "flat"),
    [(1.5, 1.0, 0.0, 1), (1.5, -1.0, 1.5, 0), (0.5, 1.0, -0.5, 0), (0.5, -1.0, 0.0, 1), (1.1, 1.0, -1.1, 0)],
)
def test_the_sign_rule(ratio: float, advantage: float, slope: float, flat: int) -> None:
    """Flat where the ratio has already gone beyond the bound in the direction the advantage asks for, only there."""
    loss, d_logprobs, _, sums = run(one_token(old_logprobs=-1.0 - math.log(ratio), advantages=advantage))
    bounded = min(ratio, 1.28) if advantage > 0 else max(ratio, 0.8)
    torch.testing.assert_close(float(loss), -bounded * advantage, rtol=3e-7, atol=0)
    torch.testing.assert_close(float(d_logprobs), slope, rtol=3e-7, atol=0)
    assert (sums["flat"], sums["outside"]) == (flat, ratio != 1.1)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    data = one_token(old_logprobs=-4.0, advantages=-2.0)  # ratio e^3 = 20
    free, bounded = run(data), run(data, dual_clip=3.0)
    torch.testing.assert_close(float(free[0]), 2 * 20.085536923, rtol=1e-6, atol=0)
    assert free[3]["flat"] == 0
    assert bounded[0] == 6.0
    assert bounded[1] == 0.0
    assert bounded[3]["flat"] == 1


def test_cispo_keeps_the_gradient_beyond_the_bound() -> None:
    """A ratio of 2, clipped to 1.2, and an advantage of -2: the slope is +2.4."""
    data = one_token(old_logprobs=-1.0 - 0.6931472, advantages=-2.0)
    loss, slope, _, sums = run(data, objective=CISPO, clip_high=0.2)
    torch.testing.assert_close(float(slope), 2.4, rtol=1e-7, atol=0)
    torch.testing.assert_close(float(loss), -2.4, rtol=1e-7, atol=0)
    assert (sums["flat"], sums["outside"]) == (0, 1)


@pytest.mark.parametrize("objective", [PPO, CISPO])
def test_zero_advantage_is_zero_even_where_the_ratio_overflows(objective: int) -> None:
    loss, slope, _, sums = run(one_token(old_logprobs=-100.0, advantages=0.0), objective=objective)
    assert loss == 0
    assert slope == 0
    assert sums["loss"] == 0
    assert sums["flat"] == 0
    assert sums["outside"] == 1


def test_terms_with_a_zero_coefficient_are_measured_but_not_added() -> None:
    """The reference gives the token up: k3 overflows, and must not turn the loss into inf * 0."""
    data = one_token(entropy=2.0, ref_logprobs=99.0)
    loss, slope, d_entropy, sums = run(data, kl_coef=0.0, entropy_coef=0.0)
    assert loss == -1
    assert slope == -1
    assert d_entropy == 0
    assert sums["ref_kl"] == torch.inf
    assert sums["entropy"] == 2


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5])
def test_small_differences_keep_their_digits(size: float) -> None:
    """k3 and ratio - 1 near 0, where exp(x) - 1 in float32 would be noise: 4e-7 of k3, not of 1."""
    data = batch(1, 1000, spread=size)
    _, _, _, sums = run(data, kl_coef=1.0, entropy_coef=0.0)
    exact = formula(data, torch.float64, kl_coef=1.0, entropy_coef=0.0)[3]
    for name in ("k3", "ref_kl", "ratio_dev_sq"):
        torch.testing.assert_close(sums[name], exact[name], rtol=4e-7, atol=0)


@pytest.mark.parametrize("estimator", [2, 3])
def test_kl_slope_keeps_its_digits_near_zero(estimator: int) -> None:
    data = one_token(logprobs=-1.0, ref_logprobs=-1.0 - 2.0**-20, advantages=0.0)
    _, slope, _, _ = run(data, kl_coef=1.0, kl_estimator=estimator)
    exact = 2.0**-20 if estimator == 2 else -torch.expm1(torch.tensor(-(2.0**-20), dtype=torch.float64))
    torch.testing.assert_close(float(slope), float(exact), rtol=2e-7, atol=0)


def test_both_sides_of_the_series_meet(accurate: Callable[..., None]) -> None:
    """Differences around 1/2 in magnitude, where the Taylor series hands over to exp."""
    for step in (-0.5001, -0.5, -0.4999, 0.4999, 0.5, 0.5001):
        data = one_token(logprobs=-1.0, old_logprobs=-1.0 - step, ref_logprobs=-1.0 - step)
        result, exact, theirs = run(data), formula(data, torch.float64), formula(data, torch.float32)
        accurate(result[1], exact[1], theirs[1])
        for name in ("k3", "ref_kl", "ratio_dev"):
            torch.testing.assert_close(result[3][name], exact[3][name], rtol=1e-6, atol=0)


def test_masked_tokens_are_never_read() -> None:
    data = batch(3, 400)
    data["mask"][1] = False
    expected = run(data, dual_clip=2.0)
    floats = ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs")
    hidden = data | {k: torch.where(data["mask"], data[k], torch.nan) for k in floats}
    hidden["row_weights"] = torch.where(data["mask"].any(1), data["row_weights"], torch.nan)
    result = run(hidden, dual_clip=2.0)
    for got, want in zip(result[:3], expected[:3], strict=True):
        assert torch.equal(got, want)
    assert result[3] == expected[3]


@pytest.mark.parametrize("objective", [PPO, CISPO])
@pytest.mark.parametrize("which", ["logprobs", "old_logprobs", "advantages", "ref_logprobs"])
def test_nan_at_a_live_token_is_seen(which: str, objective: int) -> None:
    data = batch(2, 20)
    data["mask"][:] = True
    data["advantages"][1, 3] = 0.0  # 0 * NaN is not 0
    clean = run(data, objective=objective)
    data[which][1, 3] = torch.nan
    loss, d_logprobs, _, sums = run(data, objective=objective)
    assert bool(loss.isnan())
    assert bool(d_logprobs[1, 3].isnan())
    if which != "ref_logprobs":
        assert bool(sums["loss"].isnan())
    elsewhere = torch.ones(2, 20, dtype=torch.bool)
    elsewhere[1, 3] = False
    assert torch.equal(d_logprobs[elsewhere], clean[1][elsewhere])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens(shape: tuple[int, int], with_entropy: bool) -> None:
    data = batch(*shape) | ({} if with_entropy else {"entropy": None})
    loss, d_logprobs, d_entropy, sums = run(data)
    assert loss == 0
    assert loss.dtype == torch.float32
    assert d_logprobs.shape == shape
    assert d_entropy.shape == (shape if with_entropy else (0,))
    assert not any(sums.values())


def test_no_live_token() -> None:
    data = batch(2, 20)
    data["mask"][:] = False
    loss, d_logprobs, d_entropy, sums = run(data)
    assert loss == 0
    assert not bool(d_logprobs.any())
    assert not bool(d_entropy.any())
    assert not any(sums.values())


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_through_the_op(accurate: Callable[..., None], dtype: torch.dtype, aggregation: str, objective: str) -> None:
    """Weights from the wrapper, gradients through autograd with an upstream factor, non-contiguous inputs."""
    data = batch(300, 4) | {"row_weights": torch.zeros(300)}
    data = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
    turned = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in data.items()}
    lengths = data["mask"].sum(1)
    weights = {
        "token_mean": torch.full((300,), 1 / int(lengths.sum())),
        "sequence_mean": 1 / (lengths.clamp(min=1) * int((lengths > 0).sum())),
        "sequence_sum_constant": torch.full((300,), 1 / 1200),
    }[aggregation]
    s = settings(objective={"ppo": PPO, "cispo": CISPO}[objective])
    logprobs, entropy = (turned[k].detach().requires_grad_() for k in ("logprobs", "entropy"))
    keywords = {k: s[k] for k in ("clip_low", "clip_high", "entropy_coef", "kl_coef")}
    with ops.backends.force("triton"):
        loss, stats = ops.ppo_loss(
            logprobs,
            turned["old_logprobs"],
            turned["advantages"],
            turned["mask"],
            objective=objective,
            entropy=entropy,
            ref_logprobs=turned["ref_logprobs"],
            kl_estimator="k3",
            aggregation=aggregation,
            **keywords,
        )
        (3.0 * loss).backward()
    exact = formula(data | {"row_weights": weights}, torch.float64, **s)
    theirs = formula(data | {"row_weights": weights}, torch.float32, **s)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=1e-7)
    assert loss.dtype == torch.float32
    for got, want, other in ((logprobs.grad, exact[1], theirs[1]), (entropy.grad, exact[2], theirs[2])):
        assert got.dtype == dtype
        accurate(got, 3 * want, (3 * other).to(dtype))
    for name in SUMS:
        got, want = float(getattr(stats, name)), float(exact[3][name])
        assert abs(got - want) <= 1200 * torch.finfo(torch.float32).eps, name
