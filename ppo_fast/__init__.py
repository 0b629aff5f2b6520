"""PPO for language models: fused vocabulary ops and a thin trainer with a critic."""

__version__ = "0.1.0"
