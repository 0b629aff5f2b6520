"""One JSON file a kind of machine: what was measured, where, with which versions, at which commit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import ppo_fast
from harness.timing import last_level_cache
from ppo_fast.files import write_atomically

PACKAGES = ("torch", "ppo_fast", "triton", "transformers", "trl", "torchrl", "numpy")


def processor() -> str:
    """The processor's name as it gives it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0].strip() if names else platform.machine()


def instruction_sets() -> list[str]:
    """Those that matter here and that the processor has."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


def machine_kind(threads: int) -> str:
    """What the file is named after; machines of one kind share it. No host name."""
    best = next(reversed(instruction_sets()), platform.machine())
    slug = re.sub(r"[^a-z0-9]+", "-", f"{processor()} {best} {threads} threads".lower())
    return slug.strip("-")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The commit that is checked out, with "+changes" where a tracked file differs; None without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def header(folder: Path, threads: int) -> dict[str, Any]:
    """Machine, versions and commit; no host name and no path."""
    return {
        "machine": {
            "processor": processor(),
            "instruction_sets": instruction_sets(),
            "cores": os.cpu_count(),
            "threads": threads,
            "last_level_cache": last_level_cache(),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": commit(folder),
        "backends": ppo_fast.backends(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """As JSON, whole or not at all."""
    write_atomically(path, json.dumps(result, indent=1) + "\n")
