"""The tokens of a decode step straight from hidden states, against the bare product and softmax with multinomial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.case import DTYPES, Bar, Case, Expected, Variant
from head import GEMM, VOCABULARY, Head, gemm_answers, gemm_work, gemms, into, make_head
from ppo_fast import ops
from ppo_fast.ops._noise import gumbel

OP = "linear_sample"
FP32, BF16 = torch.float32, torch.bfloat16
ROWS = 16
SHARE, KEPT = 0.9, 1024
PLAIN, NUCLEUS, TOP_K, GREEDY, TORCH = "plain", f"top-p {SHARE}", "top-k 50", "greedy", "softmax, multinomial"
MEMORY_MB = 8
_CUTS: Mapping[str, dict[str, float]] = {
    GREEDY: {"temperature": 0.0},  # first, so that none of those compared comes right after the GEMM's huge result
    PLAIN: {},
    NUCLEUS: {"top_p": SHARE, "return_kept": True},
    TOP_K: {"top_k": 50},
}
_OWN = {FP32: 5e-5, BF16: 1e-2}


def _keys(x: Head) -> Tensor:
    return torch.stack([torch.arange(x.tokens), torch.full((x.tokens,), 7)], 1)


def _ours(name: str) -> Callable[[tuple[Head, Tensor]], dict[str, Tensor]]:
    def run(prepared: tuple[Head, Tensor]) -> dict[str, Tensor]:
        x, keys = prepared
        with torch.no_grad():
            ids, logprobs, *_ = ops.linear_sample(x.hidden, x.weight, keys=keys, **_CUTS[name])
        return {f"ids, {name}": ids, f"logprobs, {name}": logprobs}

    return run


def _multinomial(x: Head) -> dict[str, Tensor]:
    with torch.no_grad():
        probabilities = torch.softmax(x.hidden @ x.weight.t(), -1, dtype=torch.float32)
        ids = torch.multinomial(probabilities, 1)
        logprobs = probabilities.gather(1, ids).log()
    return {"possible": logprobs.isfinite().all()}  # its draws are its own


def answers(x: Head) -> Mapping[str, Expected]:
    """Draws and log-probs in float64, from a full sort; the noise is the op's."""
    logits = x.hidden.double() @ x.weight.double().t()
    ordered, order = logits.sort(dim=1, descending=True)
    noise = gumbel(_keys(x), torch.arange(x.weight.shape[0] // 4 + 1)[None], torch.float64).flatten(1)
    found = {"possible": Expected(torch.tensor(1.0, dtype=torch.float64))}
    for name in _CUTS:
        z = ordered.clone()
        if name in (NUCLEUS, TOP_K):
            z[:, KEPT if name == NUCLEUS else 50 :] = -torch.inf
        if name == NUCLEUS:
            p = z.softmax(1)
            z[p.cumsum(1) - p >= SHARE] = -torch.inf
        key = z if name == GREEDY else z + noise.gather(1, order)
        column = key.argmax(1, keepdim=True)
        found[f"ids, {name}"] = Expected(order.gather(1, column)[:, 0].double())
        found[f"logprobs, {name}"] = Expected(z.log_softmax(1).gather(1, column)[:, 0])
    return found


def case(dtype: torch.dtype, rows: int = ROWS, vocabulary: int = VOCABULARY, hidden_size: int = 896) -> Case:
    """Every way to draw, beside the product."""
    work = gemm_work(1, rows, vocabulary, hidden_size)
    own = {"prepare": lambda x: (x, _keys(x)), "work": work, "tolerance": _OWN[dtype]}
    return Case(
        f"{OP} [{rows}, {hidden_size}]",
        dtype,
        inputs=lambda seed: make_head(rows, dtype, vocabulary, hidden_size),
        reference=lambda x: {**gemm_answers(x), **answers(x)},
        variants=[
            *gemms(rows, 1, vocabulary=vocabulary),
            *(Variant(name, _ours(name), **own) for name in _CUTS),
            Variant(TORCH, _multinomial, work=work),
        ],
        memory=(PLAIN, NUCLEUS),
        seconds=8.0,
    )


def _bars(dtype: torch.dtype) -> list[Bar]:
    key = f"{OP} [{ROWS}, 896] {DTYPES[dtype]}"
    row = f"[{ROWS}, 896] x [V, 896]"
    return [
        Bar(OP, f"{NUCLEUS}, {row}", key, NUCLEUS, 1.10, "plain temperature sampling", [PLAIN]),
        Bar(OP, f"{NUCLEUS}, {row}", key, NUCLEUS, MEMORY_MB, kind="memory"),
        Bar(OP, f"plain, {row}", key, PLAIN, 0.5 if dtype is FP32 else 0.95, "the bare GEMM", GEMM, beside=into(GEMM)),
        Bar(OP, f"plain, {row}", key, PLAIN, 1.0, TORCH, [TORCH]),
    ]


CASES = [case(FP32), case(BF16)]
BARS = [*_bars(FP32), *_bars(BF16)]
