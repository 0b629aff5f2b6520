"""Log-probability and entropy of selected tokens straight from hidden states; the logits are never stored."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ppo_fast.ops._chunks import chunk_loop
from ppo_fast.ops._library import define, differentiable, no_double_backward, stat_dtype
from ppo_fast.ops._linear import (
    LAYER_ARGUMENTS,
    LAYER_SCHEMA,
    NEEDS_SCHEMA,
    check_layer,
    fake_gradients,
    finished,
    split_layer,
)
from ppo_fast.ops._row_math import Gradients, Statistics
from ppo_fast.profiling import annotate


@overload
def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    kept_ids: Tensor | None = None,
    return_entropy: Literal[False] = False,
    entropy_grad: bool = True,
) -> Tensor: ...
@overload
def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    kept_ids: Tensor | None = None,
    return_entropy: Literal[True],
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    kept_ids: Tensor | None = None,
    return_entropy: bool,
    entropy_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_selected_logprobs(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [...] any integer dtype
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,  # [...] bool, True = live
    kept_ids: Tensor | None = None,  # [..., K] int64, padded with -1
    return_entropy: bool = False,
    entropy_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of ``token_ids``, in nats, under the distribution of an output layer; optionally its entropy.

    The logits are, in this order,

        z = hidden @ weight.T + bias
        z = z * logit_scale                  Cohere's ``logit_scale``; for Granite pass 1 / ``logits_scaling``
        z = softcap * tanh(z / softcap)      Gemma 2's ``final_logit_softcapping``
        z = z / temperature

    The C++ kernels give a token the same bits whatever the other tokens are, how many, and for any number of threads.

    Args:
        hidden: ``[..., H]`` float32, bfloat16, float16 or float64, any strides; cast to the dtype of ``weight``.
        weight: ``[V, H]``, any strides; may be the (tied) embedding. A plain tensor or Parameter. Of a layer that peft
            has adapted, ``.weight`` is the base weight: `ppo_fast.head_weights` gives what the layer multiplies by.
        token_ids: ``[...]`` in [0, V). Ids at masked positions are not looked at.
        bias: ``[V]``.
        temperature: a positive number, or a tensor that broadcasts to ``token_ids``. It receives no gradient.
        softcap, logit_scale: positive numbers.
        mask: ``[...]`` bool. Masked rows never reach the output layer: outputs and gradients are 0 there.
        kept_ids: ``[..., K]`` the tokens that top-k or top-p kept, distinct, -1 where there are fewer than K. Log-probs
            and entropy are then those of the distribution renormalised on the set, and only these rows of ``weight``
            are multiplied: ``2 K H`` operations a token in place of ``2 V H``.
        return_entropy: also return ``-sum_j p_j log p_j``, differentiable.
        entropy_grad: False returns the entropy as a constant, for metrics: it then costs no product with the layer.

    Returns:
        log-probs ``[...]``, or ``(log-probs, entropy)``, in float32 (float64 for a float64 weight); differentiable in
        ``hidden``, ``weight`` and ``bias``. Logits are accumulated and kept in float32 whatever the input.

    Raises:
        TypeError: for a dtype that is none of the above, or a tensor that isn't plain (distributed, quantised, sparse).
        ValueError: for shapes or devices that don't fit, numbers out of range, a kept set that names a token twice.
        IndexError: for an id out of range, or outside its kept set, on CPU (or with PPO_FAST_CHECK=1); elsewhere NaN.

    Cost, with ``G = 2 N V H`` operations: without gradients G. With a frozen output layer (neither weight nor bias
    requires grad) and no gradient through the entropy (``return_entropy`` or ``entropy_grad`` is False) 2 G: the
    forward pass forms ``(W[y] - E_p[W]) / temperature`` for each token, and the backward pass multiplies it by the
    incoming gradient, with no matrix product. Otherwise the backward pass recomputes the logits chunk by chunk: 3 G
    with a frozen layer, 4 G with a trainable one; on CPU tokens without any incoming gradient are left out of it. A
    loss that is local to the token is cheaper through `linear_token_loss`.

    Numerics, each tested on every CPU path. float32: the error against float64 is at most twice that of float32
    PyTorch, in log-probs, entropies and gradients. 16-bit inputs: log-probs and entropies as a float32 output layer
    makes them of the same inputs; gradients at most as far off as those of 16-bit PyTorch. A log-prob is never
    positive (that of a certain token is 0 or its tiny negative), an entropy never negative, and the gradient of a row
    of logits sums to 0 within rounding.

    Under autocast hidden and weight are cast to its dtype. Double backward is an error.
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
    need_hidden, need_weight, need_bias = layer.needs()
    ahead = need_hidden and not (need_weight or need_bias or (return_entropy and entropy_grad))
    with annotate("ppo_fast::linear_selected_logprobs"):
        logprobs, entropy, _ = torch.ops.ppo_fast.linear_selected_logprobs(*layer, bool(return_entropy), ahead)
    shape = token_ids.shape
    if not entropy_grad:
        entropy = entropy.detach()
    return (logprobs.reshape(shape), entropy.reshape(shape)) if return_entropy else logprobs.reshape(shape)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs [N], entropy [N] or [0], and if ``ahead`` dlogprob/dhidden [N, H] in the stat dtype, else [0]."""
    return_entropy, ahead = arguments[LAYER_ARGUMENTS:]
    head, rows, mask = split_layer(arguments)
    logprobs = rows.hidden.new_zeros(rows.hidden.shape[0], dtype=head.stat_dtype)
    entropy = torch.zeros_like(logprobs) if return_entropy else logprobs.new_empty(0)
    gradients = Gradients.zeros(head, rows, head.stat_dtype if ahead else None, False, False)

    def consume(statistics: Statistics, index: Tensor | slice) -> tuple[Tensor, None]:
        logprobs[index] = statistics.logprobs
        if return_entropy:
            entropy[index] = statistics.entropy
        return torch.ones_like(statistics.logprobs), None

    chunk_loop(head, rows, mask, consume, gradients, want_entropy=return_entropy, chunk_tokens=None)
    return logprobs, entropy, logprobs.new_empty(0) if gradients.hidden is None else gradients.hidden


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = arguments[:2]
    return_entropy, ahead = arguments[LAYER_ARGUMENTS:]
    logprobs = hidden.new_empty(hidden.shape[0], dtype=stat_dtype(weight.dtype))
    empty = logprobs.new_empty(0)
    return (
        logprobs,
        torch.empty_like(logprobs) if return_entropy else empty,
        logprobs.new_empty(hidden.shape) if ahead else empty.clone(),
    )


def _backward(
    grad_logprobs: Tensor | None,  # [N] stat dtype
    grad_entropy: Tensor | None,  # [N]
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias in the dtypes of their tensors, [0] where not needed. Recomputes the logits."""
    need_hidden, need_weight, need_bias = arguments[LAYER_ARGUMENTS:]
    head, rows, mask = split_layer(arguments)
    if grad_logprobs is None:
        assert grad_entropy is not None
        grad_logprobs = torch.zeros_like(grad_entropy)
    if grad_logprobs.device.type == "cpu":  # where counting the rows without a gradient costs nothing
        alive = grad_logprobs != 0
        if grad_entropy is not None:
            alive |= grad_entropy != 0
        mask = alive if mask is None else mask & alive
    gradients = Gradients.zeros(head, rows, head.weight.dtype if need_hidden else None, need_weight, need_bias)

    def consume(statistics: Statistics, index: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        return grad_logprobs[index], None if grad_entropy is None else grad_entropy[index]

    chunk_loop(head, rows, mask, consume, gradients, want_entropy=grad_entropy is not None, chunk_tokens=None)
    return finished(gradients, head, lambda dtype: dtype)


def _backward_ahead(grad: Tensor, direction: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, H] = grad [N] times direction [N, H]; exactly 0 where there is no gradient, and at masked positions."""
    if mask is not None:
        grad = torch.where(mask, grad, 0.0)
    grad = grad[:, None]
    return torch.where(grad == 0, 0.0, grad * direction).to(dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, bias, token_ids, temperature, mask, kept_ids, softcap, logit_scale, return_entropy, ahead = inputs
    _, entropy, direction = output
    ctx.ahead, ctx.settings = ahead, (softcap, logit_scale)
    ctx.hidden_dtype = hidden.dtype
    if ahead:
        ctx.save_for_backward(direction, mask)
    else:
        ctx.save_for_backward(hidden, weight, bias, token_ids, temperature, mask, kept_ids)
    ctx.mark_non_differentiable(*([direction] if return_entropy and not ahead else [entropy, direction]))
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None) -> Any:
    gradients: list[Tensor | None] = [None] * (LAYER_ARGUMENTS + 2)
    if grad_logprobs is None and grad_entropy is None:
        return tuple(gradients)
    if ctx.ahead:
        direction, mask = ctx.saved_tensors
        # Under create_graph the result must hang on something, so that double backward meets the error.
        source = direction.detach().requires_grad_() if torch.is_grad_enabled() else direction
        gradients[0] = torch.ops.ppo_fast.linear_selected_logprobs_backward_ahead(
            grad_logprobs, source, mask, ctx.hidden_dtype
        )
        return tuple(gradients)
    needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = torch.ops.ppo_fast.linear_selected_logprobs_backward(
        grad_logprobs, grad_entropy, *ctx.saved_tensors, *ctx.settings, *needs
    )
    for i, needed in enumerate(needs):
        gradients[i] = found[i] if needed else None
    return tuple(gradients)


define(
    f"linear_selected_logprobs({LAYER_SCHEMA}, bool return_entropy, bool ahead) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
define(
    f"linear_selected_logprobs_backward(Tensor? grad_logprobs, Tensor? grad_entropy, {LAYER_SCHEMA}, {NEEDS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad_logprobs, grad_entropy, *arguments: tuple(
        fake_gradients(arguments, arguments[LAYER_ARGUMENTS:], lambda dtype: dtype)
    ),
)
define(
    "linear_selected_logprobs_backward_ahead(Tensor grad, Tensor direction, Tensor? mask, ScalarType dtype) -> Tensor",
    _backward_ahead,
    lambda grad, direction, mask, dtype: torch.empty_like(direction, dtype=dtype),
)
differentiable("linear_selected_logprobs", _autograd, _setup_context)
no_double_backward("linear_selected_logprobs_backward", "linear_selected_logprobs")
no_double_backward("linear_selected_logprobs_backward_ahead", "linear_selected_logprobs")
