"""hidden, weight and bias as they come: any subset of them requires a gradient, and two may be one tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ppo_fast.ops import linear_ppo_loss, linear_selected_logprobs, linear_token_loss

B, T, H, V = 2, 4, 5, 19

pytestmark = pytest.mark.usefixtures("cpu_backend")


def reinforce(logprobs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logprobs - 0.1 * entropy


def by_hand(hidden, weight, bias, ids, advantages, entropy_coef=0.1) -> Tensor:
    logp = (hidden @ weight.T + bias).log_softmax(-1)
    picked, entropy = logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
    return (-advantages * picked - entropy_coef * entropy).sum()


def logprobs(hidden, weight, bias, ids, advantages) -> Tensor:
    picked, entropy = linear_selected_logprobs(hidden, weight, ids, bias=bias, return_entropy=True)
    return (-advantages * picked - 0.1 * entropy).sum()


def logprobs_alone(hidden, weight, bias, ids, advantages) -> Tensor:
    return (-advantages * linear_selected_logprobs(hidden, weight, ids, bias=bias)).sum()


def token_loss(hidden, weight, bias, ids, advantages) -> Tensor:
    loss = linear_token_loss(hidden, weight, ids, reinforce, (advantages,), bias=bias, chunk_tokens=3)
    assert isinstance(loss, Tensor)
    return loss


def cispo(hidden, weight, bias, ids, advantages) -> Tensor:
    """At a ratio of 1, the policy loss that is REINFORCE itself."""
    with torch.no_grad():
        old = linear_selected_logprobs(hidden, weight, ids, bias=bias)
    mask = torch.ones(B, T, dtype=torch.bool)
    settings = {"objective": "cispo", "normalizer": 1, "entropy_coef": 0.1, "chunk_tokens": 3}
    return linear_ppo_loss(hidden, weight, ids, old, advantages, mask, bias=bias, **settings)[0]


OPS = {"logprobs": logprobs, "logprobs alone": logprobs_alone, "token loss": token_loss, "ppo": cispo}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    leaves = [torch.randn(B, T, H).to(dtype), torch.randn(V, H).to(dtype), torch.randn(V).to(dtype)]
    return leaves, torch.randint(V, (B, T)), torch.randn(B, T).to(dtype)


@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradients_go_where_they_are_asked_for_and_nowhere_else(op, which):
    leaves, ids, advantages = inputs()
    mine = [x.clone().requires_grad_(on) for x, on in zip(leaves, which, strict=True)]
    loss = OPS[op](*mine, ids, advantages)
    assert loss.requires_grad == any(which)
    if not any(which):
        return
    (3 * loss).backward(retain_graph=True)
    full = [x.clone().requires_grad_() for x in leaves]
    coef = 0.0 if op == "logprobs alone" else 0.1
    expected = torch.autograd.grad(3 * by_hand(*full, ids, advantages, coef), full)
    for times in (1, 2):
        for x, on, gradient in zip(mine, which, expected, strict=True):
            if on:
                assert gradient.any()
                torch.testing.assert_close(x.grad, times * gradient, rtol=1e-11, atol=1e-12)
            else:
                assert x.grad is None
        if times == 1:
            (3 * loss).backward()


@pytest.mark.parametrize("op", OPS)
def test_one_tensor_in_two_places(op):
    """The tied embedding, its column as a bias, and an upstream gradient that is no scalar."""
    table = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    _, ids, advantages = inputs()
    coef = 0.0 if op == "logprobs alone" else 0.1

    def gradient(function, *more):
        hidden = torch.nn.functional.embedding(ids.roll(1, -1), table).tanh()
        loss = function(hidden, table, table[:, 0], ids, advantages, *more)
        upstream = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        return torch.autograd.grad(torch.stack([loss, loss.square(), loss.exp() * 1e-9]), table, upstream)[0]

    torch.testing.assert_close(gradient(OPS[op]), gradient(by_hand, coef), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_may_begin_at_any_element(dtype):
    """Kernels that read two elements as one word need them on a word's boundary: `make sanitize` watches."""
    weight, ids = torch.randn(V, 6).to(dtype), torch.randint(V, (B, T))
    shifted = torch.empty(V * 6 + 1, dtype=dtype)[1:].view(V, 6).copy_(weight)
    results = []
    for w in (weight, shifted):
        hidden = torch.linspace(-1, 1, B * T * 6).view(B, T, 6).to(dtype).requires_grad_()
        out = linear_selected_logprobs(hidden, w, ids)
        out.sum().backward()
        results.append((out, hidden.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
