"""RMSNorm: values and gradients on every path, and bits that depend on the row alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ppo_fast.ops import backends, rms_norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def separate(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def run(function, x: Tensor, weight: Tensor, upstream: Tensor, dtype: torch.dtype, eps: float = 1e-6) -> list[Tensor]:
    """The result and both gradients in ``dtype``."""
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (x, weight)]
    y = function(*leaves, eps)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(dtype))]


def rows(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    """x, weight and the gradient of the result; rows have a common direction with it, so that both terms count."""
    x = torch.randn(shape, dtype=torch.float64) * scale
    weight = 1 + 0.3 * torch.randn(shape[-1], dtype=torch.float64)
    upstream = torch.randn(shape, dtype=torch.float64) + x / scale
    return [t.to(dtype) for t in (x, weight, upstream)]


SHAPES = [(1,), (3, 7), (2, 15), (2, 16), (2, 17), (2, 33), (2, 3, 64), (40, 576), (3, 4097), (0, 8)]


def assert_exact(as_exact_as, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """As exact as PyTorch, the input's gradient measured by its terms, which may cancel."""
    x, weight, upstream = (t.double() for t in inputs)
    terms = weight * upstream * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    scales = (None, float(terms.abs().max()) if terms.numel() else None, None)
    ours, theirs, exact = run(rms_norm, *inputs, dtype), *(run(separate, *inputs, of) for of in (dtype, torch.float64))
    for got, their, value, scale in zip(ours, theirs, exact, scales, strict=True):
        as_exact_as(got, their, value, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(cpu_backend, as_exact_as, dtype, shape):
    inputs = rows(*shape, dtype=dtype)
    ours = run(rms_norm, *inputs, dtype)
    assert [t.shape for t in ours] == [shape, shape, shape[-1:]]
    assert all(t.dtype == dtype for t in ours)
    assert_exact(as_exact_as, inputs, dtype)


@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e4, 1e15])
def test_rows_of_any_size(cpu_backend, as_exact_as, scale):
    """Down to where eps decides."""
    assert_exact(as_exact_as, rows(5, 100, scale=scale), torch.float32)


def test_gradcheck(cpu_backend):
    x, weight, _ = (t.requires_grad_() for t in rows(3, 5, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 0.3), (x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(isa, threads, dtype):
    x, weight, upstream = rows(2001, 45, dtype=dtype)
    threads(1)
    whole = run(rms_norm, x, weight, upstream, dtype)[:2]
    for count in (2, 3):
        threads(count)
        assert all(map(torch.equal, run(rms_norm, x, weight, upstream, dtype)[:2], whole))
    for i in (0, 1, 1000, 2000):
        alone = run(rms_norm, x[i], weight, upstream[i], dtype)[:2]
        assert all(torch.equal(got, expected[i]) for got, expected in zip(alone, whole, strict=True))
    x[7, 3] = math.nan
    others = torch.arange(2001) != 7
    got = run(rms_norm, x, weight, upstream, dtype)[:2]
    assert all(torch.equal(g[others], expected[others]) for g, expected in zip(got, whole, strict=True))
    assert got[0][7].isnan().all()


def test_inputs_of_any_layout(cpu_backend):
    x, weight, upstream = torch.randn(20, 6, 4).transpose(0, 1), torch.randn(8)[::2], torch.ones(()).expand(6, 20, 4)
    ours = run(rms_norm, x, weight, upstream, torch.float32)
    plain = run(rms_norm, x.contiguous(), weight.contiguous(), upstream.contiguous(), torch.float32)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_the_result_may_be_written_to(cpu_backend, shape):
    x, weight, _ = (t.requires_grad_() for t in rows(*shape))
    within, apart = rms_norm(x, weight).mul_(3).add_(1), rms_norm(x, weight) * 3 + 1
    assert torch.equal(within, apart)
    ours, theirs = (torch.autograd.grad(y.sum(), (x, weight)) for y in (within, apart))
    assert all(map(torch.equal, ours, theirs))


def test_torch_func(cpu_backend):
    x, weight, _ = rows(4, 3, 6, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.hessian, lambda f: f):
        ours, theirs = (
            torch.func.vmap(transform(lambda x, f=f: f(x, weight, 0.3).sin().sum()))(x) for f in (rms_norm, separate)
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("asked", [(True, False), (False, True)])
def test_gradients_flow_to_what_asks_for_them(cpu_backend, asked):
    x, weight, upstream = rows(4, 6)
    everything = run(rms_norm, x, weight, upstream, torch.float32)[1:]
    leaves = [t.requires_grad_(on) for t, on in zip((x, weight), asked, strict=True)]
    rms_norm(*leaves).backward(upstream)
    for leaf, on, expected in zip(leaves, asked, everything, strict=True):
        assert torch.equal(leaf.grad, expected) if on else leaf.grad is None


def test_backward_keeps_the_input_and_a_number_a_row():
    x, weight = torch.randn(10, 30, requires_grad=True), torch.ones(30)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        rms_norm(x, weight)
    assert sorted(t.numel() for t in kept.values()) == [10, 30, 300]


def test_every_path_is_named(cpu_backend):
    assert backends()["rms_norm"]["cpu"] == cpu_backend


def test_opcheck(opcheck):
    x, weight, grad = rows(5, 6)
    rstd = torch.ops.ppo_fast.rms_norm(x, weight, 1e-6)[1]
    opcheck(torch.ops.ppo_fast.rms_norm.default, (x, weight, 1e-6))
    opcheck(torch.ops.ppo_fast.rms_norm_backward.default, (grad, x, weight, rstd))


def test_bad_input():
    x, weight, _ = rows(3, 4)
    with pytest.raises(TypeError, match="x must be a tensor"):
        rms_norm([1.0], weight)
    with pytest.raises(TypeError, match=r"weight must have the dtype of x, torch.float32, got torch.float64"):
        rms_norm(x, weight.double())
    with pytest.raises(ValueError, match=r"x must have the shape \[..., H\] with H >= 1, got \[\]"):
        rms_norm(torch.tensor(1.0), weight)
    with pytest.raises(ValueError, match=r"weight must have the shape of the last axis of x, \[4\], got \[3\]"):
        rms_norm(x, weight[:3])
    with pytest.raises(ValueError, match=r"eps must be finite and >= 0, got -1.0"):
        rms_norm(x, weight, -1.0)


def test_the_kernel_reads_no_memory_that_isnt_there():
    x, weight, _ = rows(3, 4)
    with pytest.raises(ValueError, match="weight must be"):
        torch.ops.ppo_fast.rms_norm(x, weight[:3], 1e-6)
    with pytest.raises(ValueError, match="rstd must be"):
        torch.ops.ppo_fast.rms_norm_backward(x, x, weight, torch.ones(2))
