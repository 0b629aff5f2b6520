"""What sampling hands to training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_fast.models.head import Head
from ppo_fast.models.tokens import TokenBatch

MOST_KEPT = 1024
"""Tokens that top-k and top-p leave at most: each is stored with its position, and scored again in training."""


@dataclass(frozen=True)
class Rollout(TokenBatch):
    """Replies with the log-probs of the very distribution they were sampled from, temperature and cuts included."""

    logprobs: Tensor  # float32 [B, T], nats, 0 where not live
    finished: Tensor  # bool [B], ended by an EOS id or a stop string, not by the limit
    kept_ids: Tensor | None = None  # int64 [B, T, K], under top-k or top-p what each token was drawn from, then -1
    min_new_tokens: int = 0  # before so many tokens the ids below were excluded from what was drawn from
    excluded_ids: tuple[int, ...] = ()  # EOS

    @property
    def kept_at_limit(self) -> float | None:
        """The share of tokens whose kept set has the most tokens there can be, `MOST_KEPT`; None if nothing was cut.

        Where top-p is the only cut, their nucleus may have been wider, and less than a share p was sampled from.
        """
        if self.kept_ids is None:
            return None
        full = (self.kept_ids >= 0).sum(-1)[self.response_mask] == MOST_KEPT
        return float(full.double().mean())

    def rows(self, index: Tensor) -> Rollout:
        """The chosen rows, cut to the widest prompt and reply among them."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        left = self.prompt_length - int(prompt_mask.sum(1).max())
        width = max(1, int(response_mask.sum(1).max()))
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[index, left : self.prompt_length + width],
            prompt_mask=prompt_mask[:, left:],
            response_mask=response_mask[:, :width],
            logprobs=self.logprobs[index, :width],
            finished=self.finished[index],
            kept_ids=None if self.kept_ids is None else _narrowed(self.kept_ids[index, :width]),
        )

    def to(self, device: torch.device) -> Rollout:
        """All tensors on ``device``."""
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved)

    def by_head(self, head: Head, live: Tensor) -> list[tuple[Head, Tensor]]:
        """``head`` as it was when sampling, and which of the ``live`` tokens [B, T] it decided.

        One entry, or a second one without EOS for the tokens before ``min_new_tokens``. Kept sets leave it out already.
        """
        if not self.min_new_tokens or self.kept_ids is not None:
            return [(head, live)]
        early = torch.arange(live.shape[1], device=live.device) < self.min_new_tokens
        return [(head.without(self.excluded_ids), live & early), (head, live & ~early)]


def _narrowed(kept_ids: Tensor) -> Tensor:
    """Cut to the widest set among them."""
    return kept_ids[..., : max(1, int((kept_ids >= 0).sum(-1).max()))]
