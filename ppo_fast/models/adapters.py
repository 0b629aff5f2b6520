"""Several LoRA adapters on one base: one of them active, or none, and never a surprise in between.

Three traps of switching adapters are closed here. peft's own switch turns ``requires_grad`` of the other adapters off,
under the optimizer's feet; ours touches no ``requires_grad``. Others may call peft's between two of ours, so what is
active is read from the layers, never remembered. And activation checkpointing recomputes a block during backward, with
whatever adapter is active by then; ``checkpoint_contexts`` makes the recomputation use the one of its forward pass.

That recomputation switches twice a block, so a switch must be cheap: it reads two flags of each adapted layer, and sets
those that differ. peft's walks all modules of the model several times, tens of milliseconds for a model of 30 layers.
"""

from __future__ import annotations

import contextlib

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]
_Flags = list[tuple[bool, "str | list[str]"]]  # of each adapted layer: disabled, active


class Adapters:
    """Which adapter of a ``PeftModel`` is active. ``None`` stands for the bare base model.

    The adapters in ``trainable``, and no others, require gradients from here on; the first of them is active.
    """

    def __init__(self, model: PeftModel, trainable: tuple[str, ...]) -> None:
        self._model = model
        tuner = model.base_model
        tuner.enable_adapter_layers()
        tuner.set_adapter(trainable[0], inference_mode=True)
        tuner.set_requires_grad([name for name in model.peft_config if name not in trainable], False)
        tuner.set_requires_grad(list(trainable), True)
        self._layers = [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]

    def use(self, name: str | None) -> contextlib.AbstractContextManager[None]:
        """Runs the body with adapter ``name``, then goes back to the one before. Can be entered more than once.

        Raises:
            ValueError: the model has no adapter of this name.
        """
        if name is not None and name not in self._model.peft_config:
            raise ValueError(f"adapter is {name!r}, expected one of {sorted(self._model.peft_config)} or None")
        return _Switched(self, self._flags_of(name))

    def checkpoint_contexts(self) -> Contexts:
        """For ``torch.utils.checkpoint(context_fn=...)``: (forward, recomputation), the latter as the forward was."""
        return contextlib.nullcontext(), _Switched(self, self._flags())

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The trained parameters of adapter ``name``, by their names in the model."""
        # Asked of peft: a parameter's name doesn't tell (an embedding's ends in the adapter's name, a base module may
        # be called `value` too).
        trained = {key: p for key, p in self._model.named_parameters() if p.requires_grad}
        self._model.base_model.set_requires_grad(name, False)
        own = {key: p for key, p in trained.items() if not p.requires_grad}
        self._model.base_model.set_requires_grad(name, True)
        return own

    def _flags(self) -> _Flags:
        return [(layer._disable_adapters, layer._active_adapter) for layer in self._layers]

    def _flags_of(self, name: str | None) -> _Flags:
        if name is None:
            return [(True, active) for _, active in self._flags()]
        # A module saved whole (modules_to_save) knows the adapters that have a copy of it, and no others.
        return [
            (False, [name] if not isinstance(layer, AuxiliaryTrainingWrapper) or name in layer._adapters else [])
            for layer in self._layers
        ]

    def _switch(self, flags: _Flags) -> _Flags:
        """Sets the flags and returns those before."""
        before = self._flags()
        for layer, now, (disabled, active) in zip(self._layers, before, flags, strict=True):
            # A module's attributes are read in no time, and slow to set.
            if now[0] != disabled:
                layer._disable_adapters = disabled
            if now[1] != active:
                layer._active_adapter = active
        return before


class _Switched(contextlib.AbstractContextManager[None]):
    """These flags inside, those before outside. A kept graph that is walked twice enters its contexts twice."""

    def __init__(self, adapters: Adapters, flags: _Flags) -> None:
        self._adapters = adapters
        self._flags = flags
        self._before: list[_Flags] = []

    def __enter__(self) -> None:
        self._before.append(self._adapters._switch(self._flags))

    def __exit__(self, *_: object) -> None:
        self._adapters._switch(self._before.pop())
