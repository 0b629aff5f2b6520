"""Runs the GPU tests and every bench, each within its share of the time, writes the JSON and prints the report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gpu
from gpu.choice import bench_choice
from gpu.decode import bench_decode
from gpu.head import bench_head
from gpu.iteration import bench_iteration
from gpu.machine import Machine, Numbers
from gpu.parts import Part, run_parts
from gpu.report import report
from gpu.rows import bench_rows
from gpu.sampling import bench_sampling
from harness.results import header, write_result
from ppo_fast import ops

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = "tests"
SHARES = {TESTS: 100, "head": 80, "rows": 30, "sampling": 20, "choice": 70, "decode": 60, "iteration": 50}


def benches(machine: Machine) -> dict[str, Callable[[], Numbers]]:
    """By name, whose first word has the share."""
    shape = machine.heads[0]
    run = ROOT / "runs" / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    heads = {f"head {' x '.join(map(str, at))}": functools.partial(bench_head, machine, at) for at in machine.heads}
    return {
        **heads,
        "rows": lambda: bench_rows(machine, shape[2]),
        "sampling": lambda: bench_sampling(machine, shape),
        "choice": lambda: bench_choice(machine, shape),
        "decode": lambda: bench_decode(machine),
        "iteration": lambda: bench_iteration(machine, run),
    }


def bench(machine: Machine, name: str) -> Numbers:
    torch.manual_seed(0)
    interpreted = machine.dry and name not in ("decode", "iteration")
    with ops.backends.force("triton") if interpreted else contextlib.nullcontext():
        return benches(machine)[name]()


def parts(machine: Machine, folder: Path) -> dict[str, Part]:
    commands = {}
    if importlib.util.find_spec("pytest"):
        commands[TESTS] = ["pytest", "-q", str(ROOT / "tests/kernels/gpu")]
    else:
        print("pytest is not installed: the GPU tests are left out, the bench still checks values before it times")
    for name in benches(machine):
        commands[name] = ["gpu", "--part", name, "--json", str(folder / f"{name}.json"), *["--dry"] * machine.dry]
    return {name: Part(SHARES[name.split()[0]], [sys.executable, "-m", *command]) for name, command in commands.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=gpu.__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, kernels interpreted")
    parser.add_argument("--json", type=Path, help="where to write")
    parser.add_argument("--seconds", type=float, default=450, help="for all parts together (default: 450)")
    parser.add_argument("--part", help="one bench alone, here and without a limit; writes nothing but its numbers")
    arguments = parser.parse_args()
    machine = Machine(arguments.dry)
    if not machine.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --dry runs what a CPU can")
    slug = "dry" if machine.dry else "-".join(torch.cuda.get_device_name().lower().split())
    path = arguments.json or (ROOT / "runs" if machine.dry else ROOT / "bench" / "results") / f"gpu-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        write_result(path, bench(machine, arguments.part))
        return

    started = time.perf_counter()
    results: Numbers = {"dry": machine.dry, **header(Path(__file__).parent, torch.get_num_threads())}
    results["gpu"] = None if machine.dry else torch.cuda.get_device_name()

    def keep(found: dict[str, Numbers]) -> None:
        results["parts"] = found
        results["minutes"] = round((time.perf_counter() - started) / 60, 2)
        write_result(path, results)

    with tempfile.TemporaryDirectory() as folder:
        failed = run_parts(parts(machine, Path(folder)), Path(folder), arguments.seconds, keep)
    report(results["parts"])
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    if failed:
        sys.exit(f"without {', '.join(failed)}")


if __name__ == "__main__":
    main()
