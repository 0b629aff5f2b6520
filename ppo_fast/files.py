"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` beside ``path``, then moves it there: a reader never sees half a file.

    Lone surrogates, which a user's data may hold and UTF-8 cannot, are written as ``\\udXXX`` (valid in JSON).
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
