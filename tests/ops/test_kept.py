"""The two ops under every kept set, called directly; what the public ops promise of them is tested there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

OPS = torch.ops.ppo_fast
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def stat(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def make(n: int, H: int, V: int, K: int, dtype: torch.dtype = torch.float32, plain: bool = False) -> Case:
    """Distinct ids, a third of them blank in every second row; the token's own is anywhere."""
    kept = torch.stack([torch.randperm(V)[:K] for _ in range(n)])
    own = torch.randint(K, (n,))
    token_ids = kept[torch.arange(n), own]
    blank = (torch.rand(n, K) < 0.3) & (torch.arange(n) % 2 == 1)[:, None]
    blank[torch.arange(n), own] = False
    kept = torch.where(blank, -1, kept)
    hidden, weight = torch.randn(n, H).to(dtype), (3 / math.sqrt(H) * torch.randn(V, H)).to(dtype)
    numbers = {"dtype": stat(dtype)}
    c, e = torch.randn(n, **numbers), torch.randn(n, **numbers)
    if plain:
        return Case(hidden, weight, None, token_ids, None, kept, None, 1.0, c, None)
    bias, temperature = torch.randn(V, **numbers), 0.5 + torch.rand(n, **numbers)
    return Case(hidden, weight, bias, token_ids, temperature, kept, 5.0, 0.8, c, e)


class Result(NamedTuple):
    logprobs: Tensor  # [n]
    entropy: Tensor  # [n]
    d_hidden: Tensor  # [n, H]
    d_weight: Tensor  # [V, H]
    d_bias: Tensor  # [V]


def run(x: Case) -> Result:
    hidden, weight, bias, token_ids, temperature, kept_ids, softcap, logit_scale, c, e = x
    rest = token_ids, temperature, kept_ids, softcap, logit_scale
    logits, logprobs, entropy = OPS._kept_forward(hidden, weight, bias, *rest, True)
    d_weight, d_bias = (torch.zeros(shape, dtype=logits.dtype) for shape in (weight.shape, weight.shape[0]))
    d_hidden = OPS._kept_backward(c, e, logits, hidden, weight, *rest, True, d_weight, d_bias)
    return Result(logprobs, entropy, d_hidden, d_weight, d_bias)


def by_definition(x: Case, dtype: torch.dtype) -> Result:
    """From the whole vocabulary, in plain autograd."""
    hidden, weight, bias = (torch.zeros(len(x.weight)) if y is None else y for y in x[:3])
    inputs = [y.to(dtype, copy=True).requires_grad_() for y in (hidden, weight, bias)]
    z = (inputs[0] @ inputs[1].T + inputs[2]) * x.logit_scale
    if x.softcap is not None:
        z = x.softcap * torch.tanh(z / x.softcap)
    if x.temperature is not None:
        z = z / x.temperature.to(dtype)[:, None]
    chosen = torch.zeros(len(z), len(x.weight) + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(x.kept_ids < 0, len(x.weight), x.kept_ids), True)
    logp = z.masked_fill(~chosen[:, :-1], -torch.inf).log_softmax(1)
    entropy = -(logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(1)
    logprobs = logp.gather(1, x.token_ids[:, None])[:, 0]
    loss = (logprobs * x.c.to(dtype)).sum() + (0 if x.e is None else (entropy * x.e.to(dtype)).sum())
    return Result(logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs))


def same_bits(a: Result, b: Result) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(5, 1, 7, 1), (6, 33, 50, 1), (9, 24, 300, 17), (8, 1003, 60, 40), (70, 8, 65, 5), (8, 37, 2001, 1025)],
    ids=str,
)
@pytest.mark.parametrize("plain", [True, False])
def test_against_float64(cpu_backend, as_exact_as, sizes, dtype, plain):
    """n, H, V, K: one row of the weight, fewer than make a group, whole groups and not, more ids than a block."""
    x = make(*sizes, dtype, plain)
    got, near, exact = run(x), by_definition(x, stat(dtype)), by_definition(x, torch.float64)
    if dtype == torch.float64:
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
        return
    # PyTorch's batched products of one row sum in a worse order than its matrix products do.
    times = 16.0 if cpu_backend == "eager" else 4.0
    for a, b, c in zip(got, near, exact, strict=True):
        as_exact_as(a, b, c, times)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_read_in_place_whatever_their_strides(cpu_backend, dtype):
    x = make(7, 21, 40, 9, dtype)
    expected = run(x)
    wide = torch.full((80, 50), torch.nan, dtype=dtype)
    for weight in (wide[::2, 5:26], wide.T[5:45, 30:51], wide[40:, ::2][:, :21], wide[40:, 1 : 2 * 21 : 2]):
        weight.copy_(x.weight)
        assert weight.stride() != x.weight.stride()
        assert same_bits(run(x._replace(weight=weight)), expected)
        wide.fill_(torch.nan)


def test_rows_past_two_to_the_31_elements(cpu_backend, tmp_path):
    stride = 2**31 + 11
    far = torch.from_file(str(tmp_path / "holes"), shared=True, size=stride + 20, dtype=torch.bfloat16)
    x = make(3, 20, 2, 2, torch.bfloat16)
    weight = far.as_strided((2, 20), (stride, 1))
    weight.copy_(x.weight)
    assert same_bits(run(x._replace(weight=weight)), run(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_number_of_threads(cpu_backend, threads, dtype):
    """Ids that many tokens hold, so that a sum in another order would show."""
    if cpu_backend == "eager":
        pytest.skip("PyTorch's own products don't promise it")
    x = make(300, 300, 40, 25, dtype)
    seen = []
    for count in (1, 2, 3):
        threads(count)
        seen.append(run(x))
    assert same_bits(seen[0], seen[1])
    assert same_bits(seen[0], seen[2])


def test_a_token_does_not_depend_on_the_others(cpu_backend):
    if cpu_backend == "eager":
        pytest.skip("PyTorch's own products don't promise it")
    x = make(9, 40, 60, 11)
    whole = run(x)
    for i in range(9):
        one = [y[i : i + 1] if j in (0, 3, 4, 5, 8, 9) else y for j, y in enumerate(x)]
        alone = run(Case(*one))
        assert torch.equal(alone.logprobs[0], whole.logprobs[i])
        assert torch.equal(alone.entropy[0], whole.entropy[i])
        assert torch.equal(alone.d_hidden[0], whole.d_hidden[i])


@pytest.mark.parametrize("alive", [[], [2], [0, 5]])
def test_tokens_without_a_gradient_are_left_out(cpu_backend, alive):
    """Even where their hidden state is NaN. What the buffers held before stays."""
    x = make(6, 12, 30, 5)
    dead = torch.ones(6, dtype=torch.bool)
    dead[alive] = False
    x.c[dead] = 0
    x.e[dead] = 0
    expected = by_definition(x, torch.float64)
    x.hidden[dead] = torch.nan
    rest = x[3:8]
    logits, *_ = OPS._kept_forward(*x[:8], True)
    d_weight, d_bias = torch.ones(30, 12), torch.ones(30)
    d_hidden = OPS._kept_backward(x.c, x.e, logits, *x[:2], *rest, True, d_weight, d_bias)
    assert not d_hidden[dead].any()
    torch.testing.assert_close(d_hidden, expected.d_hidden.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_weight, 1 + expected.d_weight.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_bias, 1 + expected.d_bias.float(), rtol=1e-4, atol=1e-5)
    held = torch.zeros(30, dtype=torch.bool)
    held[x.kept_ids[~dead].flatten().clamp(min=0)] = True
    assert (d_weight[~held] == 1).all()


def test_only_what_is_asked_for(cpu_backend):
    x = make(6, 12, 30, 5)
    everything, rest = run(x), x[3:8]
    logits, _, entropy = OPS._kept_forward(*x[:8], False)
    assert entropy.shape == (0,)
    d_weight, d_bias = torch.zeros(30, 12), torch.zeros(30)
    assert OPS._kept_backward(x.c, x.e, logits, *x[:2], *rest, False, d_weight, None).shape == (0,)
    assert OPS._kept_backward(x.c, x.e, logits, *x[:2], *rest, False, None, d_bias).shape == (0,)
    d_hidden = OPS._kept_backward(x.c, x.e, logits, *x[:2], *rest, True, None, None)
    assert same_bits(everything, everything._replace(d_hidden=d_hidden, d_weight=d_weight, d_bias=d_bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_minus_infinity(cpu_backend, dtype):
    """One that isn't the token's has probability 0; the token's own makes its log-prob -inf; all: entropy 0."""
    x = make(3, 6, 20, 4, dtype, plain=True)._replace(
        token_ids=torch.tensor([0, 1, 2]),
        kept_ids=torch.tensor([[0, 5, 6, 7], [8, 1, -1, 9], [2, 1, 3, -1]]),
        e=torch.ones(3, dtype=stat(dtype)),
    )
    bias = torch.zeros(20, dtype=stat(dtype))
    bias[[1, 2, 3, 6]] = -torch.inf
    got = run(x._replace(bias=bias))
    finite = run(x._replace(kept_ids=torch.tensor([[0, 5, -1, 7], [8, 1, -1, 9], [2, 1, 3, -1]])))
    torch.testing.assert_close(got.logprobs[0], finite.logprobs[0])
    torch.testing.assert_close(got.entropy[0], finite.entropy[0])
    torch.testing.assert_close(got.d_hidden[0], finite.d_hidden[0])
    assert got.logprobs[1:].tolist() == [-math.inf, -math.inf]
    assert got.entropy[1] > 0
    assert got.entropy[2] == 0
    assert got.d_hidden[1].isfinite().all()
    assert not got.d_hidden[2].any()
    for id in (1, 2, 3, 6):
        assert not got.d_bias[id] or id == 1  # c arrives at a token whose probability is 0
    assert got.d_weight.isfinite().all()


def test_nan_in_a_live_row_propagates(cpu_backend):
    for change in (lambda x: x.hidden, lambda x: x.weight[x.kept_ids[1, 2], None], lambda x: x.bias[:, None]):
        x = make(4, 6, 40, 4)
        x.kept_ids[:] = torch.arange(16).view(4, 4)
        x = x._replace(token_ids=x.kept_ids[:, 1].clone())
        if change(x).shape[0] == 4:
            x.hidden[1, 3] = torch.nan
        elif change(x).shape[0] == 1:
            x.weight[x.kept_ids[1, 2], 3] = torch.nan
        else:
            x.bias[x.kept_ids[1, 2]] = torch.nan
        got = run(x)
        for y in (got.logprobs, got.entropy, got.d_hidden.sum(1)):
            assert y.isnan().tolist() == [False, True, False, False]


def test_a_nearly_certain_token(cpu_backend):
    """Its log-prob is 0 or the right tiny negative number, and what gradient there is sums to zero over the set."""
    x = make(1, 4, 10, 3, plain=True)
    x = x._replace(weight=torch.zeros(10, 4), bias=torch.zeros(10), c=torch.ones(1), hidden=torch.ones(1, 4))
    x.bias[x.token_ids] = 20.0
    got, exact = run(x), by_definition(x, torch.float64)
    if cpu_backend == "eager":
        assert got.logprobs == 0
        return
    torch.testing.assert_close(got.logprobs.double(), exact.logprobs, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.entropy.double(), exact.entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.d_bias.double(), exact.d_bias, rtol=1e-6, atol=0)
    assert got.d_bias.sum().abs() < 1e-6 * got.d_bias.abs().max()


@pytest.mark.parametrize(
    ("kept_ids", "error", "match"),
    [
        ([[1, 2], [3, 20]], IndexError, r"kept_ids must lie in \[0, 20\), or be -1 for none, at live positions"),
        ([[1, -2], [3, 4]], IndexError, r"kept_ids must lie in \[0, 20\)"),
        ([[1, 2], [3, 3]], ValueError, "kept_ids must not name a token twice at one position"),
        ([[1, 2], [4, -1]], IndexError, "token_ids must lie in their kept set at live positions: .* lacks token 3"),
        ([[-1, -1], [3, -1]], IndexError, "kept_ids lacks token 1"),
        ([[2, 2], [3, 99]], IndexError, r"kept_ids must lie in \[0, 20\)"),
    ],
)
def test_sets_that_are_none(cpu_backend, kept_ids, error, match):
    x = make(2, 3, 20, 2)._replace(token_ids=torch.tensor([1, 3]), kept_ids=torch.tensor([[1, -1], [-1, 3]]))
    run(x)  # -1 may be anywhere, any number of times
    with pytest.raises(error, match=match):
        run(x._replace(kept_ids=torch.tensor(kept_ids)))


def test_no_token(cpu_backend):
    x = make(1, 6, 20, 4)
    none = Case(*(y[:0] if j in (0, 3, 4, 5, 8, 9) else y for j, y in enumerate(x)))
    got = run(none)
    assert [len(y) for y in got] == [0, 0, 0, 20, 20]
    assert not got.d_weight.any()


@pytest.mark.parametrize("name", ["c", "e", "logits", "hidden", "token_ids", "temperature", "kept_ids", "d_weight"])
def test_a_direct_call_reads_no_memory_that_is_not_there(cpu_backend, name):
    if cpu_backend == "eager":
        pytest.skip("PyTorch checks its own operations")
    x = make(6, 12, 30, 5)
    arguments: dict[str, Any] = {"d_weight": torch.zeros(30, 12), "logits": torch.randn(6, 5), **x._asdict()}
    arguments[name] = arguments[name][:-1]

    def call():
        OPS._kept_backward(
            **{k: v for k, v in arguments.items() if k != "bias"}, need_hidden=True, d_bias=torch.zeros(30)
        )

    with pytest.raises(ValueError, match=" must be "):
        call()
    arguments = {**arguments, **x._asdict(), "logits": torch.randn(6, 5), "d_weight": torch.zeros(30, 12)}
    call()
    arguments["kept_ids"][2, 2] = 30
    with pytest.raises(IndexError, match=r"kept_ids must lie in \[0, 30\)"):
        call()


def test_opcheck(opcheck):
    x = make(4, 6, 15, 3)
    opcheck(OPS._kept_forward.default, (*x[:8], True))
    opcheck(OPS._kept_forward.default, (*make(4, 6, 15, 3, plain=True)[:8], False))
    logits = OPS._kept_forward(*x[:8], True)[0]
    for need_hidden, d_weight, d_bias in ((True, None, None), (False, torch.zeros(15, 6), torch.zeros(15))):
        opcheck(OPS._kept_backward.default, (x.c, x.e, logits, *x[:2], *x[3:8], need_hidden, d_weight, d_bias))
