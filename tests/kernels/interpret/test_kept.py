"""Kept sets in Triton, interpreted, against float64 and PyTorch: the two primitives, and one public op on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import kept as kernels

# The interpreter computes the branch that tl.where drops, too, and NumPy says so where that is 0 * inf or log(0).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Case(NamedTuple):
    hidden: Tensor  # [n, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V] stat dtype
    token_ids: Tensor  # [n]
    temperature: Tensor | None  # [n] stat dtype
    kept_ids: Tensor  # [n, K]
    softcap: float | None
    logit_scale: float
    c: Tensor  # [n] stat dtype
    e: Tensor | None  # [n] stat dtype

    def converted(self, dtype: torch.dtype) -> Case:
        return Case(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in self))


class Result(NamedTuple):
    logprobs: Tensor  # [n]
    entropy: Tensor  # [n]
    d_hidden: Tensor  # [n, H]
    d_weight: Tensor  # [V, H]
    d_bias: Tensor  # [V]


def make(n: int, H: int, V: int, K: int, dtype: torch.dtype = torch.float32, *, plain: bool = False) -> Case:
    """Distinct ids, a third of them blank in every second row; the token's own is anywhere."""
    torch.manual_seed(n * V + K)
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    kept = torch.stack([torch.randperm(V)[:K] for _ in range(n)])
    own = torch.randint(K, (n,))
    token_ids = kept[torch.arange(n), own]
    blank = (torch.rand(n, K) < 0.3) & (torch.arange(n) % 2 == 1)[:, None]
    blank[torch.arange(n), own] = False
    kept = torch.where(blank, -1, kept)
    hidden, weight = torch.randn(n, H).to(dtype), (3 / math.sqrt(H) * torch.randn(V, H)).to(dtype)
    c, e = torch.randn(n, dtype=stat), torch.randn(n, dtype=stat)
    if plain:
        return Case(hidden, weight, None, token_ids, None, kept, None, 1.0, c, None)
    bias, temperature = torch.randn(V, dtype=stat), 0.5 + torch.rand(n, dtype=stat)
    return Case(hidden, weight, bias, token_ids, temperature, kept, 5.0, 0.8, c, e)


def run(x: Case) -> Result:
    middle = x.token_ids, x.temperature, x.kept_ids, x.softcap, x.logit_scale
    logits, logprobs, entropy = kernels.kept_forward(x.hidden, x.weight, x.bias, *middle, True)
    d_weight, d_bias = logits.new_zeros(x.weight.shape), logits.new_zeros(x.weight.shape[0])
    d_hidden = kernels.kept_backward(x.c, x.e, logits, x.hidden, x.weight, *middle, True, d_weight, d_bias)
    return Result(logprobs, entropy, d_hidden, d_weight, d_bias)


def definition(x: Case) -> Result:
    """By autograd, in the dtype of the case."""
    hidden, weight = x.hidden.clone().requires_grad_(), x.weight.clone().requires_grad_()
    bias = (weight.new_zeros(weight.shape[0]) if x.bias is None else x.bias.clone()).requires_grad_()
    ids = x.kept_ids.clamp(min=0)
    z = (torch.einsum("nh,nkh->nk", hidden, weight[ids]) + bias[ids]) * x.logit_scale
    if x.softcap is not None:
        z = x.softcap * torch.tanh(z / x.softcap)
    if x.temperature is not None:
        z = z / x.temperature[:, None]
    z = torch.where(x.kept_ids < 0, -1e30, z)
    table = z.log_softmax(-1)
    logprobs = table.gather(1, (x.kept_ids == x.token_ids[:, None]).int().argmax(1)[:, None])[:, 0]
    entropy = -torch.where(x.kept_ids < 0, 0.0, table.exp() * table).sum(-1)
    total = (x.c * logprobs + (0.0 if x.e is None else x.e * entropy)).sum()
    return Result(logprobs.detach(), entropy.detach(), *torch.autograd.grad(total, (hidden, weight, bias)))


SHAPES = [(1, 1, 1, 1), (3, 33, 40, 7), (4, 130, 60, 37)]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "shaped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(
    accurate: Callable[..., None], shape: tuple[int, int, int, int], dtype: torch.dtype, plain: bool
) -> None:
    case = make(*shape, dtype, plain=plain)
    result = run(case)
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    exact, theirs = definition(case.converted(torch.float64)), definition(case.converted(stat))
    for i, (got, want, single) in enumerate(zip(result, exact, theirs, strict=True)):
        accurate(got, want, single, unit=i < 2)
    assert bool((result.logprobs <= 0).all() and (result.entropy >= 0).all())


def test_a_set_larger_than_one_block_of_logits(accurate: Callable[..., None]) -> None:
    case = make(1, 16, 1300, 1100)
    exact, theirs = definition(case.converted(torch.float64)), definition(case)
    result = run(case)
    for got, want, single in zip(result[:3], exact, theirs, strict=False):
        accurate(got, want, single)


def test_through_the_public_op(accurate: Callable[..., None]) -> None:
    case = make(4, 33, 40, 7)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    with ops.backends.force("triton"):
        logprobs, entropy = ops.linear_selected_logprobs(
            leaves[0],
            leaves[1],
            case.token_ids,
            bias=leaves[2],
            temperature=case.temperature,
            softcap=case.softcap,
            logit_scale=case.logit_scale,
            kept_ids=case.kept_ids,
            return_entropy=True,
        )
        torch.autograd.backward([logprobs, entropy], [case.c, case.e])
    exact, theirs = definition(case.converted(torch.float64)), definition(case)
    for got, want, single in zip((logprobs, entropy, *(x.grad for x in leaves)), exact, theirs, strict=True):
        accurate(got.detach(), want, single)


def test_masked_tokens_are_never_read() -> None:
    """NaN in their hidden states and temperature, ids that are none."""
    case = make(6, 33, 40, 7)
    mask = torch.tensor([True, False, True, False, False, True])
    poisoned = case._replace(
        hidden=torch.where(mask[:, None], case.hidden, torch.nan),
        token_ids=torch.where(mask, case.token_ids, -7),
        kept_ids=torch.where(mask[:, None], case.kept_ids, 99),
    )
    found = []
    for x, live in ((case, {}), (poisoned, {"mask": mask})):
        hidden = x.hidden.clone().requires_grad_()
        with ops.backends.force("triton"):
            logprobs = ops.linear_selected_logprobs(
                hidden, x.weight, x.token_ids, temperature=case.temperature, kept_ids=x.kept_ids, **live
            )
            logprobs.backward(case.c)
        found.append((logprobs.detach(), hidden.grad))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got[mask], want[mask])
        assert not bool(got[~mask].any())


def test_an_id_in_many_sets_is_added_up_by_one_program_in_order(accurate: Callable[..., None]) -> None:
    case = make(70, 16, 9, 8, torch.bfloat16)
    assert int((case.kept_ids == 3).sum()) > 40
    first, again = run(case), run(case)
    exact, theirs = definition(case.converted(torch.float64)), definition(case.converted(torch.float32))
    accurate(first.d_weight, exact.d_weight, theirs.d_weight)
    assert torch.equal(first.d_weight, again.d_weight)


def test_gradients_are_added_to_what_is_there() -> None:
    case = make(3, 33, 40, 7)
    middle = case.token_ids, case.temperature, case.kept_ids, case.softcap, case.logit_scale
    logits, _, _ = kernels.kept_forward(case.hidden, case.weight, case.bias, *middle, False)
    expected = run(case)
    d_weight, d_bias = torch.full_like(expected.d_weight, 2.0), torch.full_like(expected.d_bias, 3.0)
    rest = case.c, case.e, logits, case.hidden, case.weight, *middle
    assert kernels.kept_backward(*rest, False, d_weight, None).shape == (0,)
    kernels.kept_backward(*rest, False, None, d_bias)
    torch.testing.assert_close(d_weight, expected.d_weight + 2)
    torch.testing.assert_close(d_bias, expected.d_bias + 3)


def test_peaked_and_excluded_candidates(accurate: Callable[..., None]) -> None:
    """One candidate 40 above the others; some at -inf; a set of nothing but -inf."""
    case = make(3, 16, 40, 20)._replace(softcap=None)
    bias = torch.zeros(40)
    bias[case.kept_ids[0, 3]] = 40.0
    result, exact, theirs = (
        run(case._replace(bias=bias)),
        definition(case._replace(bias=bias).converted(torch.float64)),
        definition(case._replace(bias=bias)),
    )
    for got, want, single in zip(result, exact, theirs, strict=True):
        accurate(got, want, single, unit=True)
    empty = run(case._replace(bias=torch.full((40,), -torch.inf)))
    assert bool((empty.logprobs == -torch.inf).all())
    assert not bool(empty.entropy.any() or empty.d_hidden.any() or empty.d_weight.any())


def test_what_is_no_set_gives_nan_to_its_token_alone() -> None:
    """Direct only: on CPU tensors the public op raises."""
    case, ids = make(3, 16, 40, 7), None
    clean = run(case)
    ids = case.kept_ids.clone()
    ids[1, 0] = 40
    lacking = torch.where(case.kept_ids == case.token_ids[:, None], -1, case.kept_ids)
    lacking[[0, 2]] = case.kept_ids[[0, 2]]
    for broken in (ids, lacking):
        result = run(case._replace(kept_ids=broken))
        assert bool(result.logprobs[1].isnan())
        assert torch.equal(result.logprobs[[0, 2]], clean.logprobs[[0, 2]])
        assert torch.equal(result.d_hidden[[0, 2]], clean.d_hidden[[0, 2]])


def test_tokens_without_a_gradient_read_no_weight() -> None:
    case = make(3, 16, 40, 7)
    silent = torch.tensor([1.0, 0.0, 1.0])
    case = case._replace(c=case.c * silent, e=case.e * silent)
    middle = case.token_ids, case.temperature, case.kept_ids, case.softcap, case.logit_scale
    logits, _, _ = kernels.kept_forward(case.hidden, case.weight, case.bias, *middle, False)
    poisoned = torch.full_like(case.weight, torch.nan)
    poisoned[case.kept_ids[[0, 2]].clamp(min=0)] = 1.0
    d_hidden = kernels.kept_backward(case.c, case.e, logits, case.hidden, poisoned, *middle, True, None, None)
    assert not bool(d_hidden[1].any())
    assert bool(d_hidden.isfinite().all())


def test_offsets_past_two_to_the_31_elements() -> None:
    """Rows of the weight 2^30 elements apart, in a storage of which only their pages are touched."""
    case = make(2, 33, 4, 3, torch.bfloat16)
    far = torch.empty(3 * 2**30 + 33, dtype=torch.bfloat16).as_strided((4, 33), (2**30, 1)).copy_(case.weight)
    columns = case.weight.T.contiguous().T
    for moved in (far, columns):
        for got, want in zip(run(case._replace(weight=moved)), run(case), strict=True):
            assert torch.equal(got, want)


def test_no_token() -> None:
    case = make(2, 16, 40, 7)
    none = Case(*(x[:0] if isinstance(x, Tensor) and x.shape[0] == 2 else x for x in case))
    result = run(none)
    assert result.d_hidden.shape == (0, 16)
    assert not bool(result.d_weight.any())
