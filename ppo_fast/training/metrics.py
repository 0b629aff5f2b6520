"""One iteration's metrics, each as SEMANTICS defines it: over live tokens or replies of the whole rollout batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast.training.checks import Agreement
from ppo_fast.training.experience import Experience
from ppo_fast.training.importance import importance_metrics
from ppo_fast.training.rewards import Scores
from ppo_fast.training.update import UpdateStats


def collect(experience: Experience, scores: Scores, update: UpdateStats, step0: Agreement) -> dict[str, float]:
    """Names and values; a quantity that isn't defined this time (no reference, equal returns) is left out."""
    rollout = experience.rollout
    generated, mask = rollout.response_mask, experience.mask
    lengths, finished = rollout.lengths.double(), rollout.finished
    metrics = {
        "objective/scores": _mean(experience.scores[_scored(scores)]),
        "objective/non_score_reward": _mean(experience.kl_rewards.sum(1)),
        "objective/rlhf_reward": _mean(experience.scores + experience.kl_rewards.sum(1)),
        "objective/entropy": _mean(-experience.old_logprobs.masked_fill(~generated, 0.0).sum(1)),
        "completions/mean_length": _mean(lengths),
        "completions/finished_frac": _mean(finished),
        "reward/unscored": float(sum(value is None for value in scores.total)),
        "rollout/tokens": float(generated.sum()),
        "rollout/logp_diff_p99": step0.p99,
        "rollout/logp_diff_max": step0.maximum,
    }
    if rollout.kept_at_limit is not None:
        metrics["rollout/kept_at_limit"] = rollout.kept_at_limit
    total = [value for value in scores.total if value is not None]
    if total:
        metrics["reward/mean"] = sum(total) / len(total)
    for name, values in scores.by_function.items():
        known = [value for value in values if value is not None]
        if known:
            metrics[f"reward/{name}"] = sum(known) / len(known)
    metrics |= _divergence(experience) | _correlation(experience.scores[finished], lengths[finished])
    metrics |= _advantages(experience.raw_advantages[mask])
    metrics |= _explained(experience.values[mask], experience.returns[mask])
    if experience.importance is not None:
        metrics |= importance_metrics(
            experience.old_logprobs[mask], rollout.logprobs[mask], experience.importance[mask]
        )
    return {name: value for name, value in (metrics | _update(update)).items() if value == value}


def _divergence(experience: Experience) -> dict[str, float]:
    if experience.ref_logprobs is None:
        return {}
    k1 = experience.old_logprobs - experience.ref_logprobs
    per_reply = k1.masked_fill(~experience.rollout.response_mask, 0.0).sum(1)
    return {
        "objective/kl": _mean(per_reply),
        "objective/kl_p95": float(torch.quantile(per_reply, 0.95)),
        "objective/kl_max": float(per_reply.max()),
    }


def _update(update: UpdateStats) -> dict[str, float]:
    result = {"update/skipped_steps": float(update.skipped_steps), "update/stopped_early": float(update.stopped_early)}
    if update.policy is not None and update.value is not None:
        result |= {
            "policy/entropy_avg": float(update.policy.entropy_mean),
            "policy/clipfrac_avg": float(update.policy.flat_fraction),
            "policy/outside_avg": float(update.policy.outside_fraction),
            "policy/approxkl_avg": float(update.policy.approx_kl_k2),
            "policy/approxkl_k3_avg": float(update.policy.approx_kl_k3),
            "val/ratio": float(update.policy.ratio_mean),
            "val/ratio_var": float(update.policy.ratio_var),
            "loss/policy_avg": float(update.policy.loss_mean),
            "loss/value_avg": float(update.value.loss_mean),
            "val/clipfrac_avg": float(update.value.clipped_fraction),
        }
    if update.policy_grad_norms:
        result["policy/grad_norm"] = sum(update.policy_grad_norms) / len(update.policy_grad_norms)
        result["critic/grad_norm"] = sum(update.value_grad_norms) / len(update.value_grad_norms)
    return result


def _explained(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Of the returns by the rollout-time values, before the update; undefined where all returns are equal."""
    variance = float(returns.double().var(correction=0)) if returns.numel() else 0.0
    if variance == 0.0:
        return {}
    return {"critic/explained_var": 1.0 - float((returns - values).double().var(correction=0)) / variance}


def _advantages(live: Tensor) -> dict[str, float]:
    if live.numel() == 0:
        return {}
    return {
        "advantages/mean": _mean(live),
        "advantages/std": float(live.double().std(correction=0)),
        "advantages/min": float(live.min()),
        "advantages/max": float(live.max()),
    }


def _correlation(scores: Tensor, lengths: Tensor) -> dict[str, float]:
    if scores.numel() < 3 or scores.min() == scores.max() or lengths.min() == lengths.max():
        return {}
    return {"objective/score_length_corr": float(torch.corrcoef(torch.stack([scores.double(), lengths]))[0, 1])}


def _scored(scores: Scores) -> list[int]:
    return [row for row, value in enumerate(scores.total) if value is not None]


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
