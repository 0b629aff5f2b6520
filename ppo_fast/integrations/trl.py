"""TRL's GRPO and RLOO trainers on ppo_fast's output layer, on CPU and CUDA.

    from ppo_fast.integrations import trl

    trl.enable()                    # before or after the trainer is made; trl.disable() undoes it
    with trl.enabled() as calls:    # or for a while; calls says what ran
        trainer.train()

TRL's fused head (``trl.trainer.utils.add_fused_lm_head``) looks up two names of its module at every call, and they are
replaced: ``_use_triton`` decides whether rows without a label (prompt, padding) are dropped before the output layer,
which TRL does on GPUs only, and ``_ChunkedLogProbFunction`` is the output layer. Loss, masks, temperature and metrics
stay TRL's. The third seam is ``_compute_loss``: while the trainer's own runs it is known whether the entropy will be
differentiated (an entropy bonus) or is a metric, which for a frozen layer (LoRA) makes 2 products of 3. Anybody else's
loss gets an entropy that can be differentiated.

Numerics: those of `linear_selected_logprobs`. Beside TRL's: logits are never rounded to 16 bits, neither for 16-bit
models nor under autocast, where the weight's gradient is rounded once, as that of any ``nn.Linear``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ppo_fast.errors import UserError
from ppo_fast.ops import linear_selected_logprobs

TESTED = ("1.16.0",)
_DEVICES = ("cpu", "cuda")
_OUTPUTS = {"log_probs", "entropy"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Calls:
    """Calls of the output layer since ``enable()``; ``G`` is one product with it."""

    scored: int = 0
    """Without gradients: G."""
    frozen: int = 0
    """Gradient of the hidden states only: 2 G, all in the forward pass; 3 G with an entropy bonus."""
    trained: int = 0
    """Gradient of the weight too: 4 G."""
    rows: int = 0
    """Tokens in these calls."""
    left: Counter[str] = field(default_factory=Counter)
    """Calls left to TRL, by reason."""


_calls = Calls()
_undo: list[Callable[[], None]] = []
_entropy_grad: ContextVar[bool] = ContextVar("entropy_grad", default=True)


def enable() -> Calls:
    """Put ppo_fast's output layer into TRL until `disable`, and start counting calls anew.

    Every model that TRL gave a fused head is served: GRPO's and RLOO's policy and reference. Trainers that ask the head
    for more than log-probs and entropy (SFT), quantised weights, DeepSpeed ZeRO-3 and other devices are left to TRL,
    with one warning a reason and a count in the ``Calls`` returned here, which goes on counting.

    Raises:
        UserError: where TRL is missing, or is none of the versions in `TESTED`.
    """
    global _calls
    _check_version()
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer import utils

    _calls = Calls()
    if not _undo:
        _replace(utils, "_use_triton", _drop_rows(utils._use_triton))
        _replace(utils, "_ChunkedLogProbFunction", _OutputLayer(utils._ChunkedLogProbFunction))
        _replace(GRPOTrainer, "_compute_loss", _tells_entropy_grad(GRPOTrainer, _has_entropy_bonus))
        _replace(RLOOTrainer, "_compute_loss", _tells_entropy_grad(RLOOTrainer, lambda _: False))
    return _calls


def disable() -> None:
    """Put back what `enable` replaced."""
    while _undo:
        _undo.pop()()


@contextlib.contextmanager
def enabled() -> Iterator[Calls]:
    """`enable` for the length of a ``with`` block; inside of an enabled stretch it changes nothing but the count."""
    outermost = not _undo
    try:
        yield enable()
    finally:
        if outermost:
            disable()


def _check_version() -> None:
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found not in TESTED:
        raise UserError(
            f"ppo_fast.integrations.trl supports TRL {', '.join(TESTED)}, and {found or 'none'} is installed: "
            f"run `pip install trl=={TESTED[-1]}`"
        )


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _drop_rows(stock: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    return lambda device: device.type in _DEVICES or stock(device)


def _tells_entropy_grad(trainer: type, bonus: Callable[[Any], bool]) -> Callable[..., Tensor]:
    """The trainer's loss, during which `_entropy_grad` says whether it differentiates the entropy."""
    loss, logps = trainer._compute_loss, trainer._get_per_token_logps_and_entropies  # type: ignore[attr-defined]

    @functools.wraps(loss)
    def compute_loss(self: Any, model: Any, inputs: Any) -> Tensor:
        # Somebody else's method in this place could keep the entropies and use them outside of this loss.
        own = getattr(self._get_per_token_logps_and_entropies, "__func__", None) is not logps
        token = _entropy_grad.set(own or bonus(self))
        try:
            return loss(self, model, inputs)
        finally:
            _entropy_grad.reset(token)

    return compute_loss


def _has_entropy_bonus(trainer: Any) -> bool:
    return trainer._entropy_bonus_enabled


class _OutputLayer:
    """Stands in for TRL's autograd function."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    @torch.compiler.disable  # counts and warns
    def apply(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """log-probs [N], entropy [N] if in ``outputs``, and None for the three others that TRL's function gives."""
        reason = _why_stock(hidden, weight, bias, softcap, logit_scale, outputs)
        if reason is not None:
            if reason not in _calls.left:
                warnings.warn(f"ppo_fast leaves this output layer to TRL: {reason}", stacklevel=2)
            _calls.left[reason] += 1
            return self.stock.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
        _count(hidden, weight, bias)
        if weight.itemsize < hidden.itemsize and not torch.is_autocast_enabled(hidden.device.type):
            # cast_lm_head_to_fp32 widens the hidden states; the op would round them back to the dtype of the weight.
            weight = weight.to(hidden.dtype)
        found = linear_selected_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            return_entropy="entropy" in outputs,
            entropy_grad=_entropy_grad.get(),
        )
        logprobs, entropy = found if isinstance(found, tuple) else (found, None)
        return logprobs, entropy, None, None, None


def _why_stock(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> str | None:
    """Why this call is none for us, or None."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if hidden.device.type not in _DEVICES:
        return f"device {hidden.device.type}"
    if not _OUTPUTS.issuperset(outputs):
        return f"it is asked for {', '.join(sorted({*outputs} - _OUTPUTS))}"
    for tensor in (weight, bias):
        if tensor is not None and (type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in _DTYPES):
            return f"its parameters are {type(tensor).__name__} of {tensor.dtype}, not plain tensors of floats"
    if (softcap is not None and softcap <= 0) or logit_scale <= 0:
        return f"softcap {softcap} and logit scale {logit_scale} are not both positive"
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 shards its weight again before the backward pass"
    return None


def _count(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _calls.rows += hidden.shape[0]
    if not torch.is_grad_enabled():
        _calls.scored += 1
    elif weight.requires_grad or (bias is not None and bias.requires_grad):
        _calls.trained += 1
    elif hidden.requires_grad:
        _calls.frozen += 1
    else:
        _calls.scored += 1
