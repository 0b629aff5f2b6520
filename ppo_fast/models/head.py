"""The language-model head as data: what stands between the last hidden states and the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_fast.errors import UserError


@dataclass(frozen=True)
class Head:
    """``logits = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, the ops' own arguments."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    logit_scale: float

    def kwargs(self) -> dict[str, Any]:
        """The head's keyword arguments of every ``linear_*`` op, the weight aside."""
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32, for the few rows of a decode step.  ``hidden``: [N, H] -> [N, V]."""
        logits = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float() * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_of(model: PreTrainedModel) -> Head:
    """The head of a causal language model, read from its output embedding and configuration, and tried once.

    Raises:
        UserError: the head is adapted (LoRA on ``lm_head``) or quantised, or the model's logits aren't what the
            formula gives.
    """
    output = model.get_output_embeddings()
    if isinstance(output, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise UserError(
            "the adapter is on the model's head, which the fused ops read as a plain matrix; leave lm_head out of the "
            "adapter's target_modules and modules_to_save"
        )
    if not isinstance(output, nn.Linear) or not output.weight.is_floating_point():
        raise UserError(
            f"the model's head is a {type(output).__name__}, not a plain linear layer in floating point; give a causal "
            "language model and don't quantise its head"
        )
    config = model.config
    # Gemma caps, Cohere multiplies, Granite divides: the three forms in transformers.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    head = Head(weight=output.weight, bias=output.bias, softcap=softcap, logit_scale=float(scale))
    _try_once(model, head)
    return head


@torch.no_grad()
def _try_once(model: PreTrainedModel, head: Head) -> None:
    vocabulary = head.weight.shape[0]
    ids = torch.arange(1, 5, device=head.weight.device).remainder(vocabulary)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits.float()
    got = head.logits(hidden)
    # In 16 bits the model rounds after every step of the formula; ours does so once, after the product.
    tolerance = max(1e-4, 4 * torch.finfo(head.weight.dtype).eps)
    if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise UserError(
            f"{type(model).__name__} changes its logits after the head in a way that ppo_fast doesn't know "
            "(bias, softcap and scale are known); the fused ops would train another model than the one that samples"
        )
