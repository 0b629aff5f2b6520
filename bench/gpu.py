"""The ops on a GPU against what a user would have instead, and the choice dispatch should make. Run by bench/gpu.sh.

    GEMMs        the head's three products, 16-bit: what the linear ops are measured against
    scoring      log-prob and entropy without gradients
    actor loss   PPO loss with entropy bonus, forward and backward, head frozen and trainable
    sampling     a decode step's tokens from hidden states
    rows         ops on logits, advantages and log-probs that are there already
    choice       scoring by `head_scores` or through the vendor's GEMM, by number of tokens
    iteration    one PPO iteration of a 7B-shaped model with LoRA, random weights: its peak memory

A variant's values are compared with float64 before it is timed: ours must be at least as near as plain PyTorch.
Variants of a case are timed in turns, and the medians of their times are set against each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import peers
from harness.results import header
from ppo_fast import ops
from ppo_fast.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
CHECKED_ROWS = 64
ENTROPY_COEF = 0.01
BAR_GEMMS, BAR_EXTRA = 1.2, 1 << 30

Result = tuple[Tensor, ...]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where it runs: a GPU, or with ``dry`` a CPU that only shows that every line runs."""

    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16  # Triton's interpreter multiplies bfloat16 as integers

    @property
    def rounds(self) -> int:
        return 1 if self.dry else 7

    @property
    def heads(self) -> list[tuple[int, int, int]]:
        """(tokens, H, V)"""
        return [(12, 32, 301)] if self.dry else [(8192, 4096, 151_936), (4096, 896, 151_936)]

    @property
    def rows(self) -> tuple[int, int]:
        """[B, T] of the row ops."""
        return (2, 40) if self.dry else (512, 1024)

    @property
    def scored(self) -> tuple[int, ...]:
        return (1, 20) if self.dry else (1, 16, 64, 256, 1024, 2048)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, backend="aot_eager" if self.dry else "inductor")

    def milliseconds(self, call: Callable[[], object]) -> float:
        if self.dry:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_of(self, call: Callable[[], object]) -> int | None:
        """Bytes that a call has allocated at most, beside what was there; None without a GPU."""
        if self.dry:
            call()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def setting(**variables: str) -> Iterator[None]:
    """Environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def measure(machine: Machine, variants: dict[str, Callable[[], object]]) -> dict[str, Numbers]:
    """Median time and peak memory of each variant, timed in turns after two calls to warm up."""
    found: dict[str, Numbers] = {}
    for name, call in variants.items():
        try:
            call()
            peak = machine.peak_of(call)
        except torch.OutOfMemoryError:
            found[name] = {"ms": None, "peak_bytes": None, "why": "out of memory"}
            continue
        found[name] = {"ms": None, "peak_bytes": peak}
    times: dict[str, list[float]] = {name: [] for name, row in found.items() if "why" not in row}
    for _ in range(machine.rounds):
        for name, rounds in times.items():
            rounds.append(machine.milliseconds(variants[name]))
    for name, rounds in times.items():
        found[name]["ms"] = round(statistics.median(rounds), 4)
    return found


def require_as_exact(what: str, ours: Result, theirs: Result, exact: Result) -> list[float]:
    """Our largest errors; exits where one is larger than PyTorch's in the same dtype, or than two roundings of it."""
    errors = []
    for mine, plain, truth in zip(ours, theirs, exact, strict=True):
        error = float((mine.double() - truth).abs().max())
        rounding = 2 * torch.finfo(mine.dtype).eps * max(1.0, float(truth.abs().max()))
        if not error <= max(float((plain.double() - truth).abs().max()), rounding):
            sys.exit(f"{what}: the error against float64 is {error:.3g}, more than PyTorch's; not timed")
        errors.append(error)
    return errors


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


def exact_rows(x: Head, n: int) -> Result:
    """Log-probs, entropies and d_hidden of the mean PPO loss of the first n tokens, in float64."""
    small = x.first(n)
    hidden = small.hidden.double().requires_grad_()
    z = hidden @ small.weight.double().t()
    table = z.log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    logprobs = table.gather(1, small.ids[:, None])[:, 0]
    losses = peers.ppo_terms(logprobs, entropy, small.old.double(), small.advantages.double(), ENTROPY_COEF)
    (d_hidden,) = torch.autograd.grad(losses.mean(), hidden)
    return logprobs.detach(), entropy.detach(), d_hidden


def our_loss(hidden: Tensor, weight: Tensor, x: Head) -> Tensor:
    loss, _ = ops.linear_ppo_loss(
        hidden[None], weight, x.ids[None], x.old[None], x.advantages[None], x.mask[None], entropy_coef=ENTROPY_COEF
    )
    return loss


def with_gradients(loss: Callable[[Tensor, Tensor], Tensor], x: Head, trainable: bool) -> Callable[[], Result]:
    def call() -> Result:
        hidden = x.hidden.detach().requires_grad_()
        weight = x.weight.detach().requires_grad_(trainable)
        return torch.autograd.grad(loss(hidden, weight), (hidden, weight) if trainable else (hidden,))

    return call


# ---------------------------------------------------------------------------------------------------------------- cases


def bench_gemms(machine: Machine, x: Head) -> dict[str, Numbers]:
    gradient = torch.randn(len(x.ids), x.weight.shape[0], device=machine.device, dtype=machine.dtype)
    return measure(
        machine,
        {
            "GEMM 1": lambda: x.hidden @ x.weight.t(),
            "GEMM 2": lambda: gradient @ x.weight,
            "GEMM 3": lambda: gradient.t() @ x.hidden,
        },
    )


def bench_head(machine: Machine, shape: tuple[int, int, int]) -> Numbers:
    """GEMMs, scoring and the actor loss at one shape."""
    x = make_head(machine, shape)
    n = min(CHECKED_ROWS, shape[0])
    small, exact = x.first(n), exact_rows(x, n)
    with torch.no_grad():
        plain = peers.eager_linear_logprobs(small.hidden, small.weight, small.ids)
        for way in ("fused", "vendor"):
            with setting(PPO_FAST_SCORING=way):
                ours = ops.linear_selected_logprobs(small.hidden, small.weight, small.ids, return_entropy=True)
            require_as_exact(f"scoring, {way}", ours, plain, exact[:2])
    eager = with_gradients(
        lambda h, w: peers.eager_linear_ppo(h, w, small.ids, small.old, small.advantages, ENTROPY_COEF), small, False
    )
    mine = with_gradients(lambda h, w: our_loss(h, w, small), small, False)
    errors = require_as_exact("actor loss", mine(), eager(), exact[2:])

    def scored(way: str) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad(), setting(PPO_FAST_SCORING=way):
                return ops.linear_selected_logprobs(x.hidden, x.weight, x.ids, return_entropy=True)

        return call

    def without_grad(function: Callable[..., Any]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return function(x.hidden, x.weight, x.ids)

        return call

    gemms = bench_gemms(machine, x)
    scoring = {
        "ours": scored(""),
        "ours, fused": scored("fused"),
        "ours, vendor": scored("vendor"),
        "eager": without_grad(peers.eager_linear_logprobs),
        "torch.compile": without_grad(machine.compiled(peers.eager_linear_logprobs)),
    }
    results: Numbers = {"errors": errors, "gemms": gemms, "scoring": measure(machine, scoring)}

    rest = x.ids, x.old, x.advantages, ENTROPY_COEF
    compiled = machine.compiled(peers.eager_linear_ppo)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ours": lambda h, w: our_loss(h, w, x),
        "eager": lambda h, w: peers.eager_linear_ppo(h, w, *rest),
        "torch.compile": lambda h, w: compiled(h, w, *rest),
    }
    if peers.NO_TRL is None:
        losses["TRL"] = lambda h, w: peers.trl_trainers_linear_ppo(h, w, *rest)
    for name, trainable in (("frozen", False), ("trainable", True)):
        variants = {who: with_gradients(loss, x, trainable) for who, loss in losses.items()}
        found = measure(machine, variants)
        used = ("GEMM 1", "GEMM 2", "GEMM 3")[: 3 if trainable else 2]
        results[name] = {**found, "bars": judged(found, [gemms[gemm]["ms"] for gemm in used], x, trainable)}
    return results


def judged(found: dict[str, Numbers], gemms: list[float | None], x: Head, trainable: bool) -> Numbers:
    """The three bars of the actor loss; None where something could not be measured."""
    ours, eager = found["ours"], found["eager"]["ms"]
    known = [ms for ms in gemms if ms is not None]
    d_weight = 4 * x.weight.numel() if trainable else 0
    extra = None if ours["peak_bytes"] is None else ours["peak_bytes"] - d_weight
    against_gemms = ours["ms"] / sum(known) if ours["ms"] and len(known) == len(gemms) else None
    return {
        "over the GEMMs": against_gemms,
        "at most 1.2x of the GEMMs": None if against_gemms is None else against_gemms <= BAR_GEMMS,
        "never slower than eager": None if not (ours["ms"] and eager) else ours["ms"] <= eager,
        "bytes beside d_weight": extra,
        "under 1 GiB beside d_weight": None if extra is None else extra < BAR_EXTRA,
    }


def bench_rows(machine: Machine, vocabulary: int) -> Numbers:
    """The ops on [B, T] and on logits."""
    B, T = machine.rows
    generator = torch.Generator(machine.device).manual_seed(0)
    how: dict[str, Any] = {"device": machine.device, "generator": generator}
    x = torch.randn(4, B, T, **how)
    mask = torch.ones(B, T, dtype=torch.bool, device=machine.device)
    logits = torch.randn(4 * B, vocabulary, **how)
    ids = torch.randint(vocabulary, (4 * B,), **how)

    def ppo(function: Callable[[Tensor], Tensor]) -> Callable[[], Result]:
        def call() -> Result:
            leaf = x[0].detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf)

        return call

    rest = x[1], x[2], mask
    compiled_ppo, compiled_rows = machine.compiled(peers.eager_ppo), machine.compiled(peers.eager_logprobs)
    return {
        "selected_logprobs": measure(
            machine,
            {
                "ours": lambda: ops.selected_logprobs(logits, ids, return_entropy=True),
                "eager": lambda: peers.eager_logprobs(logits, ids),
                "torch.compile": lambda: compiled_rows(logits, ids),
                "one read": lambda: logits.sum(),
            },
        ),
        "ppo_loss": measure(
            machine,
            {
                "ours": ppo(lambda p: ops.ppo_loss(p, *rest, entropy=x[3], entropy_coef=ENTROPY_COEF)[0]),
                "eager": ppo(lambda p: peers.eager_ppo(p, *rest, x[3], ENTROPY_COEF)),
                "torch.compile": ppo(lambda p: compiled_ppo(p, *rest, x[3], ENTROPY_COEF)),
            },
        ),
        "gae": measure(
            machine,
            {
                "ours": lambda: ops.gae(x[0], x[1], mask, return_moments=True),
                "Python loop": lambda: peers.loop_gae(x[0], x[1], mask, 1.0, 0.95),
            },
        ),
    }


def bench_sampling(machine: Machine, shape: tuple[int, int, int]) -> dict[str, Numbers]:
    """One token for each of 64 rows."""
    x = make_head(machine, shape).first(64)
    n = len(x.ids)
    keys = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)], 1).to(machine.device)

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


def bench_choice(machine: Machine, shape: tuple[int, int, int]) -> Numbers:
    """Both ways of scoring by number of tokens; the fused one with its fixed and with the fastest tile."""
    x = make_head(machine, shape)
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


def bench_iteration(machine: Machine, folder: Path) -> Numbers:
    """One PPO iteration of a Qwen2-7B-shaped model with LoRA, all roles on one copy of its random weights."""
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    from ppo_fast.training import PPOConfig, PPOTrainer

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "word": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    large = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    tiny = dict.fromkeys(large, 2) | {"vocab_size": 301, "hidden_size": 16}
    config = Qwen2Config(
        **(tiny if machine.dry else large), tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    trainer = PPOTrainer(
        model,
        reward_funcs=lambda prompts, completions, completion_ids, **columns: [float(len(x)) for x in completion_ids],
        args=PPOConfig(
            output_dir=str(folder),
            response_length=4 if machine.dry else 128,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1 if machine.dry else 4,
            num_ppo_epochs=1,
            total_episodes=2 if machine.dry else 8,
            gradient_checkpointing=True,
            temperature=1.0,
            dtype=str(machine.dtype).removeprefix("torch."),
            save_steps=0,
        ),
        train_dataset=[{"prompt": "word"}],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    start = time.perf_counter()
    peak = machine.peak_of(trainer.train)
    return {"seconds": round(time.perf_counter() - start, 1), "peak_bytes_beside_weights": peak}


# --------------------------------------------------------------------------------------------------------------- report


def say(title: str, rows: dict[str, Numbers]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        if "ms" not in row:
            continue
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:10.0f} MiB"
        print(f"  {name:18} {row.get('why') or format(row['ms'], '10.3f') + ' ms'}{memory}")


def report(results: Numbers) -> None:
    for shape, head in results["heads"].items():
        for part in ("gemms", "scoring", "frozen", "trainable"):
            say(f"{shape}: {part}", head[part])
            for bar, value in head[part].get("bars", {}).items():
                print(f"  {bar}: {value}")
    say("sampling, 64 rows", results["sampling"])
    for op, rows in results["rows"].items():
        say(op, rows)
    for n, rows in results["choice"]["by tokens"].items():
        say(f"scoring {n} tokens", rows)
    print(f"\nkernels/head_scores.py should hold _FUSED_TOKENS = {results['choice']['_FUSED_TOKENS']}")
    print(f"fastest tiles: {results['choice']['tiles']}")
    print(f"7B-shaped LoRA iteration: {results['iteration']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, kernels interpreted")
    parser.add_argument("--json", type=Path, help="where to write")
    arguments = parser.parse_args()
    machine = Machine(arguments.dry)
    if not machine.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --dry runs what a CPU can")
    torch.manual_seed(0)
    started = time.perf_counter()
    with ops.backends.force("triton") if machine.dry else contextlib.nullcontext():
        results: Numbers = {"dry": machine.dry, **header(Path(__file__).parent, torch.get_num_threads())}
        results["gpu"] = None if machine.dry else torch.cuda.get_device_name()
        results["heads"] = {" x ".join(map(str, shape)): bench_head(machine, shape) for shape in machine.heads}
        results["rows"] = bench_rows(machine, machine.heads[0][2])
        results["sampling"] = bench_sampling(machine, machine.heads[0])
        results["choice"] = bench_choice(machine, machine.heads[0])
    run = ROOT / "runs" / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    results["iteration"] = bench_iteration(machine, run)
    results["minutes"] = round((time.perf_counter() - started) / 60, 2)
    report(results)
    slug = "dry" if machine.dry else "-".join(torch.cuda.get_device_name().lower().split())
    path = arguments.json or (ROOT / "runs" if machine.dry else ROOT / "bench" / "results") / f"gpu-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(results, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


if __name__ == "__main__":
    main()
