"""The clipped policy loss of PPO straight from hidden states; its gradients are made in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._aggregation import nan_without_tokens, row_weights
from ppo_fast.ops._checks import check_float_like, check_mask
from ppo_fast.ops._chunks import chunk_loop
from ppo_fast.ops._library import define, differentiable, stat_dtype, sum_dtype
from ppo_fast.ops._linear import (
    LAYER_ARGUMENTS,
    LAYER_SCHEMA,
    NEEDS_SCHEMA,
    check_chunk_tokens,
    check_layer,
    fake_gradients,
    finished,
    gradient_dtype,
    save_gradients,
    scaled_gradients,
    split_layer,
)
from ppo_fast.ops._row_math import Gradients, Statistics
from ppo_fast.ops.ppo_loss import KL_ESTIMATORS, OBJECTIVES, PPO_SUMS, PPOStats, check_ppo_settings
from ppo_fast.profiling import annotate


def linear_ppo_loss(
    hidden: Tensor,  # [B, T, H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [B, T] any integer dtype
    old_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    objective: str = "ppo",
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,  # [B, T]
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    aggregation: str = "token_mean",
    normalizer: float | Tensor | None = None,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kept_ids: Tensor | None = None,  # [B, T, K] int64, padded with -1
    chunk_tokens: int | None = None,
) -> tuple[Tensor, PPOStats]:
    """`ppo_loss` of `linear_selected_logprobs`, in one pass that keeps neither logits nor anything to recompute them.

    Loss, statistics and gradients are those of

        logprobs, entropy = linear_selected_logprobs(hidden, weight, token_ids, ..., return_entropy=True)
        ppo_loss(logprobs, old_logprobs, advantages, mask, entropy=entropy, ...)

    where every argument is explained. The entropy is always in the statistics; with entropy_coef > 0 it has a gradient.

    Args:
        chunk_tokens: tokens whose logits exist at one time. Default: as many as fit into 80 MiB on CPU and 896 MiB
            elsewhere, at least 32. The result does not depend on it but for rounding.

    Returns:
        the loss to minimise, 0-d float32 (float64 for a float64 weight), differentiable in ``hidden``, ``weight`` and
        ``bias``, and `PPOStats` with ``log_ratios [B, T]``.

    Raises:
        TypeError, ValueError, IndexError: as the two ops above do.

    Cost, with ``G = 2 N V H`` over the live tokens: G without gradients, 2 G with a frozen output layer, 3 G with a
    trainable one; on CPU tokens without a gradient (clipped, or with advantage 0) are left out of the second and third
    product. The backward pass multiplies by the incoming scalar; where that is exactly 1 it does nothing. Under
    torch.compile this is one opaque op, one graph for any B and T. Keep it outside of activation checkpointing, which
    would run it twice. Double backward is an error. Numerics: as stated
    for `linear_selected_logprobs`.
    """
    layer = check_layer(
        hidden,
        weight,
        token_ids,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        kept_ids=kept_ids,
    )
    if token_ids.dim() != 2:
        raise ValueError(f"token_ids must have the shape [B, T], got {list(token_ids.shape)}")
    check_mask(mask, token_ids.shape, token_ids.device, "token_ids")
    check_float_like("old_logprobs", old_logprobs, token_ids, "token_ids")
    check_float_like("advantages", advantages, token_ids, "token_ids")
    if ref_logprobs is not None:
        check_float_like("ref_logprobs", ref_logprobs, token_ids, "token_ids")
    check_chunk_tokens(chunk_tokens)
    check_ppo_settings(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        objective=objective,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        has_entropy=True,
        has_reference=ref_logprobs is not None,
    )
    with annotate("ppo_fast::linear_ppo_loss"):
        dtype, shape = layer.stat_dtype, token_ids.shape
        weights = row_weights(mask, aggregation, normalizer, dtype)
        loss, _, _, _, log_ratios, sums = torch.ops.ppo_fast.linear_ppo_loss(
            *layer,
            old_logprobs.detach().to(dtype).reshape(-1),
            advantages.detach().to(dtype).reshape(-1),
            weights[:, None].expand(shape).reshape(-1),
            None if ref_logprobs is None else ref_logprobs.detach().to(dtype).reshape(-1),
            float(clip_low),
            float(clip_high),
            None if dual_clip is None else float(dual_clip),
            OBJECTIVES[objective],
            float(entropy_coef),
            float(kl_coef),
            KL_ESTIMATORS[kl_estimator],
            *layer.needs(),
            chunk_tokens,
        )
        stats = PPOStats(*sums.unbind(0))._replace(log_ratios=log_ratios.reshape(shape))
        return nan_without_tokens(loss, mask, normalizer), stats


_SCHEMA = (
    f"linear_ppo_loss({LAYER_SCHEMA}, Tensor old_logprobs, Tensor advantages, Tensor token_weights, "
    "Tensor? ref_logprobs, float clip_low, float clip_high, float? dual_clip, int objective, float entropy_coef, "
    f"float kl_coef, int kl_estimator, {NEEDS_SCHEMA}, int? chunk_tokens) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ARGUMENTS = LAYER_ARGUMENTS + 15
_NEEDS = slice(-4, -1)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """loss 0-d, d_hidden, d_weight, d_bias ([0] where not needed), log_ratios [N], sums in the order of PPO_SUMS."""
    old_logprobs, advantages, token_weights, ref_logprobs, *settings = arguments[LAYER_ARGUMENTS:-4]
    entropy_coef = settings[4]
    need_hidden, need_weight, need_bias = arguments[_NEEDS]
    head, rows, mask = split_layer(arguments)
    N, dtype = rows.hidden.shape[0], head.stat_dtype
    wide = sum_dtype(rows.hidden.device)
    loss = rows.hidden.new_zeros((), dtype=wide)
    sums = rows.hidden.new_zeros(len(PPO_SUMS), dtype=wide)
    log_ratios = rows.hidden.new_zeros(N, dtype=dtype)
    kept_in = gradient_dtype(head.weight.dtype) if need_hidden else None
    gradients = Gradients.zeros(head, rows, kept_in, need_weight, need_bias)

    def consume(statistics: Statistics, index: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        def column(x: Tensor) -> Tensor:  # [n, 1]: every token is a row of its own, with its own weight
            return x[index].contiguous()[:, None]

        old = column(old_logprobs)
        part, c, e, part_sums = torch.ops.ppo_fast.ppo_loss(
            statistics.logprobs[:, None],
            old,
            column(advantages),
            torch.ones_like(old, dtype=torch.bool),
            column(token_weights)[:, 0],
            statistics.entropy[:, None],
            None if ref_logprobs is None else column(ref_logprobs),
            *settings,
        )
        loss.add_(part)
        sums.add_(part_sums)
        log_ratios[index] = statistics.logprobs - old[:, 0]
        return c[:, 0], e[:, 0] if entropy_coef else None

    chunk_loop(head, rows, mask, consume, gradients, want_entropy=True, chunk_tokens=arguments[-1])
    return loss.to(dtype), *finished(gradients, head), log_ratios, sums


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, weight = arguments[:2]
    loss = hidden.new_empty((), dtype=stat_dtype(weight.dtype))
    sums = hidden.new_empty(len(PPO_SUMS), dtype=sum_dtype(hidden.device))
    return loss, *fake_gradients(arguments, arguments[_NEEDS]), loss.new_empty(hidden.shape[0]), sums


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    save_gradients(ctx, inputs, output[1:4], inputs[_NEEDS])


def _autograd(ctx: Any, grad_loss: Tensor | None, *rest: Tensor | None) -> Any:
    return (*scaled_gradients(ctx, grad_loss), *[None] * (_ARGUMENTS - 3))


define(_SCHEMA, _forward, _fake)
differentiable("linear_ppo_loss", _autograd, _setup_context)
