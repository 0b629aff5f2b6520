"""From replies and scores to advantages: one pass over the roles that don't sample, then arithmetic on [B, T]."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_fast import ops
from ppo_fast.models.head import Head
from ppo_fast.models.roles import Actor, Roles
from ppo_fast.profiling import annotate
from ppo_fast.rollout.batch import Rollout
from ppo_fast.training.config import PPOConfig
from ppo_fast.training.importance import importance_weights

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Forwards:
    """What the frozen roles say about the replies. Float32, [B, T] unless noted, 0 where not live."""

    rescored_logprobs: Tensor | None  # the trainer's own log-probs, with old_logprobs="rescored"
    ref_logprobs: Tensor | None  # None without a reference
    values: Tensor
    bootstrap_values: Tensor  # [B], of the state after the last token


@dataclass(frozen=True)
class Experience:
    """Everything an update needs, fixed before its first step. Float32, [B, T] unless noted."""

    rollout: Rollout
    mask: Tensor  # bool, the tokens that take part in the update
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor
    rewards: Tensor
    advantages: Tensor  # whitened over all live tokens
    returns: Tensor
    scores: Tensor  # [B], after the EOS rule, 0 where unscored
    kl_rewards: Tensor  # the part of rewards that the reference asks for
    raw_advantages: Tensor  # before whitening
    importance: Tensor | None = None  # weights of the surrogate, with importance_correction

    def rows(self, index: Tensor) -> Experience:
        """The chosen rows, cut to the longest reply among them."""
        rollout = self.rollout.rows(index)
        width = rollout.response_mask.shape[1]
        cut = {
            field.name: value[index, :width] if value.dim() == 2 else value[index]
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, rollout=rollout, **cut)


def micro_batches(count: int, size: int, device: torch.device, start: int = 0) -> Iterator[Tensor]:
    """Row indices ``start .. start + count`` in runs of ``size``."""
    yield from torch.arange(start, start + count, device=device).split(size)


def policy_logprobs(actor: Actor, batch: Rollout, temperature: float) -> Tensor:
    """Log-probs [B, T] of the reply tokens under ``actor``, as the sampler had it: temperature, kept sets, EOS."""
    return _logprobs(actor.head, actor.hidden(batch), batch, temperature)


def _logprobs(own_head: Head, hidden: Tensor, batch: Rollout, temperature: float) -> Tensor:
    """The same [n B, T] from n sets of states [n B, T, H]."""
    n = len(hidden) // len(batch.token_ids)
    parts = [
        ops.linear_selected_logprobs(
            hidden,
            head.weight,
            batch.response_ids.repeat(n, 1),
            mask=mask.repeat(n, 1),
            temperature=temperature,
            kept_ids=None if batch.kept_ids is None else batch.kept_ids.repeat(n, 1, 1),
            **head.kwargs(),
        )
        for head, mask in batch.by_head(own_head, batch.response_mask)
    ]
    return torch.stack(parts).sum(0)  # 0 where another head decided


@torch.no_grad()
def score(roles: Roles, rollout: Rollout, config: PPOConfig, progress: Progress) -> Forwards:
    """Reference log-probs and values of every reply token, and the policy's own where they are asked for.

    A body runs once for all that its states serve: a critic that is a head on the policy takes the states that its
    log-probs were made from. Bodies that differ by an adapter run one after the other: a micro-batch has hundreds of
    rows, at which a product of twice as many takes twice as long. Heads that are one matrix read it once, on CPUs.

    Rescored log-probs are made from the very rows that training takes together, and so of equal bits; else as many rows
    go together as are good for a pass without gradients.
    """
    shape = rollout.response_mask.shape
    device = rollout.token_ids.device
    rescored = roles.policy if config.old_logprobs == "rescored" else None
    asked = {"rescored": rescored, "reference": roles.reference}
    actors = {name: actor for name, actor in asked.items() if actor is not None}
    logprobs = {name: torch.zeros(shape, device=device) for name in actors}
    values, bootstrap = torch.zeros(shape, device=device), torch.zeros(shape[0], device=device)
    together = config.micro_batch_size if rescored else config.forward_batch_size(rollout.token_ids.shape[1])
    for rows in micro_batches(shape[0], together, device):
        batch = rollout.rows(rows)
        width = batch.response_mask.shape[1]
        states = {}
        for name, actor in actors.items():
            with annotate(f"ppo_fast/{name}_forward"):
                states[name] = actor.hidden(batch, after_last=True)
        row_values, bootstrap[rows] = roles.critic.values(
            batch, states.get("rescored") if roles.critic.shares_policy else None
        )
        values[rows, :width] = row_values.where(batch.response_mask, 0.0)
        for head, names in _by_head(actors, device):
            hidden = torch.cat([states[name][:, :-1] for name in names])
            found = _logprobs(head, hidden, batch, config.temperature)
            for name, own in zip(names, found.chunk(len(names)), strict=True):
                logprobs[name][rows, :width] = own.float()
        progress(int(batch.response_mask.sum()))
    return Forwards(logprobs.get("rescored"), logprobs.get("reference"), values, bootstrap)


def _by_head(actors: dict[str, Actor], device: torch.device) -> list[tuple[Head, list[str]]]:
    """The actors' heads as they are now, each with the names of those that go through it together.

    Only our C++ kernels promise a token the same bits whatever the others are, which rescored log-probs must have.
    """
    keeps_bits = device.type == "cpu" and ops.backends()["linear_selected_logprobs"]["cpu"] != "eager"
    groups: list[tuple[Head, list[str]]] = []
    for name, actor in actors.items():
        head = actor.head
        for other, names in groups:
            if keeps_bits and head.is_same(other):
                names.append(name)
                break
        else:
            groups.append((head, [name]))
    return groups


def eos_rule(scores: Tensor, finished: Tensor, config: PPOConfig) -> Tensor:
    """Scores [B] after what a reply pays for not ending: a fixed score in place of its own, or a penalty."""
    if config.missing_eos_score is not None:
        return scores.where(finished, config.missing_eos_score)
    return scores - (config.missing_eos_penalty or 0.0) * ~finished


def shape(
    rollout: Rollout, forwards: Forwards, task_scores: list[float | None], kl_coef: float, config: PPOConfig
) -> Experience:
    """Token rewards, advantages and returns of one rollout batch.

    ``r_t = -kl_coef * k(logp_old - logp_ref) + 1[t = last] * score`` (seeds/000, Eq. 3.1), GAE on them, advantages
    whitened over all live tokens, returns left as they are.
    """
    device = rollout.token_ids.device
    scored = torch.tensor([value is not None for value in task_scores], device=device)
    scores = torch.tensor([value or 0.0 for value in task_scores], device=device)
    scores = eos_rule(scores, rollout.finished, config)
    cut = ~rollout.finished
    mask = rollout.response_mask & scored[:, None]
    bootstrap_values = torch.zeros_like(scores)
    if config.truncation == "mask":
        mask = mask & rollout.finished[:, None]
    elif config.truncation == "bootstrap":
        scores = scores.where(~cut, 0.0)
        bootstrap_values = forwards.bootstrap_values.where(cut, 0.0)
    scores = scores.where(scored, 0.0)

    old = rollout.logprobs if forwards.rescored_logprobs is None else forwards.rescored_logprobs
    ref = forwards.ref_logprobs
    in_reward = kl_coef if config.kl_in == "reward" and ref is not None else 0.0
    zeros = torch.zeros_like(scores)
    estimator = config.kl_estimator
    kl_rewards = ops.shape_rewards(zeros, old, ref, mask, kl_coef=in_reward, kl_estimator=estimator)
    rewards = ops.shape_rewards(scores, old, ref, mask, kl_coef=in_reward, kl_estimator=estimator)
    if config.whiten_rewards:
        rewards = ops.whiten(rewards, mask, shift_mean=False)
    advantages, returns, moments = ops.gae(
        rewards, forwards.values, mask, gamma=config.gamma, lam=config.lam, bootstrap_values=bootstrap_values,
        return_moments=True,
    )  # fmt: skip
    return Experience(
        rollout=rollout,
        mask=mask,
        old_logprobs=old,
        ref_logprobs=ref,
        values=forwards.values,
        rewards=rewards,
        advantages=ops.whiten(advantages, mask, moments=moments),
        returns=returns,
        scores=scores,
        kl_rewards=kl_rewards,
        raw_advantages=advantages,
        importance=None
        if config.importance_correction is None
        else importance_weights(old, rollout.logprobs, config.importance_correction, config.importance_cap),
    )
