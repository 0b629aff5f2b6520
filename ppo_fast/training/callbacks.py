"""Callbacks: transformers' own, and one more event for what happens inside an iteration."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import DefaultFlowCallback


class OwnFlow(DefaultFlowCallback):
    """Stands where transformers wants its rule for when to log and save: here the trainer's loop is that rule."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Changes nothing."""
        return control

    on_epoch_end = on_step_end


class ProgressCallback(TrainerCallback):
    """A callback that also hears how far the current phase has come."""

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """``phase`` is rollout, score or update; ``done`` of ``total`` tokens are through it."""
