"""What was measured, as text."""

from __future__ import annotations

from gpu.machine import Numbers


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
    decode = results["decode"]
    say("rollout, 64 x (64+64)", {name: row for name, row in decode.items() if isinstance(row, dict)})
    print(f"  tokens/s {decode['tokens_per_second']}, equal greedy ids {decode['equal_greedy_ids']}")
    print(f"\nkernels/head_scores.py should hold _FUSED_TOKENS = {results['choice']['_FUSED_TOKENS']}")
    print(f"fastest tiles: {results['choice']['tiles']}")
    print(f"7B-shaped LoRA iteration: {results['iteration']}")
