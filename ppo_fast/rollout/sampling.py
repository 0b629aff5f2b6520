"""One token for each row of hidden states, and its log-prob."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_fast import ops
from ppo_fast.models.head import Head


def draw(
    hidden: Tensor,  # [n, H]
    head: Head,
    keys: Tensor,  # int64 [n, 2]: (seed of the reply, index of the token in it)
    *,
    temperature: float,
    banned: tuple[int, ...],
    banned_rows: Tensor,  # bool [n], which mustn't get one of the banned tokens
) -> tuple[Tensor, Tensor]:
    """Token ids int64 [n], and their log-probs float32 [n] under the distribution they are drawn from."""
    logits = head.logits(hidden)
    for token in banned:
        logits[banned_rows, token] = -torch.inf
    if temperature == 0:
        ids = logits.argmax(-1)
    else:
        cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(-1, dtype=torch.float64)
        target = (_uniform(keys) * cumulative[:, -1])[:, None]
        ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return ids, ops.selected_logprobs(logits, ids, temperature=temperature or 1.0)


def _uniform(keys: Tensor) -> Tensor:
    """float64 [n] in [0, 1)."""
    x = keys[:, 0] * -7046029254386353131 + keys[:, 1] * -4658895280553007687
    for multiplier in (-4658895280553007687, -7723592293110705685):
        x = (x ^ (x >> 29)) * multiplier
    return ((x ^ (x >> 32)) & ((1 << 53) - 1)).double() * 2.0**-53
