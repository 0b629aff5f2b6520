"""The scaling plot: time and extra memory of the PPO loss over the number of tokens and the size of the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_scaling import AT_TOKENS
from head import GEMMS_2, VOCABULARY

_LINES = {
    "frozen head": ("ppo_fast, linear_ppo_loss", "C0"),
    "eager": ("PyTorch, full logits", "C3"),
    "TRL": ("TRL 1.16, chunked head", "C1"),
    "2 GEMMs": ("2 bare GEMMs", "0.5"),
}


def series(cases: Mapping[str, Any], over: str) -> dict[str, list[tuple[int, float, float | None]]]:
    """Per line (N or V, median seconds, MB of extra memory), ascending. Over N at the full V, over V at AT_TOKENS."""
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    for key, case in cases.items():
        match = re.match(r"scaling N=(\d+) V=(\d+)", key)
        if match is None:
            continue
        n, v = map(int, match.groups())
        if (v if over == "N" else n) != (VOCABULARY if over == "N" else AT_TOKENS):
            continue
        variants = dict(case["variants"])
        variants["2 GEMMs"] = {"seconds": sum(variants[name]["seconds"] for name in GEMMS_2)}
        for name in _LINES:
            if "seconds" in variants.get(name, {}):
                nbytes = variants[name].get("peak_bytes")
                point = (n if over == "N" else v, variants[name]["seconds"], nbytes and nbytes / 1e6)
                lines.setdefault(name, []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def scaling(result: Mapping[str, Any], path: Path) -> None:
    """Draws the picture from a result's JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex="col", sharey="row", layout="constrained")
    for column, (over, title) in enumerate((("N", f"V = {VOCABULARY:,}"), ("V", f"N = {AT_TOKENS}"))):
        lines = series(result["cases"], over)
        for name, points in lines.items():
            label, colour = _LINES[name]
            for row, field in enumerate((1, 2)):
                xy = [(point[0], point[field]) for point in points if point[field] is not None]
                if xy:
                    axes[row][column].plot(*zip(*xy, strict=True), "o-", color=colour, label=label)
        axes[0][column].set_title(title)
        axes[1][column].set_xlabel("tokens N" if over == "N" else "vocabulary V")
        measured = sorted({point[0] for points in lines.values() for point in points})
        for axis in axes[:, column]:
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(measured, [f"{x:,}" for x in measured])
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds, forward and backward")
    axes[1][0].set_ylabel("extra memory at the peak, MB")
    axes[0][0].legend(frameon=False)
    machine = result["machine"]
    figure.suptitle(f"PPO loss from hidden states, float32, frozen head; {machine['threads']} threads")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
