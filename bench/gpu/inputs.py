"""Tokens before an output layer, as all the linear ops are timed on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.machine import Machine
from ppo_fast import ops


@dataclass(frozen=True)
class Head:
    """Tokens before an output layer."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [N]
    old: Tensor  # [N]
    advantages: Tensor  # [N]
    mask: Tensor  # [N]

    def first(self, n: int) -> Head:
        return Head(self.hidden[:n], self.weight, self.ids[:n], self.old[:n], self.advantages[:n], self.mask[:n])


def make_head(machine: Machine, shape: tuple[int, int, int]) -> Head:
    N, H, V = shape
    generator = torch.Generator(machine.device).manual_seed(0)
    how: dict[str, Any] = {"device": machine.device, "generator": generator}
    hidden = torch.randn(N, H, **how).to(machine.dtype)
    weight = torch.empty(V, H, dtype=machine.dtype, device=machine.device)
    for rows in weight.split(16_384):
        rows.copy_(torch.randn(rows.shape, **how) * 2 / H**0.5)
    ids = torch.randint(V, (N,), **how)
    plain = Head(hidden, weight, ids, *(torch.zeros(N, device=machine.device) for _ in range(3)))
    with torch.no_grad():
        logprobs = ops.linear_selected_logprobs(hidden, weight, ids)
    old = logprobs - 0.1 * torch.rand(N, **how)
    return Head(hidden, weight, ids, old, torch.randn(N, **how), plain.mask == 0)
