"""Linear layers on few rows: values on every path, and bits that depend on the row alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import linear

from ppo_fast.ops import backends, small_linear

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
    x = torch.randn(64, H).to(dtype)
    exact = linear(x.double(), weight.double(), bias.double())
    wide_weight, wide_bias = weight.float(), bias.float()

    def error(y: Tensor) -> float:
        return float((y.double() - exact).square().mean().sqrt())

    for n in (1, 2, 5, 16, 64):
        got = torch.cat([small_linear(part, weight, bias) for part in x.split(n)])
        as_exact_as(got, torch.cat([linear(part, weight, bias) for part in x.split(n)]), exact)
        got = torch.cat([small_linear(part, weight, bias, out_dtype=torch.float32) for part in x.split(n)])
        theirs = torch.cat([linear(part.float(), wide_weight, wide_bias) for part in x.split(n)])
        as_exact_as(got, theirs, exact)
        rounding = torch.finfo(torch.float32).eps * float(exact.square().mean().sqrt()) / 4
        assert error(got) <= 2 * max(error(theirs), rounding), n


def test_without_a_bias(cpu_backend):
    weight, bias = layer(40, 30, torch.float32)
    x = torch.randn(5, 30)
    assert torch.allclose(small_linear(x, weight) + bias, small_linear(x, weight, bias))


@pytest.mark.parametrize(("V", "H"), [(1, 1), (33, 3), (130, 257), (100, 4864)])
def test_float64(cpu_backend, V, H):
    weight, bias = layer(V, H, torch.float64)
    x = torch.randn(19, H, dtype=torch.float64)
    assert torch.allclose(small_linear(x, weight, bias), linear(x, weight, bias), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_once(cpu_backend, dtype):
    """The result in a 16-bit dtype is the unrounded one, rounded: also beyond its range, and for NaN."""
    weight, bias = layer(70, 200, dtype)
    x = torch.randn(5, 200).to(dtype)
    x[1] *= 1e4
    x[2, 7] = math.nan
    x[3, 0] = math.inf
    wide = small_linear(x, weight, bias, out_dtype=stat(dtype))
    got = small_linear(x, weight, bias)
    assert got.dtype == dtype
    assert torch.equal(got.nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))
    assert torch.equal(got.isnan(), wide.isnan())
    assert got[2].isnan().all()
    assert not got[[0, 1, 4]].isnan().any()


def test_more_rows_than_it_is_made_for(cpu_backend):
    weight, bias = layer(50, 40, torch.float64)
    x = torch.randn(203, 40, dtype=torch.float64)
    assert torch.allclose(small_linear(x, weight, bias), linear(x, weight, bias), atol=1e-13)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 1)])
def test_leading_dimensions(cpu_backend, shape):
    weight, bias = layer(33, 6, torch.float32)
    x = torch.randn(*shape, 6)
    got = small_linear(x, weight, bias)
    assert got.shape == (*shape, 33)
    assert torch.allclose(got, linear(x, weight, bias), atol=1e-6)


def test_computes_in_the_dtype_of_the_weight_and_returns_that_of_x(cpu_backend):
    weight = layer(20, 30, torch.bfloat16)[0]
    x = torch.randn(3, 30)
    assert torch.equal(small_linear(x, weight), small_linear(x.bfloat16(), weight, out_dtype=torch.float32))
    assert small_linear(x.half(), weight).dtype == torch.float16
    assert small_linear(x, weight, out_dtype=torch.bfloat16).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------- bits of the C++ path


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(isa, dtype):
    """Every number of rows, hence every tile height, with prefetching and without; another row holds NaN."""
    weight, bias = layer(72, 523, dtype)
    x = torch.randn(65, 523).to(dtype)
    alone = torch.cat([small_linear(row[None], weight, bias) for row in x])
    for n in range(1, 66):
        assert torch.equal(small_linear(x[:n], weight, bias), alone[:n]), n
    x[3] = math.nan
    others = torch.arange(65) != 3
    assert torch.equal(small_linear(x, weight, bias)[others], alone[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16])
def test_the_same_bits_for_any_number_of_threads(isa, threads, dtype, n):
    weight, bias = layer(4001, 301, dtype)
    x = torch.randn(n, 301).to(dtype)
    seen = []
    for count in (1, 2, 3):
        threads(count)
        seen.append(small_linear(x, weight, bias))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [64, 65, 1024, 2048])
def test_strides_change_no_bit(isa, dtype, H):
    """Read in place or copied: rows apart, columns apart, at odd elements, a page apart, one row for all."""
    (weight, bias), x = layer(40, H, dtype), torch.randn(9, H).to(dtype)
    expected = small_linear(x, weight, bias)
    moved = [
        torch.empty(9, H + 7, dtype=dtype)[:, 5 : H + 5],
        torch.empty(9, H + 8, dtype=dtype)[:, 6 : H + 6],
        torch.empty(9 * H + 1, dtype=dtype)[1:].view(9, H),
        torch.empty(H, 9, dtype=dtype).t(),
        torch.empty(9, 2 * H, dtype=dtype)[:, ::2],
        torch.empty(9, 4096, dtype=dtype)[:, :H],
    ]
    for y in moved:
        assert torch.equal(small_linear(y.copy_(x), weight, bias), expected)
    assert torch.equal(small_linear(x[:1].expand(9, H), weight, bias), expected[:1].expand(9, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_reach_past_their_row(isa, dtype):
    """Whole vectors are computed beyond V; rows of the output lie side by side."""
    for V in (1, 15, 33, 63):
        weight = torch.ones(V, 3, dtype=dtype)
        assert torch.equal(small_linear(torch.ones(7, 3, dtype=dtype), weight), torch.full((7, V), 3, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [64, 65])
def test_strides_of_the_weight_change_no_bit(isa, dtype, H):
    """Rows apart, at odd elements, far apart, one row for all, and the other way round, which is copied."""
    (weight, bias), x = layer(40, H, dtype), torch.randn(9, H).to(dtype)
    expected = small_linear(x, weight, bias)
    moved = [
        torch.empty(40, H + 7, dtype=dtype)[:, 5 : H + 5],
        torch.empty(40, 3 * H, dtype=dtype)[:, H : 2 * H],
        torch.empty(40 * H + 1, dtype=dtype)[1:].view(40, H),
        torch.empty(H, 40, dtype=dtype).t(),
        torch.empty(40, 2 * H, dtype=dtype)[:, ::2],
    ]
    for other in moved:
        assert torch.equal(small_linear(x, other.copy_(weight), bias), expected)
    assert torch.equal(small_linear(x, weight[:1].expand(40, H)), small_linear(x, weight[:1].repeat(40, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_around_rows_is_not_read_as_theirs(isa, dtype):
    """NaN right before and behind x, weight and both of extra, and in the columns between their rows."""

    def in_nan(like: Tensor) -> Tensor:
        room = torch.full((len(like) + 2, like.shape[1] + 5), math.nan, dtype=like.dtype)
        return room[1:-1, 2:-3].copy_(like)

    for H, R in ((1, 1), (7, 3), (33, 17), (95, 31)):
        weight, bias = layer(37, H, dtype)
        x, down, up = torch.randn(9, H).to(dtype), torch.randn(9, R, dtype=stat(dtype)), torch.randn(37, R)
        expected = small_linear(x, weight, bias, extra=(down, up))
        assert not expected.isnan().any()
        got = small_linear(in_nan(x), in_nan(weight), bias, extra=(in_nan(down), in_nan(up)))
        assert torch.equal(got, expected)


# ---------------------------------------------------------------------------------------------------------------- extra


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("H", "R"), [(1, 1), (64, 16), (130, 8), (33, 40), (513, 64)])
def test_a_second_product_is_added_before_rounding(cpu_backend, as_exact_as, dtype, H, R):
    """Of 16-bit rows too, it is a product of float32 numbers: as exact as one in float32."""
    weight, bias = layer(50, H, dtype)
    x, down = torch.randn(19, H).to(dtype), torch.randn(19, R, dtype=stat(dtype))
    up = torch.randn(50, R, dtype=stat(dtype)) / math.sqrt(R)
    exact = linear(x.double(), weight.double(), bias.double()) + down.double() @ up.double().t()
    theirs = linear(x.to(stat(dtype)), weight.to(stat(dtype)), bias.to(stat(dtype))) + down @ up.t()
    for n in (1, 7, 19):
        parts = zip(x.split(n), down.split(n), strict=True)
        wide = torch.cat([small_linear(a, weight, bias, extra=(b, up), out_dtype=stat(dtype)) for a, b in parts])
        as_exact_as(wide, theirs, exact)
    assert torch.equal(small_linear(x, weight, bias, extra=(down, up)), wide.to(dtype))


def test_a_second_product_in_float64(cpu_backend):
    weight, bias = layer(50, 33, torch.float64)
    x, down, up = (torch.randn(*shape, dtype=torch.float64) for shape in ((19, 33), (19, 7), (50, 7)))
    expected = linear(x, weight, bias) + down @ up.t()
    assert torch.allclose(small_linear(x, weight, bias, extra=(down, up)), expected, rtol=0, atol=1e-13)


def test_of_an_extra_a_row_does_not_depend_on_the_others(isa, threads):
    weight, bias = layer(72, 96, torch.float32)
    x, down, up = torch.randn(65, 96), torch.randn(65, 16), torch.randn(72, 16)
    alone = torch.cat([small_linear(a[None], weight, bias, extra=(b[None], up)) for a, b in zip(x, down, strict=True)])
    for n in (2, 6, 13, 65):
        threads(1 + n % 3)
        assert torch.equal(small_linear(x[:n], weight, bias, extra=(down[:n], up)), alone[:n])


# ------------------------------------------------------------------------------------------------------------- promises


def test_every_path_is_named(cpu_backend):
    assert backends()["small_linear"]["cpu"] == cpu_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(opcheck, dtype):
    x, weight, bias = torch.randn(3, 6).to(dtype), layer(40, 6, dtype)[0], torch.randn(40)
    for extra in ((None, None), (torch.randn(3, 2), torch.randn(40, 2))):
        for wide in (False, True):
            opcheck(torch.ops.ppo_fast.small_linear.default, (x, weight, bias, *extra, wide))


def test_compiles_into_one_graph_for_any_number_of_rows(cpu_backend):
    weight, bias = layer(40, 6, torch.float32)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(x: Tensor) -> Tensor:
        return small_linear(torch.relu(x), weight, bias) + 1

    with torch.no_grad():
        for n in (3, 5, 16):
            x = torch.randn(n, 1, 6)
            assert torch.equal(step(x), small_linear(torch.relu(x), weight, bias) + 1)
    assert counter.frame_count == 1


def test_inference_mode(cpu_backend):
    weight, bias = layer(40, 6, torch.float32)
    x = torch.randn(3, 6, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = small_linear(x, weight, bias)
        assert not got.requires_grad
        assert torch.allclose(got, linear(x, weight, bias), atol=1e-6)


def test_a_gradient_is_refused():
    given = {"x": torch.randn(3, 6), "weight": torch.randn(4, 6), "bias": torch.randn(4)}
    extra = (torch.randn(3, 2), torch.randn(4, 2))
    for name in given:
        recording = given | {name: given[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"{name} requires grad, but small_linear has no derivative"):
            small_linear(**recording)
    for i in range(2):
        recording = [part.clone().requires_grad_(i == j) for j, part in enumerate(extra)]
        with pytest.raises(ValueError, match=rf"extra\[{i}\] requires grad"):
            small_linear(**given, extra=tuple(recording))
    assert not small_linear(**given, extra=extra).requires_grad


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weight": [[1.0]]}, TypeError, "weight must be a tensor, got list"),
        ({"weight": torch.ones(3, 2, dtype=torch.int64)}, TypeError, "weight must be float32, bfloat16, float16 or"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have the shape \[V, H\] with V, H >= 1, got \[3\]"),
        ({"weight": torch.ones(0, 2)}, ValueError, r"weight must have the shape .* got \[0, 2\]"),
        ({"weight": torch.ones(3, 0)}, ValueError, r"weight must have the shape .* got \[3, 0\]"),
        ({"bias": torch.ones(2)}, ValueError, r"bias must have the shape of the rows of weight, \[3\]"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "bias must be on the device of the rows"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor, got float"),
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"x": torch.ones(1, 2, dtype=torch.int32)}, TypeError, "x must be float32, bfloat16, float16 or float64"),
        ({"x": torch.ones(1, 3)}, ValueError, r"x must have the shape \[..., H\] with H = 2, got \[1, 3\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have the shape .* got \[\]"),
        ({"x": torch.ones(1, 2, device="meta")}, ValueError, "x must be on the device of weight, cpu, got meta"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be float32, .* got torch.int32"),
        ({"extra": (torch.ones(1, 4), torch.ones(2, 4))}, ValueError, r"extra\[1\] must have the shape \[V, R\] with"),
        ({"extra": (torch.ones(1, 5), torch.ones(3, 4))}, ValueError, r"extra\[0\] must have the shape of x and the"),
        ({"extra": (torch.ones(2, 4), torch.ones(3, 4))}, ValueError, r"extra\[0\] must have the shape of x and the"),
        ({"extra": (torch.ones(1, 4), 1)}, TypeError, r"extra\[1\] must be a tensor, got int"),
        ({"extra": (torch.ones(1, 4), torch.ones(3, 4, device="meta"))}, ValueError, r"extra\[1\] must be on the"),
    ],
)  # fmt: skip
def test_bad_input(changed, error, message):
    good = {"x": torch.ones(1, 2), "weight": torch.ones(3, 2)}
    small_linear(**good)
    with pytest.raises(error, match=message):
        small_linear(**good | changed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_direct_call_reads_no_memory_that_is_not_there(isa, dtype):
    op, weight = torch.ops.ppo_fast.small_linear, torch.ones(40, 6, dtype=dtype)
    x, down, up = (
        torch.ones(3, 6, dtype=dtype),
        torch.ones(3, 2, dtype=stat(dtype)),
        torch.ones(40, 2, dtype=stat(dtype)),
    )
    op(x, weight, None, down, up, False)
    bad = [
        (x, weight[:, :5], None, None, None),
        (x, weight[:0], None, None, None),
        (x, weight[0], None, None, None),
        (x, torch.ones(6, 40, dtype=dtype).t(), None, None, None),
        (x, weight.to(torch.int16), None, None, None),
        (x, weight, torch.ones(39, dtype=stat(dtype)), None, None),
        (x[0], weight, None, None, None),
        (x[:, :0], weight[:, :0], None, None, None),
        (x, weight, None, down, None),
        (x, weight, None, None, up),
        (x, weight, None, down[:2], up),
        (x, weight, None, down[:, :0], up[:, :0]),
        (x, weight, None, down, up[:39]),
        (x, weight, None, down, torch.ones(2, 40, dtype=stat(dtype)).t()),
        (x, weight, None, down.half(), up),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="must be"):
            op(*arguments, False)
