"""The output layer in Triton, interpreted, against float64: both ways of scoring, and the gradients, through the ops.

The interpreter checks logic and numerics, not speed, races or what tensor cores do. GEMMs are torch's here, widened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import ppo_fast.ops as ops
from ppo_fast.kernels import head_scores, linear_head

# The interpreter computes the branch that tl.where drops, too, and NumPy says so where that is 0 * inf or log(0).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCORING = ("fused", "vendor")


class Case(NamedTuple):
    hidden: Tensor  # [n, H]
    weight: Tensor  # [V, H]
    token_ids: Tensor  # [n]
    bias: Tensor | None = None  # [V]
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    mask: Tensor | None = None  # [n]

    def converted(self, dtype: torch.dtype) -> Case:
        """With all numbers in ``dtype``."""
        return Case(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in self))


class Result(NamedTuple):
    logprobs: Tensor  # [n]
    entropy: Tensor  # [n]
    d_hidden: Tensor | None = None  # [n, H]
    d_weight: Tensor | None = None  # [V, H]
    d_bias: Tensor | None = None  # [V]


def make(n: int, H: int, V: int, dtype: torch.dtype = torch.float32, *, plain: bool = True) -> Case:
    generator = torch.Generator().manual_seed(n * V + H)
    hidden = torch.randn(n, H, generator=generator)
    weight = 3 / math.sqrt(H) * torch.randn(V, H, generator=generator)
    case = Case(hidden.to(dtype), weight.to(dtype), torch.randint(V, (n,), generator=generator))
    if plain:
        return case
    return case._replace(
        bias=torch.randn(V, generator=generator),
        temperature=torch.rand(n, generator=generator) + 0.5,
        softcap=5.0,
        logit_scale=0.8,
    )


def keywords(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("bias", "temperature", "softcap", "logit_scale", "mask")}


def score(case: Case) -> Result:
    with ops.backends.force("triton"), torch.no_grad():
        return Result(
            *ops.linear_selected_logprobs(
                case.hidden, case.weight, case.token_ids, return_entropy=True, **keywords(case)
            )
        )


def linear_loss(logprobs: Tensor, entropy: Tensor, c: Tensor, e: Tensor) -> Tensor:
    return c * logprobs + e * entropy


def coefficients(case: Case) -> tuple[Tensor, Tensor]:
    c, e = torch.randn(2, case.hidden.shape[0], generator=torch.Generator().manual_seed(1)).unbind(0)
    return c, e


def train(case: Case) -> Result:
    """Everything by the op that makes gradients in its forward pass."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = leaves
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(logprobs: Tensor, entropy: Tensor, c: Tensor, e: Tensor) -> Tensor:
        seen.append((logprobs.detach(), entropy.detach()))
        return linear_loss(logprobs, entropy, c, e)

    with ops.backends.force("triton"):
        total = ops.linear_token_loss(
            hidden, weight, case.token_ids, loss, coefficients(case), **{**keywords(case), "bias": bias}
        )
        total.backward()
    return Result(*map(torch.cat, zip(*seen, strict=True)), *(None if x is None else x.grad for x in leaves))


def definition(case: Case) -> Result:
    """By autograd, in the dtype of the case."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    bias = None if case.bias is None else case.bias.clone().requires_grad_()
    z = torch.nn.functional.linear(hidden, weight, bias) * case.logit_scale
    if case.softcap is not None:
        z = case.softcap * torch.tanh(z / case.softcap)
    t = case.temperature
    z = z / (t[:, None] if isinstance(t, Tensor) else t)
    table = z.log_softmax(-1)
    logprobs = table.gather(1, case.token_ids[:, None])[:, 0]
    entropy = -torch.where(table == -torch.inf, 0.0, table.exp() * table.clamp(min=-6e4)).sum(-1)
    c, e = coefficients(case)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    found = torch.autograd.grad(linear_loss(logprobs, entropy, c.to(z.dtype), e.to(z.dtype)).sum(), inputs)
    return Result(logprobs.detach(), entropy.detach(), *found)


Check = Callable[[Case, Result], None]


@pytest.fixture
def check(accurate: Callable[..., None]) -> Check:
    """Log-probs and entropies as a float32 output layer makes them of the inputs; gradients as PyTorch does in their
    dtype (bfloat16: from float32 logits, rounded where PyTorch rounds)."""

    def check(case: Case, result: Result) -> None:
        exact, single = definition(case.converted(torch.float64)), definition(case.converted(torch.float32))
        accurate(result.logprobs, exact.logprobs, single.logprobs, unit=True)
        accurate(result.entropy, exact.entropy, single.entropy, unit=True)
        assert bool((result.logprobs <= 0).all())
        assert bool((result.entropy >= 0).all())
        if result.d_hidden is None:
            return
        dtype = case.hidden.dtype
        theirs = single if dtype == torch.float32 else definition(case.converted(dtype))
        accurate(result.d_hidden, exact.d_hidden, theirs.d_hidden)
        accurate(result.d_weight, exact.d_weight, theirs.d_weight)
        if case.bias is not None:
            accurate(result.d_bias, exact.d_bias, single.d_bias)

    return check


@pytest.fixture(params=SCORING)
def scoring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PPO_FAST_SCORING", request.param)
    return request.param


SHAPES = [(1, 1, 1), (5, 33, 257), (18, 64, 501)]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "shaped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores(scoring: str, check: Check, shape: tuple[int, int, int], dtype: torch.dtype, plain: bool) -> None:
    case = make(*shape, dtype, plain=plain)
    check(case, score(case))


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "shaped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(check: Check, shape: tuple[int, int, int], dtype: torch.dtype, plain: bool) -> None:
    case = make(*shape, dtype, plain=plain)
    check(case, train(case))


def test_scores_of_several_blocks_of_tokens(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_FAST_SCORING", "fused")
    case = make(130, 16, 300, torch.bfloat16, plain=False)
    check(case, score(case))


def test_float64_is_scored_and_differentiated_through_memory(accurate: Callable[..., None]) -> None:
    case = make(5, 33, 257, torch.float64, plain=False).converted(torch.float64)
    exact = definition(case)
    for got, want in zip(train(case), exact, strict=True):
        accurate(got, want, want)
    for got, want in zip(score(case)[:2], exact[:2], strict=True):
        accurate(got, want, want)


@pytest.mark.parametrize("way", [pytest.param("fused", marks=pytest.mark.long), "vendor"])
def test_vocabulary_of_qwen(way: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_FAST_SCORING", way)
    case = make(2, 16, 151_936, torch.bfloat16)
    check(case, score(case))


@pytest.mark.parametrize("where", [0, 4095, 4096, 4200])
def test_peaked_row(scoring: str, check: Check, where: int) -> None:
    """One logit 40 above the rest, in the first tile, on a border, in the last; selected, and not selected."""
    case = make(2, 16, 4201)
    bias = torch.zeros(4201)
    bias[where] = 40
    case = case._replace(bias=bias, token_ids=torch.tensor([where, (where + 1) % 4201]))
    result = score(case)
    check(case, result)
    check(case, train(case))
    assert result.logprobs[0] > -1e-4
    assert result.logprobs[1] < -20


def test_certain_token_has_no_positive_log_prob(scoring: str) -> None:
    bias = torch.full((300,), -1e4)
    bias[7] = 0
    case = make(3, 16, 300)._replace(bias=bias, token_ids=torch.full((3,), 7))
    result = score(case)
    assert torch.equal(result.logprobs, torch.zeros(3))
    assert torch.equal(result.entropy, torch.zeros(3))
    assert not bool(train(case).d_hidden.any())


def test_far_from_zero(scoring: str, check: Check) -> None:
    case = make(3, 16, 1001)._replace(bias=torch.full((1001,), -1e4))
    check(case, score(case))
    check(case, train(case))


def test_excluded_tokens(scoring: str, accurate: Callable[..., None]) -> None:
    """A bias of -inf on the whole first tile and the last columns; one of the rows selects an excluded token."""
    bias = torch.zeros(5001)
    bias[:4096] = -torch.inf
    bias[4900:] = -torch.inf
    case = make(2, 16, 5001)._replace(bias=bias, token_ids=torch.tensor([4097, 17]))
    result, trained = score(case), train(case._replace(token_ids=torch.tensor([4097, 4098])))
    kept = slice(4096, 4900)
    smaller = case._replace(bias=None, weight=case.weight[kept], token_ids=torch.tensor([1, 2]))
    exact, single = definition(smaller.converted(torch.float64)), definition(smaller)
    accurate(result.logprobs[:1], exact.logprobs[:1], single.logprobs[:1])
    assert result.logprobs[1] == -torch.inf
    accurate(result.entropy, exact.entropy, single.entropy)
    accurate(trained.d_hidden, exact.d_hidden, single.d_hidden)
    accurate(trained.d_weight[kept], exact.d_weight, single.d_weight)
    assert not bool(trained.d_weight[:4096].any())


def test_row_of_minus_infinity(scoring: str) -> None:
    case = make(2, 16, 300)._replace(bias=torch.full((300,), -torch.inf))
    result, trained = score(case), train(case)
    assert bool((result.logprobs == -torch.inf).all())
    assert torch.equal(result.entropy, torch.zeros(2))
    assert not bool(trained.d_hidden.any() or trained.d_weight.any() or trained.d_bias.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_rows_are_never_read(scoring: str, dtype: torch.dtype) -> None:
    case = make(6, 33, 257, dtype, plain=False)
    mask = torch.tensor([True, False, True, False, False, True])
    hidden = torch.where(mask[:, None], case.hidden, torch.nan)
    poisoned = case._replace(hidden=hidden, mask=mask, token_ids=torch.where(mask, case.token_ids, -7))
    alone = Case(*(x[mask] if isinstance(x, Tensor) and x.shape[:1] == (6,) else x for x in case))
    result, want = score(poisoned), score(alone)
    for got, expected in zip(result[:2], want[:2], strict=True):
        assert torch.equal(got[mask], expected)
        assert not bool(got[~mask].any())
    trained = train(poisoned)
    assert not bool(trained.d_hidden[~mask].any())
    assert bool(trained.d_weight.isfinite().all())


def test_nan_in_a_live_row_stays_in_it_and_is_seen(scoring: str) -> None:
    case = make(3, 33, 257)
    hidden = case.hidden.clone()
    hidden[1, 3] = torch.nan
    broken = case._replace(hidden=hidden)
    for result, clean in ((score(broken), score(case)), (train(broken), train(case))):
        for got, before in zip(result[:3], clean[:3], strict=True):
            if got is not None:
                assert bool(got[1].isnan().all())
                assert torch.equal(got[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("token_id", [-1, 257, 2**31, 2**40])
def test_id_out_of_range_is_nan(scoring: str, token_id: int) -> None:
    """Direct only: on CPU tensors the public op raises before any kernel runs."""
    case = make(2, 16, 257)
    ids = torch.tensor([int(case.token_ids[0]), token_id])
    head = case.hidden, case.weight, None
    clean = linear_head.head_forward(*head, case.token_ids, None, None, 1.0, None, True)
    result = linear_head.head_forward(*head, ids, None, None, 1.0, None, True)
    assert bool(result[0][1].isnan())
    assert torch.equal(result[0][:1], clean[0][:1])
    assert torch.equal(result[1], clean[1])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_without_a_distribution_is_nan(scoring: str, temperature: float) -> None:
    """Direct only: on CPU tensors the public op raises."""
    case = make(1, 16, 257)
    t = torch.full((1,), temperature)
    results = linear_head.head_forward(case.hidden, case.weight, None, case.token_ids, t, None, 1.0, None, True)
    assert bool(results[0].isnan() and results[1].isnan())


def test_rows_without_gradient_are_zero_but_pass_on_nan() -> None:
    case = make(3, 16, 257)
    hidden = case.hidden.clone()
    hidden[2, 5] = torch.nan
    logits, c = torch.empty(3, 257), torch.tensor([1.0, 0.0, 0.0])
    results = linear_head.head_forward(hidden, case.weight, None, case.token_ids, None, None, 1.0, logits, True)
    d_hidden = linear_head.head_backward(
        hidden, case.weight, case.token_ids, None, None, 1.0, logits, *results, c, c * 0, True, None, None
    )
    assert bool(d_hidden[0].any())
    assert not bool(d_hidden[1].any())
    assert bool(d_hidden[2].isnan().all())


def test_only_what_is_asked_for() -> None:
    case = make(4, 16, 257, torch.bfloat16)
    logits, ones = torch.empty(4, 257), torch.ones(4)
    head = case.hidden, case.weight
    results = linear_head.head_forward(*head, None, case.token_ids, None, None, 1.0, logits, False)
    assert results[1].shape == (0,)
    rest = case.token_ids, None, None, 1.0, logits, *results, ones, None
    assert linear_head.head_backward(*head, *rest, False, None, None).shape == (0, 16)
    no_rows = [x[:0] for x in (case.hidden, case.token_ids)]
    results = linear_head.head_forward(no_rows[0], case.weight, None, no_rows[1], None, None, 1.0, None, True)
    assert [x.shape for x in results] == [(0,)] * 4


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced rows": lambda x: x.repeat_interleave(2, 0)[::2],
    "sliced columns": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[:, : x.shape[1]],
    "transposed": lambda x: x.T.contiguous().T,
    "offset": lambda x: torch.cat([torch.full_like(x[:, :1], torch.nan), x], -1)[:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(scoring: str, layout: str) -> None:
    case = make(5, 33, 257)
    moved = case._replace(hidden=LAYOUTS[layout](case.hidden), weight=LAYOUTS[layout](case.weight))
    results = [
        linear_head.head_forward(x.hidden, x.weight, None, x.token_ids, None, None, 1.0, None, True)
        for x in (moved, case)
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)  # the vendor's GEMM may add in another order


def test_offsets_past_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of hidden states and weight 2^30 elements apart, in storages of which only their pages are touched."""
    monkeypatch.setenv("PPO_FAST_SCORING", "fused")
    case = make(3, 33, 4, torch.bfloat16)
    far = []
    for x, apart in ((case.hidden, 2**30), (case.weight, 2**30 - 2**20)):
        storage = torch.empty((x.shape[0] - 1) * apart + x.shape[1], dtype=x.dtype)
        far.append(storage.as_strided(x.shape, (apart, 1)).copy_(x))
    rest = None, case.token_ids, None, None, 1.0, None, True
    for got, expected in zip(
        linear_head.head_forward(*far, *rest),
        linear_head.head_forward(case.hidden, case.weight, *rest),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_logits_past_two_to_the_31_elements() -> None:
    """The row kernels on a workspace whose rows are 2^30 elements apart, its operand in 16 bits over them."""
    case = make(3, 33, 257, torch.bfloat16, plain=False)
    far = torch.empty(2**31 + 257).as_strided((3, 257), (2**30, 1))
    found = []
    for logits in (far, torch.empty(3, 257)):
        rest = case.token_ids, case.temperature, case.softcap, case.logit_scale, logits
        results = linear_head.head_forward(case.hidden, case.weight, case.bias, *rest, True)
        c, e = coefficients(case)
        d_hidden = linear_head.head_backward(case.hidden, case.weight, *rest, *results, c, e, True, None, None)
        found.append((*results, d_hidden))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_split_is_fixed_by_shape_and_covers_the_vocabulary() -> None:
    for n in (1, 16, 17, 300, 2048):
        for V in (1, 127, 128, 5001, 151_936, 262_144):
            for tile in {*head_scores._TILES.values(), *head_scores._FEW_TILES.values()}:
                n_splits, each = head_scores.splits(n, V, tile)
                assert (n_splits - 1) * each * tile.columns < V <= n_splits * each * tile.columns


def test_a_row_does_not_depend_on_the_others() -> None:
    """Within a configuration: the split is that of the number of tokens, so the same number of them."""
    case = make(20, 33, 1001)
    reordered = torch.arange(20).flip(0)
    results = [
        linear_head.head_forward(case.hidden[i], case.weight, None, case.token_ids[i], None, None, 1.0, None, True)
        for i in (torch.arange(20), reordered)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other[reordered])


def test_choice_between_fused_and_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(8, 4)
    few, many = torch.empty(256, 4), torch.empty(257, 4)
    assert head_scores.chosen(few, weight)
    assert not head_scores.chosen(many, weight)
    assert not head_scores.chosen(few, weight.double())
    monkeypatch.setenv("PPO_FAST_SCORING", "fused")
    assert head_scores.chosen(many, weight)
    monkeypatch.setenv("PPO_FAST_SCORING", "cublas")
    with pytest.raises(ValueError, match="PPO_FAST_SCORING must be fused or vendor, got 'cublas'"):
        head_scores.chosen(many, weight)


def test_autotuning_times_each_tile_once_a_problem_and_takes_the_fastest(
    monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    timed: list[head_scores.Tile] = []

    def time(call: Any) -> float:
        timed.append(call.args[-1])
        if call.args[-1].tokens == 128:
            raise head_scores.OutOfResources(2**20, 2**10, "shared memory")
        return float(call.args[-1].tokens)

    monkeypatch.setattr(head_scores, "do_bench", time)
    monkeypatch.setattr(head_scores, "_fastest", {})
    monkeypatch.setenv("PPO_FAST_AUTOTUNE", "1")
    case = make(20, 33, 257, torch.bfloat16)
    for _ in range(2):
        check(case, score(case))
    assert len(timed) == len(set(timed)) > 2
    assert [tile.tokens for tile in head_scores._fastest.values()] == [16]


def test_chunks_of_the_loop_and_blocks_of_scoring_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring through memory takes the rows in blocks; the loop hands them over in chunks."""
    case = make(16, 16, 257, torch.bfloat16, plain=False)
    whole = train(case)
    with ops.backends.force("triton"):
        hidden = case.hidden.detach().requires_grad_()
        ops.linear_token_loss(
            hidden, case.weight, case.token_ids, linear_loss, coefficients(case), chunk_tokens=7, **keywords(case)
        ).backward()
    torch.testing.assert_close(hidden.grad, whole.d_hidden, rtol=1e-2, atol=1e-2)
    monkeypatch.setenv("PPO_FAST_SCORING", "vendor")
    expected = score(case)
    monkeypatch.setattr(linear_head, "_SCORING_BYTES", 257 * 4 * 7)
    for got, want in zip(score(case)[:2], expected[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_backends_name_the_kernels() -> None:
    with ops.backends.force("triton"):
        assert ops.backends()["linear_ppo_loss"] == {"cpu": "triton", "cuda": "triton"}
    assert ops.backends()["linear_ppo_loss"]["cpu"] != "triton"
