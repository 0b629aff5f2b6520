"""Log-prob and entropy straight from hidden states, against the bare product with the output layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import peers
from harness.case import DTYPES, Bar, Case, Variant
from head import GEMM, GEMMS_2, Head, answers, gemm_answers, gemm_work, gemms, into, make_head
from ppo_fast import ops

OP = "linear_selected_logprobs"
FP32, BF16 = torch.float32, torch.bfloat16
LARGE = 4096
SCORE, GRADIENT, KEPT = "score", "with gradient", "kept sets, with gradient"
_OWN = {FP32: 5e-5, BF16: 1e-2}


def _named(logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    return {"logprobs": logprobs, "entropy": entropy}


def _score(x: Head) -> dict[str, Tensor]:
    with torch.no_grad():
        return _named(*ops.linear_selected_logprobs(x.hidden, x.weight, x.ids, return_entropy=True))


def _scored_by(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Head], dict[str, Tensor]]:
    def run(x: Head) -> dict[str, Tensor]:
        with torch.no_grad():
            return _named(*function(x.hidden, x.weight, x.ids))

    return run


def _with_gradient(x: Head) -> dict[str, Tensor]:
    hidden = x.hidden.detach().requires_grad_()
    ops.linear_selected_logprobs(hidden, x.weight, x.ids).backward(x.advantages)
    return {"d_hidden": hidden.grad}


def _with_gradient_kept(x: Head) -> dict[str, Tensor]:
    hidden = x.hidden.detach().requires_grad_()
    ops.linear_selected_logprobs(hidden, x.weight, x.ids, kept_ids=x.kept_ids).backward(x.advantages)
    return {"d_hidden, kept": hidden.grad}


def _touch_kept(x: Head) -> Head:
    _ = x.kept_ids
    return x


def _answers(x: Head, kept: bool) -> dict[str, object]:
    def loss(logprobs: Tensor, _: Tensor, index: Tensor) -> Tensor:
        return logprobs * x.advantages[index].double()

    return {
        **gemm_answers(x),
        **answers(x, loss),
        **(answers(x, loss, suffix=", kept", kept=True) if kept else {}),
    }


def case(tokens: int, dtype: torch.dtype, which: Sequence[str], **settings: object) -> Case:
    """The variants named in ``which`` beside the GEMMs, and the peers of scoring."""
    own = {"work": gemm_work(1, tokens), "tolerance": _OWN[dtype]}
    both = {"work": gemm_work(2, tokens), "tolerance": _OWN[dtype]}
    compiled = peers.compiled(peers.eager_linear_logprobs)
    known = [
        Variant(SCORE, _score, **own),
        Variant(GRADIENT, _with_gradient, **both),
        Variant(KEPT, _with_gradient_kept, _touch_kept, tolerance=_OWN[dtype]),
        Variant("eager", _scored_by(peers.eager_linear_logprobs), work=own["work"]),
        Variant("torch.compile", _scored_by(compiled), work=own["work"]),
        Variant("TRL", _scored_by(peers.trl_linear_logprobs), work=own["work"], missing=peers.NO_TRL),
    ]
    count = 2 if GRADIENT in which else 1
    return Case(
        f"{OP} N={tokens}",
        dtype,
        inputs=lambda seed: make_head(tokens, dtype),
        reference=lambda x: _answers(x, KEPT in which),
        variants=[*gemms(tokens, count, out=tokens < LARGE), *(variant for variant in known if variant.name in which)],
        first_rows=Head.first,
        **settings,
    )


def cases(dtype: torch.dtype) -> list[Case]:
    """The sizes of the table."""
    scoring = [SCORE, "eager", "torch.compile", "TRL"]
    full = [*scoring, GRADIENT, KEPT]
    return [
        *(case(tokens, dtype, scoring, seconds=6.0) for tokens in (16, 64)),
        case(512, dtype, full, memory=("GEMM 1", SCORE, GRADIENT), seconds=15.0),
        case(LARGE, dtype, [SCORE], memory=(SCORE,), seconds=10.0, rounds=2, long=True),
    ]


def _bars(dtype: torch.dtype) -> list[Bar]:
    name = DTYPES[dtype]
    fp32 = dtype is FP32

    def key(tokens: int) -> str:
        return f"{OP} N={tokens} {name}"

    score = "log-prob and entropy, no grad"
    decode = [
        bar
        for tokens in ((16, 64) if fp32 else ())
        for bar in (
            Bar(OP, f"{score}, N={tokens}", key(tokens), SCORE, 0.5, "the bare GEMM", GEMM),
            Bar(OP, f"{score}, N={tokens}", key(tokens), SCORE, 0.6, "the bare GEMM into `out=`", into(GEMM)),
        )
    ]
    limit = 0.80 if fp32 else 0.95
    large = f"{score}, N={LARGE}"
    return [
        Bar(OP, f"{score}, N=512", key(512), SCORE, limit, "the bare GEMM", GEMM, beside=into(GEMM)),
        Bar(OP, f"{score}, N=512", key(512), SCORE, 8, kind="memory"),
        *decode,
        Bar(OP, large, key(LARGE), SCORE, 0.03, "N=512", GEMM, kind="ratio growth", since=key(512)),
        Bar(OP, large, key(LARGE), SCORE, 32, kind="memory"),
        Bar(
            OP,
            "with gradient, frozen head, fwd+bwd, N=512",
            key(512),
            GRADIENT,
            0.88 if fp32 else 1.05,
            "2 GEMMs",
            GEMMS_2,
            beside=into(GEMMS_2),
        ),
        Bar(OP, "kept sets, K=64, frozen head, fwd+bwd", key(512), KEPT, 0.03, "the full vocabulary", [GRADIENT]),
    ]


CASES = [*cases(FP32), *cases(BF16)]
BARS = [*_bars(FP32), *_bars(BF16)]
