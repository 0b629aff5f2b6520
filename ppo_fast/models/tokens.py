"""Prompts and replies as one block of token ids: prompts padded on the left, replies on the right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """``B`` replies of at most ``T`` tokens to prompts of at most ``L`` tokens.

    Which positions count comes from the masks alone, never from comparing ids with the pad id: that one may be equal
    to EOS.
    """

    token_ids: Tensor  # int64 [B, L+T]
    prompt_mask: Tensor  # bool [B, L], True at prompt tokens, which stand at the right end
    response_mask: Tensor  # bool [B, T], True at the tokens the policy chose, EOS included

    @property
    def prompt_length(self) -> int:
        """``L``."""
        return self.prompt_mask.shape[1]

    @property
    def response_ids(self) -> Tensor:
        """int64 [B, T]."""
        return self.token_ids[:, self.prompt_length :]

    def completion_ids(self) -> list[list[int]]:
        """Each reply's own tokens, as lists."""
        return [ids[live].tolist() for ids, live in zip(self.response_ids, self.response_mask, strict=True)]

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: tokens the policy chose."""
        return self.response_mask.sum(1)

    @property
    def attention_mask(self) -> Tensor:
        """bool [B, L+T]."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def position_ids(self) -> Tensor:
        """int64 [B, L+T], counted from each row's first real token: left padding must not shift them."""
        return (self.attention_mask.long().cumsum(1) - 1).clamp_min(0)


def pad_prompts(prompt_ids: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [B, L] and mask bool [B, L], padded on the left."""
    width = max(len(ids) for ids in prompt_ids)
    ids = torch.full((len(prompt_ids), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(prompt_ids), width, dtype=torch.bool)
    for row, prompt in enumerate(prompt_ids):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, width - len(prompt) :] = True
    return ids, mask
