"""What the linear_* ops share: the arguments that describe rows and output layer, and gradients made ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ppo_fast.ops._checks import (
    check_dense,
    check_float_tensor,
    check_ids_in_range,
    check_like,
    check_mask,
    check_scale,
    check_token_ids,
    temperature_like,
)
from ppo_fast.ops._library import define, may_give_away, no_double_backward, stat_dtype
from ppo_fast.ops._memory import rounded
from ppo_fast.ops._row_math import Gradients, Head, Rows

# The leading arguments of every registered linear op; `split_layer` takes them apart again.
LAYER_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor token_ids, Tensor? temperature, Tensor? mask, "
    "Tensor? kept_ids, float? softcap, float logit_scale"
)
NEEDS_SCHEMA = "bool need_hidden, bool need_weight, bool need_bias"
LAYER_ARGUMENTS = 9


class Layer(NamedTuple):
    """Checked arguments in the order and layout of `LAYER_SCHEMA`: one flat dimension of N tokens."""

    hidden: Tensor  # [N, H], in the dtype of the weight
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    token_ids: Tensor  # [N] int64
    temperature: Tensor | None  # [N] stat dtype; None for 1
    mask: Tensor | None  # [N] bool
    kept_ids: Tensor | None  # [N, K] int64
    softcap: float | None
    logit_scale: float

    @property
    def stat_dtype(self) -> torch.dtype:
        return stat_dtype(self.weight.dtype)

    def needs(self) -> tuple[bool, bool, bool]:
        """Which of hidden, weight and bias get a gradient: decides the matrix products, so it must be known ahead."""
        on = torch.is_grad_enabled()
        return (
            on and self.hidden.requires_grad,
            on and self.weight.requires_grad,
            on and self.bias is not None and self.bias.requires_grad,
        )


def check_layer(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [...]
    *,
    bias: Tensor | None,  # [V]
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    mask: Tensor | None,  # [...] bool
    kept_ids: Tensor | None,  # [..., K]
) -> Layer:
    """Check, cast and flatten the arguments that all linear ops have in common.

    Under autocast hidden and weight are cast to its dtype, as for ``nn.Linear``; nothing else is, since old log-probs
    and advantages need their precision. Otherwise hidden is cast to the weight's dtype. The casts are differentiable.
    """
    check_head(hidden, weight, bias, softcap, logit_scale)
    device, shape = hidden.device, hidden.shape[:-1]
    token_ids = check_token_ids(token_ids, shape, device, "hidden without its last dimension")
    if mask is not None:
        check_mask(mask, shape, device, "token_ids")
    check_ids_in_range(token_ids, weight.shape[0], mask)
    if not isinstance(temperature, Tensor):
        check_scale("temperature", temperature)
    if kept_ids is not None:
        kept_ids = _check_kept_ids(kept_ids, token_ids)

    hidden, weight = cast_alike(hidden, weight)
    stat = stat_dtype(weight.dtype)
    scaled = isinstance(temperature, Tensor) or temperature != 1
    return Layer(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        token_ids.reshape(-1),
        temperature_like(temperature, token_ids, stat).reshape(-1) if scaled else None,
        None if mask is None else mask.reshape(-1),
        kept_ids,
        None if softcap is None else float(softcap),
        float(logit_scale),
    )


def check_head(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    softcap: float | None,
    logit_scale: float,
) -> None:
    """The rows and the output layer, without what is asked of them."""
    _check_plain("hidden", hidden)
    _check_plain("weight", weight)
    if bias is not None:
        _check_plain("bias", bias)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight must have the shape [V, H] with V, H >= 1, got {list(weight.shape)}")
    V, H = weight.shape
    if hidden.dim() == 0 or hidden.shape[-1] != H:
        raise ValueError(f"hidden must have the shape [..., H] with H = {H} as in weight, got {list(hidden.shape)}")
    check_like("weight", weight, (V, H), hidden.device, "hidden")
    if bias is not None:
        check_like("bias", bias, (V,), hidden.device, "weight without its last dimension")
    if softcap is not None:
        check_scale("softcap", softcap)
    check_scale("logit_scale", logit_scale)


def cast_alike(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden in the dtype of the weight; under autocast both in its dtype, as for ``nn.Linear``."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        weight = weight.to(torch.get_autocast_dtype(device))
    return hidden.to(weight.dtype), weight


def _check_plain(name: str, x: Any) -> None:
    """A dense floating-point tensor whose memory holds its values: no DTensor, no quantised or sparse weight."""
    check_float_tensor(name, x)
    if type(x) in (Tensor, torch.nn.Parameter, FakeTensor):
        return
    raise TypeError(
        f"{name} must be a plain dense torch.Tensor or Parameter, got {type(x).__name__}: dequantise a quantised one. "
        "One sharded by FSDP2 is whole inside the forward pass of the module it was sharded with: call the op there. A "
        "DTensor elsewhere: where ranks hold different tokens, full_tensor(grad_placements=[Partial()]) adds their "
        "gradients up; a bare full_tensor() would drop those of the other ranks"
    )


def _check_kept_ids(kept_ids: Any, token_ids: Tensor) -> Tensor:
    """[N, K] int64. What the sets hold is checked where they are used, at live positions."""
    if not isinstance(kept_ids, Tensor):
        raise TypeError(f"kept_ids must be a tensor, got {type(kept_ids).__name__}")
    if kept_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"kept_ids must be int64 or int32, got {kept_ids.dtype}")
    check_dense("kept_ids", kept_ids)
    if kept_ids.dim() != token_ids.dim() + 1 or kept_ids.shape[-1] == 0:
        raise ValueError(
            f"kept_ids must have the shape of token_ids and one more dimension K >= 1, "
            f"{[*token_ids.shape, 'K']}, got {list(kept_ids.shape)}"
        )
    K = kept_ids.shape[-1]
    check_like("kept_ids", kept_ids, (*token_ids.shape, K), token_ids.device, "token_ids with K ids each")
    return kept_ids.to(torch.int64).reshape(-1, K)


def check_chunk_tokens(chunk_tokens: int | None) -> None:
    if chunk_tokens is None:
        return
    if not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool):
        raise TypeError(f"chunk_tokens must be an int or None, got {type(chunk_tokens).__name__}")
    if not 1 <= chunk_tokens < 2**63:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")


def split_layer(arguments: tuple[Any, ...]) -> tuple[Head, Rows, Tensor | None]:
    """(head, rows, mask) from the leading `LAYER_ARGUMENTS` arguments of a registered op."""
    hidden, weight, bias, token_ids, temperature, mask, kept_ids, softcap, logit_scale = arguments[:LAYER_ARGUMENTS]
    return Head(weight, bias, softcap, logit_scale), Rows(hidden, token_ids, temperature, kept_ids), mask


# ------------------------------------------------------------------------------- gradients made in the forward pass


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a gradient made ahead of the backward pass is kept in: the dtype of its tensor, but float32 for float16.

    A loss scaler's factor comes only with the backward pass; without it most of a float16 gradient would underflow.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def finished(gradients: Gradients, head: Head, dtype: Any = gradient_dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients as an op returns them: each in ``dtype`` of its tensor's dtype, and [0] where unwanted."""
    empty = head.weight.new_empty(0)
    hidden, weight, bias = gradients.hidden, gradients.weight, gradients.bias
    return (
        empty if hidden is None else hidden,
        empty.clone() if weight is None else rounded(weight, dtype(head.weight.dtype)),
        empty.clone() if bias is None or head.bias is None else bias.to(dtype(head.bias.dtype)),
    )


def fake_gradients(
    arguments: tuple[Any, ...], needs: tuple[bool, bool, bool], dtype: Any = gradient_dtype
) -> list[Tensor]:
    """The shape rule of `finished`."""
    return [
        x.new_empty(x.shape, dtype=dtype(x.dtype)) if needed else arguments[1].new_empty(0)
        for x, needed in zip(arguments[:3], needs, strict=True)
    ]


def save_gradients(
    ctx: Any, arguments: tuple[Any, ...], gradients: Sequence[Tensor], needs: tuple[bool, bool, bool]
) -> None:
    """For ``setup_context``: keep the gradients for `scaled_gradients`."""
    ctx.save_for_backward(*gradients)
    ctx.dtypes = [x.dtype if needed else None for x, needed in zip(arguments[:3], needs, strict=True)]
    ctx.set_materialize_grads(False)


def scaled_gradients(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    """The saved gradients of hidden, weight and bias times the incoming scalar.

    Out of place, for a second backward finds the saved buffers unchanged, unless they may be given away.
    """
    result: list[Tensor | None] = [None, None, None]
    if grad_loss is None:
        return result
    again = torch.is_grad_enabled()  # create_graph=True
    one = may_give_away(grad_loss)
    for i, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
        if dtype is None or not ctx.needs_input_grad[i]:
            continue
        if one and gradient.dtype == dtype:
            result[i] = gradient
            continue
        # The op's own derivative raises; a constant would turn double backward into a silent zero.
        source = gradient.detach().requires_grad_() if again else gradient
        result[i] = torch.ops.ppo_fast.linear_loss_backward(grad_loss, source, dtype)
    return result


def _linear_loss_backward(grad_loss: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # The factor must not be rounded to the 16 bits of the gradient, as a 0-d tensor on a GPU would be.
    factor = grad_loss.item() if grad_loss.device.type == "cpu" else grad_loss.reshape(1)
    if gradient.dtype == dtype:
        return torch.mul(gradient, factor, out=torch.empty_like(gradient))
    return (gradient * factor).to(dtype)


define(
    "linear_loss_backward(Tensor grad_loss, Tensor gradient, ScalarType dtype) -> Tensor",
    _linear_loss_backward,
    lambda grad_loss, gradient, dtype: torch.empty_like(gradient, dtype=dtype),
)
no_double_backward("linear_loss_backward", "linear_token_loss or linear_ppo_loss")
