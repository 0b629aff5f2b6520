"""The PPO loss and its gradients straight from hidden states, against 2 or 3 products with the output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import peers
from harness.case import DTYPES, Bar, Case, Expected, Variant, Work
from head import GEMMS_2, GEMMS_3, VOCABULARY, Head, answers, gemm_answers, gemm_work, gemms, into, make_head
from ppo_fast import ops

OP = "linear_ppo_loss"
FP32, BF16 = torch.float32, torch.bfloat16
LARGE = 4096
ENTROPY_COEF = 0.01
D_WEIGHT_MB = VOCABULARY * 896 * 4 / 1e6
FROZEN, TRAINABLE = "frozen head", "trainable head"
ALL, MASKED, CLIPPED, KEPT = "all rows live", "half masked", "half clipped", "kept sets"
OWN = {FP32: 5e-5, BF16: 1e-2}


def token_loss(
    x: Head, old: Tensor, entropy_coef: float, tokens: int, live: Tensor | None = None
) -> Callable[..., Tensor]:
    """A token's share of the mean loss, for `answers`."""

    def loss(logprobs: Tensor, entropy: Tensor, index: Tensor) -> Tensor:
        rows = old[index].double(), x.advantages[index].double()
        share = 1.0 if live is None else live[index].double()
        return peers.ppo_terms(logprobs, entropy, *rows, entropy_coef) * share / tokens

    return loss


def ready(x: Head) -> Head:
    """The inputs with everything made that stands behind a cached property."""
    _ = x.old, x.old_kept, x.old_half_clipped, x.kept_ids
    return x


def ppo_fast_loss(
    x: Head, *, trainable: bool = False, suffix: str = "", old: str = "old", **settings: Any
) -> dict[str, Tensor]:
    """Forward and backward of the op; results under the names of `answers`."""
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_(trainable)
    mask = settings.pop("mask", torch.ones_like(x.half))
    if "kept_ids" in settings:
        settings["kept_ids"] = x.matrix(settings["kept_ids"])
    rows = (x.matrix(row) for row in (x.ids, getattr(x, old), x.advantages, mask))
    loss, _ = ops.linear_ppo_loss(x.matrix(hidden), weight, *rows, **settings)
    loss.backward()
    return named(loss, hidden, weight, suffix)


def named(loss: Tensor, hidden: Tensor, weight: Tensor, suffix: str = "") -> dict[str, Tensor]:
    """The loss is there to be compared where the weight trains: only then the answers are of all rows."""
    results = {"d_hidden" + suffix: hidden.grad}
    if weight.requires_grad:
        results |= {"loss" + suffix: loss.detach(), "d_weight" + suffix: weight.grad}
    return results


def peer_loss(function: Callable[..., Tensor], *, trainable: bool) -> Callable[[Head], dict[str, Tensor]]:
    """Forward and backward of a peer's mean loss."""

    def run(x: Head) -> dict[str, Tensor]:
        hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_(trainable)
        loss = function(hidden, weight, x.ids, x.old, x.advantages, ENTROPY_COEF)
        loss.backward()
        return named(loss, hidden, weight)

    return run


def eager(work: Work, *, trainable: bool = False) -> Variant:
    """Plain PyTorch, by the full logits."""
    return Variant("eager", peer_loss(peers.eager_linear_ppo, trainable=trainable), ready, work)


def peer_variants(work: Work) -> list[Variant]:
    """Plain PyTorch and TRL's chunked head, frozen."""
    trl = peer_loss(peers.trl_linear_ppo, trainable=False)
    return [eager(work), Variant("TRL", trl, ready, work, missing=peers.NO_TRL)]


def compiled(work: Work) -> Variant:
    """torch.compile of plain PyTorch, frozen."""
    run = peer_loss(peers.compiled(peers.eager_linear_ppo), trainable=False)
    return Variant("torch.compile", run, ready, work)


def as_trl_does(work: Work) -> Variant:
    """TRL's chunked head as its trainers call it."""
    run = peer_loss(peers.trl_trainers_linear_ppo, trainable=False)
    return Variant("TRL, its trainers' tile", run, ready, work, missing=peers.NO_TRL)


def _frozen_or_trainable(tokens: int, dtype: torch.dtype, trainable: bool) -> Case:
    count = 3 if trainable else 2
    name = TRAINABLE if trainable else FROZEN
    work = gemm_work(count, tokens)
    others = [compiled(work), as_trl_does(work)] if dtype is FP32 else [compiled(work)]
    return Case(
        f"{OP} {name} N={tokens}",
        dtype,
        inputs=lambda seed: make_head(tokens, dtype),
        reference=lambda x: {
            **gemm_answers(x),
            **answers(x, token_loss(x, x.old, ENTROPY_COEF, tokens), every_row=trainable),
        },
        variants=[
            *gemms(tokens, count),
            Variant(
                name,
                lambda x: ppo_fast_loss(x, trainable=trainable, entropy_coef=ENTROPY_COEF),
                ready,
                work,
                tolerance=OWN[dtype],
            ),
            *([eager(work, trainable=True)] if trainable else [*peer_variants(work), *others]),
        ],
        first_rows=Head.first,
        memory=(name, "eager"),
        seconds=45.0 if dtype is FP32 else 25.0,
        rounds=3,
    )


def _large(dtype: torch.dtype) -> Case:
    """Both heads in one case: the GEMMs take most of its time. d_weight is checked at N=512."""
    return Case(
        f"{OP} N={LARGE}",
        dtype,
        inputs=lambda seed: make_head(LARGE, dtype),
        reference=lambda x: {**gemm_answers(x), **answers(x, token_loss(x, x.old, ENTROPY_COEF, LARGE))},
        variants=[
            *gemms(LARGE, 3, out=False),
            *(
                Variant(
                    name,
                    lambda x, name=name: {
                        "d_hidden": ppo_fast_loss(x, trainable=name == TRAINABLE, entropy_coef=ENTROPY_COEF)["d_hidden"]
                    },
                    ready,
                    gemm_work(count, LARGE),
                    tolerance=OWN[dtype],
                )
                for name, count in ((FROZEN, 2), (TRAINABLE, 3))
            ),
        ],
        first_rows=Head.first,
        memory=(FROZEN, TRAINABLE),
        seconds=20.0,
        rounds=2,
        long=True,
    )


def _rows_answers(x: Head) -> Mapping[str, Expected]:
    """Whole, masked, clipped and kept rows; without an entropy bonus, so that a clipped row is dead."""
    n = x.tokens
    return {
        **answers(x, token_loss(x, x.old, 0.0, n)),
        **answers(x, token_loss(x, x.old, 0.0, int(x.half.sum()), x.half), suffix=", masked"),
        **answers(x, token_loss(x, x.old_half_clipped, 0.0, n), suffix=", clipped"),
        **answers(x, token_loss(x, x.old_kept, 0.0, n), suffix=", kept", kept=True),
    }


def _fewer_rows(tokens: int, dtype: torch.dtype) -> Case:
    own = {"prepare": ready, "tolerance": OWN[dtype]}
    return Case(
        f"{OP} fewer rows N={tokens}",
        dtype,
        inputs=lambda seed: make_head(tokens, dtype),
        reference=_rows_answers,
        variants=[
            Variant(ALL, ppo_fast_loss, work=gemm_work(2, tokens), **own),
            Variant(MASKED, lambda x: ppo_fast_loss(x, suffix=", masked", mask=x.half), **own),
            Variant(CLIPPED, lambda x: ppo_fast_loss(x, suffix=", clipped", old="old_half_clipped"), **own),
            Variant(KEPT, lambda x: ppo_fast_loss(x, suffix=", kept", old="old_kept", kept_ids=x.kept_ids), **own),
        ],
        seconds=12.0,
    )


def _bars(dtype: torch.dtype) -> list[Bar]:
    name, fp32 = DTYPES[dtype], dtype is FP32
    frozen, trainable = f"{OP} {FROZEN} N=512 {name}", f"{OP} {TRAINABLE} N=512 {name}"
    large, fewer = f"{OP} N={LARGE} {name}", f"{OP} fewer rows N=512 {name}"
    row = "fwd+bwd with entropy bonus, {}, N={}".format
    faster = [("eager", 2.0), ("torch.compile", 1.4), ("TRL", 1.9)] if fp32 else [("eager", 2.5)]
    names = {"eager": "eager", "torch.compile": "torch.compile", "TRL": "TRL's chunked head"}
    # What both calls must return is no workspace: d_hidden grows with N.
    grown = tuple(n * 896 * dtype.itemsize / 1e6 for n in (LARGE, 512))
    out = []
    for head, small, to, limit, memory in (
        (FROZEN, frozen, GEMMS_2, 0.88 if fp32 else 1.05, 96.0),
        (TRAINABLE, trainable, GEMMS_3, 0.95 if fp32 else 1.10, D_WEIGHT_MB + 96.0),
    ):
        at_512, at_large = row(head, 512), row(head, LARGE)
        out += [
            Bar(OP, at_512, small, head, limit, f"{len(to)} GEMMs", to, beside=into(to)),
            Bar(OP, at_512, small, head, memory, kind="memory"),
            *(
                Bar(OP, at_512, small, head, times, names[peer], [peer], "at least")
                for peer, times in (faster if head is FROZEN else [])
            ),
            Bar(OP, at_large, large, head, 0.03, "N=512", to, kind="ratio growth", since=small),
            Bar(OP, at_large, large, head, 4, "N=512, d_hidden apart", kind="memory growth", since=small, less=grown),
        ]
    return [
        *out,
        Bar(OP, "half the rows masked beforehand", fewer, MASKED, 0.56, "all rows live", [ALL]),
        Bar(OP, "half the rows dead after clipping", fewer, CLIPPED, 0.80 if fp32 else 0.83, "all rows live", [ALL]),
        Bar(OP, "kept sets, K=64, frozen head, fwd+bwd", fewer, KEPT, 0.03, "the full vocabulary", [ALL]),
    ]


CASES = [
    case
    for dtype in (FP32, BF16)
    for case in (
        _frozen_or_trainable(512, dtype, False),
        _frozen_or_trainable(512, dtype, True),
        _fewer_rows(512, dtype),
        _large(dtype),
    )
]
BARS = [*_bars(FP32), *_bars(BF16)]
