"""Shared by the acceptance tests made from the worked numbers of the four texts in seeds/.

Every test runs once for each CPU implementation of the registered ops. A number that exercises the policy loss also
runs through every route from logits to that loss: `selected_logprobs` then `ppo_loss`, and the three fused ops on
hidden states and a head. Masked positions of every input hold NaN, so a test that masks also proves they aren't read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ppo_fast
from ppo_fast import ops

# On CPU tensors the Triton kernels need their interpreter: TRITON_INTERPRET=1 runs every number through them as well.
_BACKENDS = [
    name for name in ppo_fast.backends.available() if name != "triton" or os.environ.get("TRITON_INTERPRET") == "1"
]


@pytest.fixture(scope="module", autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ppo_fast.backends.force(request.param):
        yield request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, routes in (("surrogate", ["ppo_loss", *_ROUTES]), ("policy_loss", list(_ROUTES))):
        if fixture in metafunc.fixturenames:
            pairs = [(name, route) for route in routes for name in _backends_of(route)]
            metafunc.parametrize(("backend", fixture), pairs, indirect=True, scope="module")
            return
    metafunc.parametrize("backend", _BACKENDS, indirect=True, scope="module")


def _backends_of(route: str) -> list[str]:
    """Those that run different code on the route."""
    if ppo_fast.backends()[route]["cpu"] != "eager":
        return _BACKENDS
    # linear_ppo_loss has no kernel of its own yet, but calls that of ppo_loss, so that one more of them is enough.
    return list(dict.fromkeys(["eager", _BACKENDS[-1]])) if route == "linear_ppo_loss" else ["eager"]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


# Relative to 1 + |number|: under 20 units in the last place of float32, 50 of float64.
_ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6}


@pytest.fixture
def exact(dtype: torch.dtype) -> Callable[[Any, Any], None]:
    """Equality up to the rounding of `dtype`, shape included."""
    tolerance = _ROUNDING[dtype]

    def check(actual: Any, expected: Any) -> None:
        got = torch.as_tensor(actual).detach().double()
        wanted = torch.as_tensor(expected, dtype=torch.float64).detach()
        assert got.shape == wanted.shape
        assert bool(((got - wanted).abs() <= tolerance * (1.0 + wanted.abs())).all()), (got, wanted)

    return check


@pytest.fixture
def printed(dtype: torch.dtype) -> Callable[..., None]:
    """Equality with numbers as a text prints them: within half a unit of the last printed digit."""

    def check(actual: Any, *texts: str) -> None:
        flat = torch.as_tensor(actual).detach().double().flatten().tolist()
        assert len(flat) == len(texts)
        for got, text in zip(flat, texts, strict=True):
            half_unit = 0.5 * 10.0 ** int(Decimal(text).as_tuple().exponent)
            assert abs(got - float(text)) <= half_unit + _ROUNDING[dtype] * max(1.0, abs(got)), (got, text)

    return check


class Outcome(NamedTuple):
    loss: Tensor  # 0-d
    gradient: Tensor  # of the loss: [B, T] by the log-probs, or [B, T, V] by the logits
    stats: Any  # PPOStats; None from linear_token_loss, which has none


def _hide(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())), float("nan"))


def _reflection(size: int, dtype: torch.dtype) -> Tensor:
    """A head weight that is its own transpose and its own inverse, and mixes every logit into every hidden unit."""
    v = torch.arange(1, size + 1, dtype=torch.float64)
    return (torch.eye(size, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v)).to(dtype)


def _by_logits(
    logits: Tensor, token_ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **keywords: Any
) -> Outcome:
    logits = _hide(logits, mask).requires_grad_()
    logprobs, entropy = ops.selected_logprobs(logits, token_ids, mask=mask, return_entropy=True)
    loss, stats = ops.ppo_loss(logprobs, old, advantages, mask, entropy=entropy, **keywords)
    loss.backward()
    return Outcome(loss.detach(), logits.grad, stats)


def _from_hidden(logits: Tensor, mask: Tensor, compute: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Outcome:
    """The loss `compute(hidden, weight)` with hidden states whose logits are `logits`.

    Run with a frozen head, which takes another way to the gradient of the hidden states, and with a trainable one,
    whose own gradient is checked against it.
    """
    head = _reflection(logits.shape[-1], logits.dtype)
    tolerance = 10 * _ROUNDING[logits.dtype]
    outcomes = []
    for trainable in (False, True):
        weight = head.clone().requires_grad_(trainable)
        hidden = _hide(logits @ head, mask).requires_grad_()
        loss, stats = compute(hidden, weight)
        loss.backward()
        assert not hidden.grad[~mask].any()
        outcomes.append(Outcome(loss.detach(), hidden.grad @ head, stats))
    frozen, trained = outcomes
    torch.testing.assert_close(frozen.loss, trained.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(frozen.gradient, trained.gradient, rtol=tolerance, atol=tolerance)
    expected = trained.gradient[mask].T @ hidden.detach()[mask]
    torch.testing.assert_close(weight.grad, expected, rtol=tolerance, atol=tolerance)
    return frozen


def _by_linear_selected_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    **keywords: Any,
) -> Outcome:
    def compute(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        if weight.requires_grad or keywords.get("entropy_coef"):
            logprobs, entropy = ops.linear_selected_logprobs(hidden, weight, token_ids, mask=mask, return_entropy=True)
        else:  # the backward pass without a matrix product
            logprobs, entropy = ops.linear_selected_logprobs(hidden, weight, token_ids, mask=mask), None
        return ops.ppo_loss(logprobs, old, advantages, mask, entropy=entropy, **keywords)

    return _from_hidden(logits, mask, compute)


def _by_linear_ppo_loss(
    logits: Tensor,
    token_ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    **keywords: Any,
) -> Outcome:
    def compute(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        return ops.linear_ppo_loss(hidden, weight, token_ids, old, advantages, mask, **keywords)

    return _from_hidden(logits, mask, compute)


def _by_linear_token_loss(
    logits: Tensor,
    token_ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    objective: str = "ppo",
    entropy_coef: float = 0.0,
    normalizer: float | None = None,
) -> Outcome:
    count = float(mask.sum()) if normalizer is None else normalizer

    def token_loss(logprobs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio = (logprobs - old).exp()
        if objective == "ppo":
            loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
        else:
            loss = -ratio.clamp(max=1 + clip_high).detach() * advantages * logprobs
        return (loss - entropy_coef * entropy) / count

    def compute(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        return ops.linear_token_loss(hidden, weight, token_ids, token_loss, (old, advantages), mask=mask), None

    return _from_hidden(logits, mask, compute)


_ROUTES = {
    "selected_logprobs": _by_logits,
    "linear_selected_logprobs": _by_linear_selected_logprobs,
    "linear_ppo_loss": _by_linear_ppo_loss,
    "linear_token_loss": _by_linear_token_loss,
}


def _run_route(
    route: Callable[..., Outcome],
    logits: Tensor,
    token_ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    keywords: dict[str, Any],
) -> Outcome:
    if mask is None:
        mask = torch.ones_like(token_ids, dtype=torch.bool)
    return route(logits, token_ids, _hide(old, mask), _hide(advantages, mask), mask, **keywords)


@pytest.fixture(scope="module")
def policy_loss(request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """`(logits, token_ids, old_logprobs, advantages, mask=None, **keywords of ppo_loss)`, gradient by the logits."""

    def compute(
        logits: Tensor,
        token_ids: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        **keywords: Any,
    ) -> Outcome:
        return _run_route(_ROUTES[request.param], logits, token_ids, old_logprobs, advantages, mask, keywords)

    return compute


_SHARES = (0.1, 0.2, 0.3, 0.4)  # how the four tokens not selected split the rest of the probability


@pytest.fixture(scope="module")
def surrogate(request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """`(logprobs, old_logprobs, advantages, mask=None, **keywords of ppo_loss)`, gradient by the log-probs.

    The routes that start from logits get five of them a position, such that the selected token has the wanted
    log-prob; their gradient is checked to be c * (1[j = y] - p_j) at every logit, and c is what comes back.
    """

    def compute(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, **keywords: Any
    ) -> Outcome:
        if mask is None:
            mask = torch.ones_like(logprobs, dtype=torch.bool)
        if request.param == "ppo_loss":
            leaf = _hide(logprobs, mask).requires_grad_()
            loss, stats = ops.ppo_loss(leaf, _hide(old_logprobs, mask), _hide(advantages, mask), mask, **keywords)
            loss.backward()
            return Outcome(loss.detach(), leaf.grad, stats)

        wanted = logprobs.double()
        others = torch.log1p(-wanted.exp()).unsqueeze(-1) + torch.tensor(_SHARES, dtype=torch.float64).log()
        by_rank = torch.cat([wanted.unsqueeze(-1), others], -1)  # [B, T, 5], the selected token first
        token_ids = torch.arange(wanted.numel()).reshape(wanted.shape) % 5
        by_token = by_rank.gather(-1, (torch.arange(5) - token_ids.unsqueeze(-1)) % 5)
        logits = (by_token + 1.5).to(logprobs.dtype)
        result = _run_route(_ROUTES[request.param], logits, token_ids, old_logprobs, advantages, mask, keywords)

        one_hot = torch.nn.functional.one_hot(token_ids, 5).double()
        slope = one_hot - by_token.exp()
        d_logprobs = (result.gradient.double() * one_hot).sum(-1) / (slope * one_hot).sum(-1)
        tolerance = _ROUNDING[logprobs.dtype]
        torch.testing.assert_close(
            result.gradient.double(), d_logprobs.unsqueeze(-1) * slope, rtol=tolerance, atol=tolerance
        )
        return Outcome(result.loss, d_logprobs, result.stats)

    return compute
