"""selected_logprobs in Triton, interpreted, against float64 log_softmax: logic and numerics, not speed or races."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import selected_logprobs as kernels

# The interpreter computes the branch that tl.where drops, too, and NumPy says so where that is 0 * inf or log(0).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LOWEST = torch.finfo(torch.float32).min


class Result(NamedTuple):
    logprobs: Tensor
    entropy: Tensor
    grad: Tensor


class Case(NamedTuple):
    logits: Tensor  # [A, B, V]
    token_ids: Tensor  # [A, B]
    temperature: Tensor  # [A, B]
    c: Tensor  # [A, B]
    e: Tensor  # [A, B]

    def with_logits(self, logits: Tensor) -> Case:
        return self._replace(logits=logits)


def stat(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_case(logits: Tensor, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    A, B, V = logits.shape
    dtype = stat(logits.dtype)
    return Case(
        logits,
        torch.randint(0, V, (A, B), generator=generator),
        torch.rand(A, B, generator=generator).to(dtype) + 0.5,
        torch.randn(A, B, generator=generator).to(dtype),
        torch.randn(A, B, generator=generator).to(dtype),
    )


def random_logits(A: int, B: int, V: int, dtype: torch.dtype, scale: float = 4.0) -> Tensor:
    return (scale * torch.randn(A, B, V, generator=torch.Generator().manual_seed(V))).to(dtype)


def run_directly(case: Case, mask: Tensor | None = None) -> Result:
    logprobs, entropy, lse = kernels.selected_logprobs(case.logits, case.token_ids, case.temperature, mask, True)
    rest = (case.token_ids, case.temperature, mask, entropy, lse)
    return Result(logprobs, entropy, kernels.selected_logprobs_backward(case.c, case.e, case.logits, *rest))


def run_through_the_op(case: Case, mask: Tensor | None = None) -> Result:
    logits = case.logits.detach().requires_grad_()
    with ops.backends.force("triton"):
        logprobs, entropy = ops.selected_logprobs(
            logits, case.token_ids, temperature=case.temperature, mask=mask, return_entropy=True
        )
        torch.autograd.backward([logprobs, entropy], [case.c, case.e])
    assert logits.grad is not None
    return Result(logprobs.detach(), entropy.detach(), logits.grad)


def formula(case: Case, dtype: torch.dtype) -> Result:
    """The definition, differentiated by autograd, in one dtype from the (rounded) inputs on."""
    logits = case.logits.detach().clone().requires_grad_()
    logp = (logits.to(dtype) / case.temperature.to(dtype)[..., None]).log_softmax(-1)
    logprobs = logp.gather(-1, case.token_ids[..., None])[..., 0]
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp.clamp(min=LOWEST)).sum(-1)
    (grad,) = torch.autograd.grad([logprobs, entropy], logits, [case.c.to(dtype), case.e.to(dtype)])
    return Result(logprobs.detach(), entropy.detach(), grad)


def exact_formula(case: Case) -> Result:
    return formula(case.with_logits(case.logits.double()), torch.float64)


def as_torch(case: Case) -> Result:
    """What PyTorch gives in the stat dtype, its gradient rounded to the dtype of the logits."""
    return formula(case, stat(case.logits.dtype))


def of_rounded_lse(case: Case) -> float:
    """What half a unit in the last place of the log-sum-exp, at most 128 where it is used, makes of the gradient.

    Backward gets the row's log-sum-exp in the stat dtype: p is off by its rounding, once in logits / temperature and
    once scaled back to the logits.
    """
    lse = (case.logits.double() / case.temperature.double()[..., None]).logsumexp(-1).clamp(-128, 128)
    half_unit = torch.finfo(stat(case.logits.dtype)).eps * float(lse.abs().max()) / 2
    return 2 * half_unit * float(exact_formula(case).grad.abs().max())


@pytest.fixture(params=[run_directly, run_through_the_op], ids=["direct", "op"])
def run(request: pytest.FixtureRequest) -> Callable[..., Result]:
    return request.param


@pytest.fixture
def check(run: Callable[..., Result], accurate: Callable[..., None]) -> Callable[[Case], Result]:
    def check(case: Case) -> Result:
        result, exact, theirs = run(case), exact_formula(case), as_torch(case)
        accurate(result.logprobs, exact.logprobs, theirs.logprobs, unit=True)
        accurate(result.entropy, exact.entropy, theirs.entropy, unit=True)
        accurate(result.grad, exact.grad, theirs.grad, inherited=of_rounded_lse(case))
        return result

    return check


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 2, 7, 257, 5001])
def test_random_rows(check: Callable[[Case], Result], V: int, dtype: torch.dtype) -> None:
    check(make_case(random_logits(2, 2, V, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vocabulary_of_qwen(check: Callable[[Case], Result], dtype: torch.dtype) -> None:
    check(make_case(random_logits(1, 2, 151_936, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 4095, 4096, 5000])
def test_peaked_row(check: Callable[[Case], Result], where: int, dtype: torch.dtype) -> None:
    """One logit 40 above the rest, in the first block, on its border, in the last; selected, and not selected."""
    logits = random_logits(1, 2, 5001, dtype, scale=1.0)
    logits[..., where] += 40
    case = make_case(logits)
    result = check(case._replace(token_ids=torch.tensor([[where, (where + 1) % 5001]])))
    assert result.logprobs[0, 0] > -1e-4
    assert result.logprobs[0, 1] < -20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("noise", "level"), [(0.0, -1e4), (3.0, -1e4), (3.0, 1e4)])
def test_far_from_zero(check: Callable[[Case], Result], noise: float, level: float, dtype: torch.dtype) -> None:
    """The log-sum-exp is rounded to 5e-4 there; log-probs and gradients must not be."""
    case = make_case((random_logits(1, 2, 5001, torch.float32, scale=noise) + level).to(dtype))
    check(case._replace(temperature=torch.ones_like(case.temperature)))


def test_just_inside_and_outside_of_the_trusted_log_sum_exp(check: Callable[[Case], Result]) -> None:
    logits = random_logits(1, 4, 300, torch.float32, scale=1.0)
    logits += (torch.tensor([126.0, 130.0, -126.0, -130.0]) - logits.logsumexp(-1))[..., None]
    case = make_case(logits)
    check(case._replace(temperature=torch.ones_like(case.temperature)))


@pytest.mark.parametrize("filler", [-torch.inf, LOWEST], ids=["-inf", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_excluded_tokens(
    run: Callable[..., Result], accurate: Callable[..., None], dtype: torch.dtype, filler: float
) -> None:
    """A first block and scattered tokens with probability 0; of the two rows one selects an excluded token."""
    logits = random_logits(1, 2, 5001, dtype)
    logits[..., :4096] = filler
    logits[..., 4200:4300] = filler
    case = make_case(logits)._replace(token_ids=torch.tensor([[4097, 17]]))
    result = run(case)
    allowed = torch.tensor([i for i in range(4096, 5001) if not 4200 <= i < 4300])
    kept = case.with_logits(logits[..., allowed])._replace(token_ids=torch.tensor([[1, 1]]))
    exact, theirs = exact_formula(kept), as_torch(kept)
    accurate(result.logprobs[:, :1], exact.logprobs[:, :1], theirs.logprobs[:, :1])
    assert result.logprobs[0, 1] == -torch.inf or (filler == LOWEST and result.logprobs[0, 1] < LOWEST / 2)
    accurate(result.entropy, exact.entropy, theirs.entropy)
    first = Case(*(x[:, :1] for x in kept))
    accurate(result.grad[:, :1, allowed], exact.grad[:, :1], theirs.grad[:, :1], inherited=of_rounded_lse(first))
    expected = torch.zeros(5001, dtype=torch.float64)
    expected[17] = float(case.c[0, 1] / case.temperature[0, 1])
    excluded = torch.ones(5001, dtype=torch.bool)
    excluded[allowed] = False
    torch.testing.assert_close(result.grad[0, 1, excluded].double(), expected[excluded], rtol=8e-3, atol=0)
    assert not bool(result.grad[0, 0, excluded].any())


def test_row_of_minus_infinity(run: Callable[..., Result]) -> None:
    logits = random_logits(1, 2, 300, torch.float32)
    logits[0, 1] = -torch.inf
    case = make_case(logits)
    result = run(case)
    assert result.logprobs[0, 1] == -torch.inf
    assert result.entropy[0, 1] == 0
    assert not bool(result.grad[0, 1].any())
    alone = run(Case(*(x[:, :1] for x in case)))
    assert torch.equal(result.logprobs[0, 0], alone.logprobs[0, 0])
    assert torch.equal(result.grad[0, 0], alone.grad[0, 0])


def test_log_sum_exp() -> None:
    logits = random_logits(1, 4, 5001, torch.float32)
    logits[0, 3] = -torch.inf
    case = make_case(logits)
    mask = torch.tensor([[True, False, True, True]])
    _, _, lse = kernels.selected_logprobs(logits, case.token_ids, case.temperature, mask, False)
    exact = (logits.double() / case.temperature.double()[..., None]).logsumexp(-1)
    torch.testing.assert_close(lse[0, ::2].double(), exact[0, ::2], rtol=2.4e-7, atol=0)
    assert lse[0, 1] == 0
    assert lse[0, 3] == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_are_never_read(run: Callable[..., Result], dtype: torch.dtype) -> None:
    """NaN in logits, temperature and upstream gradients, and an impossible id, change nothing at masked rows."""
    case = make_case(random_logits(2, 3, 257, dtype))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    poisoned = Case(
        torch.where(mask[..., None], case.logits, torch.nan),
        torch.where(mask, case.token_ids, -7),
        case.temperature,
        torch.where(mask, case.c, torch.nan),
        torch.where(mask, case.e, torch.nan),
    )
    result, unmasked = run(poisoned, mask), run(case)
    for got, live in zip(result, unmasked, strict=True):
        assert torch.equal(got[mask], live[mask])
        assert not bool(got[~mask].any())


def test_masked_rows_without_a_temperature() -> None:
    case = make_case(random_logits(1, 2, 257, torch.float32))
    mask = torch.tensor([[True, False]])
    broken = case._replace(temperature=torch.where(mask, case.temperature, torch.nan))
    for got, expected in zip(run_directly(broken, mask), run_directly(case, mask), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("position", [0, 256])
def test_nan_in_a_live_row_stays_in_it_and_is_seen(run: Callable[..., Result], position: int) -> None:
    case = make_case(random_logits(1, 2, 257, torch.float32))
    logits = case.logits.clone()
    logits[0, 1, position] = torch.nan
    clean, result = run(case), run(case.with_logits(logits))
    for got, before in zip(result, clean, strict=True):
        assert bool(got[0, 1].isnan().all())
        assert torch.equal(got[0, 0], before[0, 0])


@pytest.mark.parametrize("token_id", [-1, 257, 2**31, 2**40, -(2**40)])
def test_id_out_of_range_is_nan(token_id: int) -> None:
    """Direct only: on CPU tensors the public op raises before any kernel runs."""
    case = make_case(random_logits(1, 2, 257, torch.float32))
    clean = run_directly(case)
    result = run_directly(case._replace(token_ids=torch.tensor([[int(case.token_ids[0, 0]), token_id]])))
    assert bool(result.logprobs[0, 1].isnan())
    assert bool(result.grad[0, 1].isnan().all())
    assert torch.equal(result.entropy, clean.entropy)
    assert torch.equal(result.grad[0, 0], clean.grad[0, 0])


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_without_a_distribution_is_nan(temperature: float) -> None:
    """Direct only: on CPU tensors the public op raises."""
    case = make_case(random_logits(1, 1, 257, torch.float32))
    result = run_directly(case._replace(temperature=torch.full((1, 1), temperature)))
    assert all(bool(x.isnan().all()) for x in result)


def test_upstream_gradients_one_at_a_time(accurate: Callable[..., None]) -> None:
    """None, zero, and both; the gradients of log-prob and entropy add up."""
    case = make_case(random_logits(1, 3, 257, torch.float32))
    logprobs, entropy, lse = kernels.selected_logprobs(case.logits, case.token_ids, case.temperature, None, True)
    zero = torch.zeros_like(case.c)

    def backward(c: Tensor | None, e: Tensor | None, entropy: Tensor = entropy) -> Tensor:
        arguments = (case.logits, case.token_ids, case.temperature, None, entropy, lse)
        return kernels.selected_logprobs_backward(c, e, *arguments)

    for only, given in ((case._replace(e=zero), (case.c, None)), (case._replace(c=zero), (None, case.e))):
        result = backward(*given)
        accurate(result, exact_formula(only).grad, as_torch(only).grad, inherited=of_rounded_lse(only))
        assert torch.equal(result, backward(only.c, only.e))
    assert torch.equal(backward(case.c, None, logprobs.new_empty(0)), backward(case.c, None))
    assert not bool(backward(None, None).any())
    both = backward(case.c, case.e)
    accurate(both, exact_formula(case).grad, as_torch(case).grad, inherited=of_rounded_lse(case))


def test_rows_without_gradient_are_zero_but_pass_on_nan() -> None:
    case = make_case(random_logits(1, 3, 257, torch.float32))
    logits = case.logits.clone()
    logits[0, 2, 5] = torch.nan
    silent = torch.tensor([[False, True, True]])
    zeroed = [torch.where(silent, 0.0, x) for x in (case.c, case.e)]
    result = run_directly(case._replace(logits=logits, c=zeroed[0], e=zeroed[1]))
    assert bool(result.grad[0, 0].any())
    assert not bool(result.grad[0, 1].any())
    assert bool(result.grad[0, 2].isnan().all())


def test_entropy_is_empty_when_not_asked_for() -> None:
    case = make_case(random_logits(2, 2, 257, torch.bfloat16))
    logprobs, entropy, lse = kernels.selected_logprobs(case.logits, case.token_ids, case.temperature, None, False)
    with_entropy = kernels.selected_logprobs(case.logits, case.token_ids, case.temperature, None, True)
    assert entropy.shape == (0,)
    assert entropy.dtype == torch.float32
    assert torch.equal(logprobs, with_entropy[0])
    assert torch.equal(lse, with_entropy[2])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
def test_no_rows_and_one_row(run: Callable[..., Result], shape: tuple[int, int]) -> None:
    result = run(make_case(random_logits(*shape, 257, torch.float32)))
    assert result.logprobs.shape == result.entropy.shape == shape
    assert result.grad.shape == (*shape, 257)


LAYOUTS = {
    "sliced rows": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "sliced columns": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "offset": lambda x: torch.cat([torch.full_like(x[..., :1], torch.nan), x], -1)[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(run: Callable[..., Result], layout: str) -> None:
    case = make_case(random_logits(2, 3, 257, torch.float32))
    logits = LAYOUTS[layout](case.logits)
    assert not logits.is_contiguous() or layout == "sliced rows"
    assert torch.equal(logits, case.logits)
    for got, expected in zip(run(case.with_logits(logits)), run(case), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("shape", "strides"), [((3, 2), (2**30, 2048)), ((2, 3), (2048, 2**30))], ids=["A", "B"])
def test_offsets_past_two_to_the_31_elements(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    """Six rows in a storage of 4 GiB, of which only their pages are ever touched; forward, backward, and in place."""
    case = make_case(random_logits(*shape, 1003, torch.bfloat16))
    expected = run_directly(case)
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16).as_strided((*shape, 1003), (*strides, 1))
    far.copy_(case.logits)
    for got, want in zip(run_directly(case.with_logits(far)), expected, strict=True):
        assert torch.equal(got, want)
    _, entropy, lse = kernels.selected_logprobs(far, case.token_ids, case.temperature, None, True)
    kernels.selected_logprobs_backward_(case.c, case.e, far, case.token_ids, case.temperature, None, entropy, lse)
    assert torch.equal(far, expected.grad)


@pytest.mark.parametrize("level", [0.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_over_the_logits(dtype: torch.dtype, level: float) -> None:
    """The in-place form gives the same bits, also where it reads a row twice, leaves what lies between rows alone, and
    zeroes masked rows, NaN or not."""
    case = make_case((random_logits(2, 2, 5001, torch.float32) + level).to(dtype))
    mask = torch.tensor([[True, True], [False, True]])
    expected = run_directly(case, mask)
    wide = torch.full((2, 2, 5003), 7.0, dtype=dtype)
    logits = wide[..., 1:5002]
    logits.copy_(torch.where(mask[..., None], case.logits, torch.nan))
    _, entropy, lse = kernels.selected_logprobs(logits, case.token_ids, case.temperature, mask, True)
    arguments = (case.token_ids, case.temperature, mask, entropy, lse)
    assert kernels.selected_logprobs_backward_(case.c, case.e, logits, *arguments) is None
    assert torch.equal(logits, expected.grad)
    assert bool((wide[..., [0, 5002]] == 7).all())


def test_inplace_backward_of_the_public_op() -> None:
    case = make_case(random_logits(2, 2, 257, torch.float32))
    leaf = case.logits.clone().requires_grad_()
    with ops.backends.force("triton"):
        logits = leaf * 1.0
        logprobs, entropy = ops.selected_logprobs(
            logits, case.token_ids, temperature=case.temperature, return_entropy=True, inplace_backward=True
        )
        torch.autograd.backward([logprobs, entropy], [case.c, case.e])
    expected = run_directly(case).grad
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(logits.detach(), expected)
