"""PPO for language models: fused vocabulary ops and a thin trainer with a critic.

The names below are imported at first use: ``import ppo_fast`` brings neither torch nor transformers, and the ops never
bring transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_fast.errors import UserError
    from ppo_fast.models.head import head_weights
    from ppo_fast.ops import (
        PPOStats,
        ValueStats,
        backends,
        gae,
        group_advantages,
        linear_ppo_loss,
        linear_sample,
        linear_selected_logprobs,
        linear_token_loss,
        lora_linear,
        masked_mean,
        ppo_loss,
        rms_norm,
        selected_logprobs,
        shape_rewards,
        small_linear,
        value_loss,
        whiten,
    )
    from ppo_fast.training import PPOConfig, PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "PPOConfig",
    "PPOStats",
    "PPOTrainer",
    "UserError",
    "ValueStats",
    "__version__",
    "backends",
    "gae",
    "group_advantages",
    "head_weights",
    "linear_ppo_loss",
    "linear_sample",
    "linear_selected_logprobs",
    "linear_token_loss",
    "lora_linear",
    "masked_mean",
    "ppo_loss",
    "rms_norm",
    "selected_logprobs",
    "shape_rewards",
    "small_linear",
    "value_loss",
    "whiten",
]


# Where a name is that isn't in ppo_fast.ops.
_HOME = {
    "PPOConfig": "ppo_fast.training",
    "PPOTrainer": "ppo_fast.training",
    "UserError": "ppo_fast.errors",
    "head_weights": "ppo_fast.models.head",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "ppo_fast.ops")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
