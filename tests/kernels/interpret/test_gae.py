"""gae in Triton, interpreted, against the recurrence written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import gae as kernels

# The interpreter computes the branch that tl.where drops, too, and NumPy says so where that is 0 * inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

Run = Callable[..., tuple[Tensor, Tensor, Tensor]]


def run_directly(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.gae(rewards, values, mask, gamma, lam, bootstrap)


def run_through_the_op(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    with ops.backends.force("triton"):
        return ops.gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap, return_moments=True)


@pytest.fixture(params=[run_directly, run_through_the_op], ids=["direct", "op"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def recurrence(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One live position after the other, from the last, in the dtype of the inputs."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(values.shape[0]):
        following = torch.zeros_like(values[0, 0]) if bootstrap is None else bootstrap[b]
        advantage = torch.zeros_like(values[0, 0])
        for t in reversed(mask[b].nonzero()[:, 0].tolist()):
            advantage = (rewards[b, t] + gamma * following - values[b, t]) + gamma * lam * advantage
            following = values[b, t]
            advantages[b, t], returns[b, t] = advantage, advantage + following
    return advantages, returns


def batch(
    B: int, T: int, dtype: torch.dtype = torch.float32, density: float = 0.7, seed: int = 0
) -> tuple[Tensor, ...]:
    """(rewards, values, mask with holes, bootstrap values)."""
    generator = torch.Generator().manual_seed(seed + 1000 * T)
    rewards, values = torch.randn(2, B, T, generator=generator).to(dtype)
    mask = torch.rand(B, T, generator=generator) < density
    return rewards, values, mask, torch.randn(B, generator=generator).to(dtype)


@pytest.fixture
def check(run: Run, accurate: Callable[..., None]) -> Callable[..., None]:
    def check(
        rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
    ) -> None:
        result = run(rewards, values, mask, gamma, lam, bootstrap)
        boot = None if bootstrap is None else bootstrap.double()
        exact = recurrence(rewards.double(), values.double(), mask, gamma, lam, boot)
        theirs = recurrence(rewards, values, mask, gamma, lam, bootstrap)
        for got, want, same_dtype in zip(result[:2], exact, theirs, strict=True):
            accurate(got, want, same_dtype)
            assert not bool(got[~mask].any())
        moments, live = result[2], result[0].double()[mask]
        assert moments.dtype == torch.float64
        assert moments[0] == live.numel()
        if live.numel():
            spread = (live - live.mean()).square().sum()
            torch.testing.assert_close(moments[1], live.sum(), rtol=1e-12, atol=1e-12 * float(live.abs().sum()))
            torch.testing.assert_close(moments[2], spread, rtol=1e-12, atol=1e-24)
        else:
            assert not bool(moments.any())

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bootstrap", [False, True], ids=["no bootstrap", "bootstrap"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.95)])
def test_recurrence(check: Callable[..., None], gamma: float, lam: float, bootstrap: bool, dtype: torch.dtype) -> None:
    rewards, values, mask, boot = batch(3, 50, dtype)
    check(rewards, values, mask, gamma, lam, boot if bootstrap else None)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65])
def test_lengths_around_the_smallest_block(check: Callable[..., None], T: int) -> None:
    rewards, values, mask, bootstrap = batch(2, T)
    mask[0] = True
    check(rewards, values, mask, 0.99, 0.95, bootstrap)


def test_rows_longer_than_the_largest_block(check: Callable[..., None]) -> None:
    """1500 positions are two blocks of 1024; a hole lies over their border, position 476."""
    rewards, values, mask, bootstrap = batch(1, 1500)
    mask[0, 400:600] = False
    check(rewards, values, mask, 1.0, 0.99, bootstrap)


@pytest.mark.parametrize("T", [128, 129, 200, 257])
def test_many_blocks(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    """Blocks of 64: up to five of them, one without any live position, the carry passing through untouched."""
    monkeypatch.setattr(kernels, "_MAX_BLOCK", 64)
    rewards, values, mask, bootstrap = batch(3, T)
    mask[1, T - 128 : T - 64] = False
    mask[2, T - 64 :] = False
    check(rewards, values, mask, 0.999, 0.97, bootstrap)


def test_block_size_changes_rounding_only(monkeypatch: pytest.MonkeyPatch, accurate: Callable[..., None]) -> None:
    rewards, values, mask, bootstrap = batch(2, 200)
    whole = kernels.gae(rewards, values, mask, 0.99, 0.95, bootstrap)
    monkeypatch.setattr(kernels, "_MAX_BLOCK", 64)
    blocks = kernels.gae(rewards, values, mask, 0.99, 0.95, bootstrap)
    exact = recurrence(rewards.double(), values.double(), mask, 0.99, 0.95, bootstrap.double())[0]
    accurate(blocks[0], exact, whole[0])
    torch.testing.assert_close(blocks[2], whole[2], rtol=1e-6, atol=1e-6)


PATTERNS = ["1111", "0111", "1110", "1011", "0110", "1001", "0100", "0001", "1000", "0000"]


@pytest.mark.parametrize("bootstrap", [False, True], ids=["no bootstrap", "bootstrap"])
def test_every_kind_of_hole(check: Callable[..., None], bootstrap: bool) -> None:
    """In front, in the middle, at the end, everywhere."""
    mask = torch.tensor([[c == "1" for c in pattern] for pattern in PATTERNS])
    rewards, values, _, boot = batch(len(PATTERNS), 4)
    check(rewards, values, mask, 0.9, 0.8, boot if bootstrap else None)


def test_a_hole_costs_no_discount() -> None:
    """The row with holes equals the row without them, squeezed together, to the bit."""
    rewards, values, mask, bootstrap = batch(1, 40, density=0.5)
    spread, _, _ = kernels.gae(rewards, values, mask, 0.9, 0.8, bootstrap)
    n = int(mask.sum())
    packed = [x[mask][None] for x in (rewards, values)]
    squeezed, _, _ = kernels.gae(*packed, torch.ones(1, n, dtype=torch.bool), 0.9, 0.8, bootstrap)
    torch.testing.assert_close(spread[mask], squeezed[0], rtol=3e-7, atol=3e-7)


def test_masked_positions_are_never_read(run: Run) -> None:
    rewards, values, mask, bootstrap = batch(3, 100)
    mask[2] = False
    expected = run(rewards, values, mask, 0.99, 0.95, bootstrap)
    for poison in (torch.nan, torch.inf):
        hidden = [torch.where(mask, x, poison) for x in (rewards, values)]
        boot = torch.where(mask.any(1), bootstrap, poison)  # nobody's successor in a row without live positions
        for got, want in zip(run(*hidden, mask, 0.99, 0.95, boot), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("which", ["reward", "value"])
def test_nan_spreads_to_earlier_positions_of_its_row_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(kernels, "_MAX_BLOCK", 64)
    rewards, values, _, bootstrap = batch(2, 130)
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[0, 80:90] = False
    clean, _, _ = run(rewards, values, mask, 0.99, 0.95, bootstrap)
    (rewards if which == "reward" else values)[0, 100] = torch.nan
    advantages, returns, moments = run(rewards, values, mask, 0.99, 0.95, bootstrap)
    live = mask[0, :101]
    assert bool(advantages[0, :101][live].isnan().all())
    assert bool(returns[0, :101][live].isnan().all())
    assert not bool(advantages[0, 80:90].any())
    assert torch.equal(advantages[0, 101:], clean[0, 101:])
    assert torch.equal(advantages[1], clean[1])
    assert moments[0] == mask.sum()
    assert bool(moments[1:].isnan().all())


def test_moments_of_advantages_far_from_zero(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of 1e6 and a spread of 1: of a sum of squares minus a squared sum four digits would be left."""
    monkeypatch.setattr(kernels, "_MAX_BLOCK", 64)
    rewards, _, mask, _ = batch(3, 130, torch.float64)
    advantages, _, moments = run(rewards + 1e6, torch.zeros_like(rewards), mask, 0.0, 0.0, None)
    live = advantages[mask]
    assert moments[0] == live.numel()
    torch.testing.assert_close(moments[1], live.sum(), rtol=1e-13, atol=0)
    torch.testing.assert_close(moments[2], (live - live.mean()).square().sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("B", [1, 256, 257, 700])
def test_moments_of_many_rows(B: int) -> None:
    """The merging program alone, around its block of 256 rows; some rows have no live position."""
    generator = torch.Generator().manual_seed(B)
    x = 1e3 + torch.randn(B, 5, dtype=torch.float64, generator=generator)
    x += torch.arange(B)[:, None]
    live = torch.rand(B, 5, generator=generator) < 0.5
    live[0] = True
    count = live.sum(1).double()
    total = torch.where(live, x, 0.0).sum(1)
    spread = torch.where(live, x - (total / count)[:, None], 0.0).square().sum(1)
    moments = torch.full((3,), torch.nan, dtype=torch.float64)
    kernels._merge_moments_kernel[(1,)](torch.stack([count, total, spread], 1), moments, B, ROWS=256)
    everything = x[live]
    expected = [everything.numel(), everything.sum(), (everything - everything.mean()).square().sum()]
    torch.testing.assert_close(moments, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_no_positions(run: Run, shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    advantages, returns, moments = run(empty, empty, empty.bool(), 0.99, 0.95, torch.zeros(shape[0]))
    assert advantages.shape == returns.shape == shape
    assert torch.equal(moments, torch.zeros(3, dtype=torch.float64))


def test_discount_is_not_rounded_for_float64() -> None:
    """gamma and lambda reach the kernel as float64: 0.99 rounded to float32 would show in the eighth digit."""
    rewards, values, mask, _ = batch(1, 64, torch.float64, density=2.0)
    advantages, _, _ = kernels.gae(rewards, values, mask, 0.99, 0.95, None)
    exact, _ = recurrence(rewards, values, mask, 0.99, 0.95, None)
    torch.testing.assert_close(advantages, exact, rtol=1e-13, atol=1e-13)
