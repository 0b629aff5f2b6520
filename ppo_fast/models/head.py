"""The language-model head as data: what stands between the last hidden states and the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_fast.errors import UserError

# Far below any logit, so that exp gives 0; finite, since 0 * -inf would make an entropy NaN.
_BANNED = -1e4


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

    def is_same(self, other: Head) -> bool:
        """Whether both are one matrix in memory, and not only equal."""
        settings = (self.softcap, self.logit_scale)
        return (
            self.weight is other.weight and self.bias is other.bias and settings == (other.softcap, other.logit_scale)
        )

    def without(self, token_ids: Sequence[int]) -> Head:
        """The head that gives ``token_ids`` no probability.

        Raises:
            ValueError: the head has a softcap, which would bring a banned logit back.
        """
        if self.softcap is not None:
            raise ValueError("a head with softcap can't exclude tokens by its bias")
        kept = self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        bias = kept if kept.dtype == torch.float64 else kept.float()
        ids = torch.tensor(list(token_ids), dtype=torch.int64, device=bias.device)
        return dataclasses.replace(self, bias=bias.index_fill(0, ids, _BANNED / self.logit_scale))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32, for the few rows of a decode step.  ``hidden``: [N, H] -> [N, V]."""
        logits = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float() * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """``(weight [V, H], bias [V] or None)`` that an output layer multiplies by as it stands now, for the linear ops.

    A plain ``nn.Linear`` gives its own parameters, at no cost. Of a layer that peft has adapted, ``layer.weight`` is
    the base weight, without a word; this is the exact one, as the layer's own forward pass has it: ``W + sum(scaling *
    B @ A)`` over the active LoRA adapters, DoRA's magnitudes, the copy that ``modules_to_save`` made, or the base where
    adapters are disabled or merged. It is differentiable in all of them:

        weight, bias = ppo_fast.head_weights(model.get_output_embeddings())
        loss, stats = ppo_fast.linear_ppo_loss(hidden, weight, token_ids, ..., bias=bias)

    Call it afresh in every step. A folded weight is a new [V, H] tensor, in float32 whatever the base (float64 for
    float64): in 16 bits the base would round a small adapter away. For the same reason keep the op that gets it out of
    autocast. The head then costs as a trainable one: 3 products where the bare frozen one takes 2, and the gradient of
    the weight, [V, H] float32.

    Raises:
        TypeError: the layer is no ``nn.Linear``, is quantised, or has an adapter that is no single matrix for all
            tokens or is unknown.
        ValueError: LoRA dropout is on, which draws another matrix for every token; or autocast is, with something to
            fold.
    """
    if isinstance(layer, ModulesToSaveWrapper):
        active = layer.active_adapters
        original = layer.disable_adapters or not active or any(name not in layer.modules_to_save for name in active)
        return head_weights(layer.original_module if original else layer.modules_to_save[active[0]])
    if type(layer) is LoraLinear:
        return _folded(layer)
    if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise TypeError(
            f"the model's head is adapted by {type(layer).__module__}.{type(layer).__qualname__}, which can't be read "
            "as one matrix (LoRA and DoRA on a plain linear layer, and modules_to_save, can); leave lm_head out of the "
            "adapter, or merge it"
        )
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise TypeError(
            f"the model's head is a {type(layer).__name__}, not a plain linear layer; give a causal language model's "
            "output layer, get_output_embeddings()"
        )
    if not layer.weight.is_floating_point():
        raise TypeError(f"the model's head is quantised ({layer.weight.dtype}); don't quantise it")
    return layer.weight, layer.bias


def _folded(layer: LoraLinear) -> tuple[Tensor, Tensor | None]:
    """The base weight with the active adapters folded in, for what ``peft.tuners.lora.layer.Linear.forward`` does."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as its own forward pass does
    base, bias = head_weights(layer.base_layer)
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not active:
        return base, bias
    if torch.is_autocast_enabled(base.device.type):
        raise ValueError(
            "the model's head carries an adapter, which the 16 bits of autocast would round away; call head_weights, "
            "and the op that gets its weight, outside of autocast"
        )
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    weight = base.to(dtype)
    for name in active:
        variant, dropout = layer.lora_variant.get(name), layer.lora_dropout[name]
        if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
            raise ValueError(
                f"adapter {name!r} has dropout {dropout.p} on the model's head, in training another matrix for every "
                "token; set lora_dropout=0, or leave lm_head out of the adapter"
            )
        a, b, scaling = layer.lora_A[name].weight.to(dtype), layer.lora_B[name].weight.to(dtype), layer.scaling[name]
        if variant is None:
            weight = torch.addmm(weight, b, a, alpha=scaling)
        elif isinstance(variant, DoraLinearVariant) and len(active) == 1:  # of several, peft's own passes differ
            weight = torch.addmm(weight, b, a, alpha=scaling)
            norm = torch.linalg.vector_norm(weight.detach(), dim=1)  # a constant: DoRA, Liu et al. 2024, section 4.3
            weight = weight * (layer.lora_magnitude_vector[name].weight.to(dtype) / norm)[:, None]
        else:
            raise TypeError(
                f"adapter {name!r} on the model's head is a {type(variant).__name__}, one of {len(active)} active, "
                "which can't be read as one matrix; leave lm_head out of the adapter"
            )
        if layer.lora_bias[name]:
            shift = scaling * layer.lora_B[name].bias.to(dtype)
            bias = shift if bias is None else bias.to(dtype) + shift
    return weight, bias


def head_of(model: PreTrainedModel) -> Head:
    """The head of a causal language model as its adapters make it now, from output embedding and configuration.

    Raises:
        UserError: the head can't be read as one matrix (see `head_weights`).
    """
    try:
        weight, bias = head_weights(model.get_output_embeddings())
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    config = model.config
    # Gemma caps, Cohere multiplies, Granite divides: the three forms in transformers.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight, bias, softcap, float(scale))


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Tries `head_of` against the model's own logits.

    Raises:
        UserError: they aren't what the formula gives, or the head can't be read as one matrix.
    """
    head = head_of(model)
    vocabulary = head.weight.shape[0]
    ids = torch.arange(1, 5, device=head.weight.device).remainder(vocabulary)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits.float()
    if expected.isnan().any():
        raise UserError(
            f"{type(model).__name__} gives NaN for logits; its weights are damaged, or peft's DoRA is on a tied head, "
            "whose padding row of zeros has no direction: use plain LoRA there"
        )
    got = head.logits(hidden)
    # In 16 bits the model rounds after every step of the formula; ours does so once, after the product.
    tolerance = max(1e-4, 4 * torch.finfo(head.weight.dtype).eps)
    if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise UserError(
            f"{type(model).__name__} changes its logits after the head in a way that ppo_fast doesn't know "
            "(bias, softcap and scale are known); the fused ops would train another model than the one that samples"
        )
