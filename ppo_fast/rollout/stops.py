"""Texts that end a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

# Tokens decoded beside those that the longest string can span: the first of a run may lose its leading space, or be
# the rest of a character that began before it.
_MARGIN = 4


@dataclass(frozen=True)
class StopStrings:
    """A reply ends with the token that completes one of ``strings``. Its tokens are actions like any other."""

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.strings or not all(isinstance(string, str) and string for string in self.strings):
            raise ValueError(f"strings must hold texts of at least one character, got {self.strings!r}")

    def end(self, ids: Sequence[int]) -> bool:
        """Whether the last of ``ids`` completes one of the strings."""
        span = max(len(string.encode()) for string in self.strings) + _MARGIN  # a token is a byte at least
        window = list(ids[-span:])
        text = self._text(window)
        found = [string for string in self.strings if string in text]
        if not found:
            return False
        before = self._text(window[:-1])
        return any(_occurrences(string, text) > _occurrences(string, before) for string in found)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _occurrences(string: str, text: str) -> int:
    """Overlapping ones, too."""
    return sum(text.startswith(string, at) for at in range(len(text)))
