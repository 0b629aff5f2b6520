"""The bench of the vocabulary ops: values, times, memory, and the table of bars.

    make bench                             everything; writes bench/results/ops-MACHINE.json, the plot, README's table
    make bench BENCH="--quick --only gae"  a look at some cases; writes nothing

Cases and bars stand in bench_*.py. A variant is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import bench_gae
import bench_linear_ppo_loss
import bench_linear_sample
import bench_linear_selected_logprobs
import bench_linear_token_loss
import bench_lora_linear
import bench_norms_and_gates
import bench_ppo_loss
import bench_scaling
import bench_selected_logprobs
import bench_small_linear
import plots
import readme
from harness.bars import judge
from harness.floors import measure_floors
from harness.memory import peak_bytes
from harness.results import header, machine_kind, write_result
from harness.run import add_memory, run_case, say_at_once, select
from harness.table import table

BENCH = Path(__file__).parent
MEASURED = (
    bench_selected_logprobs,
    bench_linear_selected_logprobs,
    bench_linear_ppo_loss,
    bench_linear_token_loss,
    bench_gae,
    bench_ppo_loss,
    bench_small_linear,
    bench_lora_linear,
    bench_norms_and_gates,
    bench_linear_sample,
)
CASES = [*(case for module in MEASURED for case in module.CASES), *bench_scaling.CASES]
BARS = [bar for module in MEASURED for bar in module.BARS]
QUICK_SECONDS, QUICK_ROUNDS = 2.0, 2


def main() -> int:
    """Runs what the command line chose. 1 if a variant's values were wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name contains a word")
    parser.add_argument("--quick", action="store_true", help="two rounds; long cases only by --only; no memory")
    parser.add_argument("--memory", action="store_true", help="with --quick, measure memory all the same")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--json", type=Path, help="write the results of any run there")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "VARIANT"), help="one measurement of peak memory, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        key, name = arguments.peak
        case = next(case for case in CASES if case.key == key)
        print(json.dumps({"peak_bytes": peak_bytes(case, name)}))
        return 0
    cases = select(CASES, arguments.only, long=bool(arguments.only) or not arguments.quick)
    if arguments.list:
        print("\n".join(case.key for case in cases))
        return 0

    started = time.perf_counter()
    floors = measure_floors()
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOPS" for name, rate in floors.gemm.items())
    print(f"read {floors.read / 1e9:.1f} GB/s, copy {floors.copy / 1e9:.1f} GB/s, GEMM {rates}", flush=True)
    limits = {"seconds": QUICK_SECONDS, "rounds": QUICK_ROUNDS} if arguments.quick else {}
    results = {}
    for case in cases:
        say_at_once(case.key)
        results[case.key] = run_case(case, floors, say_at_once, **limits)
        if arguments.memory or not arguments.quick:
            add_memory(case, results[case.key], Path(__file__), arguments.threads, say_at_once)
    bars = [judge(bar, results) for bar in BARS if not arguments.only or bar.case in results]
    print("\n" + table(bars))
    name = f"ops-{machine_kind(arguments.threads)}"
    whole = {
        "name": name,
        **header(BENCH, arguments.threads),
        "command": "make bench",
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "floors": floors.as_json(),
        "bars": bars,
        "cases": results,
    }
    if arguments.json:
        write_result(arguments.json, whole)
    if not (arguments.quick or arguments.only):
        write_result(BENCH / "results" / f"{name}.json", whole)
        plots.scaling(whole, BENCH / "results" / f"{name}-scaling.png")
        readme.rewrite()
        print(f"wrote {name}.json and its plot in bench/results, and the table in README.md")
    return int(any("refused" in variant for case in results.values() for variant in case["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
