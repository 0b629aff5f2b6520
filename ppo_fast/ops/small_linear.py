"""Linear layers on few rows, as a decode step has them, over a weight that was packed beforehand.

Packed, a weight [V, H] is panels of 32 output features, ``[ceil(V / 32), H, 32]``: a panel is read from end to end with
the features of one step side by side, as vector lanes. bfloat16 keeps two neighbours along H together,
``[ceil(V / 32), ceil(H / 2), 32, 2]``, the operand of its dot products. Features past V and an odd H are filled up with
zeros. The layout is the same on every device and instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_float_tensor, check_like
from ppo_fast.ops._library import define, stat_dtype

_LANES = 32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What the panels unpacked at a time may take, where no kernel reads them as they are.
_UNPACKED_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """What `pack_weight` makes and `small_linear` takes: a copy, which doesn't follow later changes of the weight."""

    panels: Tensor
    """``[ceil(V / 32), H, 32]``, for bfloat16 ``[ceil(V / 32), ceil(H / 2), 32, 2]``, contiguous."""
    bias: Tensor | None
    """``[V]`` float32, or float64 for a float64 weight."""
    out_features: int
    """V."""
    in_features: int
    """H."""

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def device(self) -> torch.device:
        return self.panels.device

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same on another device."""
        return replace(self, panels=self.panels.to(device), bias=None if self.bias is None else self.bias.to(device))

    def unpack(self) -> Tensor:
        """The weight ``[V, H]``."""
        return _unpack(self.panels, self.in_features)[: self.out_features]


@torch.no_grad()
def pack_weight(
    weight: Tensor,  # [V, H]
    bias: Tensor | None = None,  # [V]
) -> PackedWeight:
    """A copy of ``weight``, and of ``bias``, in the layout that `small_linear` reads.

    The copy takes the weight's own memory, V rounded up to a multiple of 32. It is a constant, to autograd too: after
    an optimizer step the weight has to be packed again.

    Args:
        weight: ``[V, H]`` float32, bfloat16, float16 or float64, any strides.
        bias: ``[V]`` of any of these; kept in float32 (float64 for a float64 weight).

    Raises:
        TypeError: for a dtype that is none of the above.
        ValueError: for a weight that is no matrix or is empty, and shapes or devices that don't fit.
    """
    check_float_tensor("weight", weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must have the shape [V, H] with V, H >= 1, got {list(weight.shape)}")
    if bias is not None:
        check_float_tensor("bias", bias)
        check_like("bias", bias, weight.shape[:1], weight.device, "the rows of weight")
        bias = bias.detach().to(stat_dtype(weight.dtype), copy=True).contiguous()
    V, H = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    missing = (0, -H % pair, 0, -V % _LANES)
    if any(missing):
        weight = torch.nn.functional.pad(weight, missing)
    # [panel, feature, word, element of the word], words and features exchanged
    words = weight.unflatten(0, (-1, _LANES)).unflatten(-1, (-1, pair)).transpose(1, 2)
    panels = words.clone(memory_format=torch.contiguous_format)
    return PackedWeight(panels if pair == 2 else panels.squeeze(-1), bias, V, H)


def small_linear(
    x: Tensor,  # [..., H]
    packed: PackedWeight,  # of a weight [V, H]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., V]
    """``x @ weight.T + bias`` for inference, at its best for 1 to 64 rows, right for any number, none included.

    Products are added up in float32 (float64 for a float64 weight) and rounded once. The C++ kernels give a row the
    same bits whatever the other rows are, how many there are, and for any number of threads.

    Args:
        x: ``[..., H]`` float32, bfloat16, float16 or float64, any strides; computed in the weight's dtype.
        packed: from `pack_weight`.
        out_dtype: of the result; None for that of ``x``. float32 from 16-bit inputs is the unrounded sum.

    Raises:
        TypeError: for a dtype that is none of the above, or a weight that isn't packed.
        ValueError: for shapes or devices that don't fit, and for an ``x`` that requires grad while gradients are
            recorded: there is no derivative.
    """
    check_float_tensor("x", x)
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"packed must be a PackedWeight, from pack_weight(weight), got {type(packed).__name__}")
    if x.dim() == 0 or x.shape[-1] != packed.in_features:
        raise ValueError(f"x must have the shape [..., H] with H = {packed.in_features}, got {list(x.shape)}")
    if x.device != packed.device:
        raise ValueError(f"x must be on the device of packed, {packed.device}, got {x.device}")
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype not in _FLOATS:
        raise TypeError(f"out_dtype must be float32, bfloat16, float16 or float64, got {out_dtype}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires grad, but small_linear has no derivative: call it under torch.no_grad()")
    # No named range around it: a decode step makes hundreds of these calls, and profilers see the op itself.
    y = torch.ops.ppo_fast.small_linear(
        x.reshape(-1, packed.in_features).to(packed.dtype),
        packed.panels,
        packed.bias,
        packed.out_features,
        out_dtype != packed.dtype,
    )
    return y.to(out_dtype).view(*x.shape[:-1], packed.out_features)


def _unpack(panels: Tensor, in_features: int) -> Tensor:
    """The rows of the weight that the panels hold, those past V included, [32 panels, H]."""
    words = panels if panels.dim() == 4 else panels.unsqueeze(-1)
    return words.transpose(1, 2).flatten(2).flatten(0, 1)[:, :in_features]


# ------------------------------------------------------------------------------------------------------ registered op


def _eager(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, wide: bool) -> Tensor:
    """[n, V] in the dtype of x, or of the sums if ``wide``; the panels are unpacked a few at a time."""
    y = _fake(x, panels, bias, out_features, wide)
    dtype = stat_dtype(x.dtype)
    rows = x.to(dtype)
    count = max(1, _UNPACKED_BYTES // (_LANES * x.shape[1] * dtype.itemsize))
    for start, part in zip(range(0, out_features, count * _LANES), panels.split(count), strict=True):
        columns = slice(start, min(start + count * _LANES, out_features))
        product = rows @ _unpack(part, x.shape[1])[: columns.stop - start].to(dtype).t()
        y[:, columns] = product if bias is None else product + bias[columns]
    return y


def _fake(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, wide: bool) -> Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=stat_dtype(x.dtype) if wide else x.dtype)


define(
    "small_linear(Tensor x, Tensor panels, Tensor? bias, int out_features, bool wide) -> Tensor",
    _eager,
    _fake,
)
