"""What one writes in an afternoon: an iteration of PPO from transformers, peft and PyTorch, without ppo_fast.

The peer of bench_iteration.py. It is meant to be correct and unhurried: ``generate`` with its cache, whole logits, a
critic with a body and an adapter of its own, the reference by switching the adapter off; both losses first, then both
backward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from harness.stages import Stages

CLIP, VALUE_CLIP, VF_COEF, MAX_NORM = 0.2, 0.2, 0.1, 1.0
GAMMA, LAM = 1.0, 0.95


class Critic(nn.Module):
    """Values of every position, [B, L] float32."""

    def __init__(self, body: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(hidden_size, 1, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` [B, L]."""
        return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state)[..., 0].float()


class PlainPPO:
    """A policy and a critic under LoRA.

    ``logits`` of "all" positions, cut to the reply's afterwards, is how it is commonly written; "reply" asks the model
    for the reply's alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora: Callable[[str], LoraConfig],
        temperature: float,
        *,
        logits: Literal["all", "reply"] = "all",
        learning_rate: float = 1e-5,
    ) -> None:
        config = model.config
        self.critic = Critic(
            get_peft_model(copy.deepcopy(model.base_model), lora("FEATURE_EXTRACTION")), config.hidden_size, model.dtype
        )
        self.policy = get_peft_model(model, lora("CAUSAL_LM"))
        self.temperature, self.logits = temperature, logits
        self.trained = [p for m in (self.policy, self.critic) for p in m.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=learning_rate, weight_decay=0.0)

    def logprobs(self, ids: Tensor, replies: int, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the last ``replies`` tokens, [B, replies], and their mean entropy, without its gradient."""
        kept = 0 if self.logits == "all" else replies + 1  # 0: all of them
        logits = self.policy(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, -replies - 1 : -1]
        table = (logits.float() / self.temperature).log_softmax(-1)
        chosen = table.gather(-1, ids[:, -replies:, None])[..., 0]
        if not entropy:
            return chosen, None
        with torch.no_grad():
            return chosen, -(table.exp() * table).sum(-1).mean()

    def iterate(
        self,
        prompts: Tensor,  # [B, L]
        new_tokens: int,
        reward: Callable[[Tensor], Tensor],  # replies [B, T] -> [B]
        *,
        epochs: int,
        minibatches: int,
        kl_coef: float,
    ) -> Stages:
        """Generate, score, update; every reply has ``new_tokens`` tokens."""
        stages = Stages()
        with stages.stage("rollout"), torch.no_grad():
            self.policy.eval()
            sampling = GenerationConfig(
                do_sample=True, temperature=self.temperature, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
                eos_token_id=None, pad_token_id=0, bos_token_id=1,
            )  # fmt: skip
            ids = self.policy.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=sampling
            )
        with stages.stage("score"), torch.no_grad():
            old, _ = self.logprobs(ids, new_tokens)
            with self.policy.disable_adapter():
                reference, _ = self.logprobs(ids, new_tokens)
            values = self.critic(ids)[:, -new_tokens - 1 : -1]
            rewards = -kl_coef * (old - reference)
            rewards[:, -1] += reward(ids[:, -new_tokens:])
            advantages, following = torch.zeros_like(rewards), torch.zeros(len(ids))
            for t in reversed(range(new_tokens)):
                next_value = values[:, t + 1] if t + 1 < new_tokens else 0.0
                following = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * following
                advantages[:, t] = following
            returns = advantages + values
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        with stages.stage("update"):
            self.policy.train()
            for _ in range(epochs):
                for rows in torch.randperm(len(ids)).chunk(minibatches):
                    self._step(ids[rows], old[rows], values[rows], advantages[rows], returns[rows])
        return stages

    def _step(self, ids: Tensor, old: Tensor, old_values: Tensor, advantages: Tensor, returns: Tensor) -> None:
        replies = old.shape[1]
        new, _ = self.logprobs(ids, replies, entropy=True)
        ratio = (new - old).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        values = self.critic(ids)[:, -replies - 1 : -1]
        near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2).mean()
        (-surrogate.mean()).backward()
        (VF_COEF * value_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
