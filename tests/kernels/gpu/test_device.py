"""The public ops on GPU tensors, against float64; on CPU tensors with the kernels interpreted where there is no GPU.

What the interpreter can't show: races, tensor cores, vendor GEMMs with float32 output, and the dispatcher's CUDA key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton

import ppo_fast.ops as ops

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(not HAS_GPU and not triton.knobs.runtime.interpret, reason="no GPU; run by bench/gpu.sh"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
N, H, V = (300, 256, 5001) if HAS_GPU else (20, 32, 301)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on_triton() -> Iterator[None]:
    torch.manual_seed(0)
    with contextlib.nullcontext() if HAS_GPU else ops.backends.force("triton"):
        yield


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(N, H, device=DEVICE), 3 * H**-0.5 * torch.randn(V, H, device=DEVICE)
    return hidden.to(dtype), weight.to(dtype), torch.randint(V, (N,), device=DEVICE)


def definition(hidden: Tensor, weight: Tensor, ids: Tensor, c: Tensor, e: Tensor, **how: Any) -> list[Tensor]:
    """logprobs, entropy, d_hidden, d_weight of sum(c * logprob + e * entropy) in the dtype of the inputs."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    z = hidden @ weight.T
    if how:
        cap = how["softcap"]
        z = cap * torch.tanh((z + how["bias"].to(z.dtype)) / cap) / how["temperature"].to(z.dtype)[:, None]
    table = z.log_softmax(-1)
    logprobs, entropy = table.gather(1, ids[:, None])[:, 0], -(table.exp() * table).sum(-1)
    found = torch.autograd.grad((c.to(z.dtype) * logprobs + e.to(z.dtype) * entropy).sum(), (hidden, weight))
    return [x.detach() for x in (logprobs, entropy, *found)]


def near(got: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """At most four times PyTorch's own error, or four roundings of the largest value."""
    rounding = torch.finfo(got.dtype).eps * float(exact.abs().max())
    allowed = 4 * max(float((theirs.double() - exact).abs().max()), rounding)
    assert float((got.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", ["fused", "vendor"])
def test_linear_ops(monkeypatch: pytest.MonkeyPatch, scoring: str, dtype: torch.dtype, shaped: bool) -> None:
    monkeypatch.setenv("PPO_FAST_SCORING", scoring)
    hidden, weight, ids = head(dtype)
    c, e = torch.randn(2, N, device=DEVICE).unbind(0)
    how: dict[str, Any] = {}
    if shaped:
        bias, temperature = torch.randn(V, device=DEVICE), torch.rand(N, device=DEVICE) + 0.5
        how = {"bias": bias, "softcap": 5.0, "temperature": temperature}
    exact = definition(hidden.double(), weight.double(), ids, c, e, **how)
    single = definition(hidden.float(), weight.float(), ids, c, e, **how)
    theirs = definition(hidden, weight, ids, c, e, **how)

    with torch.no_grad():
        scored = ops.linear_selected_logprobs(hidden, weight, ids, return_entropy=True, **how)
    for got, want, yardstick in zip(scored, exact, single, strict=False):
        near(got, want, yardstick)
    assert all(bool(x.le(0).all()) for x in (scored[0], -scored[1]))

    leaves = hidden.requires_grad_(), weight.requires_grad_()
    ops.linear_token_loss(*leaves, ids, lambda p, h, c, e: c * p + e * h, (c, e), **how).backward()
    for leaf, want, yardstick in zip(leaves, exact[2:], theirs[2:], strict=True):
        near(leaf.grad, want, yardstick)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_again(dtype: torch.dtype) -> None:
    """What is ours gives them; vendor GEMMs may not."""
    hidden, weight, ids = head(dtype)
    with torch.no_grad():
        runs = [ops.linear_selected_logprobs(hidden[:100], weight, ids[:100], return_entropy=True) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_replace_the_logits_in_their_own_memory(dtype: torch.dtype) -> None:
    """A 16-bit gradient lies over float32 logits: were it stored before all warps have read, rows would be wrong."""
    hidden, weight, ids = head(dtype)
    c = torch.ones(N, device=DEVICE)
    results = []
    for _ in range(5 if HAS_GPU else 1):
        logits = torch.empty(N, V, device=DEVICE)
        head_rows = hidden, weight
        statistics = torch.ops.ppo_fast._head_forward(*head_rows, None, ids, None, None, 1.0, logits, False)
        exact = logits.double().softmax(1)
        torch.ops.ppo_fast._head_backward(
            *head_rows, ids, None, None, 1.0, logits, *statistics, c, None, False, None, None
        )
        gradient = logits if dtype == torch.float32 else logits.view(dtype)[:, :V]
        results.append(gradient)
        hit = torch.zeros_like(exact).scatter_(1, ids[:, None], 1.0)
        scale = 1.0 if dtype != torch.float16 else 2.0**14
        error = (gradient.double() / scale - (hit - exact)).abs()
        assert float(error.max()) <= 2 * torch.finfo(dtype).eps


def test_kept_sets() -> None:
    hidden, weight, ids = head(torch.bfloat16)
    offsets = torch.arange(17, device=DEVICE) * 11
    kept = (ids[:, None] + offsets) % V
    leaf = hidden.clone().requires_grad_()
    logprobs = ops.linear_selected_logprobs(leaf, weight, ids, kept_ids=kept)
    logprobs.sum().backward()
    exact = torch.einsum("nh,nkh->nk", hidden.double(), weight[kept].double()).log_softmax(-1)
    near(logprobs.detach(), exact[:, 0], exact[:, 0].float())
    p = exact.exp()
    p[:, 0] -= 1
    d_hidden = -torch.einsum("nk,nkh->nh", p, weight[kept].double())
    near(leaf.grad, d_hidden, d_hidden.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling(dtype: torch.dtype) -> None:
    hidden, weight, _ = head(dtype)
    keys = torch.stack([torch.full((N,), 3), torch.arange(N)], 1).to(DEVICE)
    ids, logprobs = ops.linear_sample(hidden, weight, keys=keys)
    exact = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, ids[:, None])[:, 0]
    near(logprobs, exact, (hidden.float() @ weight.float().T).log_softmax(1).gather(1, ids[:, None])[:, 0])
    assert torch.equal(ids, ops.linear_sample(hidden, weight, keys=keys)[0])
    with ops.backends.force("eager"):
        plain = ops.linear_sample(hidden, weight, keys=keys)[0]
    assert int((ids != plain).sum()) <= N // 20  # the best two keys within a rounding


def test_rows_of_logits_and_losses() -> None:
    B, T = 4, 50
    logits = 4 * torch.randn(B, T, V, device=DEVICE)
    ids = torch.randint(V, (B, T), device=DEVICE)
    mask = torch.rand(B, T, device=DEVICE) < 0.8
    logprobs, entropy = ops.selected_logprobs(logits, ids, mask=mask, return_entropy=True)
    x = torch.randn(3, B, T, device=DEVICE)

    def everything() -> list[Tensor]:
        leaf = logprobs.clone().requires_grad_()
        advantages, returns = ops.gae(x[0], x[1], mask)
        loss, stats = ops.ppo_loss(leaf, logprobs + 0.1 * x[2], advantages, mask, entropy=entropy, entropy_coef=0.01)
        value, _ = ops.value_loss(x[1].clone().requires_grad_(), x[1] + x[2], returns, mask)
        (loss + value).backward()
        return [advantages, returns, loss.detach(), value.detach(), leaf.grad, *stats]

    got = everything()
    with ops.backends.force("eager"):
        plain = ops.selected_logprobs(logits, ids, mask=mask, return_entropy=True)
        want = everything()
    for a, b in zip([logprobs, entropy, *got], [*plain, *want], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_compiled_in_one_graph_under_autocast() -> None:
    hidden, weight, ids = head(torch.float32)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return ops.linear_selected_logprobs(hidden, weight, ids).sum()

    compiled: Callable[..., Tensor] = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaf = weight.clone().requires_grad_()
    compiled(hidden, leaf).backward()
    again = weight.clone().requires_grad_()
    step(hidden, again).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, again.grad)
