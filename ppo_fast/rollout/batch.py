"""What sampling hands to training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_fast.models.tokens import TokenBatch


@dataclass(frozen=True)
class Rollout(TokenBatch):
    """Replies with the log-probs of the very distribution they were sampled from, temperature included."""

    logprobs: Tensor  # float32 [B, T], nats, 0 where not live
    finished: Tensor  # bool [B], ended by an EOS id, not by the limit

    def rows(self, index: Tensor) -> Rollout:
        """The chosen rows, cut to the widest prompt and reply among them."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        left = self.prompt_length - int(prompt_mask.sum(1).max())
        width = max(1, int(response_mask.sum(1).max()))
        return Rollout(
            token_ids=self.token_ids[index, left : self.prompt_length + width],
            prompt_mask=prompt_mask[:, left:],
            response_mask=response_mask[:, :width],
            logprobs=self.logprobs[index, :width],
            finished=self.finished[index],
        )

    def to(self, device: torch.device) -> Rollout:
        """All tensors on ``device``."""
        return Rollout(**{field.name: getattr(self, field.name).to(device) for field in dataclasses.fields(self)})
