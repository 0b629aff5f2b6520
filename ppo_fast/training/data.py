"""Prompts: read, checked, turned into token ids, and drawn without replacement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ppo_fast.errors import UserError

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset: what the model sees, and the columns that go to the reward functions."""

    prompt: str | Chat
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """The prompt as a person reads it: the last message of a chat."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def row(self) -> dict[str, Any]:
        """As a row of a dataset."""
        return {"prompt": self.prompt, **self.columns}


def read_prompts(dataset: Iterable[Mapping[str, Any]] | str | Path) -> list[Prompt]:
    """Prompts of a JSONL file, a list of rows or a ``datasets.Dataset``.

    Raises:
        UserError: no such file, a line that isn't JSON, no rows, or a row without a usable ``prompt``.
    """
    rows = _read_jsonl(Path(dataset)) if isinstance(dataset, (str, Path)) else list(dataset)
    if not rows:
        raise UserError("the dataset has no rows; PPO needs prompts to reply to")
    prompts = []
    for number, row in enumerate(rows, 1):
        if "prompt" not in row:
            raise UserError(
                f"row {number} of the dataset has no 'prompt' column (it has {', '.join(map(str, row)) or 'none'}); "
                "rename the column that holds the prompts"
            )
        prompts.append(Prompt(_checked(row["prompt"], number), {k: v for k, v in row.items() if k != "prompt"}))
    return prompts


def split_prompts(prompts: Sequence[Prompt], heldout: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held-out): the ``heldout`` prompts with the smallest SHA-256, so that a prompt never changes sides."""
    if not 0 <= heldout < len(prompts):
        raise UserError(f"heldout = {heldout} of {len(prompts)} prompts leaves none to train on; lower it")
    order = sorted(range(len(prompts)), key=lambda i: hashlib.sha256(_canonical(prompts[i]).encode()).digest())
    away = set(order[:heldout])
    return [p for i, p in enumerate(prompts) if i not in away], [p for i, p in enumerate(prompts) if i in away]


def dataset_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_canonical(prompt).encode() + b"\n")
    return digest.hexdigest()


def tokenize(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[list[int]]:
    """Token ids of each prompt, chats through the chat template, opened for the reply.

    Raises:
        UserError: an empty prompt, or one longer than ``limit`` tokens.
    """
    result = []
    for prompt in prompts:
        if isinstance(prompt.prompt, str):
            ids = tokenizer(prompt.prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt.prompt, add_generation_prompt=True, return_dict=False)
        if not ids:
            raise UserError(f"the prompt {prompt.text!r} has no tokens; remove it from the dataset")
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"the prompt {prompt.text[:60]!r}... has {len(ids)} tokens; with response_length the model's context "
                f"leaves {limit}: shorten it or lower response_length"
            )
        result.append(ids)
    return result


class PromptSampler:
    """Indices without replacement, reshuffled when used up; resumable to the draw."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def draw(self, count: int) -> list[int]:
        """The next ``count`` indices."""
        while len(self._order) < count:
            self._order += torch.randperm(self._size, generator=self._generator).tolist()
        drawn, self._order = self._order[:count], self._order[count:]
        return drawn

    def state(self) -> dict[str, Any]:
        """What :meth:`load` needs to go on from here."""
        return {"order": list(self._order), "generator": self._generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from ``state``."""
        self._order = list(state["order"])
        self._generator.set_state(state["generator"])


def _checked(prompt: Any, number: int) -> str | Chat:
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    if messages and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in messages):
        return messages
    raise UserError(
        f"the prompt in row {number} of the dataset is neither text nor a list of messages with 'role' and 'content': "
        f"{prompt!r:.80}"
    )


def _canonical(prompt: Prompt) -> str:
    return json.dumps(prompt.prompt, ensure_ascii=False, sort_keys=True)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"there is no dataset file {str(path)!r}; give a JSONL file with a 'prompt' in every line")
    rows = []
    # Not splitlines(): it also cuts at U+2028 and its like, which JSON strings may hold.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"line {number} of {path} isn't JSON ({error.msg}); write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} isn't a JSON object; write one object a line, with a 'prompt'")
        rows.append(row)
    return rows
