"""Runs every bench, prints the report and writes the JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import torch

import gpu
from gpu.choice import bench_choice
from gpu.decode import bench_decode
from gpu.head import bench_head
from gpu.iteration import bench_iteration
from gpu.machine import Machine, Numbers
from gpu.report import report
from gpu.rows import bench_rows
from gpu.sampling import bench_sampling
from harness.results import header
from ppo_fast import ops
from ppo_fast.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=gpu.__doc__.splitlines()[0])
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
    results["decode"] = bench_decode(machine)
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
