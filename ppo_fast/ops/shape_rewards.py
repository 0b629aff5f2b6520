"""From one score per reply to one reward per token: the KL penalty at every token, the score at the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.ops._checks import (
    check_coefficient,
    check_float_like,
    check_float_tensor,
    check_like,
    check_mask,
    check_matrix,
    choose,
)
from ppo_fast.ops._eager import kl_terms
from ppo_fast.ops._library import stat_dtype
from ppo_fast.ops.ppo_loss import KL_ESTIMATORS
from ppo_fast.profiling import annotate


def shape_rewards(
    scores: Tensor,  # [B]
    logprobs: Tensor,  # [B, T]
    ref_logprobs: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
    token_rewards: Tensor | None = None,  # [B, T]
) -> Tensor:  # [B, T]
    """``r_t = -kl_coef * k(logprobs_t - ref_logprobs_t) + token_rewards_t + 1[t = last] * score``, detached.

    Args:
        scores: one per reply, paid at the row's last live token. A row without live tokens is paid nothing.
        logprobs, ref_logprobs: of the behaviour policy and the reference, in nats, on the chosen tokens.
            ``ref_logprobs`` may be None where kl_coef is 0, and is not read there.
        mask: where False nothing is read and the reward is 0; it may have holes.
        kl_coef: finite and >= 0, in units of the score per nat.
        kl_estimator: ``"k1"`` d, ``"k2"`` d^2 / 2, ``"k3"`` exp(-d) - 1 + d.
        token_rewards: rewards that fall on tokens themselves, such as an environment's.

    Returns:
        ``[B, T]`` float32 (float64 where logprobs are).

    Raises:
        TypeError, ValueError: for an argument of the wrong type, shape, device or range, and for ref_logprobs=None
            where kl_coef is not 0.

    Source: Ziegler et al. 2019, eq. 2, spread over tokens as in Stiennon et al. 2020.
    """
    check_matrix("logprobs", logprobs)
    check_mask(mask, logprobs.shape, logprobs.device, "logprobs")
    check_float_tensor("scores", scores)
    check_like("scores", scores, logprobs.shape[:1], logprobs.device, "the rows of logprobs")
    check_coefficient("kl_coef", kl_coef)
    estimator = choose("kl_estimator", kl_estimator, KL_ESTIMATORS)
    if ref_logprobs is not None:
        check_float_like("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    elif kl_coef:
        raise ValueError(f"ref_logprobs must be given where kl_coef is not 0, got None with {kl_coef}")
    if token_rewards is not None:
        check_float_like("token_rewards", token_rewards, logprobs, "logprobs")

    with annotate("ppo_fast::shape_rewards"), torch.no_grad():
        dtype = stat_dtype(logprobs.dtype)
        from_the_end = mask.flip(1).cumsum(1).flip(1)
        rewards = torch.where(mask & (from_the_end == 1), scores.to(dtype)[:, None], 0.0)
        if kl_coef and ref_logprobs is not None:
            kl = kl_terms(logprobs.to(dtype) - ref_logprobs.to(dtype), estimator)
            rewards = rewards - torch.where(mask, kl_coef * kl, 0.0)
        if token_rewards is not None:
            rewards = rewards + torch.where(mask, token_rewards.to(dtype), 0.0)
        return rewards
