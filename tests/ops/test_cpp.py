"""What only the C++ kernels have: instruction sets, threads, memory layouts, 16-bit conversions, exponentials.

What every backend promises is tested in the files of the ops, on these kernels too.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ppo_fast
from ppo_fast.ops import backends, linear_selected_logprobs

OPS = torch.ops.ppo_fast
ISAS = [name for name in backends.available() if name not in ("eager", "triton")]
LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3}
V_REAL = 151_936
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.skipif(not ISAS, reason=f"no C++ extension here: {backends()['why']['cpu']}")


def stat(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_op(
    logits: Tensor,  # [A, B, V]
    ids: Tensor,  # [A, B]
    temperature: Tensor | None = None,  # [A, B]
    mask: Tensor | None = None,  # [A, B]
    c: Tensor | None = None,  # [A, B]
    e: Tensor | None = None,  # [A, B]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, lse [A, B] and the gradient [A, B, V] for upstream gradients c and e, ones by default."""
    ones = torch.ones(ids.shape, dtype=stat(logits.dtype))
    temperature = ones if temperature is None else temperature
    logprobs, entropy, lse = OPS.selected_logprobs(logits, ids, temperature, mask, True)
    gradient = OPS.selected_logprobs_backward(
        ones if c is None else c, ones if e is None else e, logits, ids, temperature, mask, entropy, lse
    )
    return logprobs, entropy, lse, gradient


def exact(
    logits: Tensor, ids: Tensor, temperature: Tensor | None = None, c: Tensor | None = None, e: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same from the definitions, in float64."""
    one = torch.ones(ids.shape, dtype=torch.float64)
    t, c, e = (one if x is None else x.double() for x in (temperature, c, e))
    z = logits.double() / t[..., None]
    logp = z.log_softmax(-1)
    p = logp.exp()
    p_logp = torch.where(p > 0, p * logp, 0.0)
    entropy = -p_logp.sum(-1)
    onehot = torch.nn.functional.one_hot(ids, logits.shape[-1])
    gradient = c[..., None] * (onehot - p) - e[..., None] * (p_logp + p * entropy[..., None])
    return logp.gather(-1, ids[..., None])[..., 0], entropy, z.logsumexp(-1), gradient / t[..., None]


def loss_inputs(B: int, T: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    new = -5 * torch.rand(B, T, dtype=dtype)
    return {
        "new": new,
        "old": new + 0.3 * torch.randn(B, T, dtype=dtype),
        "advantages": torch.randn(B, T, dtype=dtype),
        "mask": torch.rand(B, T) > 0.3,
        "weights": torch.rand(B, dtype=dtype) / (B * T),
        "entropy": torch.rand(B, T, dtype=dtype),
        "ref": new + 0.3 * torch.randn(B, T, dtype=dtype),
    }


def token_ops(B: int, T: int, dtype: torch.dtype = torch.float32) -> list[Callable[[], tuple[Tensor, ...]]]:
    """Calls of the three ops over [B, T], on fixed inputs."""
    x = loss_inputs(B, T, dtype)
    bootstrap = torch.randn(B, dtype=dtype)
    return [
        lambda: OPS.ppo_loss(*x.values(), 0.2, 0.2, 3.0, 0, 0.01, 0.1, 3),
        lambda: OPS.ppo_loss(*x.values(), 0.2, 0.2, None, 1, 0.01, 0.1, 2),
        lambda: OPS.value_loss(x["new"], x["old"], x["advantages"], x["mask"], x["weights"], 0.2),
        lambda: OPS.gae(x["new"], x["old"], x["mask"], 0.99, 0.95, bootstrap),
    ]


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Signs of zeros and NaNs included."""
    return all(torch.equal(*(z.reshape(-1).view(torch.uint8) for z in pair)) for pair in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------- the extension


def test_loads_where_it_is_required():
    environment = {**os.environ, "PPO_FAST_REQUIRE_EXT": "1"}
    code = "import ppo_fast; print(ppo_fast.backends()['gae']['cpu'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [ISAS[-1]]


def test_imports_as_a_module_of_its_own():
    """The stable C ABI of Python and torch is all it needs: no torch.ops.load_library, no ppo_fast.ops before it."""
    (path,) = Path(ppo_fast.__file__).parent.glob("_C*.so")
    code = (
        "import torch, importlib.util as u; "
        f"s = u.spec_from_file_location('_C', {str(path)!r}); m = u.module_from_spec(s); s.loader.exec_module(m); "
        "print(torch.ops.ppo_fast._set_isa(-1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(LEVELS[ISAS[-1]])]


def test_best_level_is_what_the_cpu_has():
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        assert platform.machine() not in ("x86_64", "AMD64") or sys.platform == "darwin"
        return
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    best = 0
    if flags >= {"avx2", "fma", "f16c"}:
        best = 2 if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"} else 1
        best += best == 2 and "avx512_bf16" in flags
    assert OPS._set_isa(-1) == best
    assert list(LEVELS)[: best + 1] == ISAS


def test_set_isa_says_what_is_in_force():
    with backends.force(ISAS[-1]):  # restores the level
        for name in ISAS:
            assert OPS._set_isa(LEVELS[name]) == LEVELS[name]
        best = OPS._set_isa(-1)
        for level in (-2, best + 1):
            with pytest.raises(ValueError, match=rf"level must lie in \[-1, {best}\].*got {level}"):
                OPS._set_isa(level)
        assert OPS._set_isa(-1) == best


def test_levels_really_differ():
    """Double sums run over another number of lanes, so their last bits differ: forcing a level selects other code.

    The level of bfloat16 dot products is for the output layer, where it rounds the gradient of the logits.
    """
    op, seen = token_ops(30, 100)[0], []
    for name in ISAS[:3]:
        with backends.force(name):
            seen.append(op()[3])
    hidden, weight = torch.randn(5, 30).bfloat16(), torch.randn(40, 30).bfloat16()
    gradients = []
    for name in ISAS[2:]:
        with backends.force(name):
            x = hidden.clone().requires_grad_()
            linear_selected_logprobs(x, weight, torch.arange(5)).sum().backward()
            gradients.append(x.grad)
    assert len(gradients) < 2 or not torch.equal(*gradients)
    for i, a in enumerate(seen):
        for b in seen[i + 1 :]:
            assert not same_bits((a,), (b,))
            assert torch.allclose(a, b, rtol=1e-6)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, part of binutils")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="about x86 instructions")
def test_wide_instructions_stay_in_their_namespace():
    """A CPU without AVX2 or AVX-512 must never meet them: not in an inline function that the linker merged across
    levels, not in a helper of the compiler's. Judged by the mangled name, whose beginning is the function's own
    namespace: a template of the standard library over one of our types has that further in."""
    (path,) = Path(ppo_fast.__file__).parent.glob("_C*.so")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    # VEX mnemonics begin with v, and nothing else does but verr and verw; some BMI ones come with them. Only EVEX
    # reaches zmm, registers past 15 and masks.
    vex = re.compile(r"\t(v(?!er[rw]\b)|(andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt)\b)")
    evex = re.compile(r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]\b|\{%k|\{1to\d+\}|\{r[nuzd]-sae\}")
    name = re.compile(r"^[0-9a-f]+ <(.+)>:$")
    owners: dict[re.Pattern[str], set[str]] = {vex: set(), evex: set()}
    function = ""
    for line in listing.splitlines():
        if found := name.match(line):
            function = found[1]
        for pattern, holders in owners.items():
            if pattern.search(line):
                holders.add(function)
    assert owners[vex]
    assert owners[evex]

    def outside(holders: set[str], namespaces: str) -> set[str]:
        return {f for f in holders if not re.match(rf"_ZZ?N?[A-Z]*8ppo_fast({namespaces})L?\d", f)}

    assert not outside(owners[vex], "4avx2|6avx512|11avx512_bf16")
    assert not outside(owners[evex], "6avx512|11avx512_bf16")


# ---------------------------------------------------------------------------------------- independence of the result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, V_REAL), (3, 5, 40_003)])
def test_rows_have_the_same_bits_for_any_number_of_threads(isa, threads, dtype, shape):
    x, ids = (3 * torch.randn(shape)).to(dtype), torch.randint(shape[2], shape[:2])
    x[0, 0] -= 100  # a row whose gradient reads it twice
    seen = []
    for count in (1, 2, 3):
        threads(count)
        seen.append(row_op(x, ids))
    assert same_bits(seen[0], seen[1])
    assert same_bits(seen[0], seen[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 70_001), (300, 257), (70_001, 1)])
def test_tokens_have_the_same_bits_for_any_number_of_threads(isa, threads, dtype, shape):
    for op in token_ops(*shape, dtype):
        seen = []
        for count in (1, 2, 3):
            threads(count)
            seen.append(op())
        assert same_bits(seen[0], seen[1])
        assert same_bits(seen[0], seen[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_surroundings(isa, dtype):
    """Alone, in a batch, strided, shifted by one element or to an odd address: the same bits."""
    V = 20_011
    x, ids = (3 * torch.randn(2, 3, V)).to(dtype), torch.randint(V, (2, 3))
    expected = row_op(x, ids)
    for a in range(2):
        for b in range(3):
            alone = row_op(x[a : a + 1, b : b + 1].clone(), ids[a : a + 1, b : b + 1])
            assert same_bits(alone, tuple(y[a : a + 1, b : b + 1] for y in expected))

    offset = torch.empty(x.numel() + 1, dtype=dtype)[1:].view_as(x).copy_(x)
    transposed = torch.empty(3, 2, V + 7, dtype=dtype)[..., 5 : V + 5].transpose(0, 1).copy_(x)
    raw = torch.empty(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    raw[1:] = x.reshape(-1).view(torch.uint8)
    odd = torch.frombuffer(raw.numpy(), dtype=dtype, offset=1).view_as(x)
    assert offset.storage_offset() == 1
    assert odd.data_ptr() % 2 == 1 - raw.data_ptr() % 2
    for moved in (offset, transposed, odd):
        assert torch.equal(moved, x)
        assert same_bits(row_op(moved, ids), expected)
        ones = torch.ones(2, 3, dtype=stat(dtype))
        OPS.selected_logprobs_backward_(ones, ones, moved, ids, ones, None, expected[1], expected[2])
        assert same_bits((moved,), (expected[3],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_does_not_depend_on_its_place(isa, dtype):
    """Whole vectors, tails, vectors across rows, one column: the same bits for the same token and weight."""
    x = loss_inputs(37, 3, dtype)
    settings = 0.2, 0.2, 3.0, 0, 0.01, 0.1, 3
    (_, expected, d_entropy, *_), lanes = OPS.ppo_loss(*x.values(), *settings), x["weights"].repeat_interleave(3)
    column = {k: lanes if k == "weights" else v.reshape(-1, 1) for k, v in x.items()}
    _, got, got_entropy, *_ = OPS.ppo_loss(*column.values(), *settings)
    assert same_bits((got.view(37, 3), got_entropy.view(37, 3)), (expected, d_entropy))
    for i in (0, 50, 110):
        one = {k: v[i : i + 1] for k, v in column.items()}
        assert OPS.ppo_loss(*one.values(), *settings)[1][0, 0] == expected.reshape(-1)[i]


@pytest.mark.parametrize("V", [2501, 4999])  # their last blocks end in tiles of every height
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others_before_an_output_layer(isa, dtype, V):
    """Panels of one vector and of two, full or not: the same log-prob, entropy and gradient of a token."""
    hidden, weight = torch.randn(70, 33).to(dtype), torch.randn(V, 33).to(dtype)
    ids = torch.randint(V, (70,))

    def scored(rows: slice) -> tuple[Tensor, ...]:
        leaf = hidden[rows].clone().requires_grad_()
        pair = linear_selected_logprobs(leaf, weight, ids[rows], temperature=0.7, return_entropy=True)
        (gradient,) = torch.autograd.grad(sum(y.sum() for y in pair), leaf)
        return (*(y.detach() for y in pair), gradient)

    expected = scored(slice(None))
    for first, end in ((0, 1), (3, 10), (5, 21), (0, 17), (20, 52), (31, 64), (0, 48), (21, 70)):
        assert same_bits(scored(slice(first, end)), tuple(y[first:end] for y in expected))


def test_far_rows(isa, tmp_path):
    """Offsets past 2^31 elements, in a file of holes."""
    V, stride = 1003, 2**31 + 11
    far = torch.from_file(str(tmp_path / "holes"), shared=True, size=stride + V, dtype=torch.bfloat16)
    x = far.as_strided((2, 1, V), (stride, stride, 1))
    x.copy_(torch.randn(2, 1, V))
    ids = torch.tensor([[1], [1002]])
    expected = row_op(x.clone(), ids)
    assert same_bits(row_op(x, ids), expected)
    ones = torch.ones(2, 1)
    OPS.selected_logprobs_backward_(ones, ones, x, ids, ones, None, expected[1], expected[2])
    assert same_bits((x,), (expected[3],))


# --------------------------------------------------------------------------------------------------- rows of logits


@pytest.mark.parametrize(
    ("make", "V"),
    [
        (lambda V: torch.linspace(-60, 60, V), 40_000),  # a higher maximum in every block
        (lambda V: torch.linspace(60, -60, V), 40_000),
        (lambda V: torch.randn(V) * 3, V_REAL),
        (lambda V: torch.randn(V).index_fill_(0, torch.tensor([V - 1]), 40.0), V_REAL),  # a peak in the last column
        (lambda V: torch.cat([torch.full((20_000,), -math.inf), torch.randn(V - 20_000)]), 40_000),
        (lambda V: torch.cat([torch.randn(V - 20_000), torch.full((20_000,), -math.inf)]), 40_000),
        (
            lambda V: torch.full((V,), torch.finfo(torch.float32).min).index_fill_(0, torch.tensor([30_001]), 5.0),
            40_000,
        ),
        (lambda V: torch.full((V,), 0.5 * torch.finfo(torch.float32).min), 33),
        (lambda V: torch.randn(V) - 1e4, 5003),
        (lambda V: torch.randn(V) * 1e-4 + 1e6, 5003),
        (lambda V: torch.tensor([0.0, 1.9, 1.9, 1.9]).repeat(V // 4), 8192),  # a maximum that stays below the slack
        (lambda V: torch.randn(V), 1),
        (lambda V: torch.randn(V), 31),
        (lambda V: torch.randn(V), 16_385),
    ],
)
def test_rows_against_float64(isa, make, V):
    """A rounding or so of the results; the gradient carries the rounding of lse, at most 2e-6 where it is trusted."""
    x = make(V)[None, None].expand(1, 3, V)
    ids = torch.tensor([[0, V // 2, int(x[0, 0].argmax())]])
    temperature = torch.tensor([[1.0, 0.7, 1.3]])
    c, e = torch.tensor([[1.0, -0.3, 0.5]]), torch.tensor([[0.1, 0.4, -0.2]])
    got, expected = row_op(x, ids, temperature, c=c, e=e), exact(x, ids, temperature, c, e)
    for result, wanted in zip(got[:3], expected[:3], strict=True):
        overflow = wanted.abs() > torch.finfo(torch.float32).max
        error = (result.double() - wanted).abs()
        assert (overflow | (error <= 1.5 * EPS * wanted.abs() + 5e-7)).all(), (result, wanted)
        assert result[overflow].isinf().all()
    scale = (c.abs() + e.abs() * (1 + expected[1])) / temperature
    assert ((got[3].double() - expected[3]).abs().amax(-1) / scale).max() < 2.5e-6
    assert (got[3].double().sum(-1).abs() / scale).max() < 2.5e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 100, 19_999, 20_000])
def test_nan_anywhere_in_a_live_row(isa, dtype, column):
    for filler in (0.0, -math.inf):
        x = torch.full((1, 2, 20_001), filler, dtype=dtype)
        x[0, :, 7] = 1.0
        x[0, 0, column] = math.nan
        *statistics, gradient = row_op(x, torch.full((1, 2), 7))
        for y in statistics:
            assert y[0, 0].isnan()
            assert y[0, 1].isfinite()
        assert gradient[0, 0].isnan().all()
        assert gradient[0, 1].isfinite().all()
        zeros = torch.zeros(1, 2, dtype=stat(dtype))
        *_, gradient = row_op(x, torch.full((1, 2), 7), c=zeros, e=zeros)
        assert gradient[0, 0].isnan().all()  # 0 * NaN
        assert not gradient[0, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_plus_infinity_is_nan_and_minus_infinity_is_nothing(isa, dtype):
    x = torch.zeros(1, 3, 5000, dtype=dtype)
    x[0, 0, 4000] = math.inf
    x[0, 1, 1:] = -math.inf
    x[0, 2] = -math.inf
    logprobs, entropy, lse, gradient = row_op(x, torch.zeros(1, 3, dtype=torch.long))
    assert logprobs[0, 0].isnan()
    assert gradient[0, 0].isnan().all()
    assert logprobs[0].tolist()[1:] == [0.0, -math.inf]
    assert entropy[0].tolist()[1:] == [0.0, 0.0]
    assert lse[0].tolist()[1:] == [0.0, -math.inf]
    assert not gradient[0, 1:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_certain_tokens_never_rise_above_zero(isa, dtype):
    """Rounding must not give a log-prob of +1e-8 or an entropy of -1e-8, wherever the maximum stands in the row."""
    N, V = 150, 20_000  # blocks and segments in which the maximum comes late
    x = -25 + torch.rand(1, N, V) * torch.rand(1, N, 1)
    ids = torch.cat([torch.arange(0, V, V // 100), torch.randint(V, (N - 100,))])[None]
    x.scatter_(2, ids[..., None], 8 * torch.rand(1, N, 1))
    near = torch.rand(1, N) < 0.5  # half of the rows have a rival before it that it exceeds by up to 3 nats
    rival = x.gather(2, ids[..., None]) - 3 * torch.rand(1, N, 1)
    x[0, near[0], 0] = rival[0, near[0], 0]
    logprobs, entropy, _, gradient = row_op(x.to(dtype), ids, temperature=torch.rand(1, N, dtype=stat(dtype)) + 0.5)
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()
    assert (logprobs[~near] > -1e-3).all()
    assert gradient.double().sum(-1).abs().max() < (4e-6 if stat(dtype) == dtype else 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_are_float32_rows_rounded_once(isa, dtype):
    """Every bit pattern is read exactly; gradients of every size, subnormal to overflowing, are rounded to nearest."""

    def compare(x: Tensor, ids: Tensor, scale: Tensor) -> None:
        logprobs, entropy, lse, wide = row_op(x.float(), ids, c=scale, e=scale)
        ones = torch.ones(ids.shape)
        narrow = OPS.selected_logprobs_backward(scale, scale, x, ids, ones, None, entropy, lse)
        assert same_bits((narrow,), (wide.to(dtype),))
        again = OPS.selected_logprobs(x, ids, ones, None, True)  # adds in another order
        for got, wanted in zip(again, (logprobs, entropy, lse), strict=True):
            assert torch.allclose(got, wanted, rtol=2 * EPS, atol=2 * EPS)

    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = patterns[patterns.isfinite()]
    x = torch.stack([finite, torch.zeros_like(finite)], -1)[None]  # [1, n, 2]: one pattern against 0
    ids = torch.ones(x.shape[:2], dtype=torch.long)
    compare(x, ids, torch.ones(ids.shape))

    x, ids = torch.randn(1, 2000, 70).to(dtype), torch.randint(70, (1, 2000))
    compare(x, ids, torch.logspace(-45, 37, 2000)[None])


def test_subnormal_logits_survive_flush_to_zero(isa):
    """float16 subnormals are normal float32 numbers: they count even where float32 subnormals are taken for zero."""
    x = torch.tensor([[[6e-8, 6e-5, 0.0, 1.0]]], dtype=torch.float16)
    ids = torch.zeros(1, 1, dtype=torch.long)
    expected = row_op(x, ids)
    if not torch.set_flush_denormal(True):
        return
    try:
        got = row_op(x, ids)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(got, expected)


def test_probabilities_over_their_whole_range(isa):
    """The exponential of the rows: 2 roundings at 0; farther out those of x - lse and, without FMA, of its product."""
    d = torch.linspace(0, 86, 100_001)
    x = torch.stack([-d, torch.zeros_like(d)], -1)[None]
    gradient = row_op(x, torch.ones(x.shape[:2], dtype=torch.long), e=torch.zeros(x.shape[:2]))[3]
    wanted = torch.sigmoid(-d.double())
    error = (-gradient[0, :, 0].double() - wanted).abs() / wanted
    assert (error < EPS * (2 + (1.2 if isa == "portable" else 0.62) * d.double())).all()


def test_direct_calls_are_checked(isa):
    """torch.ops.ppo_fast.* without the wrappers: an error, never a read out of bounds, from whatever thread."""
    x, ids, ones = torch.randn(40, 50, 2000), torch.zeros(40, 50, dtype=torch.long), torch.ones(40, 50)
    bad = ids.clone()
    bad[39, 49] = 2000
    with pytest.raises(IndexError, match=r"token_ids must lie in \[0, 2000\), got 2000 at live position 1999"):
        row_op(x, bad)
    mask = torch.ones(40, 50, dtype=torch.bool)
    mask[39, 49] = False
    assert row_op(x, bad, mask=mask)[0][39, 49] == 0
    entropy = lse = ones
    with pytest.raises(IndexError, match="token_ids"):
        OPS.selected_logprobs_backward(ones, ones, x, bad, ones, None, entropy, lse)
    with pytest.raises(ValueError, match="temperature must be"):
        OPS.selected_logprobs(x, ids, ones.double(), None, False)
    with pytest.raises(ValueError, match="logits must be contiguous in its last"):
        OPS.selected_logprobs(x.transpose(1, 2), ids[:, :1].expand(40, 2000), torch.ones(40, 2000), None, False)
    with pytest.raises(ValueError, match="logits must be float32"):
        OPS.selected_logprobs(x.long(), ids, ones, None, False)
    with pytest.raises(ValueError, match="entropy must be"):
        OPS.selected_logprobs_backward(ones, ones, x, ids, ones, None, torch.empty(0), lse)
    for overlapping in (x[:1].expand(40, 50, 2000), x.as_strided((40, 50, 2000), (100_000, 1999, 1))):
        with pytest.raises(ValueError, match="without overlapping rows"):
            OPS.selected_logprobs_backward_(ones, None, overlapping, ids, ones, None, entropy, lse)
    y = loss_inputs(4, 5)
    with pytest.raises(ValueError, match="row_weights must be"):
        OPS.ppo_loss(*{**y, "weights": torch.ones(3)}.values(), 0.2, 0.2, None, 0, 0.0, 0.0, 3)
    with pytest.raises(ValueError, match="objective must be"):
        OPS.ppo_loss(*y.values(), 0.2, 0.2, None, 2, 0.0, 0.0, 3)
    with pytest.raises(ValueError, match="kl_estimator must be"):
        OPS.ppo_loss(*y.values(), 0.2, 0.2, None, 0, 0.0, 0.0, 4)
    with pytest.raises(ValueError, match="returns must be"):
        OPS.value_loss(y["new"], y["old"], y["old"].T.contiguous().T, y["mask"], y["weights"], 0.2)
    with pytest.raises(ValueError, match="bootstrap_values must be"):
        OPS.gae(y["new"], y["old"], y["mask"], 1.0, 1.0, torch.zeros(5))


def test_float64_logits_beyond_what_their_lse_can_tell(isa):
    """At 1e20 a float64 log-sum-exp is good to 1e4 nats: the gradient must not be made from it."""
    x = torch.tensor([[[1e20, -1e20, 1e20]]], dtype=torch.float64)
    t = torch.full((1, 1), 0.3, dtype=torch.float64)
    gradient = row_op(x, torch.zeros(1, 1, dtype=torch.long), t, e=torch.zeros_like(t))[3]
    assert torch.allclose(gradient, torch.tensor([[[0.5, 0.0, -0.5]]], dtype=torch.float64) / 0.3, rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 7), (3, 0, 7), (1, 1, 1)])
def test_no_rows_and_one_of_one(isa, shape):
    x, ids = torch.randn(shape), torch.zeros(shape[:2], dtype=torch.long)
    logprobs, entropy, _, gradient = row_op(x, ids)
    assert logprobs.shape == entropy.shape == shape[:2]
    assert gradient.shape == shape
    assert not logprobs.any()
    assert not gradient.any()


# ----------------------------------------------------------------------------------------------- losses, advantages


def gradient_of_token(new: Tensor, old: Tensor, advantage: float, ref: Tensor | None, kl_coef: float = 0.0) -> Tensor:
    """d_logprob of single tokens of weight 1, without clipping, k3 as KL."""
    shape = (1, new.numel())
    one = torch.ones(1, dtype=new.dtype)
    return OPS.ppo_loss(
        new.view(shape), old.view(shape), torch.full(shape, advantage, dtype=new.dtype), torch.ones(shape).bool(), one,
        None, None if ref is None else ref.view(shape), 1.0, 1e38, None, 0, 0.0, kl_coef, 3,
    )[1][0]  # fmt: skip


def test_ratio_over_its_whole_range(isa):
    """exp in float32 within 2 units in the last place, from underflow to overflow."""
    d = torch.cat([torch.linspace(-103, 88.7, 200_001), torch.linspace(-1, 1, 100_001), torch.tensor([0.0])])
    got, wanted = gradient_of_token(d, torch.zeros_like(d), -1.0, None), d.double().exp()
    error = (got.double() - wanted).abs()
    normal = wanted > 1.2e-38
    assert (error[normal] / wanted[normal]).max() < 2 * EPS
    assert error[~normal].max() < 2e-45  # subnormals
    assert got[-1] == 1
    far = torch.tensor([89.0, 1000.0, math.inf, -110.0, -math.inf, math.nan])
    assert torch.equal(
        gradient_of_token(far, torch.zeros(6), -1.0, None).nan_to_num(7.0, posinf=9.0),
        torch.tensor([9.0, 9, 9, 0, 0, 7]),
    )


def test_kl_slope_keeps_its_digits_near_zero(isa):
    """The slope of k3 is 1 - exp(-d'): to a few roundings relative, also where exp(-d') is 1 to the last bit."""
    d = torch.cat([torch.logspace(-30, 1.9, 50_001), -torch.logspace(-30, 1.9, 50_001)])
    got = gradient_of_token(d, d, 0.0, torch.zeros_like(d), kl_coef=1.0)
    wanted = -torch.expm1(-d.double())
    assert ((got.double() - wanted) / wanted).abs().max() < 4 * EPS


def test_k3_is_exact_and_not_negative_for_tiny_updates(isa):
    """exp(d) - 1 - d at d = 1e-4 is 5e-9: below the rounding of its terms, yet the sum has six digits."""
    for size in (1e-1, 1e-2, 1e-4, 1e-6):
        d = size * torch.randn(1, 1000)
        sums = OPS.ppo_loss(
            d, torch.zeros_like(d), torch.zeros_like(d), torch.ones_like(d).bool(), torch.ones(1), None, d * 0.5,
            0.2, 0.2, None, 0, 0.0, 0.0, 3,
        )[3]  # fmt: skip
        wide = d.double()
        deviation = torch.expm1(wide)
        half = wide - (d * 0.5).double()
        for k, wanted in {
            4: deviation.sum(),
            5: deviation.square().sum(),
            8: (wide.square() / 2 + wide**3 / 6 + wide**4 / 24 + wide**5 / 120 + wide**6 / 720).sum(),
            9: (half.square() / 2 - half**3 / 6 + half**4 / 24 - half**5 / 120 + half**6 / 720).sum(),
        }.items():
            scale = deviation.abs().sum() if k == 4 else wanted
            assert abs(float(sums[k] - wanted)) < 4 * EPS * float(scale), (size, k)


@pytest.mark.parametrize("objective", [0, 1])
@pytest.mark.parametrize(("clip_high", "dual_clip"), [(2.0, None), (2.0, 3.0), (math.inf, None)])
def test_special_values_agree_with_plain_pytorch(isa, objective, clip_high, dual_clip):
    """Infinities, NaN, ratios on a bound, advantages of 0: the loss and the gradient of each token by itself."""
    values = torch.tensor([0.0, -1.0, math.log(3.0), 200.0, -200.0, math.inf, -math.inf, math.nan])
    advantages = torch.tensor([0.0, 1.0, -1.0, math.inf, math.nan])
    grid = [x.reshape(-1, 1, 1) for x in torch.meshgrid(values, values, advantages, indexing="ij")]
    live, one = torch.ones(1, 1, dtype=torch.bool), torch.ones(1)

    def run() -> Tensor:
        settings = None, None, 0.2, clip_high, dual_clip, objective, 0.0, 0.0, 3
        tokens = (OPS.ppo_loss(*token, live, one, *settings) for token in zip(*grid, strict=True))
        return torch.tensor([(loss.item(), gradient.item()) for loss, gradient, *_ in tokens])

    got = run()
    with backends.force("eager"):
        wanted = run()
    assert torch.allclose(got, wanted, rtol=4 * EPS, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (5, 1), (7, 3), (3, 100), (2, 5000), (0, 4), (4, 0)])
def test_token_ops_agree_with_plain_pytorch_at_every_shape(isa, shape):
    """Vectors cross rows in most of these shapes."""
    ops = token_ops(*shape)
    with backends.force("eager"):
        plain = [op() for op in ops]
    for op, wanted in zip(ops, plain, strict=True):
        for got, expected in zip(op(), wanted, strict=True):
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            assert torch.allclose(got, expected, rtol=1e-5, atol=4e-7 * scale)


def test_gae_is_rounded_once(isa):
    """No error builds up over 20000 undiscounted steps: each result is the float64 one, rounded."""
    rewards, values = torch.randn(2, 20_000), torch.randn(2, 20_000)
    mask = torch.rand(2, 20_000) > 0.2
    got = OPS.gae(rewards, values, mask, 1.0, 1.0, None)
    wide = OPS.gae(rewards.double(), values.double(), mask, 1.0, 1.0, None)
    for a, b in zip(got[:2], wide[:2], strict=True):
        assert torch.equal(a, b.float())


def test_moments_of_advantages_far_from_zero(isa):
    """A spread of 1 about a mean of 1e6, which a sum of squares about zero would lose, over rows of any length."""
    rewards = 1e6 + torch.randn(50, 300, dtype=torch.float64)
    mask = torch.rand(50, 300) > torch.linspace(0, 1.01, 50)[:, None]
    advantages, _, moments = OPS.gae(rewards, torch.zeros_like(rewards), mask, 0.0, 0.0, None)
    live = advantages[mask]
    wanted = torch.stack([mask.sum(), live.sum(), (live - live.mean()).square().sum()])
    assert not mask[-1].any()
    assert torch.allclose(moments, wanted, rtol=1e-10, atol=0)
