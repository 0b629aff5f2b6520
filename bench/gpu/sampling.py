"""A decode step's tokens from hidden states."""

from __future__ import annotations

import torch

from gpu.machine import Machine, Numbers, Result, measure, require_as_exact
from ppo_fast import ops

SLACK = 4.0  # of float32's own error; PyTorch's is far larger where its logits are 16-bit


def bench_sampling(machine: Machine, shape: tuple[int, int, int]) -> dict[str, Numbers]:
    """One token for each of 64 rows."""
    x = machine.make_head(shape).first(64)
    n = len(x.ids)
    keys = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)], 1).to(machine.device)

    ids, logprobs = ops.linear_sample(x.hidden, x.weight, keys=keys)
    exact = (x.hidden.double() @ x.weight.double().t()).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    plain = (x.hidden @ x.weight.t()).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    require_as_exact("linear_sample", (logprobs,), (plain,), (exact,), SLACK)

    def eager() -> Result:
        logprobs = (x.hidden @ x.weight.t()).float().log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), 1)
        return ids, logprobs.gather(1, ids)

    return measure(
        machine,
        {
            "ours": lambda: ops.linear_sample(x.hidden, x.weight, keys=keys),
            "ours, top-p 0.9": lambda: ops.linear_sample(x.hidden, x.weight, keys=keys, top_p=0.9, max_kept=64),
            "eager": eager,
            "GEMM": lambda: x.hidden @ x.weight.t(),
        },
    )
