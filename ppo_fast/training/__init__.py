"""Configuration, experience, update, the loop, checkpoints."""

from ppo_fast.training.config import PPOConfig
from ppo_fast.training.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
