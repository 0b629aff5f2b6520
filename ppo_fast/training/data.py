"""Prompts: read, checked, turned into token ids, and drawn without replacement."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ppo_fast.errors import UserError

Chat = list[dict[str, str]]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
    """(train, held-out): the ``heldout`` prompts with the smallest SHA-256, so that a prompt never changes sides.

    Rows with the same prompt stay together, so that no held-out prompt is trained on: where the last one is repeated,
    more than ``heldout`` rows are kept out.
    """
    if heldout < 0:
        raise UserError(f"heldout = {heldout} is negative; give the number of prompts to keep out of training")
    keys = [hashlib.sha256(_canonical(prompt)).digest() for prompt in prompts]
    away: set[bytes] = set()
    out = 0
    for key, rows in sorted(Counter(keys).items()):
        if out >= heldout:
            break
        away.add(key)
        out += rows
    if max(out, heldout) >= len(prompts):
        distinct = len(set(keys))
        repeated = f" ({distinct} of them distinct)" if distinct < len(keys) else ""
        raise UserError(f"heldout = {heldout} of {len(prompts)} prompts{repeated} leaves none to train on; lower it")
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for key, prompt in zip(keys, prompts, strict=True):
        sides[key in away].append(prompt)
    return sides


def dataset_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_canonical(prompt) + b"\n")
    return digest.hexdigest()


def tokenize(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[list[int]]:
    """Token ids of each prompt, chats through the chat template, opened for the reply.

    Raises:
        UserError: an empty prompt, one longer than ``limit`` tokens, or a chat that the tokenizer has no form for.
    """
    if limit is not None and limit < 1:
        excess = f"is {-limit} tokens longer than" if limit else "fills"
        raise UserError(f"response_length {excess} the model's context, and the prompt needs room too; lower it")
    result = []
    for prompt in prompts:
        if isinstance(prompt.prompt, str):
            ids = tokenizer(prompt.prompt)["input_ids"]
        else:
            ids = _chat_ids(prompt.prompt, tokenizer)
        if not ids:
            raise UserError(f"the prompt {prompt.text!r} has no tokens; remove it from the dataset")
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"the prompt {prompt.text[:60]!r}... has {len(ids)} tokens; beside response_length the model's context "
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


def _chat_ids(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    except (TemplateError, ValueError, TypeError) as error:
        if getattr(tokenizer, "chat_template", None) is None:
            raise UserError(
                "the prompts are chats (as data.template makes them) and the tokenizer has no chat template; drop "
                "data.template and give prompts as text, or use an instruct model"
            ) from error
        raise UserError(
            f"the tokenizer's chat template refuses the prompt {chat[-1]['content'][:60]!r} "
            f"({' '.join(str(error).split())}); change its messages"
        ) from error


def _checked(prompt: Any, number: int) -> str | Chat:
    messages = prompt if isinstance(prompt, list) else []
    if isinstance(prompt, str) or (messages and all(_is_message(message) for message in messages)):
        if _LONE_SURROGATE.search(json.dumps(prompt, ensure_ascii=False)):
            raise UserError(
                f"the prompt in row {number} of the dataset holds half of a surrogate pair, which is no character: "
                f"{prompt!a:.80}; remove it"
            )
        return prompt
    raise UserError(
        f"the prompt in row {number} of the dataset is neither text nor a list of messages with 'role' and 'content': "
        f"{prompt!r:.80}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _canonical(prompt: Prompt) -> bytes:
    # A Prompt made in Python may hold anything that str does.
    return json.dumps(prompt.prompt, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"there is no dataset file {str(path)!r}; give a JSONL file with a 'prompt' in every line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the dataset file {str(path)!r} isn't UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"the dataset file {str(path)!r} can't be read ({error.strerror}); give a file you may read"
        ) from error
    rows = []
    # Not splitlines(): it also cuts at U+2028 and its like, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
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
