"""Held-out evidence: the start and the trained policy on the same prompts with the same random numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ppo_fast.errors import UserError
from ppo_fast.evaluation.heldout import Evaluation, Reply, compare, save
from ppo_fast.rollout import Rollout
from ppo_fast.training import checkpoint
from ppo_fast.training.data import Prompt, dataset_hash
from ppo_fast.training.experience import eos_rule, policy_logprobs
from ppo_fast.training.recipe import Recipe
from ppo_fast.training.rewards import RewardFunctions
from ppo_fast.training.trainer import PPOTrainer


def evaluate(trainer: PPOTrainer, recipe: Recipe, chosen: Path, run: Path) -> Evaluation:
    """Compares the policy of checkpoint ``chosen`` with the reference on the held-out prompts.

    Both sides draw from the same uniform numbers, so a pair differs by the policy alone. Writes ``evaluation.json``.

    Raises:
        UserError: the recipe keeps no prompts out of training, or there is no reference.
    """
    if not recipe.heldout:
        raise UserError("the run held no prompts out; set data.heldout before training")
    recorded = json.loads((run / "run_record.json").read_text(encoding="utf-8"))["data"]["heldout_hash"]
    if recorded != dataset_hash(trainer.eval_prompts):
        raise UserError(
            "the held-out prompts aren't those of the run: its dataset has changed since, and some may have been "
            "trained on; put the file back as it was"
        )
    checkpoint.load_policy(chosen, trainer.roles)
    prompts = [prompt for prompt in recipe.heldout for _ in range(recipe.evaluation.replies_per_prompt)]
    before = _replies(trainer, recipe, prompts, reference=True)
    after = _replies(trainer, recipe, prompts, reference=False)
    about = {
        "checkpoint": chosen.name,
        "judge": recipe.settings.get("judge"),
        "seed": recipe.evaluation.seed,
        "temperature": trainer.args.temperature,
        "replies_per_prompt": recipe.evaluation.replies_per_prompt,
    }
    evaluation = compare(before, after, about=about)
    save(evaluation, run / "evaluation.json")
    return evaluation


def _replies(trainer: PPOTrainer, recipe: Recipe, prompts: Sequence[Prompt], *, reference: bool) -> list[Reply]:
    size = recipe.evaluation.batch_size
    replies = []
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        rollout = trainer.generate_replies(batch, seed=recipe.evaluation.seed + start, reference=reference)
        replies += _scored(trainer, recipe, batch, rollout)
    return replies


@torch.no_grad()
def _scored(trainer: PPOTrainer, recipe: Recipe, prompts: Sequence[Prompt], rollout: Rollout) -> list[Reply]:
    assert trainer.roles.reference is not None
    ref = policy_logprobs(trainer.roles.reference, rollout, trainer.args.temperature)
    completion_ids = rollout.completion_ids()
    texts = trainer.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    rewards = trainer.reward(prompts, texts, completion_ids).total
    filled = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64, device=ref.device)
    penalised = eos_rule(filled, rollout.finished, trainer.args).tolist()
    judged: Sequence[float | None] = [None] * len(texts)
    if recipe.judge is not None:
        judged = RewardFunctions([recipe.judge])(prompts, texts, completion_ids).total
    return [
        Reply(
            prompt=prompt.text,
            completion=texts[row],
            length=int(rollout.lengths[row]),
            finished=bool(rollout.finished[row]),
            reward=rewards[row],
            penalised=None if rewards[row] is None else penalised[row],
            judge=judged[row],
            kl=float((rollout.logprobs - ref)[row].sum()),
            ref_nll=float(-ref[row].sum() / rollout.lengths[row]),
        )
        for row, prompt in enumerate(prompts)
    ]
