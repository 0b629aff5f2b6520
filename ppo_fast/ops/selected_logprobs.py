"""Log-probability and entropy of selected tokens from logits that exist already."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ppo_fast.ops import _eager
from ppo_fast.ops._checks import check_float_tensor, check_ids_in_range, check_mask, check_token_ids, temperature_like
from ppo_fast.ops._library import define, differentiable, mutates, no_double_backward, stat_dtype
from ppo_fast.profiling import annotate

_ROWS = "Tensor token_ids, Tensor temperature, Tensor? mask"
_BACKWARD = "Tensor? grad_logprobs, Tensor? grad_entropy, Tensor{} logits, " + _ROWS + ", Tensor entropy, Tensor lse"


@overload
def selected_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    return_entropy: Literal[False] = False,
    inplace_backward: bool = False,
) -> Tensor: ...
@overload
def selected_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    return_entropy: Literal[True],
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def selected_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    return_entropy: bool,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
def selected_logprobs(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...] any integer dtype
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,  # [...] bool, True = live
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log_softmax(logits / temperature)`` at ``token_ids``, in nats; with ``return_entropy`` also the entropy.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64, any strides; rows that are contiguous along V are
            read in place.
        token_ids: ``[...]`` in [0, V). Ids at masked positions are not looked at.
        temperature: a positive number, or a tensor that broadcasts to ``token_ids`` (one per sequence: ``[B, 1]``).
            It receives no gradient.
        mask: ``[...]`` bool. Masked rows of the logits are never read: their outputs and gradients are 0.
        return_entropy: also return ``-sum_j p_j log p_j`` of the whole distribution, differentiable.
        inplace_backward: write the gradient over the storage of ``logits`` instead of a new ``[..., V]`` buffer.
            Whoever still needs the logits after the backward pass must not ask for this. Autograd knows that they
            changed: a second backward, or another operation that saved them and runs its backward later, raises. Needs
            logits that are not a leaf, whose rows are contiguous and don't overlap; torch.compile asks that when it
            traces, not again when compiled code is reused.

    Returns:
        log-probs ``[...]``, or ``(log-probs, entropy)``, in float32 (float64 for float64). A logit of -inf is legal:
        its token has probability 0. A row that is -inf throughout has log-prob -inf, entropy 0 and gradient 0. NaN in
        a live row propagates.

    Raises:
        TypeError: for a dtype that is none of the above.
        ValueError: for shapes or devices that don't fit, V == 0, a temperature that is not finite and positive, or
            logits that ``inplace_backward`` can't overwrite.
        IndexError: for an id out of range, where that can be seen (CPU, or PPO_FAST_CHECK=1); elsewhere it gives NaN.

    The gradient is ``(c (1[j = y] - p_j) - e p_j (log p_j + entropy)) / temperature`` with ``c`` and ``e`` the incoming
    gradients, formed in the statistics' dtype and rounded once. Double backward is an error.
    """
    check_float_tensor("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have the shape [..., V] with V >= 1, got {list(logits.shape)}")
    shape = logits.shape[:-1]
    token_ids = check_token_ids(token_ids, shape, logits.device, "logits without its last dimension")
    if mask is not None:
        check_mask(mask, shape, logits.device, "token_ids")
    check_ids_in_range(token_ids, logits.shape[-1], mask)
    temperature = temperature_like(temperature, token_ids, stat_dtype(logits.dtype))

    with annotate("ppo_fast::selected_logprobs"):
        rows = _as_matrix_of_rows(logits)
        outer = rows.shape[:2]
        arguments = (
            token_ids.reshape(outer),
            temperature.reshape(outer),
            None if mask is None else mask.reshape(outer).contiguous(),
            return_entropy,
        )
        if inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
            _check_overwritable(logits)
            logprobs, entropy, _ = _OverwritingLogits.apply(rows, *arguments)
        else:
            logprobs, entropy, _ = torch.ops.ppo_fast.selected_logprobs(rows, *arguments)
        logprobs = logprobs.reshape(shape)
        return (logprobs, entropy.reshape(shape)) if return_entropy else logprobs


def _as_matrix_of_rows(logits: Tensor) -> Tensor:
    """[..., V] as [A, B, V] with stride 1 along V: a view where one exists (a slice [B, T, V] does), else a copy."""
    if logits.dim() < 3:
        rows = logits.reshape(1, -1, logits.shape[-1]) if logits.dim() == 1 else logits.unsqueeze(0)
    else:
        rows = logits.flatten(0, -3)
    # clone, not contiguous: the latter leaves the stride of a dimension of size 1 as it is.
    return rows if rows.stride(2) == 1 else rows.clone(memory_format=torch.contiguous_format)


def _check_overwritable(logits: Tensor) -> None:
    """Raise ValueError where writing into the rows would not reach the logits, or would reach what must stay."""
    if logits.is_leaf:
        raise ValueError("inplace_backward needs logits that were computed, got a leaf: its values would be lost")
    if logits.numel() == 0:
        return  # strides of tensors without elements are arbitrary
    sizes, strides = logits.shape, logits.stride()
    # Rows stay apart if every stride steps over all that lies within it. (No sorting: sizes may be symbolic.)
    overlapping = False
    for i, stride in enumerate(strides[:-1]):
        reach = sizes[-1] - 1
        for j, within in enumerate(strides[:-1]):
            if j != i and sizes[j] > 1 and within <= stride:
                reach += (sizes[j] - 1) * within
        overlapping |= bool(sizes[i] > 1 and stride <= reach)
    # More than two leading dimensions are merged; those that can't be are copied.
    copied = any(strides[i] != strides[i + 1] * sizes[i + 1] for i in range(logits.dim() - 3))
    if strides[-1] != 1 or overlapping or copied:
        raise ValueError(
            "inplace_backward needs logits whose rows are contiguous along V, don't overlap and are evenly spaced, got "
            f"shape {list(sizes)} with strides {list(strides)}"
        )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, token_ids, temperature, mask, return_entropy = inputs
    _, entropy, lse = output
    ctx.save_for_backward(logits, token_ids, temperature, mask, entropy, lse)
    ctx.mark_non_differentiable(*((lse,) if return_entropy else (entropy, lse)))
    ctx.set_materialize_grads(False)
    ctx.return_entropy = return_entropy


def _incoming(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    c = None if grad_logprobs is None else grad_logprobs.contiguous()
    e = None if grad_entropy is None or not ctx.return_entropy else grad_entropy.contiguous()
    return c, e


def _backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None) -> Any:
    c, e = _incoming(ctx, grad_logprobs, grad_entropy)
    gradient = None
    if c is not None or e is not None:
        gradient = torch.ops.ppo_fast.selected_logprobs_backward(c, e, *ctx.saved_tensors)
    return gradient, None, None, None, None


class _OverwritingLogits(torch.autograd.Function):
    """selected_logprobs whose backward leaves the gradient in the storage of the logits it saved."""

    @staticmethod
    def forward(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.ppo_fast.selected_logprobs(logits, *arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None) -> Any:
        # Gradients are recorded here under create_graph alone. once_differentiable would not do: it hangs its error on
        # the incoming gradients, which are constants more often than not.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("double backward through ppo_fast::selected_logprobs is not supported")
        c, e = _incoming(ctx, grad_logprobs, grad_entropy)
        if c is None and e is None:
            return None, None, None, None, None
        # Unpacking compares versions, and the op below moves the version on: the next unpacking raises.
        logits, *rest = ctx.saved_tensors
        gradient = logits.detach()
        torch.ops.ppo_fast.selected_logprobs_backward_(c, e, gradient, *rest)
        return gradient, None, None, None, None


def _fake(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, mask: Tensor | None, return_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.new_empty(token_ids.shape, dtype=stat_dtype(logits.dtype))
    entropy = torch.empty_like(logprobs) if return_entropy else logprobs.new_empty(0)
    return logprobs, entropy, torch.empty_like(logprobs)


define(
    f"selected_logprobs(Tensor logits, {_ROWS}, bool return_entropy) -> (Tensor, Tensor, Tensor)",
    _eager.selected_logprobs,
    _fake,
)
define(
    f"selected_logprobs_backward({_BACKWARD.format('')}) -> Tensor",
    _eager.selected_logprobs_backward,
    lambda c, e, logits, *rest: logits.new_empty(logits.shape),
)
define(
    f"selected_logprobs_backward_({_BACKWARD.format('(a!)')}) -> ()",
    _eager.selected_logprobs_backward_,
    lambda *arguments: None,
)
differentiable("selected_logprobs", _backward, _setup_context)
no_double_backward("selected_logprobs_backward", "selected_logprobs")
mutates("selected_logprobs_backward_", argument=2)
