"""The folder of a run, read: settings, metrics, record, and the held-out evaluation where there is one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_fast.errors import UserError
from ppo_fast.evaluation.heldout import Evaluation, load

_TORN = "the file was cut off or edited; `ppo-fast train ... --resume` puts a torn end right"


@dataclass(frozen=True)
class Run:
    """What a run wrote."""

    folder: Path
    config: dict[str, Any]
    """config.yaml."""
    metrics: tuple[dict[str, Any], ...]
    """metrics.jsonl, one row an iteration in order of ``iteration``. Never empty."""
    record: dict[str, Any]
    """run_record.json: versions, machine, identities of model and data, cost, start and finish."""
    evaluation: Evaluation | None
    """evaluation.json; None before ``ppo-fast eval``."""

    def has_completions(self, iteration: int) -> bool:
        """Whether the replies of that iteration were kept."""
        return self._completions_path(iteration).is_file()

    def completions(self, iteration: int) -> list[dict[str, Any]]:
        """The replies of one iteration as rows of prompt, completion, score, rewards, finished, length.

        Raises UserError when they were not kept.
        """
        path = self._completions_path(iteration)
        if not path.is_file():
            raise UserError(f"{path} does not exist: the completions of iteration {iteration} were not kept")
        return _read_rows(path)

    def _completions_path(self, iteration: int) -> Path:
        return self.folder / "completions" / f"iteration-{iteration:05d}.jsonl"


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder. Raises UserError when there is none, it is not a run, or not one iteration is written."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: give the output_dir of a run")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} holds no config.yaml, so it is not a run: give the output_dir of `ppo-fast train`")
    record_path, metrics_path = path / "run_record.json", path / "metrics.jsonl"
    record = _read_record(record_path) if record_path.is_file() else {}
    metrics = _read_rows(metrics_path) if metrics_path.is_file() else []
    if not metrics:
        raise UserError(f"the run in {path} has not written one iteration yet: wait for it, or start it again")
    # A run resumed from a checkpoint writes the iterations after it again: the later row is the one that was kept.
    by_iteration: dict[int, dict[str, Any]] = {}
    for row in metrics:
        if "iteration" not in row:
            raise UserError(f"{metrics_path} has a row without an iteration: it was not written by `ppo-fast train`")
        by_iteration[int(row["iteration"])] = row
    evaluation_path = path / "evaluation.json"
    return Run(
        folder=path,
        config=_read_config(path / "config.yaml"),
        metrics=tuple(by_iteration[number] for number in sorted(by_iteration)),
        record=record,
        evaluation=load(evaluation_path) if evaluation_path.is_file() else None,
    )


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            rows.append(_parse_object(line, f"line {number} of {path}"))
    return rows


def _read_record(path: Path) -> dict[str, Any]:
    return _parse_object(path.read_text(encoding="utf-8"), str(path))


def _parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error}): {_TORN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object: {_TORN}")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML ({error}): the file was cut off or edited") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no settings: the file was cut off or edited")
    return value
