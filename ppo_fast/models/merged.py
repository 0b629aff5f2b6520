"""The policy as a checkpoint without adapters, tensor by tensor, for an engine that knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from ppo_fast.errors import UserError
from ppo_fast.models.head import head_weights
from ppo_fast.models.roles import Actor


def merged_weights(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all parameters as the role's adapter makes them now, each in its own dtype.

    They are made one at a time: beside the model there is one folded matrix. Tied parameters come once.

    Raises:
        UserError: a layer's adapter is no single matrix for all tokens, or is on one of two tied matrices.
    """
    seen: set[int] = set()  # ids of parameters, which live on; a folded tensor's may be another one's later
    with actor.adapted():
        for name, tensor, base in _tensors("", actor.model):
            if tensor is base:
                if id(base) in seen:
                    continue
                seen.add(id(base))
            elif _is_tied(actor, base):
                raise UserError(
                    f"the adapter changes {name!r}, which the model ties to another matrix, and an engine holds one "
                    "for both; leave that layer out of target_modules"
                )
            yield name, tensor.detach().to(base.dtype)


def _tensors(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name in the checkpoint, value, the parameter of the base model in its place)."""
    prefix = f"{name}." if name else ""
    if isinstance(module, BaseTunerLayer):
        base = module.get_base_layer()
        try:
            weight, bias = head_weights(module)
        except (TypeError, ValueError) as error:
            raise UserError(f"the adapter on {name!r} can't be folded into its layer: {error}") from error
        yield f"{prefix}weight", weight, base.weight
        if bias is not None:
            yield f"{prefix}bias", bias, bias if base.bias is None else base.bias
    elif isinstance(module, ModulesToSaveWrapper):
        active = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        chosen = module.modules_to_save[active[0]] if active else module.original_module
        replaced = dict(module.original_module.named_parameters())
        for key, tensor in chosen.named_parameters():
            yield f"{prefix}{key}", tensor, replaced[key]
    elif isinstance(module, AuxiliaryTrainingWrapper):
        raise UserError(f"the adapter on {name!r} is a {type(module).__name__}, which can't be folded; leave it out")
    else:
        for key, tensor in module.named_parameters(recurse=False):
            yield f"{prefix}{key}", tensor, tensor
        for key, child in module.named_children():
            yield from _tensors(f"{prefix}{key}", child)


def _is_tied(actor: Actor, parameter: Tensor) -> bool:
    embeddings = actor.model.get_input_embeddings(), actor.model.get_output_embeddings()
    holders = [m.get_base_layer() if isinstance(m, BaseTunerLayer) else m for m in embeddings]
    holders = [m.original_module if isinstance(m, ModulesToSaveWrapper) else m for m in holders]
    return all(m.weight is parameter for m in holders)
