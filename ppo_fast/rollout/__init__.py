"""Generation with a KV cache: token ids, behaviour log-probs, stop rules."""

from ppo_fast.rollout.batch import Rollout
from ppo_fast.rollout.generate import generate
from ppo_fast.rollout.linears import swaps
from ppo_fast.rollout.slots import check_cache
from ppo_fast.rollout.stops import StopStrings

__all__ = ["Rollout", "StopStrings", "check_cache", "generate", "swaps"]
