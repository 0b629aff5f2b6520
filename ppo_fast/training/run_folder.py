"""What a run leaves behind: config.yaml, metrics.jsonl, completions/, run_record.json. Written beside, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ppo_fast.errors import UserError
from ppo_fast.files import write_atomically

_METRICS = "metrics.jsonl"
_NUMBERED = re.compile(r"checkpoint-(\d+)|iteration-(\d+)\.jsonl")


class RunFolder:
    """The folder of one run. Nothing is created before :meth:`open`, and nothing in it is ever overwritten unseen."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_open = False

    def require_new(self) -> None:
        """Raises UserError if there is something in the folder already."""
        if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            raise UserError(
                f"{str(self.path)!r} is not empty; choose another output_dir, or continue that run with "
                "resume_from_checkpoint (--resume)"
            )

    def require_room(self, needed: int) -> None:
        """Raises UserError if the folder can't be made or written, or the disk has fewer than ``needed`` bytes free."""
        place = self.path.absolute()
        try:
            os.stat(place)  # says at once what no parent folder can: that the name itself is impossible
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(
                f"output_dir {str(self.path)!r} can't be used ({error.strerror}); choose another"
            ) from error
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise UserError(f"output_dir {str(self.path)!r}: {str(place)!r} is a file, not a folder; choose another")
        if not os.access(place, os.W_OK):
            raise UserError(f"{str(place)!r} can't be written to; choose another output_dir")
        free = shutil.disk_usage(place).free
        if free < needed:
            raise UserError(
                f"{str(place)!r} has {free / 2**20:.0f} MiB free and the run's checkpoints need {needed / 2**20:.0f}; "
                "free some space or choose an output_dir on another disk"
            )

    def open(self, settings: Mapping[str, Any]) -> None:
        """Creates the folder with its config.yaml."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "config.yaml").exists():
            write_atomically(self.path / "config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))
        self.is_open = True

    def rewind(self, iteration: int) -> None:
        """Makes the folder end with ``iteration``: what came later is moved into a folder superseded-N inside.

        A later checkpoint left in place would be taken for the newest of the run that goes on from here.
        """
        metrics = self.path / _METRICS
        lines = [line for line in metrics.read_text().split("\n") if line] if metrics.exists() else []
        # The last line of a killed run may be torn; it belongs to an iteration that is run again.
        kept = [line for line in lines if (number := _iteration(line)) is not None and number <= iteration]
        found = [*self.path.iterdir(), *(self.path / "completions").glob("*")]
        later = [
            path
            for path in found
            if (match := _NUMBERED.fullmatch(path.name)) and int(match[1] or match[2]) > iteration
        ]
        if not later and len(kept) == len(lines):
            return
        aside = self.path / f"superseded-{len(list(self.path.glob('superseded-*')))}"
        aside.mkdir()
        write_atomically(aside / _METRICS, "".join(line + "\n" for line in lines[len(kept) :]))
        for path in later:
            os.replace(path, aside / path.name)
        write_atomically(metrics, "".join(line + "\n" for line in kept))

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, on disk when this returns."""
        with (self.path / _METRICS).open("a") as file:
            file.write(json.dumps(dict(metrics)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_completions(self, iteration: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """completions/iteration-NNNNN.jsonl."""
        folder = self.path / "completions"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomically(folder / f"iteration-{iteration:05d}.jsonl", text)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """run_record.json."""
        write_atomically(self.path / "run_record.json", json.dumps(dict(record), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes ``folder`` when the body succeeds and vanishes when it doesn't."""
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        superseded = folder.with_name(f".{folder.name}.superseded")
        if folder.exists():  # the same iteration, saved by a run that was interrupted later
            os.replace(folder, superseded)
        os.replace(scratch, folder)
        shutil.rmtree(superseded, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _iteration(line: str) -> int | None:
    try:
        return int(json.loads(line)["iteration"])
    except (json.JSONDecodeError, KeyError):
        return None
