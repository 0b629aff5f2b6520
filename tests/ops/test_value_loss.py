from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import ValueStats, backends, value_loss

OPS = torch.ops.ppo_fast
LIVE = torch.ones(1, 1, dtype=torch.bool)


def formula(values, old, returns, mask, clip_range=0.2, aggregation="token_mean", normalizer=None) -> Tensor:
    """The loss from its definition, over the live tokens."""
    squares = (values - returns) ** 2
    if clip_range is not None:
        squares = torch.max(squares, (old + (values - old).clamp(-clip_range, clip_range) - returns) ** 2)
    tokens = torch.where(mask, squares / 2, 0.0)
    lengths = mask.sum(1)
    if aggregation == "token_mean":
        return tokens.sum() / (lengths.sum() if normalizer is None else normalizer)
    if aggregation == "sequence_mean":
        means = tokens.sum(1) / lengths.clamp(min=1)
        return means.sum() / ((lengths > 0).sum() if normalizer is None else normalizer)
    return tokens.sum() / (mask.numel() if normalizer is None else normalizer)


def batch(B=3, T=7, dtype=torch.float32) -> dict[str, Tensor]:
    """Values on both sides of the clip, a mask with holes and one dead row; finite everywhere."""
    mask = torch.rand(B, T) > 0.25
    mask[0, :2] = True
    mask[-1] = False
    old = torch.randn(B, T, dtype=dtype)
    values = old + 0.4 * torch.randn(B, T, dtype=dtype)
    return {"values": values, "old": old, "returns": torch.randn(B, T, dtype=dtype), "mask": mask}


def poisoned(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """NaN at every masked position."""
    return {k: v if k == "mask" else torch.where(data["mask"], v, torch.nan) for k, v in data.items()}


def loss_and_gradient(function, data: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    d = {k: v if k == "mask" else v.to(dtype) for k, v in data.items()}
    d["values"].requires_grad_()
    loss = function(*d.values())
    return loss.detach(), torch.autograd.grad(loss, d["values"])[0]


@pytest.mark.parametrize("clip_range", [0.2, 0.05, 0.0, None, math.inf])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient(cpu_backend, as_exact_as, clip_range, aggregation, dtype):
    for normalizer in (None, 17):
        keywords = {"clip_range": clip_range, "aggregation": aggregation, "normalizer": normalizer}
        data = batch(dtype=dtype)
        mask = data["mask"]
        got = loss_and_gradient(lambda *d, k=keywords: value_loss(*d, **k)[0], poisoned(data), dtype)
        exact = loss_and_gradient(lambda *d, k=keywords: formula(*d, **k), data, torch.float64)
        baseline = loss_and_gradient(lambda *d, k=keywords: formula(*d, **k), data, dtype)
        for i in (0, 1):
            as_exact_as(got[i], baseline[i], exact[i])
        assert torch.equal(got[1][~mask], torch.zeros_like(got[1][~mask]))


def one(value: float, old: float, target: float, **keywords) -> tuple[float, float, ValueStats]:
    """(loss, dloss/dvalue, stats) of a single token."""
    values = torch.full((1, 1), value, dtype=torch.float64, requires_grad=True)
    loss, stats = value_loss(values, torch.full_like(values, old), torch.full_like(values, target), LIVE, **keywords)
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.item(), gradient.item(), stats


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (0.5, 0.0, 1.0, 0.32, 0.0, 1),  # moved towards the return, past the clip: max(0.25, (0.2 - 1)^2) / 2
        (0.1, 0.0, 1.0, 0.405, -0.9, 0),  # inside
        (0.2, 0.0, 1.0, 0.32, -0.8, 0),  # on the bound
        (-0.5, 0.0, 1.0, 1.125, -1.5, 0),  # moved away: the unclipped error is the larger
        (0.5, 0.0, 0.4, 0.02, 0.0, 1),  # overshot: (0.2 - 0.4)^2 beats (0.5 - 0.4)^2
        (0.5, 0.0, 0.3, 0.02, 0.2, 0),  # the unclipped error beats the clipped one
        (1.0, 1.0, 1.0, 0.0, 0.0, 0),
    ],
)
def test_cases_by_hand(cpu_backend, value, old, target, loss, gradient, clipped):
    got_loss, got_gradient, stats = one(value, old, target)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_gradient == pytest.approx(gradient, abs=1e-12)
    assert stats.clipped == clipped
    assert stats.loss.item() == pytest.approx(loss, abs=1e-12)
    assert stats.sq_error.item() == pytest.approx((value - target) ** 2, abs=1e-12)


def test_equal_squares_are_not_clipped(cpu_backend):
    """|0.5 - 0.375| = |0.25 - 0.375|: a tie beyond the bound keeps the gradient of the value."""
    loss, gradient, stats = one(0.5, 0.0, 0.375, clip_range=0.25)
    assert (loss, gradient, stats.clipped.item()) == (0.125**2 / 2, 0.125, 0)


def test_no_clip_counts_nothing(cpu_backend):
    loss, gradient, stats = one(0.5, 0.0, 1.0, clip_range=None)
    assert (loss, gradient, stats.clipped.item()) == (0.125, -0.5, 0)


def test_rounding_inside_the_range_is_not_clipping(cpu_backend):
    """V_old + (V - V_old) misses V by a rounding in many of these; nothing here is beyond the clip."""
    old, values = torch.randn(1, 1000), torch.randn(1, 1000)
    assert (old + (values - old) != values).sum() > 100
    _, stats = value_loss(values, old, torch.zeros(1, 1000), torch.ones(1, 1000, dtype=torch.bool), clip_range=10.0)
    assert stats.clipped == 0


def test_statistics_and_merge(cpu_backend):
    data = batch(B=6, T=9)
    data["mask"][-1, 0] = True
    mask = data["mask"]
    loss, stats = value_loss(*poisoned(data).values())
    v, old, r = (data[k][mask].double() for k in ("values", "old", "returns"))
    clipped = (old + (v - old).clamp(-0.2, 0.2) - r) ** 2
    expected = {
        "count": float(len(v)),
        "loss": torch.max((v - r) ** 2, clipped).sum().item() / 2,
        "clipped": float((clipped > (v - r) ** 2 + 1e-7).sum()),
        "sq_error": ((v - r) ** 2).sum().item(),
    }
    assert stats._fields == tuple(expected)
    assert expected["clipped"] > 0
    for name, value in expected.items():
        got = getattr(stats, name)
        assert got.dtype == torch.float64
        assert got.shape == ()
        assert not got.requires_grad
        assert got.item() == pytest.approx(value, rel=1e-6), name
    assert stats.loss_mean.item() == pytest.approx(loss.item(), rel=1e-6)
    assert stats.clipped_fraction.item() == pytest.approx(expected["clipped"] / len(v))

    parts = [value_loss(*(x[i : i + 2] for x in poisoned(data).values()), normalizer=mask.sum()) for i in (0, 2, 4)]
    assert torch.allclose(sum(part for part, _ in parts), loss)
    merged = parts[0][1].merge(parts[1][1]).merge(parts[2][1])
    for a, b in zip(merged, stats, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(cpu_backend, dtype):
    data = {k: v if k == "mask" else v.to(dtype) for k, v in batch().items()}
    loss, gradient = loss_and_gradient(lambda *d: value_loss(*d)[0], data, dtype)
    expected, wide = loss_and_gradient(lambda *d: value_loss(*d)[0], data, torch.float32)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, wide.to(dtype))


def test_non_contiguous_inputs(cpu_backend):
    data = batch()
    expected, _ = value_loss(*data.values())
    got, _ = value_loss(*(x.T.contiguous().T for x in data.values()))
    assert torch.equal(got, expected)


def test_nan_at_a_live_token_propagates(cpu_backend):
    for name in ("values", "old", "returns"):
        data = batch()
        data[name][0, 0] = torch.nan
        loss, gradient = loss_and_gradient(lambda *d: value_loss(*d)[0], data, torch.float32)
        assert loss.isnan(), name
        assert gradient[0, 0].isnan(), name
        assert gradient.isnan().sum() == 1, name


def test_no_live_token(cpu_backend):
    nan, mask = torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.bool)
    loss, gradient = loss_and_gradient(
        lambda *d: value_loss(*d, normalizer=5)[0],
        {"values": nan, "old": nan, "returns": nan, "mask": mask},
        torch.float32,
    )
    assert loss == 0
    assert not gradient.any()
    with pytest.raises(ValueError, match="mask must have a live token"):
        value_loss(nan, nan, nan, mask)


def test_arguments():
    values, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in (-0.1, math.nan):
        with pytest.raises(ValueError, match="clip_range must be None or >= 0"):
            value_loss(values, values, values, mask, clip_range=bad)
    with pytest.raises(ValueError, match="aggregation must be one of"):
        value_loss(values, values, values, mask, aggregation="sum")
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        value_loss(values, values, values, mask.float())
    with pytest.raises(ValueError, match=r"returns must have the shape of values, \[2, 3\], got \[2, 2\]"):
        value_loss(values, values, values[:, :2], mask)


class TestAutograd:
    def test_constants_receive_no_gradient(self, cpu_backend):
        values, old, returns = (torch.randn(2, 3).requires_grad_() for _ in range(3))
        value_loss(values, old, returns, torch.ones(2, 3, dtype=torch.bool))[0].backward()
        assert values.grad is not None
        assert old.grad is returns.grad is None

    def test_gradcheck(self, cpu_backend):
        data = batch(dtype=torch.float64)
        rest = list(data.values())[1:]
        assert torch.autograd.gradcheck(lambda v: value_loss(v, *rest)[0], data["values"].requires_grad_())

    def test_upstream_scale_and_second_backward(self, cpu_backend):
        data = batch()
        values = data["values"].requires_grad_()
        loss, _ = value_loss(*data.values())
        (first,) = torch.autograd.grad(loss, values, retain_graph=True)
        (third,) = torch.autograd.grad(-3 * loss, values, retain_graph=True)
        (again,) = torch.autograd.grad(loss, values)
        assert torch.equal(first, again)
        assert torch.allclose(third, -3 * first)

    def test_double_backward_raises(self, cpu_backend):
        data = batch()
        values = data["values"].requires_grad_()
        loss, _ = value_loss(*data.values())
        (gradient,) = torch.autograd.grad(loss, values, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward through ppo_fast::value_loss is not supported"):
            (gradient.square().sum() + values.sum()).backward()

    def test_modes_that_change_nothing(self, cpu_backend):
        data = batch()
        expected, _ = value_loss(*data.values())
        for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
            with mode:
                got, _ = value_loss(data["values"] + 0, *list(data.values())[1:])
            assert torch.equal(got, expected)

    def test_compiles_to_one_graph(self):
        data = batch()
        rest = list(data.values())[1:]
        compiled = torch.compile(lambda v: value_loss(2 * v, *rest), fullgraph=True, backend="aot_eager")
        values = data["values"].requires_grad_()
        expected, stats = value_loss(2 * values, *rest)
        got, got_stats = compiled(values)
        assert torch.allclose(got, expected)
        assert isinstance(got_stats, ValueStats)
        assert torch.allclose(torch.stack(got_stats), torch.stack(stats))
        assert torch.allclose(torch.autograd.grad(got, values)[0], torch.autograd.grad(expected, values)[0])

    @pytest.mark.parametrize("clip_range", [0.2, None])
    def test_opcheck(self, opcheck, clip_range):
        data = batch(2, 4)
        data["values"].requires_grad_()
        arguments = (*data.values(), torch.ones(2), clip_range)
        assert [x.requires_grad for x in OPS.value_loss(*arguments)] == [True, False, False]
        opcheck(OPS.value_loss, arguments)
        opcheck(OPS.value_loss_backward, (torch.tensor(2.0), torch.randn(2, 4), torch.randn(2, 4)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch(data):
    """Random shapes, masks and clips, on every CPU path, against the formula in float64."""
    shape = data.draw(st.integers(1, 4), label="B") + 1, data.draw(st.integers(1, 40), label="T") + 1
    clip_range = data.draw(st.sampled_from([None, 0.01, 0.2, 1.0]), label="clip_range")
    aggregation = data.draw(st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_constant"]))
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    tensors = batch(*shape, torch.float64)
    keywords = {"clip_range": clip_range, "aggregation": aggregation}
    expected = loss_and_gradient(lambda *d: formula(*d, **keywords), tensors, torch.float64)
    for backend in [backend for backend in backends.available() if backend != "triton"]:
        with backends.force(backend):
            got = loss_and_gradient(lambda *d: value_loss(*d, **keywords)[0], poisoned(tensors), torch.float64)
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-13), backend
