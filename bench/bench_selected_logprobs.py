"""Log-prob and entropy from logits that are there, against one read of them; the gradient in place, against a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import peers
from harness.case import DTYPES, Bar, Case, Expected, Variant, Work
from harness.timing import copies_beyond_cache
from head import VOCABULARY
from ppo_fast import ops

OP = "selected_logprobs"
ROWS = 256
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Logits:
    """Rows of logits, and gradients that come in from a loss."""

    logits: Tensor  # [N, V]
    ids: Tensor  # [N]
    c: Tensor  # [N] dloss/dlogprob
    e: Tensor  # [N] dloss/dentropy
    target: Tensor  # [N, V] memory that has been touched, for copies and gradients


def make_logits(seed: int, rows: int, vocabulary: int, dtype: torch.dtype) -> Logits:
    """Logits with a standard deviation of 3."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).mul_(3).to(dtype)
    ids = torch.randint(vocabulary, (rows,), generator=generator)
    c, e = torch.randn(2, rows, generator=generator).unbind(0)
    return Logits(logits, ids, c, e, logits.clone())


def answers(x: Logits) -> Mapping[str, Expected]:
    """In float64, row by row."""
    rows = []
    for row, token, c, e in zip(x.logits, x.ids, x.c.double(), x.e.double(), strict=True):
        table = row.double().log_softmax(-1)
        p, entropy = table.exp(), -(table.exp() * table).sum()
        gradient = -c * p - e * p * (table + entropy)
        gradient[token] += c
        rows.append((table[token], entropy, gradient[::97].clone(), gradient[token]))
    logprobs, entropy, gradient, own = (torch.stack(column) for column in zip(*rows, strict=True))
    scale = float(own.abs().max())
    return {
        "logprobs": Expected(logprobs),
        "entropy": Expected(entropy),
        "sum": Expected(x.logits.double().sum(), scale=float(x.logits.double().abs().sum())),
        "copy": Expected(x.logits.double()[:, ::97], (slice(None), slice(None, None, 97))),
        "d_logits": Expected(gradient, (slice(None), slice(None, None, 97)), scale=scale),
        "own d_logits": Expected(own, (torch.arange(len(own)), x.ids), scale=scale),
    }


def _named(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"logprobs": pair[0], "entropy": pair[1]}


def _before_backward(x: Logits) -> tuple[Logits, Tensor, tuple[Tensor, Tensor]]:
    # The gradient goes over the logits, so each call gets fresh ones, in memory that was touched before.
    logits = x.target.copy_(x.logits).detach().requires_grad_().view(x.logits.shape)
    return x, logits, ops.selected_logprobs(logits, x.ids, return_entropy=True, inplace_backward=True)


def _backward(prepared: tuple[Logits, Tensor, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, logits, outputs = prepared
    (gradient,) = torch.autograd.grad(outputs, logits, (x.c, x.e))
    return {"d_logits": gradient, "own d_logits": gradient}


def cases(dtype: torch.dtype, rows: int = ROWS, vocabulary: int = VOCABULARY) -> list[Case]:
    """Forward and backward for logits of one dtype."""
    nbytes = rows * vocabulary * dtype.itemsize
    read, copy = Work(bytes=nbytes), Work(bytes=2 * nbytes)

    def ours(x: Logits) -> dict[str, Tensor]:
        with torch.no_grad():
            return _named(ops.selected_logprobs(x.logits, x.ids, return_entropy=True))

    compiled = peers.compiled(peers.eager_logprobs)
    forward = (
        Variant("logits.sum()", lambda x: {"sum": x.logits.sum()}, work=read, tolerance=1e-3),
        Variant("ppo_fast", ours, work=read, tolerance=2e-5),
        Variant("eager", lambda x: _named(peers.eager_logprobs(x.logits, x.ids)), work=read),
        Variant("torch.compile", lambda x: _named(compiled(x.logits, x.ids)), work=read),
    )
    backward = (
        Variant("copy_", lambda x: {"copy": x.target.copy_(x.logits)}, work=copy),
        Variant("ppo_fast", _backward, _before_backward, work=copy, tolerance=2e-5 if dtype is FP32 else 1e-2),
    )
    shared = {
        "dtype": dtype,
        "inputs": lambda seed: make_logits(seed, rows, vocabulary, dtype),
        "reference": answers,
        "copies": copies_beyond_cache(nbytes),
        "seconds": 8.0,
    }
    return [
        Case(f"{OP} forward [{rows}, {vocabulary}]", variants=forward, **shared),
        Case(f"{OP} backward in place [{rows}, {vocabulary}]", variants=backward, **shared),
    ]


def _bars(dtype: torch.dtype) -> list[Bar]:
    forward = f"{OP} forward [{ROWS}, {VOCABULARY}] {DTYPES[dtype]}"
    backward = f"{OP} backward in place [{ROWS}, {VOCABULARY}] {DTYPES[dtype]}"
    row = f"log-prob and entropy, [{ROWS}, V]"
    limit = 1.0 if dtype is FP32 else 2.2
    faster = [("eager", 35), ("torch.compile", 4.5)] if dtype is FP32 else []
    return [
        Bar(OP, row, forward, "ppo_fast", limit, "`logits.sum()`", ["logits.sum()"]),
        *(Bar(OP, row, forward, "ppo_fast", times, name, [name], "at least") for name, times in faster),
        Bar(OP, "its backward into a touched buffer", backward, "ppo_fast", limit, "`copy_`", ["copy_"]),
    ]


CASES = [*cases(FP32), *cases(BF16)]
BARS = [*_bars(FP32), *_bars(BF16)]
