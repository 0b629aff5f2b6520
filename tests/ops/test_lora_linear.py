"""A frozen layer and its adapter: values and gradients on every path, and bits that depend on the row alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import linear

from ppo_fast.ops import backends, lora_linear, swiglu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Rows, features, depth and rank: whole tiles and panels, one more and one less, single ones, long chains.
SIZES = [
    (1, 1, 1, 1), (12, 32, 16, 16), (13, 33, 17, 3), (11, 31, 15, 1), (100, 75, 257, 16), (40, 130, 513, 40),
    (300, 16, 64, 8), (29, 200, 1, 2), (24, 64, 4864, 16),
]  # fmt: skip


def layer(features: int, depth: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Outputs of either product have a standard deviation of about 1."""
    return {
        "weight": (torch.randn(features, depth) / math.sqrt(depth)).to(dtype),
        "lora_a": torch.randn(rank, depth) / math.sqrt(depth),
        "lora_b": torch.randn(features, rank) / math.sqrt(rank),
        "bias": torch.randn(features).to(dtype),
    }


def composed(
    x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor, scaling: float, dtype: torch.dtype
) -> Tensor:
    """The formula in ``dtype``."""
    x, weight, lora_a, lora_b, bias = (t.to(dtype) for t in (x, weight, lora_a, lora_b, bias))
    return linear(x, weight, bias) + scaling * linear(linear(x, lora_a), lora_b)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "features", "depth", "rank"), SIZES)
def test_float32_is_as_exact_as_pytorch(cpu_backend, as_exact_as, n, features, depth, rank, turned):
    """With the weight in either order, with an adapter and without."""
    given, x = layer(features, depth, rank), torch.randn(n, depth)
    if turned:
        given["weight"] = given["weight"].t().contiguous().t()
    exact = composed(x, **given, scaling=0.7, dtype=torch.float64)
    as_exact_as(lora_linear(x, **given, scaling=0.7), composed(x, **given, scaling=0.7, dtype=torch.float32), exact)
    exact = linear(x.double(), given["weight"].double(), given["bias"].double())
    theirs = linear(x, given["weight"], given["bias"])
    as_exact_as(lora_linear(x, given["weight"], bias=given["bias"]), theirs, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_in_every_dtype(cpu_backend, as_exact_as, dtype):
    """Against autograd over the formula in float64; yardstick is the same in ``dtype``."""
    given, x = layer(70, 130, 16, dtype), torch.randn(3, 40, 130).to(dtype)
    of_adapter = torch.float64 if dtype == torch.float64 else torch.float32
    given |= {name: given[name].to(of_adapter) for name in ("lora_a", "lora_b")}
    upstream = torch.randn(3, 40, 70).to(dtype)

    def run(function, cast: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach() if cast is None else t.detach().to(cast) for t in (x, given["lora_a"], given["lora_b"])]
        for leaf in leaves:
            leaf.requires_grad_()
        y = function(leaves[0], given["weight"], leaves[1], leaves[2], bias=given["bias"], scaling=1.3)
        grads = torch.autograd.grad(y, leaves, upstream.to(y.dtype))
        return [y.detach(), *grads]

    def plain(of: torch.dtype):
        return lambda *a, bias, scaling: composed(*a, bias, scaling, of)

    ours = run(lora_linear, None)
    assert [t.dtype for t in ours] == [dtype, dtype, of_adapter, of_adapter]
    for got, theirs, exact in zip(
        ours, run(plain(dtype), dtype), run(plain(torch.float64), torch.float64), strict=True
    ):
        as_exact_as(got.to(dtype), theirs.to(dtype), exact)


def test_gradcheck(cpu_backend):
    x, weight, a, b = (torch.randn(*s, dtype=torch.float64) for s in ((5, 7), (6, 7), (3, 7), (6, 3)))
    bias = torch.randn(6, dtype=torch.float64)
    for leaf in (x, a, b):
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, a, b, bias=bias, scaling=0.4), (x, a, b))
    assert torch.autograd.gradcheck(lambda x: lora_linear(x, weight), (x,))


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for_is_computed(gemm_flops, asked):
    """In products of rows by H by V: an adapter's gradient takes neither the weight nor the input's gradient."""
    given, x = layer(40, 50, 4), torch.randn(30, 50)
    leaves = [t.requires_grad_(on) for t, on in zip((x, given["lora_a"], given["lora_b"]), asked, strict=True)]
    forward = gemm_flops(lambda: lora_linear(x, **given))
    both = gemm_flops(lambda: lora_linear(x, **given).sum().backward())
    narrow = 2 * 30 * 4
    of_h = narrow * 40
    expected = {0: of_h + 2 * 30 * 40 * 50 + narrow * 50, 1: of_h + narrow * 50, 2: narrow * 40}
    assert both - forward == expected[asked.index(True)]
    assert sum(leaf.grad is not None for leaf in leaves) == 1


def test_upstream_gradients_of_any_layout(cpu_backend):
    """Expanded, transposed and sliced ones, as sums and views send them."""
    given, x = layer(32, 48, 4), torch.randn(6, 5, 48, requires_grad=True)
    kinds = [torch.ones(()).expand(6, 5, 32), torch.randn(32, 5, 6).permute(2, 1, 0), torch.randn(6, 5, 64)[..., ::2]]
    for upstream in kinds:
        got = torch.autograd.grad(lora_linear(x, **given), x, upstream)[0]
        expected = torch.autograd.grad(lora_linear(x, **given), x, upstream.contiguous())[0]
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_leading_dimensions(cpu_backend, shape):
    given, x = layer(33, 6, 2), torch.randn(*shape, 6, requires_grad=True)
    got = lora_linear(x, **given)
    assert got.shape == (*shape, 33)
    assert torch.allclose(got, composed(x, **given, scaling=1.0, dtype=torch.float32), atol=1e-5)
    got.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_result_may_be_written_to(cpu_backend, shape, dtype):
    """As OLMo's attention clamps its queries, and a hook adds to what it sees."""
    given, x = layer(33, 6, 2, dtype), torch.randn(*shape, 6).to(dtype).requires_grad_()
    apart = lora_linear(x, **given).clamp(-1, 1) + 1
    within = lora_linear(x, **given).clamp_(-1, 1)
    within += 1
    assert torch.equal(within, apart)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (within, apart)))


@pytest.mark.parametrize("gated", [False, True])
def test_torch_func(cpu_backend, gated):
    """Gradients, second ones too, and a batch of adapters over one layer."""
    given, x = {name: t.double() for name, t in layer(20, 6, 2).items()}, torch.randn(3, 4, 6, dtype=torch.float64)
    product, gate = (swiglu(x, x), x) if gated else (x, None)

    def ours(a: Tensor) -> Tensor:
        return lora_linear(x, **given | {"lora_a": a}, scaling=0.6, gate=gate).sin().sum()

    def theirs(a: Tensor) -> Tensor:
        return composed(product, **given | {"lora_a": a}, scaling=0.6, dtype=torch.float64).sin().sum()

    adapters = torch.randn(5, 2, 6, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.hessian, lambda f: f):
        torch.testing.assert_close(*(torch.func.vmap(transform(f))(adapters) for f in (ours, theirs)))


# ----------------------------------------------------------------------------------------------- a SwiGLU's last layer


def of_gate(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return lora_linear(x, weight, a, b, bias=bias, scaling=0.6, gate=gate)


def of_product(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return lora_linear(swiglu(gate, x), weight, a, b, bias=bias, scaling=0.6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", [(True,) * 4, *([i == k for i in range(4)] for k in range(4))])
def test_a_gate_is_the_product_before(cpu_backend, dtype, asked):
    """To the bit, in value and in every gradient, whichever are asked for."""
    given, upstream = layer(70, 130, 16, dtype), torch.randn(3, 7, 70).to(dtype)
    inputs = [torch.randn(3, 7, 130).to(dtype), given["lora_a"], given["lora_b"], torch.randn(3, 7, 130).to(dtype)]

    def run(function) -> list[Tensor]:
        x, a, b, gate = (t.clone().requires_grad_(on) for t, on in zip(inputs, asked, strict=True))
        y = function(x, given["weight"], a, b, gate, given["bias"])
        leaves = [t for t in (x, a, b, gate) if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    ours, theirs = run(of_gate), run(of_product)
    assert len(ours) == 1 + sum(asked)
    assert all(map(torch.equal, ours, theirs))


def test_a_gate_without_an_adapter(cpu_backend):
    given = layer(20, 12, 3)
    x, gate = (torch.randn(5, 12, requires_grad=True) for _ in range(2))
    ours, theirs = lora_linear(x, given["weight"], gate=gate), lora_linear(swiglu(gate, x), given["weight"])
    assert torch.equal(ours, theirs)
    for got, expected in zip(*(torch.autograd.grad(y.sum(), (x, gate)) for y in (ours, theirs)), strict=True):
        assert torch.equal(got, expected)


def test_gradcheck_of_a_gate(cpu_backend):
    x, weight, a, b = (torch.randn(*s, dtype=torch.float64) for s in ((5, 7), (6, 7), (3, 7), (6, 3)))
    leaves = [t.requires_grad_() for t in (x, torch.randn(5, 7, dtype=torch.float64), a, b)]
    assert torch.autograd.gradcheck(lambda x, gate, a, b: lora_linear(x, weight, a, b, gate=gate), leaves)


def test_a_gate_is_kept_and_the_product_is_not():
    given = layer(20, 12, 3)
    x, gate = (torch.randn(100, 12, requires_grad=True) for _ in range(2))
    own, kept = {t.data_ptr() for t in given.values()}, {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        lora_linear(x, **given, gate=gate)
    assert sum(t.numel() for pointer, t in kept.items() if pointer not in own) == 100 * (12 + 12 + 3)


def test_a_gate_that_doesnt_fit():
    given, x = layer(20, 12, 3), torch.randn(5, 12)
    with pytest.raises(ValueError, match=r"gate must have the shape of x, \[5, 12\], got \[12\]"):
        lora_linear(x, **given, gate=x[0])
    with pytest.raises(TypeError, match=r"gate must have the dtype of x, torch.float32, got torch.float64"):
        lora_linear(x, **given, gate=x.double())


def test_a_gate_under_autocast(cpu_backend):
    given, x, gate = layer(20, 12, 3), torch.randn(5, 12), torch.randn(5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        got = lora_linear(x, **given, gate=gate)
    cast = {name: given[name].bfloat16() for name in ("weight", "bias")}
    assert torch.equal(got, lora_linear(x.bfloat16(), **given | cast, gate=gate.bfloat16()))


def test_without_an_adapter_nothing_is_kept():
    given, x, kept = layer(20, 12, 3), torch.randn(100, 12, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = lora_linear(x, given["weight"])
    assert all(t.data_ptr() == given["weight"].data_ptr() or t.numel() == 0 for t in kept)
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], given["weight"].sum(0).expand(100, 12), atol=1e-5)


# ------------------------------------------------------------------------------------------------- bits of the C++ path


@pytest.mark.parametrize("turned", [False, True])
def test_a_row_does_not_depend_on_the_others(isa, threads, turned):
    """Every height of a tile, every number of threads, bands of rows that differ in length; another row holds NaN."""
    given, x = layer(72, 523, 5), torch.randn(421, 523)
    if turned:
        given["weight"] = given["weight"].t().contiguous().t()
    threads(1)
    alone = torch.cat([lora_linear(row[None], **given) for row in x[:30]])
    everything = lora_linear(x, **given)
    assert torch.equal(everything[:30], alone)
    for n in range(1, 31):
        assert torch.equal(lora_linear(x[:n], **given), alone[:n]), n
    for count in (2, 3, 16):
        threads(count)
        assert torch.equal(lora_linear(x, **given), everything)
    x[3] = math.nan
    others = torch.arange(421) != 3
    assert torch.equal(lora_linear(x, **given)[others], everything[others])


def test_gradients_have_the_same_bits_for_any_number_of_threads(isa, threads):
    given, x = layer(130, 300, 5), torch.randn(421, 300)
    leaves = [t.requires_grad_() for t in (x, given["lora_a"], given["lora_b"])]
    upstream, seen = torch.randn(421, 130), []
    for count in (1, 2, 3, 16):
        threads(count)
        seen.append(torch.autograd.grad(lora_linear(x, **given), leaves, upstream))
    for grads in seen[1:]:
        assert all(torch.equal(got, expected) for got, expected in zip(grads, seen[0], strict=True))


@pytest.mark.parametrize("depth", [64, 65, 1024])
def test_strides_change_no_bit(isa, depth):
    """Read in place or copied: rows apart, columns apart, a page apart, the other way round, one row for all."""

    def moved(like: Tensor) -> list[Tensor]:
        rows, columns = like.shape
        return [
            torch.full((rows, columns + 7), math.nan)[:, 5 : columns + 5],
            torch.full((rows, 2 * columns), math.nan)[:, ::2],
            torch.full((columns, rows), math.nan).t(),
            torch.full((rows, 4096), math.nan)[:, :columns],
            torch.full((rows, 5 * columns), math.nan)[:, columns : 2 * columns],
        ]

    def run(x: Tensor, upstream: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
        y, h = torch.ops.ppo_fast.lora_linear(x, *given.values(), 0.7)
        weight, _, a, b = given.values()
        return [y, *torch.ops.ppo_fast.lora_linear_backward(upstream, x, weight, a, b, h, 0.7, True, True, True)]

    made = layer(72, depth, 5)
    given = {name: made[name] for name in ("weight", "bias", "lora_a", "lora_b")}
    x, upstream = torch.randn(30, depth), torch.randn(30, 72)
    expected = run(x, upstream, given)

    def same(got: list[Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))

    for other in moved(x):
        assert same(run(other.copy_(x), upstream, given))
    for other in moved(upstream):
        assert same(run(x, other.copy_(upstream), given))
    for name in ("weight", "lora_a", "lora_b"):
        for other in moved(given[name]):
            assert same(run(x, upstream, given | {name: other.copy_(given[name])}))
    assert torch.equal(run(x[:1].expand(30, depth), upstream, given)[0], expected[0][:1].expand(30, 72))


def test_infinities_and_nan_arrive(cpu_backend):
    given, x = layer(40, 32, 4), torch.randn(20, 32)
    x[2, 5], x[7, 0] = math.nan, math.inf
    got = lora_linear(x, given["weight"])
    assert got[2].isnan().all()
    assert torch.equal(got[7], given["weight"][:, 0].sign() * math.inf)
    assert got[[0, 1, 3, 4, 5, 6, 8]].isfinite().all()


# ------------------------------------------------------------------------------------------------------------- promises


def test_every_path_is_named(cpu_backend):
    assert backends()["lora_linear"]["cpu"] == cpu_backend


def test_backward_keeps_the_input_and_the_narrow_product():
    given, x = layer(20, 12, 3), torch.randn(100, 12, requires_grad=True)
    given["lora_a"].requires_grad_()  # else the input isn't kept either
    own = {t.data_ptr() for t in given.values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lora_linear(x, **given)
    assert sum(kept.values()) == 100 * (12 + 3) * 4


def test_opcheck(opcheck):
    x, upstream, given = torch.randn(5, 6), torch.randn(5, 40), layer(40, 6, 2)
    for a, b in ((None, None), (given["lora_a"], given["lora_b"])):
        for bias in (None, given["bias"]):
            arguments = (x, given["weight"], bias, a, b, 0.5)
            opcheck(torch.ops.ppo_fast.lora_linear.default, arguments)
        h = torch.ops.ppo_fast.lora_linear(*arguments)[1]
        for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            backward = (upstream, x, given["weight"], a, b, h, 0.5, *wanted)
            opcheck(torch.ops.ppo_fast.lora_linear_backward.default, backward)


def test_compiles_into_one_graph_for_any_number_of_rows(cpu_backend):
    given = layer(40, 6, 2)
    given["lora_a"].requires_grad_()
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(x: Tensor) -> Tensor:
        return lora_linear(torch.relu(x), **given) + 1

    for n in (3, 5, 16):
        x = torch.randn(n, 2, 6, requires_grad=True)
        y = step(x)
        expected = lora_linear(torch.relu(x), **given) + 1
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))
    assert counter.frame_count == 1


def test_without_gradients(cpu_backend):
    given, x = layer(40, 6, 2), torch.randn(3, 6, requires_grad=True)
    expected = lora_linear(x, **given).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = lora_linear(x, **given)
        assert not got.requires_grad
        assert torch.equal(got, expected)


def test_autocast_is_that_of_a_linear_layer(cpu_backend):
    """The product in autocast's dtype, gradients in that of each leaf; float64 is left alone."""
    given, x = layer(40, 30, 2), torch.randn(7, 30)
    leaves = [t.requires_grad_() for t in (x, given["lora_a"], given["lora_b"])]
    cast = given | {name: given[name].bfloat16() for name in ("weight", "bias")}
    upstream = torch.randn(7, 40).bfloat16()
    expected = lora_linear(x.bfloat16(), **cast)
    for given_x in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            got = lora_linear(given_x, **given)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, expected)
        grads = [torch.autograd.grad(y, leaves, upstream, retain_graph=True) for y in (got, expected)]
        assert all(torch.equal(one, other) and one.dtype == torch.float32 for one, other in zip(*grads, strict=True))
    double = {name: t.detach().double() for name, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = lora_linear(x.detach().double(), **double)
    assert torch.equal(got, lora_linear(x.detach().double(), **double))


def test_a_second_backward_is_refused():
    given, x = layer(20, 12, 3), torch.randn(4, 12, requires_grad=True)
    (grad,) = torch.autograd.grad(lora_linear(x, **given).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"x": torch.ones(1, 3)}, ValueError, r"x must have the shape \[..., in\] with in = 2, got \[1, 3\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have the shape .* got \[\]"),
        ({"x": torch.ones(1, 2, device="meta")}, ValueError, "x must be on the device of weight, cpu, got meta"),
        ({"x": torch.ones(1, 2).double()}, TypeError, "weight must have the dtype of x, torch.float64, got"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have the shape \[out, in\] with .* got \[3\]"),
        ({"weight": torch.ones(0, 2)}, ValueError, r"weight must have the shape .* got \[0, 2\]"),
        ({"weight": torch.ones(3, 2, requires_grad=True)}, ValueError, "weight requires grad, .* keeps it frozen"),
        ({"bias": torch.ones(2)}, ValueError, r"bias must have the shape of the rows of weight, \[3\]"),
        ({"bias": torch.ones(3).half()}, TypeError, "bias must have the dtype of x, torch.float32, got torch.float16"),
        ({"bias": torch.ones(3, requires_grad=True)}, ValueError, "bias requires grad"),
        ({"lora_a": None}, ValueError, "lora_a and lora_b must be given together"),
        ({"lora_b": None}, ValueError, "lora_a and lora_b must be given together"),
        ({"lora_a": torch.ones(4, 3)}, ValueError, r"lora_a must have the shape \[r, in\] with r >= 1, in = 2, got"),
        ({"lora_a": torch.ones(0, 2), "lora_b": torch.ones(3, 0)}, ValueError, r"lora_a must have .* got \[0, 2\]"),
        ({"lora_a": torch.ones(4, 2, device="meta")}, ValueError, "lora_a must be on the device of weight"),
        ({"lora_b": torch.ones(3, 5)}, ValueError, r"lora_b must have the shape of weight and lora_a, \[3, 4\]"),
        ({"lora_b": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "lora_b must be float32, bfloat16, float16 or"),
        ({"scaling": "2"}, TypeError, "scaling must be"),
    ],
)  # fmt: skip
def test_bad_input(changed, error, message):
    good = {
        "x": torch.ones(1, 2), "weight": torch.ones(3, 2), "lora_a": torch.ones(4, 2), "lora_b": torch.ones(3, 4),
        "bias": torch.ones(3), "scaling": 0.5,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        lora_linear(**(good | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(2)}, "x must be a float32 CPU tensor"),
        ({"x": torch.ones(1, 2).double()}, "x must be a float32"),
        ({"weight": torch.ones(3, 4)}, "weight must be a float32"),
        ({"bias": torch.ones(2)}, "bias must be contiguous"),
        ({"b": None}, "a must be given together with b"),
        ({"a": torch.ones(4, 3)}, "a must be a float32"),
        ({"b": torch.ones(3, 5)}, "b must be a float32"),
        ({"grad": torch.ones(2, 3)}, "grad must be a float32"),
        ({"h": torch.ones(1, 3)}, "h must be a float32"),
    ],
)
def test_a_direct_call_reads_no_memory_that_is_not_there(isa, changed, message):
    given = {
        "grad": torch.ones(1, 3), "x": torch.ones(1, 2), "weight": torch.ones(3, 2), "bias": torch.ones(3),
        "a": torch.ones(4, 2), "b": torch.ones(3, 4), "h": torch.ones(1, 4),
    }  # fmt: skip
    given |= changed
    grad, bias, h = (given.pop(name) for name in ("grad", "bias", "h"))
    if not changed.keys() & {"grad", "h"}:
        with pytest.raises(ValueError, match=message):
            torch.ops.ppo_fast.lora_linear(bias=bias, scaling=1.0, **given)
    if "bias" not in changed:
        with pytest.raises(ValueError, match=message):
            torch.ops.ppo_fast.lora_linear_backward(
                grad, h=h, scaling=1.0, want_x=True, want_a=True, want_b=True, **given
            )
