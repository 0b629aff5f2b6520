"""What dispatch should hold: scoring by `head_scores` or through the vendor's GEMM, and the tiles that were fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.machine import Machine, Numbers, measure, setting
from head import Head
from ppo_fast import ops


def bench_choice(machine: Machine, shape: tuple[int, int, int]) -> Numbers:
    """Both ways of scoring by number of tokens; the fused one with its fixed and with the fastest tile."""
    x = machine.make_head(shape)
    ways = {"fused": {"PPO_FAST_SCORING": "fused"}, "vendor": {"PPO_FAST_SCORING": "vendor"}}
    if not machine.dry:  # Triton times candidates on a GPU only
        ways["fused, autotuned"] = {"PPO_FAST_SCORING": "fused", "PPO_FAST_AUTOTUNE": "1"}
    table: Numbers = {}
    for n in machine.scored:
        part = x.first(min(n, shape[0]))

        def scored(variables: dict[str, str], part: Head = part) -> Callable[[], object]:
            def call() -> object:
                with torch.no_grad(), setting(**variables):
                    return ops.linear_selected_logprobs(part.hidden, part.weight, part.ids, return_entropy=True)

            return call

        table[str(n)] = measure(machine, {name: scored(variables) for name, variables in ways.items()})
    faster = [n for n in machine.scored if table[str(n)]["fused"]["ms"] <= table[str(n)]["vendor"]["ms"]]
    from ppo_fast.kernels import head_scores

    tiles = {" ".join(map(str, problem)): list(tile) for problem, tile in head_scores._fastest.items()}
    return {"by tokens": table, "_FUSED_TOKENS": max(faster, default=0), "tiles": tiles}
