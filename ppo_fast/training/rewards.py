"""Scores for finished replies: Python functions, reward models, or several of them added up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ppo_fast.errors import UserError
from ppo_fast.models.layers import fuse_layers
from ppo_fast.models.loading import disable_dropout, load_model, load_tokenizer
from ppo_fast.training.data import Chat, Prompt

RewardFunction = Callable[..., Sequence["float | None"]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """One batch's scores. None: unscored."""

    total: list[float | None]  # per reply, summed over the functions that applied
    by_function: dict[str, list[float | None]]


class RewardFunctions:
    """Calls every reward function on a batch and adds the results up.

    A function is called as ``f(prompts, completions, completion_ids=..., **columns)``, with the dataset's other columns
    as lists, and returns a number or None per reply. None from one of several functions means "not applicable here";
    None from all of them, or an exception, leaves the reply unscored: it is counted and takes no part in the update.
    On the first batch an exception or a wrong result is the user's to fix, and stops the run before it has written.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise UserError("no reward function is given; pass reward_funcs=, a function or a list of them")
        self._functions = {_name(f): f for f in functions}
        if len(self._functions) != len(functions):
            raise UserError("two reward functions share a name; give each its own __name__")
        self._weights = list(weights) if weights is not None else [1.0] * len(functions)
        if len(self._weights) != len(functions):
            raise UserError(f"{len(self._weights)} reward weights for {len(functions)} reward functions; give one each")
        self._proven = False

    @property
    def names(self) -> list[str]:
        """Of the functions, in order."""
        return list(self._functions)

    def __call__(self, prompts: Sequence[Prompt], completions: list[str], completion_ids: list[list[int]]) -> Scores:
        """Scores ``completions``, the decoded replies to ``prompts``."""
        replies: list[str | Chat] = [
            text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        names = dict.fromkeys(key for prompt in prompts for key in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        by_function = {
            name: self._call(name, function, [p.prompt for p in prompts], replies, completion_ids, columns)
            for name, function in self._functions.items()
        }
        total = [self._sum(row) for row in zip(*by_function.values(), strict=True)]
        if all(value is None for value in total):
            if not self._proven:
                raise UserError(
                    f"no reply of the first batch got a score: {' and '.join(self._functions)} returned None for all "
                    f"{len(total)}; return numbers where you can judge"
                )
            logger.warning("no reply of this batch of %d got a score; it changes nothing", len(total))
        self._proven = True
        return Scores(total, by_function)

    def _sum(self, row: tuple[float | None, ...]) -> float | None:
        applied = [weight * value for weight, value in zip(self._weights, row, strict=True) if value is not None]
        return sum(applied) if applied else None

    def _call(
        self,
        name: str,
        function: RewardFunction,
        prompts: list[str | Chat],
        completions: list[str | Chat],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> list[float | None]:
        try:
            result = function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            return _checked(name, result, len(prompts))
        except Exception as error:
            if not self._proven:
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"the reward function {name!r} raised {type(error).__name__}: {error}; it must return a number or "
                    "None for each completion"
                ) from error
            logger.warning("the reward function %r failed, %d replies are left unscored: %s", name, len(prompts), error)
            return [None] * len(prompts)


class RewardModel:
    """A sequence classifier with one label as a reward function: its logit on prompt and reply.

    ``batch_size`` says how many texts of a length in tokens go together.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        batch_size: Callable[[int], int],
    ) -> None:
        if isinstance(model, str):
            path, self._model = model, load_model(model, auto_class=AutoModelForSequenceClassification)
        else:
            path, self._model = model.config.name_or_path, model
        if self._model.config.num_labels != 1:
            raise UserError(f"the reward model {path!r} has {self._model.config.num_labels} labels; it must have one")
        self._tokenizer = tokenizer or load_tokenizer(path)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.config.use_cache = False  # of keys and values, which nobody would read
        disable_dropout(self._model)
        fuse_layers(self._model)
        self._model.requires_grad_(False).eval().to(device)
        self._batch_size = batch_size
        self.__name__ = path.rstrip("/").split("/")[-1] or type(self._model).__name__

    @torch.no_grad()
    def __call__(self, prompts: list[str | Chat], completions: list[str | Chat], **_: Any) -> list[float | None]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        batch = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        batch = batch.to(self._model.device)
        together = self._batch_size(batch["input_ids"].shape[1])
        parts = [{name: rows[i : i + together] for name, rows in batch.items()} for i in range(0, len(texts), together)]
        return torch.cat([self._model(**part).logits[:, 0].float() for part in parts]).tolist()

    def _text(self, prompt: str | Chat, completion: str | Chat) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        return self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _checked(name: str, result: Any, count: int) -> list[float | None]:
    try:
        values = list(result)
    except TypeError:
        raise UserError(f"the reward function {name!r} returned {result!r:.60}, not a list of numbers") from None
    if len(values) != count:
        raise UserError(
            f"the reward function {name!r} returned {len(values)} scores for {count} completions; return one each"
        )
    for value in values:
        if value is not None and not math.isfinite(_number(name, value)):
            raise UserError(f"the reward function {name!r} returned {value!r}; return a finite number, or None")
    return [None if value is None else float(value) for value in values]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"the reward function {name!r} returned {value!r}, which isn't a number or None") from None
