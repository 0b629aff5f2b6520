"""value_loss in Triton, interpreted, against 1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2) in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import value_loss as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SUMS = ("count", "loss", "clipped", "sq_error")


def batch(B: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(values, old_values, returns, mask, row_weights)."""
    generator = torch.Generator().manual_seed(B * 10_000 + T)
    old, step, error = torch.randn(3, B, T, generator=generator).to(dtype)
    mask = torch.rand(B, T, generator=generator) < 0.8
    return old + 0.3 * step, old, old + error, mask, torch.rand(B, generator=generator).to(dtype)


def run(*arguments: Tensor | float | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, d_values, sums = kernels.value_loss(*arguments)
    assert sums.dtype == torch.float64
    return loss, d_values, dict(zip(SUMS, sums, strict=True))


def formula(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, row_weights: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """In the dtype of the inputs. Where the clipped square is larger V is out of range, and has no gradient."""
    weight = row_weights[:, None].expand_as(mask)[mask]
    new = values[mask].detach().requires_grad_()
    old, target = old_values[mask], returns[mask]
    square = (new - target) ** 2
    clipped = torch.zeros_like(new, dtype=torch.bool)
    largest = square
    if clip is not None:
        other = (torch.maximum(torch.minimum(new, old + clip), old - clip) - target) ** 2
        clipped = other > square
        largest = torch.where(clipped, other, square)
    total = (weight * largest / 2).sum()
    total.backward()
    terms = (torch.ones_like(new), largest / 2, clipped, square)
    sums = dict(zip(SUMS, (t.detach().double().sum() for t in terms), strict=True))
    return total.detach(), torch.zeros_like(values).masked_scatter(mask, new.grad), sums


def doubled(data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in data)


@pytest.fixture
def check(accurate: Callable[..., None]) -> Callable[..., None]:
    def check(data: tuple[Tensor, ...], clip: float | None) -> None:
        loss, d_values, sums = run(*data, clip)
        exact, theirs = formula(*doubled(data), clip), formula(*data, clip)
        accurate(d_values, exact[1], theirs[1])
        n, eps = float(exact[2]["count"]), torch.finfo(loss.dtype).eps
        torch.testing.assert_close(loss.double(), exact[0], rtol=8 * eps, atol=0)
        for name in SUMS:
            if name in ("count", "clipped"):
                assert sums[name] == exact[2][name], name
            else:
                torch.testing.assert_close(sums[name], exact[2][name], rtol=8 * eps, atol=n * 1e-16)

    return check


@pytest.mark.parametrize("clip", [0.2, 0.0, None, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_formula(check: Callable[..., None], dtype: torch.dtype, clip: float | None) -> None:
    """3 x 700 tokens: three blocks, with the borders of rows inside them."""
    check(batch(3, 700, dtype), clip)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 1024), (1, 1025), (2, 2000), (1500, 1)])
def test_shapes(check: Callable[..., None], B: int, T: int) -> None:
    data = batch(B, T)
    data[3][0, 0] = True
    check(data, 0.2)


def one_token(value: float, old_value: float, target: float) -> tuple[Tensor, ...]:
    numbers = (torch.full((1, 1), x) for x in (value, old_value, target))
    return *numbers, torch.ones(1, 1, dtype=torch.bool), torch.ones(1)


def test_clipped_where_strictly_larger() -> None:
    """V 0.4, V_old 0.0, R 1.0, c 0.25: 1/2 0.75^2 beats 1/2 0.6^2, and has no gradient."""
    loss, d_values, sums = run(*one_token(0.4, 0.0, 1.0), 0.25)
    assert loss == 0.28125
    assert d_values == 0
    assert sums["clipped"] == 1


def test_tie_outside_the_range_keeps_the_gradient() -> None:
    """V 0.75, clipped to 0.25, R 0.5: both squares are 1/16; not strictly larger, so the slope is V - R."""
    loss, d_values, sums = run(*one_token(0.75, 0.0, 0.5), 0.25)
    assert loss == 0.03125
    assert d_values == 0.25
    assert sums["clipped"] == 0


def test_rounding_inside_the_range_is_not_counted() -> None:
    """old + (V - old) is not V in floating point; no token inside the range may count as clipped."""
    data = batch(1, 1000)
    values = data[1] + 0.19 * torch.rand(1, 1000, generator=torch.Generator().manual_seed(1))
    _, d_values, sums = run(values, *data[1:], 0.2)
    assert sums["clipped"] == 0
    assert torch.equal(d_values, torch.where(data[3], data[4] * (values - data[2]), 0.0))


def test_masked_tokens_are_never_read() -> None:
    data = batch(3, 400)
    mask = data[3]
    mask[1] = False
    expected = run(*data, 0.2)
    hidden = [torch.where(mask, x, torch.nan) for x in data[:3]]
    result = run(*hidden, mask, torch.where(mask.any(1), data[4], torch.nan), 0.2)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])
    assert result[2] == expected[2]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_at_a_live_token_is_seen(which: int) -> None:
    data = batch(2, 20)
    data[3][:] = True
    clean = run(*data, 0.2)
    data[which][1, 3] = torch.nan
    loss, d_values, sums = run(*data, 0.2)
    assert bool(loss.isnan())
    assert bool(d_values[1, 3].isnan())
    assert bool(sums["loss"].isnan())
    elsewhere = torch.ones(2, 20, dtype=torch.bool)
    elsewhere[1, 3] = False
    assert torch.equal(d_values[elsewhere], clean[1][elsewhere])


def test_old_values_are_not_read_without_a_clip() -> None:
    data = batch(2, 20)
    expected = run(*data, None)
    result = run(data[0], torch.full_like(data[1], torch.nan), *data[2:], None)
    assert torch.equal(result[1], expected[1])
    assert result[2] == expected[2]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    loss, d_values, sums = run(*batch(*shape), 0.2)
    assert loss == 0
    assert d_values.shape == shape
    assert not any(sums.values())


@pytest.mark.parametrize("clip", [0.2, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_through_the_op(accurate: Callable[..., None], dtype: torch.dtype, clip: float | None) -> None:
    """Weights from the wrapper, gradients through autograd with an upstream factor, non-contiguous inputs."""
    values, old, returns, mask, _ = (x.to(dtype) if x.is_floating_point() else x for x in batch(300, 4))
    turned = [x.t().contiguous().t() for x in (values, old, returns, mask)]
    leaf = turned[0].requires_grad_()
    with ops.backends.force("triton"):
        loss, stats = ops.value_loss(leaf, *turned[1:], clip_range=clip)
        (3.0 * loss).backward()
    data = (values, old, returns, mask, torch.full((300,), 1 / int(mask.sum())))
    exact = formula(*doubled(data), clip)
    theirs = formula(*(x.float() if x.is_floating_point() else x for x in data), clip)
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-6, atol=0)
    assert leaf.grad.dtype == dtype
    accurate(leaf.grad, 3 * exact[1], (3 * theirs[1]).to(dtype))
    for name in SUMS:
        torch.testing.assert_close(getattr(stats, name), exact[2][name], rtol=1e-6, atol=0)
