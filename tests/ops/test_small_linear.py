"""Linear layers on few rows over a packed weight: values on every path, and bits that depend on the row alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import linear

from ppo_fast.ops import PackedWeight, backends, pack_weight, small_linear

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ISAS = [name for name in backends.available() if name not in ("eager", "triton")]


def stat(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def layer(V: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(V, H) / math.sqrt(H)).to(dtype), torch.randn(V).to(dtype)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("V", "H"), [(1, 1), (32, 1), (31, 2), (33, 3), (96, 31), (130, 257), (64, 513), (100, 4864)])
def test_within_twice_the_error_of_pytorch(cpu_backend, as_exact_as, dtype, V, H):
    """Root mean square, for every number of rows: torch multiplies one row, and a few, by other algorithms."""
    weight, bias = layer(V, H, dtype)
    packed = pack_weight(weight, bias)
    x = torch.randn(64, H).to(dtype)
    exact = linear(x.double(), weight.double(), bias.double())
    wide_weight, wide_bias = weight.float(), bias.float()

    def error(y: Tensor) -> float:
        return float((y.double() - exact).square().mean().sqrt())

    for n in (1, 2, 5, 16, 64):
        got = torch.cat([small_linear(part, packed) for part in x.split(n)])
        as_exact_as(got, torch.cat([linear(part, weight, bias) for part in x.split(n)]), exact)
        got = torch.cat([small_linear(part, packed, out_dtype=torch.float32) for part in x.split(n)])
        theirs = torch.cat([linear(part.float(), wide_weight, wide_bias) for part in x.split(n)])
        as_exact_as(got, theirs, exact)
        rounding = torch.finfo(torch.float32).eps * float(exact.square().mean().sqrt()) / 4
        assert error(got) <= 2 * max(error(theirs), rounding), n


def test_without_a_bias(cpu_backend):
    weight, bias = layer(40, 30, torch.float32)
    x = torch.randn(5, 30)
    assert torch.allclose(small_linear(x, pack_weight(weight)) + bias, small_linear(x, pack_weight(weight, bias)))


@pytest.mark.parametrize(("V", "H"), [(1, 1), (33, 3), (130, 257), (100, 4864)])
def test_float64(cpu_backend, V, H):
    weight, bias = layer(V, H, torch.float64)
    x = torch.randn(19, H, dtype=torch.float64)
    assert torch.allclose(small_linear(x, pack_weight(weight, bias)), linear(x, weight, bias), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_once(cpu_backend, dtype):
    """The result in a 16-bit dtype is the unrounded one, rounded: also beyond its range, and for NaN."""
    weight, bias = layer(70, 200, dtype)
    x = torch.randn(5, 200).to(dtype)
    x[1] *= 1e4
    x[2, 7] = math.nan
    x[3, 0] = math.inf
    wide = small_linear(x, pack_weight(weight, bias), out_dtype=stat(dtype))
    got = small_linear(x, pack_weight(weight, bias))
    assert got.dtype == dtype
    assert torch.equal(got.nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))
    assert torch.equal(got.isnan(), wide.isnan())
    assert got[2].isnan().all()
    assert not got[[0, 1, 4]].isnan().any()


def test_more_rows_than_it_is_made_for(cpu_backend):
    weight, bias = layer(50, 40, torch.float64)
    x = torch.randn(203, 40, dtype=torch.float64)
    assert torch.allclose(small_linear(x, pack_weight(weight, bias)), linear(x, weight, bias), atol=1e-13)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 1)])
def test_leading_dimensions(cpu_backend, shape):
    weight, bias = layer(33, 6, torch.float32)
    x = torch.randn(*shape, 6)
    got = small_linear(x, pack_weight(weight, bias))
    assert got.shape == (*shape, 33)
    assert torch.allclose(got, linear(x, weight, bias), atol=1e-6)


def test_computes_in_the_dtype_of_the_weight_and_returns_that_of_x(cpu_backend):
    weight = layer(20, 30, torch.bfloat16)[0]
    packed, x = pack_weight(weight), torch.randn(3, 30)
    assert torch.equal(small_linear(x, packed), small_linear(x.bfloat16(), packed, out_dtype=torch.float32))
    assert small_linear(x.half(), packed).dtype == torch.float16
    assert small_linear(x, packed, out_dtype=torch.bfloat16).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------- bits of the C++ path


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(isa, dtype):
    """Every number of rows, hence every tile height, with prefetching and without; another row holds NaN."""
    weight, bias = layer(72, 523, dtype)
    packed, x = pack_weight(weight, bias), torch.randn(65, 523).to(dtype)
    alone = torch.cat([small_linear(row[None], packed) for row in x])
    for n in range(1, 66):
        assert torch.equal(small_linear(x[:n], packed), alone[:n]), n
    x[3] = math.nan
    others = torch.arange(65) != 3
    assert torch.equal(small_linear(x, packed)[others], alone[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16])
def test_the_same_bits_for_any_number_of_threads(isa, threads, dtype, n):
    weight, bias = layer(4001, 301, dtype)
    packed, x = pack_weight(weight, bias), torch.randn(n, 301).to(dtype)
    seen = []
    for count in (1, 2, 3):
        threads(count)
        seen.append(small_linear(x, packed))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [64, 65, 1024, 2048])
def test_strides_change_no_bit(isa, dtype, H):
    """Read in place or copied: rows apart, columns apart, at odd elements, a page apart, one row for all."""
    packed, x = pack_weight(*layer(40, H, dtype)), torch.randn(9, H).to(dtype)
    expected = small_linear(x, packed)
    moved = [
        torch.empty(9, H + 7, dtype=dtype)[:, 5 : H + 5],
        torch.empty(9, H + 8, dtype=dtype)[:, 6 : H + 6],
        torch.empty(9 * H + 1, dtype=dtype)[1:].view(9, H),
        torch.empty(H, 9, dtype=dtype).t(),
        torch.empty(9, 2 * H, dtype=dtype)[:, ::2],
        torch.empty(9, 4096, dtype=dtype)[:, :H],
    ]
    for y in moved:
        assert torch.equal(small_linear(y.copy_(x), packed), expected)
    assert torch.equal(small_linear(x[:1].expand(9, H), packed), expected[:1].expand(9, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_reach_past_their_row(isa, dtype):
    """Whole vectors are computed beyond V; rows of the output lie side by side."""
    for V in (1, 15, 33, 63):
        packed = pack_weight(torch.ones(V, 3, dtype=dtype))
        assert torch.equal(small_linear(torch.ones(7, 3, dtype=dtype), packed), torch.full((7, V), 3, dtype=dtype))


# -------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "H"), [(1, 1), (32, 1), (32, 2), (64, 8), (70, 33)])
def test_packing_is_a_copy_and_unpacking_its_inverse(dtype, V, H):
    weight, bias = layer(V, H, dtype)
    packed = pack_weight(torch.nn.Parameter(weight), bias)
    assert (packed.out_features, packed.in_features, packed.dtype) == (V, H, dtype)
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(pack_weight(weight.t().contiguous().t()).panels, packed.panels)
    before = packed.panels.clone(), packed.bias.clone()
    assert not packed.panels.requires_grad
    weight.zero_()
    bias.zero_()
    assert torch.equal(packed.panels, before[0])
    assert torch.equal(packed.bias, before[1])
    even = H + H % 2 if dtype == torch.bfloat16 else H
    assert packed.panels.untyped_storage().nbytes() == -(-V // 32) * 32 * even * dtype.itemsize


def test_moved_to_another_device():
    packed = pack_weight(*layer(40, 6, torch.float32))
    there = packed.to("meta")
    assert there.device.type == there.bias.device.type == "meta"
    assert small_linear(torch.empty(3, 6, device="meta"), there).shape == (3, 40)
    with pytest.raises(ValueError, match="x must be on the device of packed, meta, got cpu"):
        small_linear(torch.empty(3, 6), there)


# ------------------------------------------------------------------------------------------------------------- promises


def test_every_path_is_named(cpu_backend):
    assert backends()["small_linear"]["cpu"] == cpu_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(opcheck, dtype):
    packed = pack_weight(*layer(40, 6, dtype))
    for wide in (False, True):
        arguments = (torch.randn(3, 6).to(dtype), packed.panels, packed.bias, 40, wide)
        opcheck(torch.ops.ppo_fast.small_linear.default, arguments)


def test_compiles_into_one_graph_for_any_number_of_rows(cpu_backend):
    packed = pack_weight(*layer(40, 6, torch.float32))
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(x: Tensor, packed: PackedWeight) -> Tensor:
        return small_linear(torch.relu(x), packed) + 1

    with torch.no_grad():
        for n in (3, 5, 16):
            x = torch.randn(n, 1, 6)
            assert torch.equal(step(x, packed), small_linear(torch.relu(x), packed) + 1)
    assert counter.frame_count == 1


def test_inference_mode(cpu_backend):
    weight, bias = layer(40, 6, torch.float32)
    x = torch.randn(3, 6, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = small_linear(x, pack_weight(weight, bias))
        assert not got.requires_grad
        assert torch.allclose(got, linear(x, weight, bias), atol=1e-6)


def test_a_gradient_is_refused():
    packed = pack_weight(torch.nn.Parameter(torch.randn(4, 6)))
    with pytest.raises(ValueError, match="x requires grad, but small_linear has no derivative"):
        small_linear(torch.randn(3, 6, requires_grad=True), packed)
    assert not small_linear(torch.randn(3, 6), packed).requires_grad


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1.0]],), TypeError, "weight must be a tensor, got list"),
        ((torch.ones(3, 2, dtype=torch.int64),), TypeError, "weight must be float32, bfloat16, float16 or float64"),
        ((torch.ones(3),), ValueError, r"weight must have the shape \[V, H\] with V, H >= 1, got \[3\]"),
        ((torch.ones(0, 2),), ValueError, r"weight must have the shape .* got \[0, 2\]"),
        ((torch.ones(3, 0),), ValueError, r"weight must have the shape .* got \[3, 0\]"),
        ((torch.ones(3, 2), torch.ones(2)), ValueError, r"bias must have the shape of the rows of weight, \[3\]"),
        ((torch.ones(3, 2), torch.ones(3, device="meta")), ValueError, "bias must be on the device of the rows"),
    ],
)
def test_what_cannot_be_packed(arguments, error, message):
    with pytest.raises(error, match=message):
        pack_weight(*arguments)


@pytest.mark.parametrize(
    ("x", "settings", "error", "message"),
    [
        ([1.0], {}, TypeError, "x must be a tensor, got list"),
        (torch.ones(1, 2, dtype=torch.int32), {}, TypeError, "x must be float32, bfloat16, float16 or float64"),
        (torch.ones(1, 3), {}, ValueError, r"x must have the shape \[..., H\] with H = 2, got \[1, 3\]"),
        (torch.tensor(1.0), {}, ValueError, r"x must have the shape .* got \[\]"),
        (torch.ones(1, 2, device="meta"), {}, ValueError, "x must be on the device of packed, cpu, got meta"),
        (torch.ones(1, 2), {"out_dtype": torch.int32}, TypeError, "out_dtype must be float32, .* got torch.int32"),
    ],
)
def test_what_cannot_be_multiplied(x, settings, error, message):
    with pytest.raises(error, match=message):
        small_linear(x, pack_weight(torch.ones(3, 2)), **settings)


def test_a_weight_that_is_not_packed():
    with pytest.raises(TypeError, match=r"packed must be a PackedWeight, from pack_weight\(weight\), got Tensor"):
        small_linear(torch.ones(1, 2), torch.ones(3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_direct_call_reads_no_memory_that_is_not_there(isa, dtype):
    op, packed = torch.ops.ppo_fast.small_linear, pack_weight(torch.ones(40, 6, dtype=dtype))
    x = torch.ones(3, 6, dtype=dtype)
    bad = [
        (x, packed.panels[:1], None, 40),
        (x, packed.panels[:, :1], None, 40),
        (x, packed.panels.transpose(1, 2), None, 40),
        (x, packed.panels.to(torch.int16), None, 40),
        (x, packed.panels, None, 65),
        (x, packed.panels, None, 0),
        (x, packed.panels, torch.ones(39, dtype=stat(dtype)), 40),
        (x[0], packed.panels, None, 40),
        (x[:, :0], packed.panels, None, 40),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="must be"):
            op(*arguments, False)
