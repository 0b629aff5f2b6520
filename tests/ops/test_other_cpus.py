"""The extension on x86-64 CPUs that lack what this machine may have: under QEMU's user-mode emulation.

QEMU raises SIGILL for an instruction of a set that the emulated CPU has not got, so a run that ends well has met none.
PyTorch itself starts there in some twenty seconds: a long proof.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

from ppo_fast.ops import backends

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64, part of qemu-user"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="about x86 instructions"),
    pytest.mark.skipif(backends.available()[:2] == ["eager"], reason="needs the C++ extension"),
]

# Every op that has C++ kernels, each dtype and a width with a tail, on the path chosen for this CPU; then in plain
# PyTorch. Prints the path and the largest difference relative to the largest value.
PROGRAM = """
import json
import torch
from ppo_fast import backends
from ppo_fast.ops import (decode_attention, gae, linear_ppo_loss, linear_sample, linear_selected_logprobs, lora_linear,
                          ppo_loss, rms_norm, selected_logprobs, small_linear, swiglu, value_loss, whiten)

torch.manual_seed(0)
B, T, H, V = 3, 11, 33, 2501
mask = torch.rand(B, T) > 0.2
x, y, z = (torch.randn(B, T) for _ in range(3))
ids = torch.randint(V, (B, T))

def results():
    out = [*gae(x, y, mask, return_moments=True), whiten(x, mask)]
    for loss, leaf in ((ppo_loss, x), (value_loss, y)):
        leaf = leaf.clone().requires_grad_()
        total = loss(leaf, 0.9 * leaf.detach(), z, mask)[0]
        out += [total.detach(), *torch.autograd.grad(total, leaf)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        logits = (3 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
        pair = selected_logprobs(logits, ids, mask=mask, temperature=0.8, return_entropy=True)
        out += [p.detach() for p in pair] + [*torch.autograd.grad(sum(p.sum() for p in pair), logits)]
        hidden, weight = (torch.randn(n, H, generator=torch.Generator().manual_seed(2)).to(dtype) for n in (B * T, V))
        hidden, weight = hidden.reshape(B, T, H).requires_grad_(), weight.requires_grad_()
        pair = linear_selected_logprobs(hidden, weight, ids, mask=mask, return_entropy=True)
        out += [p.detach() for p in pair] + [*torch.autograd.grad(sum(p.sum() for p in pair), (hidden, weight))]
        rows = hidden.detach().flatten(0, 1)
        keys = torch.arange(2 * len(rows)).reshape(-1, 2)
        for cut in ({}, {"top_k": 50, "top_p": 0.9}):
            drawn, *values = linear_sample(rows, weight.detach(), keys=keys, temperature=6, return_entropy=True, **cut)
            out += [drawn.double(), *values]
        total = linear_ppo_loss(hidden, weight, ids, x - 8, y, mask)[0]
        out += [total.detach(), *torch.autograd.grad(total, (hidden, weight))]
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
        up, gate, scale, down_a, up_b = (draw(*s).requires_grad_() for s in ((70, H), (70, H), (H,), (5, H), (41, 5)))
        layer, bias = draw(41, H), draw(41)
        for made, leaves in (
            (lora_linear(up, layer, down_a, up_b, bias=bias, gate=gate), (up, gate, down_a, up_b)),
            (swiglu(gate, up), (gate, up)),
            (rms_norm(up, scale), (up, scale)),
        ):
            out += [made.detach(), *torch.autograd.grad(made.sum(), leaves)]
        out += [small_linear(up.detach(), layer, bias)]
        out += [decode_attention(draw(2, 6, 1, 20), draw(2, 3, 17, 20), draw(2, 3, 17, 20), torch.tensor([17, 9]))]
    return out

got = results()
with backends.force("eager"):
    wanted = results()
# In units of the precision of each result.
worst = max(
    float((a.double() - b.double()).abs().max() / b.double().abs().max()) / torch.finfo(b.dtype).eps
    if b.dtype != torch.float64 else float((a - b).abs().max() / b.abs().max()) / 1e-7
    for a, b in zip(got, wanted)
)
print(json.dumps({"path": backends()["gae"]["cpu"], "available": backends.available(), "worst": worst}))
"""


@pytest.mark.parametrize(("cpu", "path"), [("Haswell", "avx2"), ("IvyBridge", "portable"), ("Nehalem", "portable")])
def test_runs_on_an_older_cpu(cpu: str, path: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PPO_FAST_REQUIRE_EXT": "1"}
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", cpu, sys.executable, "-c", PROGRAM],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["path"] == path
    assert not {"avx512", "avx512_bf16", *(["avx2"] if path == "portable" else [])} & set(got["available"])
    assert got["worst"] < 64
