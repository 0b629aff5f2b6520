"""The update: epochs over minibatches of one rollout, clipped policy and value losses, one step each."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ppo_fast import ops
from ppo_fast.models.roles import Roles
from ppo_fast.ops.ppo_loss import PPOStats
from ppo_fast.ops.value_loss import ValueStats
from ppo_fast.profiling import annotate
from ppo_fast.training.config import PPOConfig
from ppo_fast.training.experience import Experience, Progress, micro_batches
from ppo_fast.training.heap import gradients_before_graphs, return_freed_memory


@dataclass(frozen=True)
class Optimizers:
    """One for the policy's parameters, one for the critic's: clipped and stepped apart."""

    policy: torch.optim.Optimizer
    value: torch.optim.Optimizer

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.policy.zero_grad(set_to_none=True)
        self.value.zero_grad(set_to_none=True)


@dataclass
class UpdateStats:
    """Sums over every minibatch of an update, and what happened along the way."""

    policy: PPOStats | None = None
    value: ValueStats | None = None
    policy_grad_norms: list[float] = field(default_factory=list)  # before clipping, one per optimizer step
    value_grad_norms: list[float] = field(default_factory=list)
    skipped_steps: int = 0  # left out because a gradient wasn't finite
    stopped_early: bool = False  # target_kl was exceeded

    def add(self, policy: PPOStats, value: ValueStats) -> None:
        """Adds one minibatch's sums."""
        self.policy = policy if self.policy is None else self.policy.merge(policy)
        self.value = value if self.value is None else self.value.merge(value)


def run(
    roles: Roles,
    experience: Experience,
    optimizers: Optimizers,
    config: PPOConfig,
    *,
    kl_coef: float,
    progress: Progress,
    before_first_step: Callable[[Tensor], None],
) -> UpdateStats:
    """Trains policy and critic on one experience.

    Rows stand in the order the trainer shuffled them into, and stay in their minibatch over all epochs: with a learning
    rate of zero every ratio then repeats to the bit, which is how state leaking between epochs is found.

    Args:
        kl_coef: of the KL term in the loss; acts with ``kl_in="loss"``.
        before_first_step: gets the first minibatch's log-ratios [rows, T] when its gradients are there and no weight
            has changed yet.
    """
    stats = UpdateStats()
    for parameter in roles.trained:
        parameter.grad = None  # of an update that was interrupted or refused, in this trainer or an earlier one
        if roles.adapters is not None:  # peft's disable_adapter() and set_adapter(), in a callback or reward, freeze it
            parameter.requires_grad_(True)
    for _epoch in range(config.num_ppo_epochs):
        for start in range(0, config.rollout_size, config.minibatch_size):
            if not experience.mask[start : start + config.minibatch_size].any():
                continue
            policy, value, log_ratios = _gradients(roles, experience, start, kl_coef, config, progress)
            if stats.policy is None:
                before_first_step(log_ratios)
            stats.add(policy, value)
            if config.target_kl is not None and float(policy.approx_kl_k3) > config.target_kl:
                optimizers.zero_grad()
                stats.stopped_early = True
                return stats
            _step(roles, optimizers, config, stats)
    return stats


def _gradients(
    roles: Roles, experience: Experience, start: int, kl_coef: float, config: PPOConfig, progress: Progress
) -> tuple[PPOStats, ValueStats, Tensor]:
    """Both losses' gradients over one minibatch, in micro-batches that share its token count."""
    live = experience.mask[start : start + config.minibatch_size]
    normalizer = {
        "token_mean": float(live.sum()),
        "sequence_mean": float(live.any(1).sum()),
        "sequence_sum_constant": float(config.minibatch_size * config.response_length),
    }[config.aggregation]
    minibatch = UpdateStats()
    log_ratios = torch.zeros(live.shape, device=live.device)
    with _gradients_kept(roles, live.device):
        for rows in micro_batches(config.minibatch_size, config.micro_batch_size, live.device, start):
            batch = experience.rows(rows)
            policy, value = _backward(roles, batch, normalizer, kl_coef, config)
            minibatch.add(policy, value)
            assert policy.log_ratios is not None  # of linear_ppo_loss
            log_ratios[rows - start, : batch.mask.shape[1]] = policy.log_ratios.float()
            progress(int(batch.rollout.response_mask.sum()))
    assert minibatch.policy is not None
    assert minibatch.value is not None
    return minibatch.policy, minibatch.value, log_ratios


def _gradients_kept(roles: Roles, device: torch.device) -> contextlib.AbstractContextManager[None]:
    if roles.adapters is None or device.type != "cpu":
        return contextlib.nullcontext()
    return gradients_before_graphs(roles.trained)


def _backward(
    roles: Roles, batch: Experience, normalizer: float, kl_coef: float, config: PPOConfig
) -> tuple[PPOStats, ValueStats]:
    clip_low, clip_high = config.clip_bounds
    in_loss = config.kl_in == "loss" and batch.ref_logprobs is not None
    with annotate("ppo_fast/policy_forward"):
        hidden = roles.policy.hidden(batch.rollout)
    # The surrogate is linear in an advantage of either sign, so this weighs it, and neither entropy nor KL.
    advantages = batch.advantages if batch.importance is None else batch.advantages * batch.importance
    parts = [
        ops.linear_ppo_loss(
            hidden, head.weight, batch.rollout.response_ids, batch.old_logprobs, advantages, mask,
            clip_low=clip_low, clip_high=clip_high, dual_clip=config.dual_clip, objective=config.objective,
            entropy_coef=config.entropy_coef, ref_logprobs=batch.ref_logprobs if in_loss else None,
            kl_coef=kl_coef if in_loss else 0.0, kl_estimator=config.kl_estimator, aggregation=config.aggregation,
            normalizer=normalizer, temperature=config.temperature, kept_ids=batch.rollout.kept_ids, **head.kwargs(),
        )
        for head, mask in batch.rollout.by_head(roles.policy.head, batch.mask)
    ]  # fmt: skip
    policy_loss, policy = functools.reduce(_joined, parts)
    shares_body = roles.critic.shares_policy
    if not shares_body:
        # The policy's graph is freed before the critic's is built: one set of activations at a time.
        with annotate("ppo_fast/policy_backward"):
            policy_loss.backward()
        _after_graph(config)
    values = roles.critic.values_of(hidden) if shares_body else roles.critic.values(batch.rollout)[0]
    value_loss, value = ops.value_loss(
        values, batch.values, batch.returns, batch.mask, clip_range=config.cliprange_value,
        aggregation=config.aggregation, normalizer=normalizer,
    )  # fmt: skip
    with annotate("ppo_fast/value_backward"):
        (policy_loss + config.vf_coef * value_loss if shares_body else value_loss).backward()
    _after_graph(config)
    return policy, value


def _after_graph(config: PPOConfig) -> None:
    """Who checkpoints activations has asked for memory before time: each graph begins in a heap without holes."""
    if config.gradient_checkpointing:
        return_freed_memory()


def _joined(one: tuple[Tensor, PPOStats], other: tuple[Tensor, PPOStats]) -> tuple[Tensor, PPOStats]:
    """Loss and statistics of the same rows, when each half saw the other's tokens as masked."""
    (loss, stats), (other_loss, others) = one, other
    assert stats.log_ratios is not None  # of linear_ppo_loss
    assert others.log_ratios is not None
    return loss + other_loss, stats.merge(others)._replace(log_ratios=stats.log_ratios + others.log_ratios)


def _step(roles: Roles, optimizers: Optimizers, config: PPOConfig, stats: UpdateStats) -> None:
    with annotate("ppo_fast/optimizer"):
        policy_norm = _clip(roles.policy_parameters.values(), config.max_grad_norm)
        value_norm = _clip(roles.value_parameters.values(), config.max_grad_norm)
        if math.isfinite(policy_norm) and math.isfinite(value_norm):
            optimizers.policy.step()
            optimizers.value.step()
            stats.policy_grad_norms.append(policy_norm)
            stats.value_grad_norms.append(value_norm)
        else:
            stats.skipped_steps += 1
        optimizers.zero_grad()


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    return float(nn.utils.clip_grad_norm_(list(parameters), max_norm))
