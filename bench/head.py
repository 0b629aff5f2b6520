"""An output layer on tokens: inputs, right answers in float64, and the GEMMs that everything is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.case import Expected, Variant, Work

VOCABULARY, HIDDEN = 151_936, 896
BATCH = 8
KEPT = 64
SPREAD = 2.0
LIVE, CLIPPED = 0.05, 0.5  # log-ratios well inside and well outside of the clip, so that no rounding decides a branch
CHECKED = 96  # rows compared with float64; a loss and its weight's gradient need all of them
_GEMM_ROWS = 8

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probs [n], entropies [n], indices of the tokens [n]) -> loss of each token [n], in float64."""


@dataclass(frozen=True)
class Head:
    """N tokens before an output layer, and what their PPO loss needs."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [N]
    advantages: Tensor  # [N]
    shifts: Tensor  # [N] log-ratio of every token
    half: Tensor  # [N] bool, a random half

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @cached_property
    def old(self) -> Tensor:
        """Log-probs of a behaviour policy [N] that make every log-ratio ``shifts``, give or take 0.05.

        Of normal logits the log-sum-exp is known beforehand, to a few hundredths at this SPREAD and V: no product with
        the whole output layer is needed, nor an op whose memory is to be measured.
        """
        spread = SPREAD * self.hidden.float().square().mean(-1).sqrt()
        logsumexp = math.log(self.weight.shape[0]) + spread.square() / 2
        return self._own_logits(self.ids[:, None])[:, 0] - logsumexp - self.shifts

    @cached_property
    def old_kept(self) -> Tensor:
        """The same on the kept sets."""
        return self._own_logits(self.kept_ids).log_softmax(-1)[:, 0] - self.shifts

    def _own_logits(self, ids: Tensor) -> Tensor:
        return torch.einsum("nh,nkh->nk", self.hidden.float(), self.weight[ids].float())

    @cached_property
    def old_half_clipped(self) -> Tensor:
        """As ``old``, but with half of the tokens so far off that the clip takes their gradient."""
        beyond = torch.where(self.advantages > 0, CLIPPED, -CLIPPED)
        return self.old + self.shifts - torch.where(self.half, beyond, self.shifts)

    @cached_property
    def kept_ids(self) -> Tensor:
        """[N, KEPT] distinct ids, the token's own among them."""
        generator = torch.Generator().manual_seed(1)
        offsets = torch.randperm(self.weight.shape[0] - 1, generator=generator)[: KEPT - 1] + 1
        offsets = torch.cat([offsets.new_zeros(1), offsets])
        return (self.ids[:, None] + offsets) % self.weight.shape[0]

    @cached_property
    def gradient(self) -> Tensor:
        """[N, V] in the inputs' dtype: the left side of GEMMs 2 and 3, whatever its values."""
        return self.hidden @ self.weight.t() / self.weight.shape[0]

    @cached_property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Touched results of the three GEMMs."""
        return torch.zeros_like(self.gradient), torch.zeros_like(self.hidden), torch.zeros_like(self.weight)

    def matrix(self, x: Tensor) -> Tensor:
        """[N, ...] as [BATCH, N / BATCH, ...]."""
        return x.view(BATCH, -1, *x.shape[1:])

    def first(self, n: int = 64) -> Head:
        """The first n tokens."""
        rows = {name: getattr(self, name)[:n] for name in ("hidden", "ids", "advantages", "shifts", "half")}
        return replace(self, **rows)


def make_head(
    tokens: int, dtype: torch.dtype, vocabulary: int = VOCABULARY, hidden_size: int = HIDDEN, device: str = "cpu"
) -> Head:
    """Random inputs whose logits have the standard deviation SPREAD: about 10 nats of entropy at V = 151,936."""
    how: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    normal = lambda *shape: torch.randn(shape, **how)  # noqa: E731
    weight = normal(vocabulary, hidden_size).mul_(SPREAD / hidden_size**0.5).to(dtype)
    signs = torch.where(normal(tokens) > 0, 1.0, -1.0)
    return Head(
        hidden=normal(tokens, hidden_size).to(dtype),
        weight=weight,
        ids=torch.randint(vocabulary, (tokens,), **how),
        advantages=signs * (0.5 + normal(tokens).abs()),
        shifts=LIVE * torch.rand(tokens, **how),
        half=torch.randperm(tokens, **how) < tokens // 2,
    )


def checked_rows(head: Head) -> Tensor:
    """Indices of CHECKED tokens spread over all, of all tokens where there are fewer."""
    return torch.linspace(0, head.tokens - 1, min(CHECKED, head.tokens)).long()


def answers(
    head: Head,
    token_loss: TokenLoss,
    *,
    suffix: str = "",
    kept: bool = False,
    every_row: bool = False,
) -> Mapping[str, Expected]:
    """logprobs, entropy and d_hidden in float64 of some tokens; with ``every_row`` of all, and then loss and d_weight.

    Gradients are those of the sum of ``token_loss``, by autograd through the logits, so the loss has to be local.
    ``suffix`` is added to the names. d_weight is compared at every 97th token of the vocabulary and at those chosen.
    """
    rows = torch.arange(head.tokens) if every_row else checked_rows(head)
    columns = torch.cat([torch.arange(0, head.weight.shape[0], 97), head.ids]).unique()
    weight = head.weight.double()
    parts: list[list[Tensor]] = []
    d_weight = torch.zeros(len(columns), weight.shape[1], dtype=torch.float64)
    for index in rows.split(64):
        hidden, ids = head.hidden[index].double(), head.ids[index]
        if kept:
            logits = torch.einsum("nh,nkh->nk", hidden, weight[head.kept_ids[index]])
            ids = torch.zeros_like(ids)  # the token's own id stands first
        else:
            logits = hidden @ weight.t()
        logits.requires_grad_()
        table = logits.log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1)
        logprobs = table.gather(-1, ids[:, None]).squeeze(-1)
        losses = token_loss(logprobs, entropy, index)
        (d_logits,) = torch.autograd.grad(losses.sum(), logits)
        if kept:
            d_hidden = torch.einsum("nk,nkh->nh", d_logits, weight[head.kept_ids[index]])
        else:
            d_hidden = d_logits @ weight
            d_weight += d_logits[:, columns].t() @ hidden
        parts.append([x.detach() for x in (logprobs, entropy, losses, d_hidden)])
    logprobs, entropy, losses, d_hidden = (torch.cat(part) for part in zip(*parts, strict=True))
    whole = {"loss": Expected(losses.sum(), scale=float(losses.abs().sum())), "d_weight": Expected(d_weight, columns)}
    found = {
        "logprobs": Expected(logprobs, rows),
        "entropy": Expected(entropy, rows),
        "d_hidden": Expected(d_hidden, rows),
        **(whole if every_row else {}),
    }
    return {name + suffix: expected for name, expected in found.items()}


def gemm_answers(head: Head) -> Mapping[str, Expected]:
    """The products of the three GEMMs, in float64 at a few rows."""
    rows = slice(0, _GEMM_ROWS)
    hidden, gradient = head.hidden.double(), head.gradient
    d_hidden = sum(
        gradient[rows, i : i + 8192].double() @ head.weight[i : i + 8192].double()
        for i in range(0, head.weight.shape[0], 8192)
    )
    assert isinstance(d_hidden, Tensor)
    return {
        "gemm_1": Expected(hidden[rows] @ head.weight.double().t(), rows),
        "gemm_2": Expected(d_hidden, rows),
        "gemm_3": Expected(gradient[:, rows].double().t() @ hidden, rows),
    }


def gemm_work(head_gemms: float, tokens: int, vocabulary: int = VOCABULARY, hidden_size: int = HIDDEN) -> Work:
    """Operations of so many products with the output layer."""
    return Work(flops=2.0 * head_gemms * tokens * vocabulary * hidden_size)


def gemms(tokens: int, count: int, *, vocabulary: int = VOCABULARY, out: bool = True) -> list[Variant]:
    """The first ``count`` of: logits, d_hidden, d_weight; each with a fresh result, and into one that is there."""
    work = gemm_work(1, tokens, vocabulary)
    fresh = [
        Variant("GEMM 1", lambda x: {"gemm_1": x.hidden @ x.weight.t()}, work=work),
        Variant("GEMM 2", lambda x: {"gemm_2": x.gradient @ x.weight}, work=work),
        Variant("GEMM 3", lambda x: {"gemm_3": x.gradient.t() @ x.hidden}, work=work),
    ]
    into = [
        Variant("GEMM 1 out=", lambda x: {"gemm_1": torch.mm(x.hidden, x.weight.t(), out=x.buffers[0])}, work=work),
        Variant("GEMM 2 out=", lambda x: {"gemm_2": torch.mm(x.gradient, x.weight, out=x.buffers[1])}, work=work),
        Variant("GEMM 3 out=", lambda x: {"gemm_3": torch.mm(x.gradient.t(), x.hidden, out=x.buffers[2])}, work=work),
    ]
    return [*fresh[:count], *(into[:count] if out else [])]


GEMM = ("GEMM 1",)
GEMMS_2 = ("GEMM 1", "GEMM 2")
GEMMS_3 = ("GEMM 1", "GEMM 2", "GEMM 3")


def into(names: tuple[str, ...]) -> tuple[str, ...]:
    """The out= forms of GEMMs."""
    return tuple(f"{name} out=" for name in names)
