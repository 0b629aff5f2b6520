"""Argument checks of the public ops. Each names the argument, what was got and what was expected.

Values inside a tensor are looked at only where that costs nothing: on CPU, outside torch.compile. The environment
variable PPO_FAST_CHECK=1 looks on every device, at the price of a synchronisation.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_FLOAT32 = torch.finfo(torch.float32)
_INTEGER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def visible(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now: not while tracing, and off the CPU only with PPO_FAST_CHECK=1."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    return x.device.type == "cpu" or os.environ.get("PPO_FAST_CHECK") == "1"


def check_float_tensor(name: str, x: Any) -> None:
    """``x`` is a tensor of float32, bfloat16, float16 or float64."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
    check_dense(name, x)


def check_dense(name: str, x: Tensor) -> None:
    """``x`` is not sparse."""
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a plain dense tensor, got the layout {x.layout}")


def check_like(name: str, x: Tensor, shape: Sequence[int], device: torch.device, like: str) -> None:
    """``x`` has the shape and device of the argument called ``like``."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape of {like}, {list(shape)}, got {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of {like}, {device}, got {x.device}")


def check_float_like(name: str, x: Any, reference: Tensor, like: str) -> None:
    """``x`` is a floating-point tensor with the shape and device of ``reference``, the argument called ``like``."""
    check_float_tensor(name, x)
    check_like(name, x, reference.shape, reference.device, like)


def check_matrix(name: str, x: Any) -> None:
    """``x`` is a floating-point [B, T]."""
    check_float_tensor(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name} must have the shape [B, T], got {list(x.shape)}")


def check_mask(mask: Any, shape: Sequence[int], device: torch.device, like: str) -> None:
    """``mask`` is a bool tensor, True where a token is live, with the shape and device of the argument ``like``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be torch.bool (True = live), got {mask.dtype}")
    check_dense("mask", mask)
    check_like("mask", mask, shape, device, like)


def check_number(name: str, value: Any) -> None:
    """A real number. No tensor: a gradient to a coefficient would vanish, and reading one waits for its device."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_coefficient(name: str, value: float) -> None:
    """A weight in a loss: finite and not negative."""
    check_number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and >= 0, got {value}")


def check_fraction(name: str, value: float) -> None:
    """A number in [0, 1]; NaN is none."""
    check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def check_positive(name: str, value: float) -> None:
    """A finite number above zero."""
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def check_scale(name: str, value: float) -> None:
    """A positive number that float32 can hold: beyond it logits would silently become 0 or NaN."""
    check_positive(name, value)
    if not _FLOAT32.tiny <= value <= _FLOAT32.max:
        raise ValueError(f"{name} must be finite and > 0 in float32, got {value}")


def choose(name: str, value: str, table: Mapping[str, _T]) -> _T:
    """The entry of ``table`` that the user named."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, table))}, got a {type(value).__name__}")
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, table))}, got {value!r}")
    return table[value]


def check_token_ids(token_ids: Any, shape: Sequence[int], device: torch.device, like: str) -> Tensor:
    """Ids of any integer dtype as contiguous int64."""
    if not isinstance(token_ids, Tensor):
        raise TypeError(f"token_ids must be a tensor, got {type(token_ids).__name__}")
    if token_ids.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"token_ids must be an integer tensor, got {token_ids.dtype}")
    check_dense("token_ids", token_ids)
    check_like("token_ids", token_ids, shape, device, like)
    return token_ids.to(torch.int64).contiguous()


def check_ids_in_range(
    token_ids: Tensor,  # [...] int64
    vocab_size: int,
    mask: Tensor | None,  # [...] bool
) -> None:
    """Every live id lies in [0, vocab_size), where that can be seen; ids at masked positions may be anything."""
    if not visible(token_ids):
        return
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if mask is not None:
        outside &= mask
    if outside.any():
        position = outside.nonzero()[0].tolist()
        got = int(token_ids[tuple(position)])
        raise IndexError(f"token_ids must lie in [0, {vocab_size}) at live positions, got {got} at {position}")


def temperature_like(
    temperature: float | Tensor,
    token_ids: Tensor,  # [...]
    dtype: torch.dtype,
    *,
    like: str = "token_ids",
    zero: bool = False,
) -> Tensor:
    """The temperature of each token, in the shape of ``token_ids``, contiguous and constant for autograd.

    Messages call ``token_ids`` by the name ``like``; ``zero`` allows a temperature of 0.
    """
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature)
        if not (zero and temperature == 0):
            check_scale("temperature", temperature)
        return torch.full(token_ids.shape, float(temperature), dtype=dtype, device=token_ids.device)
    if temperature.dtype == torch.bool or temperature.is_complex():
        raise TypeError(f"temperature must be a number or a tensor of numbers, got {temperature.dtype}")
    check_dense("temperature", temperature)
    if temperature.is_meta and not token_ids.is_meta:
        raise ValueError(f"temperature must be on the device of {like}, {token_ids.device}, got meta")
    converted = temperature.detach().to(device=token_ids.device, dtype=dtype)
    try:
        expanded = converted.expand(token_ids.shape)
    except RuntimeError as error:
        raise ValueError(
            f"temperature must broadcast to the shape of {like}, {list(token_ids.shape)}, got {list(temperature.shape)}"
        ) from error
    # After the conversion, in which a float64 number may overflow or vanish.
    if visible(converted):
        usable = (converted >= _FLOAT32.tiny) & converted.isfinite()
        if zero:
            usable |= temperature.to(converted.device) == 0
        if not bool(usable.all()):
            wanted = ">= 0" if zero else "> 0"
            raise ValueError(f"temperature must be finite and {wanted} everywhere, got a tensor where it is not")
    return expanded.contiguous()
