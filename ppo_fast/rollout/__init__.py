"""Generation with a KV cache: token ids, behaviour log-probs, stop rules."""

from ppo_fast.rollout.batch import Rollout
from ppo_fast.rollout.generate import generate

__all__ = ["Rollout", "generate"]
