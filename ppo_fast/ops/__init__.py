"""The functional API: every op of PPO on language models, for CPU and GPU tensors. One file per op."""

from ppo_fast.ops._backends import backends
from ppo_fast.ops.decode_attention import decode_attention
from ppo_fast.ops.gae import gae
from ppo_fast.ops.group_advantages import group_advantages
from ppo_fast.ops.linear_ppo_loss import linear_ppo_loss
from ppo_fast.ops.linear_sample import linear_sample
from ppo_fast.ops.linear_selected_logprobs import linear_selected_logprobs
from ppo_fast.ops.linear_token_loss import linear_token_loss
from ppo_fast.ops.lora_linear import lora_linear
from ppo_fast.ops.ppo_loss import PPOStats, ppo_loss
from ppo_fast.ops.rms_norm import rms_norm
from ppo_fast.ops.selected_logprobs import selected_logprobs
from ppo_fast.ops.shape_rewards import shape_rewards
from ppo_fast.ops.small_linear import small_linear
from ppo_fast.ops.swiglu import swiglu
from ppo_fast.ops.value_loss import ValueStats, value_loss
from ppo_fast.ops.whiten import masked_mean, whiten

__all__ = [
    "PPOStats",
    "ValueStats",
    "backends",
    "decode_attention",
    "gae",
    "group_advantages",
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
    "swiglu",
    "value_loss",
    "whiten",
]
