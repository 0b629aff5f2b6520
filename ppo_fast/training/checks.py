"""The step-0 check: before anything is trained, trainer and sampler must agree on the tokens that were sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_fast.errors import UserError
from ppo_fast.models.tokens import TokenBatch

_WORST = 5


@dataclass(frozen=True)
class Agreement:
    """How far two sets of log-probs of the same tokens lie apart, nats."""

    p99: float
    maximum: float


def agreement(difference: Tensor, mask: Tensor) -> Agreement:
    """Statistics of ``|difference|`` [B, T] over the live tokens."""
    live = difference[mask].abs().float()
    if live.numel() == 0:
        return Agreement(0.0, 0.0)
    return Agreement(float(torch.quantile(live, 0.99)), float(live.max()))


def require_agreement(
    difference: Tensor,  # [B, T], second minus first, nats
    mask: Tensor,  # [B, T]
    batch: TokenBatch,
    tokenizer: PreTrainedTokenizerBase,
    bounds: tuple[float, float],
    what: str,
    causes: str,
) -> None:
    """Refuses to train on log-probs that mean two different distributions.

    Raises:
        UserError: the 99th percentile or the maximum of ``|difference|`` exceeds ``bounds``, or a difference isn't
            finite; the message shows the worst positions with the ratios they imply.
    """
    found = agreement(difference, mask)
    if found.p99 <= bounds[0] and found.maximum <= bounds[1]:  # false for NaN too
        return
    size = difference.abs().nan_to_num(nan=torch.inf).masked_fill(~mask, -1.0)
    lines = []
    for flat in size.flatten().topk(min(_WORST, int(mask.sum()))).indices.tolist():
        row, position = divmod(flat, difference.shape[1])
        gap = float(difference[row, position])
        token = tokenizer.decode([int(batch.response_ids[row, position])])
        lines.append(f"  reply {row}, token {position} {token!r}: {gap:+.6f} nats, ratio {torch.tensor(gap).exp():.4f}")
    raise UserError(
        f"{what} differ before the first update: 99th percentile {found.p99:.2e} nats (allowed {bounds[0]:.0e}), "
        f"maximum {found.maximum:.2e} (allowed {bounds[1]:.0e}); {causes}. Worst positions:\n" + "\n".join(lines)
    )
