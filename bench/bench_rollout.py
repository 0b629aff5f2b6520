"""Rollouts against transformers' own ``generate``: the same prompts, lengths and sampling, interleaved.

    make bench-rollout                                   everything; writes bench/results/rollout.json (15 minutes)
    make bench-rollout BENCH="--quick --only smollm2"    a look at some cases; writes nothing

SmolLM2-135M is the model of the demo, "qwen2.5-0.5b" its shape with random weights. Before anything is timed, log-probs
of a short rollout are compared with those of a full forward. Memory is what a rollout takes at its peak beyond weights
and cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import readme
from harness.bars import MB, judge
from harness.case import DTYPES, Bar, Case, Expected, Variant, Work
from harness.check import WrongValuesError
from harness.floors import measure_floors
from harness.memory import peak_bytes
from harness.results import header, write_result
from harness.run import add_memory, run_case, say_at_once, select
from harness.table import table
from ppo_fast.models.roles import Actor
from ppo_fast.recipes.smollm2 import ALIAS, ensure_model
from ppo_fast.rollout import Rollout, generate
from shapes import QWEN, random_model

BENCH = Path(__file__).parent
OP = "rollout.generate"
OWN, STOCK = "ours", "generate"
PROMPT, NEW, SLOTS = 64, 64, 16
TEMPERATURE = 0.7
LONGEST = 256
# Against a full forward, nats: the step-0 bounds of the trainer.
LOGPROB_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5}
MEMORY_BAR = 64 * 2**20 / MB


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """In evaluation mode, with an EOS that never comes."""
    if name == "smollm2-135m":
        model = AutoModelForCausalLM.from_pretrained(ensure_model(ALIAS), dtype=dtype)
    else:
        model = random_model(QWEN, dtype)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Work64:
    """Prompts of 64 tokens, and how long each reply shall become."""

    model: PreTrainedModel
    actor: Actor
    prompts: Tensor  # [B, PROMPT]
    lengths: list[int]

    def first(self, new: int) -> Work64:
        """The same prompts with short replies."""
        return replace(self, lengths=[min(new, length) for length in self.lengths])


def work(name: str, dtype: torch.dtype, lengths: Sequence[int], seed: int) -> Work64:
    """Token ids at random: what they say changes no time."""
    model = model_of(name, dtype)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(10, model.config.vocab_size - 200, (len(lengths), PROMPT), generator=generator)
    return Work64(model, Actor(model), prompts, list(lengths))


def rollout(inputs: Work64) -> Rollout:
    """Through ppo_fast, SLOTS replies at a time."""
    return generate(
        inputs.actor, inputs.prompts.tolist(), max_new_tokens=inputs.lengths, temperature=TEMPERATURE, eos_ids=(),
        pad_id=0, seeds=range(len(inputs.lengths)), slots=SLOTS,
    )  # fmt: skip


def ours(inputs: Work64) -> dict[str, Tensor]:
    """Lengths of the replies."""
    return {"lengths": rollout(inputs).lengths.double()}


@torch.no_grad()
def stock(inputs: Work64) -> dict[str, Tensor]:
    """In batches of SLOTS, each of which goes on until its longest reply is done."""
    lengths = []
    for start in range(0, len(inputs.lengths), SLOTS):
        prompts, wanted = inputs.prompts[start : start + SLOTS], inputs.lengths[start : start + SLOTS]
        settings = GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=max(wanted), pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        out = inputs.model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
        )
        lengths += [min(length, out.shape[1] - PROMPT) for length in wanted]
    return {"lengths": torch.tensor(lengths, dtype=torch.float64)}


@torch.no_grad()
def expected(inputs: Work64) -> Mapping[str, Expected]:
    """The lengths asked for; first of all our log-probs are compared with those of a full forward."""
    short = inputs.first(4)
    got = rollout(replace(short, prompts=short.prompts[:2], lengths=short.lengths[:2]))
    states = inputs.actor.hidden(got)
    logprobs = (inputs.actor.head.logits(states.flatten(0, 1)).double() / TEMPERATURE).log_softmax(-1)
    chosen = logprobs.gather(1, got.response_ids.reshape(-1, 1)).view(got.logprobs.shape)
    gap = float((chosen - got.logprobs).masked_fill(~got.response_mask, 0.0).abs().max())
    if not gap <= LOGPROB_BOUND[inputs.model.dtype]:
        raise WrongValuesError(f"log-probs are off by {gap:.1e} nats of a full forward's")
    return {"lengths": Expected(torch.tensor(inputs.lengths, dtype=torch.float64))}


def least_work(name: str, dtype: torch.dtype, lengths: Sequence[int]) -> Work:
    """Every token through every matrix once, at full speed; every matrix from memory once a step of SLOTS replies."""
    H, depth, wide, V = (
        (576, 30, 576 * 2 + 192 * 2, 49_152) if name == "smollm2-135m" else (896, 24, 896 * 2 + 256, 151_936)
    )
    inner = 1536 if name == "smollm2-135m" else 4864
    body, head = depth * H * (wide + 3 * inner), H * V
    tokens, steps = sum(lengths), math.ceil(sum(lengths) / SLOTS)
    flops = 2.0 * (body * (len(lengths) * PROMPT + tokens) + head * tokens)
    return Work(flops=flops, bytes=float(steps * (body + head) * dtype.itemsize))


def case(name: str, what: str, dtype: torch.dtype, lengths: Sequence[int], **settings: Any) -> Case:
    """Both ways of one shape."""
    least = least_work(name, dtype, lengths)
    return Case(
        f"{name} {what}",
        dtype,
        inputs=lambda seed: work(name, dtype, lengths, seed),
        reference=expected,
        variants=[Variant(OWN, ours, work=least), Variant(STOCK, stock, work=least)],
        first_rows=lambda inputs: inputs.first(1),
        seconds=0.0,
        **settings,
    )


def drawn_lengths(count: int) -> list[int]:
    """min(256, lognormal), median 32, sigma 1, seed 0."""
    normal = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (32 * normal.exp()).clamp(1, LONGEST).round().int().tolist()


EQUAL, UNEQUAL = f"{SLOTS} x ({PROMPT}+{NEW})", f"64 prompts, {SLOTS} slots"
CASES = [
    case(name, EQUAL, dtype, [NEW] * SLOTS, memory=(OWN,), rounds=3)
    for name in ("smollm2-135m", "qwen2.5-0.5b")
    for dtype in (torch.float32, torch.bfloat16)
] + [case("smollm2-135m", UNEQUAL, torch.float32, drawn_lengths(64), rounds=2, long=True)]


def _bars() -> list[Bar]:
    speed = {("smollm2-135m", "fp32"): 1.5, ("smollm2-135m", "bf16"): 2.0}
    bars = []
    for one in CASES:
        name, _, what = one.name.partition(" ")
        limit = 2.5 if what == UNEQUAL else speed.get((name, DTYPES[one.dtype]), 1.6)
        bars.append(
            Bar(OP, one.name, one.key, of=OWN, limit=limit, against="`model.generate`", to=(STOCK,), sense="at least")
        )
        if one.memory:
            bars.append(Bar(OP, one.name, one.key, of=OWN, limit=MEMORY_BAR, kind="memory"))
    return bars


BARS = _bars()


def beyond_cache(one: Case) -> int:
    """Peak bytes of one rollout beyond weights and cache."""
    inputs = one.inputs(0)
    config = inputs.model.config
    head_size = config.hidden_size // config.num_attention_heads
    column = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * inputs.model.dtype.itemsize
    return peak_bytes(one, OWN) - SLOTS * (PROMPT + NEW - 1) * column


def main() -> int:
    """Runs what the command line chose. 1 if a variant's values were wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name contains a word")
    parser.add_argument("--quick", action="store_true", help="one round; the long case only by --only; no memory")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--json", type=Path, help="write the results of any run there")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "VARIANT"), help="one measurement of peak memory, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        one = next(one for one in CASES if one.key == arguments.peak[0])
        print(json.dumps({"peak_bytes": beyond_cache(one)}))
        return 0
    floors = measure_floors()
    results = {}
    for one in select(CASES, arguments.only, long=bool(arguments.only) or not arguments.quick):
        say_at_once(one.key)
        results[one.key] = run_case(one, floors, say_at_once, rounds=1 if arguments.quick else None)
        tokens = sum(one.inputs(0).lengths)
        for name, variant in results[one.key]["variants"].items():
            if "seconds" in variant:
                variant["tokens_per_second"] = tokens / variant["seconds"]
                say_at_once(f"  {name:<42} {variant['tokens_per_second']:10.1f} tokens/s")
        if not arguments.quick:
            add_memory(one, results[one.key], Path(__file__), arguments.threads, say_at_once)
        model_of.cache_clear()
    bars = [judge(bar, results) for bar in BARS if bar.case in results]
    print("\n" + table(bars))
    whole = {
        "name": "rollout",
        **header(BENCH, arguments.threads),
        "command": "make bench-rollout",
        "floors": floors.as_json(),
        "bars": bars,
        "cases": results,
    }
    if arguments.json:
        write_result(arguments.json, whole)
    elif not (arguments.quick or arguments.only):
        write_result(BENCH / "results" / "rollout.json", whole)
        readme.rewrite()
        print("wrote rollout.json in bench/results, and the table in README.md")
    return int(any("refused" in variant for found in results.values() for variant in found["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
