"""SwiGLU's activation: values and gradients on every path, far from zero too, and bits that depend on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from ppo_fast.ops import backends, swiglu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def separate(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def run(function, gate: Tensor, up: Tensor, upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The product and both gradients in ``dtype``."""
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (gate, up)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(dtype))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (15,), (16,), (17,), (31,), (33,), (3, 5, 41), (40, 1000), (0, 4)])
def test_values_and_gradients(cpu_backend, as_exact_as, dtype, shape):
    inputs = [(torch.randn(shape, dtype=torch.float64) * scale).to(dtype) for scale in (3.0, 1.0, 1.0)]
    ours = run(swiglu, *inputs, dtype)
    assert all(t.dtype == dtype and t.shape == shape for t in ours)
    theirs, exact = (run(separate, *inputs, of) for of in (dtype, torch.float64))
    for found in zip(ours, theirs, exact, strict=True):
        as_exact_as(*found)


def test_every_size_of_gate_is_exact(cpu_backend):
    """Relative to each result: from a sigmoid of half through the tails to where one side of it vanishes."""
    gate = torch.cat([torch.linspace(-87, 87, 20001), torch.tensor([0.0, 1e-30, -1e-30, 1e-5, -1e-5])])
    ones = torch.ones_like(gate)
    exact = run(separate, gate, ones, ones, torch.float64)
    for got, value in zip(run(swiglu, gate, ones, ones, torch.float32), exact, strict=True):
        # The derivative has a zero at -1.278, where two terms of 0.22 cancel.
        scale = value.abs().clamp_min(0.1 * (gate.abs() < 3))
        assert ((got.double() - value).abs() <= 1e-6 * scale + 1e-37).all()


def test_values_without_a_limit(cpu_backend):
    gate = torch.tensor([1e30, -1e30, math.inf, math.nan, 3.0, 200.0, -200.0])
    up = torch.tensor([2.0, 2.0, 1.0, 1.0, math.nan, 1.0, 1.0])
    got = run(swiglu, gate, up, torch.ones(7), torch.float32)
    product, d_gate, d_up = got
    assert product[0] == 2e30
    assert product[1] == 0
    assert product[2] == math.inf
    assert product[3:5].isnan().all()
    assert product[5] == 200
    assert product[6] == 0
    assert d_gate[[0, 1, 5, 6]].tolist() == [2, 0, 1, 0]
    assert d_gate[3:5].isnan().all()
    assert d_up[3].isnan()
    assert d_up[[0, 1, 5, 6]].tolist() == [gate[0].item(), 0, 200, 0]


def test_gradcheck(cpu_backend):
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_does_not_depend_on_its_place(isa, threads, dtype):
    """Alone, at any distance from the end of a vector, whatever the number of threads."""
    gate, up, upstream = (torch.randn(50_001, dtype=torch.float64).to(dtype) for _ in range(3))
    threads(1)
    whole = run(swiglu, gate, up, upstream, dtype)
    for count in (2, 3):
        threads(count)
        assert all(map(torch.equal, run(swiglu, gate, up, upstream, dtype), whole))
    for n in range(1, 70):
        part = run(swiglu, gate[:n], up[:n], upstream[:n], dtype)
        assert all(torch.equal(got, expected[:n]) for got, expected in zip(part, whole, strict=True))


def test_inputs_of_any_layout(cpu_backend):
    gate, up = torch.randn(6, 20).t(), torch.randn(1, 6).expand(20, 6)
    upstream = torch.ones(()).expand(20, 6)
    ours = run(swiglu, gate, up, upstream, torch.float32)
    plain = run(swiglu, gate.contiguous(), up.contiguous(), upstream.contiguous(), torch.float32)
    assert all(map(torch.equal, ours, plain))


def test_the_result_may_be_written_to(cpu_backend):
    gate, up = (torch.randn(2, 3, 5, requires_grad=True) for _ in range(2))
    within, apart = swiglu(gate, up).mul_(3).add_(1), swiglu(gate, up) * 3 + 1
    assert torch.equal(within, apart)
    ours, theirs = (torch.autograd.grad(y.sum(), (gate, up)) for y in (within, apart))
    assert all(map(torch.equal, ours, theirs))


def test_torch_func(cpu_backend):
    gate, up = (torch.randn(4, 3, 5, dtype=torch.float64) for _ in range(2))
    for transform in (torch.func.grad, torch.func.hessian, lambda f: f):
        ours, theirs = (
            torch.func.vmap(transform(lambda g, u, f=f: f(g, u).sin().sum()))(gate, up) for f in (swiglu, separate)
        )
        torch.testing.assert_close(ours, theirs)


def test_backward_keeps_the_two_inputs():
    gate, up = (torch.randn(10, 30, requires_grad=True) for _ in range(2))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        swiglu(gate, up)
    assert kept.keys() == {gate.data_ptr(), up.data_ptr()}


def test_every_path_is_named(cpu_backend):
    assert backends()["swiglu"]["cpu"] == cpu_backend


def test_opcheck(opcheck):
    gate, up, grad = (torch.randn(5, 6) for _ in range(3))
    opcheck(torch.ops.ppo_fast.swiglu.default, (gate, up))
    opcheck(torch.ops.ppo_fast.swiglu_backward.default, (grad, gate, up))


def test_bad_input():
    x = torch.randn(3, 4)
    with pytest.raises(TypeError, match="gate must be a tensor"):
        swiglu([1.0], x)
    with pytest.raises(TypeError, match="up must be float32"):
        swiglu(x, x.long())
    with pytest.raises(TypeError, match=r"up must have the dtype of gate, torch.float32, got torch.float64"):
        swiglu(x, x.double())
    with pytest.raises(ValueError, match=r"up must have the shape of gate, \[3, 4\], got \[4\]"):
        swiglu(x, x[0])


def test_the_kernel_reads_no_memory_that_isnt_there():
    x = torch.randn(8)
    for name, arguments in {"swiglu": (x, x[:4]), "swiglu_backward": (x[:4], x, x)}.items():
        with pytest.raises(ValueError, match="contiguous, on the CPU, and of gate's dtype and size"):
            getattr(torch.ops.ppo_fast, name)(*arguments)
