"""Every registered op in plain PyTorch: the oracle of the tests and the default implementation on every device.

Float64 included. Statistics are formed in the stat dtype (float32, float64 for float64), sums over tokens in float64.
Masked positions are selected away before any arithmetic, so that a NaN there reaches neither a value nor a gradient.

The scalar mathematics of the losses stands here once, in `ppo_token_terms` and `value_token_terms`, shape-agnostic and
differentiable; the token-level ops and the fused head both use it, and csrc/ and kernels/ follow its conventions:

- The bounds ``1 - clip_low`` and ``1 + clip_high`` are formed in double precision, then rounded to the stat dtype.
- A term is flat only *strictly* beyond its bound. On the bound, and anywhere inside, the gradient is that of
  ``-ratio * A``; at ratio 1 it is ``-A``. PyTorch's max and clamp give the same there (two equal branches get half the
  gradient each, and clamp passes it on at its own limits). With dual clip, too, ratio == dual_clip is not yet flat.
- Where a term is flat, or A == 0, the ratio enters as a constant within its bounds: ``exp`` of a large difference is
  infinite, and 0 * inf would make a NaN out of a gradient that is zero.
- The clipped value term counts only where its square is strictly larger.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ppo_fast.ops._library import autograd_inside_op, detached, stat_dtype, sum_dtype

PPO, CISPO = 0, 1
MIN_STD = 1e-8  # csrc/whiten.cpp has it, too
# Logits are copied to the stat dtype at most this many elements at a time (32 MiB in float32).
_CHUNK_ELEMENTS = 1 << 23


# ----------------------------------------------------------------------------------------------------- scalar terms


def kl_terms(difference: Tensor, estimator: int) -> Tensor:
    """The estimators k1, k2, k3 of KL(p, q) at a token drawn from p, from d = log p - log q (Schulman 2020)."""
    if estimator == 1:
        return difference
    if estimator == 2:
        return 0.5 * difference * difference
    return torch.expm1(-difference) + difference


def ppo_token_terms(
    logprobs: Tensor,  # [n], any shape; differentiable
    old_logprobs: Tensor,  # [n]
    advantages: Tensor,  # [n]
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    objective: int,
    ref_logprobs: Tensor | None = None,  # [n]
    kl_coef: float = 0.0,
    kl_estimator: int = 3,
    entropy: Tensor | None = None,  # [n]; differentiable
    entropy_coef: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The policy loss of each token, and what is counted about it: (loss, surrogate, flat, outside, ratio), all [n].

    ``loss = surrogate - entropy_coef * entropy + kl_coef * k(logprobs - ref_logprobs)``, differentiable in
    ``logprobs`` and ``entropy``; the other four are plain values. Every input is a live token in the stat dtype.

    ``objective`` `PPO`: ``surrogate = -min(ratio * A, clip(ratio) * A)`` (Schulman et al. 2017, eq. 7), with dual clip
    ``-max(min(...), dual_clip * A)`` where A < 0 (Ye et al. 2020, eq. 5). `CISPO`: ``-sg(min(ratio, 1 + clip_high)) *
    A * logprobs`` (MiniMax 2025, eq. 4, without a lower bound), never flat; ``outside`` is then ratio > 1 + clip_high.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    with torch.no_grad():
        difference = logprobs - old_logprobs
        ratio = difference.exp()
        above, below = ratio > high, ratio < low
        silent = (advantages == 0) & ~difference.isnan()

    if objective == CISPO:
        outside, flat = above, torch.zeros_like(above)
        weight = ratio.clamp(max=high) * advantages
        surrogate = -torch.where(silent, 0.0, weight) * torch.where(silent, 0.0, logprobs)
    else:
        outside = above | below
        flat = (above & (advantages > 0)) | (below & (advantages < 0))
        bounded = ratio.clamp(low, high)
        if dual_clip is not None:
            too_far = (ratio > dual_clip) & (advantages < 0)
            flat = flat | too_far
            bounded = torch.where(too_far, dual_clip, bounded)
        constant = flat | silent
        moving = torch.where(constant, 0.0, logprobs - old_logprobs).exp()
        surrogate = -torch.where(constant, bounded, moving) * advantages

    loss = surrogate
    if entropy is not None and entropy_coef != 0.0:
        loss = loss - entropy_coef * entropy
    if ref_logprobs is not None and kl_coef != 0.0:
        loss = loss + kl_coef * kl_terms(logprobs - ref_logprobs, kl_estimator)
    return loss, surrogate.detach(), flat, outside, ratio


def value_token_terms(
    values: Tensor,  # [n], any shape; differentiable
    old_values: Tensor,  # [n]
    returns: Tensor,  # [n]
    *,
    clip_range: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The value loss of each token: (loss, clipped, squared error), all [n]; ``loss`` is differentiable in ``values``.

    ``loss = 1/2 max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2)``. Clamping V itself, not the difference, makes
    the two squares equal to the bit inside the range, so that ``clipped`` counts no rounding.
    """
    error = values - returns
    square = error * error
    if clip_range is None:
        return 0.5 * square, torch.zeros_like(square, dtype=torch.bool), square.detach()
    with torch.no_grad():
        bounded = values.clamp(old_values - clip_range, old_values + clip_range)
        bounded_square = (bounded - returns).square()
        clipped = bounded_square > square
        half = torch.where(bounded_square.isnan(), torch.nan, 0.5)  # NaN in old_values compares as not clipped
    return half * torch.where(clipped, bounded_square, square), clipped, square.detach()


# ------------------------------------------------------------------------------------------------- registered ops


def ppo_loss(
    logprobs: Tensor,  # [B, T]
    old_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    row_weights: Tensor,  # [B]
    entropy: Tensor | None,  # [B, T]
    ref_logprobs: Tensor | None,  # [B, T]
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    objective: int,
    entropy_coef: float,
    kl_coef: float,
    kl_estimator: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss 0-d, d_logprobs [B, T], d_entropy [B, T] or [0], sums [11] in the order of `ppo_loss.PPO_SUMS`."""

    def live(x: Tensor) -> Tensor:
        return torch.where(mask, detached(x), 0.0)

    with autograd_inside_op():
        # Zeros in every input make every sum below vanish at masked positions; the weight does it for the gradient.
        weights = torch.where(mask, detached(row_weights)[:, None], 0.0)
        old, adv = live(old_logprobs), live(advantages)
        ref = None if ref_logprobs is None else live(ref_logprobs)
        new = live(logprobs).requires_grad_()
        ent = None if entropy is None else live(entropy).requires_grad_()
        loss, surrogate, flat, outside, _ = ppo_token_terms(
            new,
            old,
            adv,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            objective=objective,
            ref_logprobs=ref,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            entropy=ent,
            entropy_coef=entropy_coef,
        )
        total = (weights * loss).sum(dtype=sum_dtype(loss.device))
        inputs = (new,) if ent is None else (new, ent)
        grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

    def total_of(x: Tensor) -> Tensor:
        return x.sum(dtype=sum_dtype(x.device))

    new = new.detach()
    difference = (new - old).to(sum_dtype(new.device))
    deviation = torch.expm1(difference)
    zero = total_of(new[:0])
    sums = torch.stack(
        [
            total_of(mask),
            total_of(surrogate),
            total_of(flat),
            total_of(outside),
            total_of(deviation),
            total_of(deviation * deviation),
            *(total_of(kl_terms(-difference, estimator)) for estimator in (1, 2, 3)),
            zero if ref is None else total_of(kl_terms((new - ref).to(difference.dtype), kl_estimator)),
            zero if ent is None else total_of(ent.detach()),
        ]
    )
    d_entropy = new.new_empty(0) if ent is None else grads[1]
    return total.detach().to(new.dtype), grads[0], d_entropy, sums


def value_loss(
    values: Tensor,  # [B, T]
    old_values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    row_weights: Tensor,  # [B]
    clip_range: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss 0-d, d_values [B, T], sums [4] in the order of `value_loss.VALUE_SUMS`."""
    with autograd_inside_op():
        weights = torch.where(mask, detached(row_weights)[:, None], 0.0)
        new, old, target = (torch.where(mask, detached(x), 0.0) for x in (values, old_values, returns))
        new.requires_grad_()
        loss, clipped, square = value_token_terms(new, old, target, clip_range=clip_range)
        total = (weights * loss).sum(dtype=sum_dtype(loss.device))
        (d_values,) = torch.autograd.grad(total, new)
    sums = torch.stack([x.sum(dtype=sum_dtype(x.device)) for x in (mask, loss.detach(), clipped, square)])
    return total.detach().to(values.dtype), d_values, sums


def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None,  # [B]
) -> tuple[Tensor, Tensor, Tensor]:
    """advantages [B, T], returns [B, T], moments [3] = (count, sum, M2 about the mean) of the live advantages."""
    B, T = rewards.shape
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    next_advantage = rewards.new_zeros(B)
    next_value = next_advantage if bootstrap_values is None else bootstrap_values
    for t in reversed(range(T)):
        live = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(live, advantage, 0.0)
        returns[:, t] = torch.where(live, advantage + values[:, t], 0.0)
        next_advantage = torch.where(live, advantage, next_advantage)
        next_value = torch.where(live, values[:, t], next_value)
    wide = advantages.to(sum_dtype(advantages.device))
    count, total = mask.sum(dtype=wide.dtype), wide.sum()
    spread = torch.where(mask, wide - total / count, 0.0).square().sum()
    return advantages, returns, torch.stack([count, total, spread])


def whiten(
    x: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    moments: Tensor,  # [3] = (count, sum, M2 about the mean)
    shift_mean: bool,
) -> Tensor:  # [B, T]
    """``(x - mean) / max(std, 1e-8)`` at live tokens, plus the mean without ``shift_mean``; 0 elsewhere."""
    count, total, spread = moments.unbind(0)
    mean = total / count
    # Wide, so that a mean far from zero costs no digits of the small differences to it.
    whitened = (x.to(moments.dtype) - mean) / (spread / count).sqrt().clamp(min=MIN_STD)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(x.dtype)


def selected_logprobs(
    logits: Tensor,  # [A, B, V]
    token_ids: Tensor,  # [A, B]
    temperature: Tensor,  # [A, B]
    mask: Tensor | None,  # [A, B] bool
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs [A, B], entropy [A, B] or [0], lse [A, B] = logsumexp(logits / temperature)."""
    V = logits.shape[2]
    dtype = stat_dtype(logits.dtype)
    logprobs = torch.zeros(token_ids.shape, dtype=dtype, device=logits.device)
    lse = torch.zeros_like(logprobs)
    entropy = torch.zeros_like(logprobs) if return_entropy else logprobs.new_empty(0)
    for a, b in _live_rows(mask, logits.shape, logits.device):
        x = logits[a, b].to(dtype) / temperature[a, b, None]
        ids, in_range = _checked_ids(token_ids[a, b], V)
        top = x.amax(1)
        dead = top == -torch.inf  # the whole row; shifting it by its maximum would give NaN
        x -= torch.where(dead, 0.0, top)[:, None]
        p = x.exp()
        total = p.sum(1)
        log_total = total.log()
        picked = torch.where(dead, -torch.inf, x.gather(1, ids[:, None])[:, 0] - log_total)
        logprobs[a, b] = torch.where(in_range, picked, torch.nan)
        lse[a, b] = torch.where(dead, -torch.inf, top + log_total)
        if return_entropy:
            # Two terms that are never negative, so nothing cancels; p * x is 0 where x is -inf.
            p *= x.clamp_(min=torch.finfo(dtype).min)
            entropy[a, b] = torch.where(dead, 0.0, log_total - p.sum(1) / total)
    return logprobs, entropy, lse


def selected_logprobs_backward(
    grad_logprobs: Tensor | None,  # [A, B]
    grad_entropy: Tensor | None,  # [A, B]
    logits: Tensor,  # [A, B, V]
    token_ids: Tensor,  # [A, B]
    temperature: Tensor,  # [A, B]
    mask: Tensor | None,  # [A, B] bool
    entropy: Tensor,  # [A, B], or [0] without grad_entropy
    lse: Tensor,  # [A, B]
) -> Tensor:
    """The gradient of the logits, [A, B, V] contiguous, in their dtype."""
    gradient = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_logit_gradient(gradient, grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse)
    return gradient


def selected_logprobs_backward_(
    grad_logprobs: Tensor | None,  # [A, B]
    grad_entropy: Tensor | None,  # [A, B]
    logits: Tensor,  # [A, B, V], overwritten
    token_ids: Tensor,  # [A, B]
    temperature: Tensor,  # [A, B]
    mask: Tensor | None,  # [A, B] bool
    entropy: Tensor,  # [A, B], or [0] without grad_entropy
    lse: Tensor,  # [A, B]
) -> None:
    """The gradient of the logits, written over them; masked rows become zero."""
    if mask is not None:
        logits.masked_fill_(~mask[..., None], 0.0)
    _write_logit_gradient(logits, grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse)


def _write_logit_gradient(
    out: Tensor,  # [A, B, V], may be logits
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
) -> None:
    """c * (1[j = y] - p_j) - e * p_j * (log p_j + entropy), over the temperature, into the live rows of ``out``."""
    dtype = stat_dtype(logits.dtype)
    for a, b in _live_rows(mask, logits.shape, logits.device):
        scale = temperature[a, b]
        ids, in_range = _checked_ids(token_ids[a, b], logits.shape[2])
        dead = lse[a, b] == -torch.inf
        x = logits[a, b].to(dtype) / scale[:, None]
        x -= torch.where(dead, 0.0, lse[a, b])[:, None]  # now log p
        p = x.exp()
        row = torch.zeros_like(x)
        if grad_logprobs is not None:
            c = torch.where(dead, 0.0, grad_logprobs[a, b])[:, None]
            row -= c * p
            row.scatter_add_(1, ids[:, None], c)
        if grad_entropy is not None:
            e = torch.where(dead, 0.0, grad_entropy[a, b])[:, None]
            x.clamp_(min=torch.finfo(dtype).min)  # p * log p is 0 where p is 0
            row -= e * p * (x + entropy[a, b, None])
        row /= scale[:, None]
        out[a, b] = torch.where(in_range[:, None], row, torch.nan).to(out.dtype)


def _live_rows(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Index pairs (a, b) of the live rows of [A, B, V], as many at a time as fit into a chunk."""
    A, B, V = shape
    live = torch.arange(A * B, device=device) if mask is None else mask.reshape(-1).nonzero()[:, 0]
    for rows in live.split(max(1, _CHUNK_ELEMENTS // max(1, V))):
        yield rows // B, rows % B


def _checked_ids(ids: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """Ids that are safe to gather with, and which of them were in range; out of range is an error on CPU."""
    in_range = (ids >= 0) & (ids < V)
    if ids.device.type == "cpu" and not bool(in_range.all()):
        raise IndexError(f"token_ids must lie in [0, {V}), got {int(ids[~in_range][0])} at a live position")
    return torch.where(in_range, ids, 0), in_range
