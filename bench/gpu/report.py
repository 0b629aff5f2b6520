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


def report_head(shape: str, head: Numbers) -> None:
    for part in ("gemms", "scoring", "frozen", "trainable"):
        say(f"{shape}: {part}", head[part])
        for bar, value in head[part].get("bars", {}).items():
            print(f"  {bar}: {value}")


def report_rows(rows: Numbers) -> None:
    for op, variants in rows.items():
        say(op, variants)


def report_choice(choice: Numbers) -> None:
    for n, rows in choice["by tokens"].items():
        say(f"scoring {n} tokens", rows)
    print(f"\nkernels/head_scores.py should hold _FUSED_TOKENS = {choice['_FUSED_TOKENS']}")
    print(f"fastest tiles: {choice['tiles']}")


def report_decode(decode: Numbers) -> None:
    say("rollout, 64 x (64+64)", {name: row for name, row in decode.items() if isinstance(row, dict)})
    print(f"  tokens/s {decode['tokens_per_second']}, equal greedy ids {decode['equal_greedy_ids']}")


def report(parts: dict[str, Numbers]) -> None:
    for name, found in parts.items():
        if "why" in found:
            print(f"\n{name}: {found['why']}")
        elif name.startswith("head "):
            report_head(name.removeprefix("head "), found)
        elif name == "rows":
            report_rows(found)
        elif name == "sampling":
            say("sampling, 64 rows", found)
        elif name == "choice":
            report_choice(found)
        elif name == "decode":
            report_decode(found)
        elif name == "iteration":
            print(f"\n7B-shaped LoRA iteration: {found}")
