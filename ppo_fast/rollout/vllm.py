"""Replies from vLLM: the policy's weights go to an engine, token ids and the log-probs of the draw come back.

The weights are sent before every rollout, so an engine never samples from old ones, after a resumption or for the
reference either. Adapters are sent folded into their layers: nothing of LoRA reaches the engine. EOS ids, their ban
before ``min_new_tokens``, stop strings, limits and one seed per reply are vLLM's own settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ppo_fast.errors import UserError
from ppo_fast.models.merged import merged_weights
from ppo_fast.models.roles import Actor
from ppo_fast.models.tokens import pad_prompts
from ppo_fast.profiling import annotate
from ppo_fast.rollout.batch import Rollout
from ppo_fast.rollout.stops import StopStrings

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where it is asked for less, but for 0."""


@dataclass(frozen=True)
class Reply:
    """An engine's answer to one prompt."""

    ids: list[int]  # EOS included
    logprobs: list[float]  # nats, of each of the ids
    reason: str | None  # vLLM's finish_reason: stop (an EOS id or a stop string), length, or a failure


class Engine(Protocol):
    """vLLM in this process or behind a URL."""

    context: int
    """Tokens of a prompt and its reply together, at most."""

    def generate(
        self, prompts: list[list[int]], settings: list[dict[str, Any]], on_tokens: Callable[[int], None] | None
    ) -> list[Reply]:
        """One reply to each prompt, in their order; ``settings`` are fields of vLLM's ``SamplingParams``."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replaces the weights, by their names in a checkpoint, and forgets what was computed with the old ones."""


class VllmSampler:
    """`rollout.generate` by an engine.

    Raises:
        UserError: the engine's log-probs aren't those of the distribution it samples from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        _require_processed(engine)

    @torch.no_grad()
    def generate(
        self,
        actor: Actor,
        prompt_ids: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        eos_ids: tuple[int, ...],
        pad_id: int,
        seeds: Sequence[int],
        min_new_tokens: int = 0,
        stop_strings: StopStrings | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Rollout:
        """One reply to each prompt, sampled from ``softmax(logits / temperature)`` of ``actor`` as it is now.

        Arguments and result are those of `rollout.generate`. A seed gives the same reply again on one engine, and
        another one than `rollout.generate` makes of it.

        Raises:
            FloatingPointError: a log-prob is NaN or infinite.
            UserError: the engine failed, or has no room for a prompt and its reply.
        """
        longest = max(map(len, prompt_ids)) + max_new_tokens
        if longest > self._engine.context:
            raise UserError(
                f"a prompt of {longest - max_new_tokens} tokens and response_length {max_new_tokens} don't fit vLLM's "
                f"max_model_len of {self._engine.context}; start it with {longest}, or shorten either"
            )
        common: dict[str, Any] = {
            # Whatever bears on the distribution: an unset field is filled in from the model's generation_config.
            "temperature": float(temperature), "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "skip_special_tokens": False,
            # These EOS ids, and not those that vLLM finds beside the model.
            "ignore_eos": True, "stop_token_ids": list(eos_ids),
            "min_tokens": min_new_tokens, "max_tokens": max_new_tokens,
        }  # fmt: skip
        if stop_strings is not None:
            common |= {"stop": list(stop_strings.strings), "include_stop_str_in_output": True}
        with annotate("ppo_fast/vllm_weights"):
            self._engine.load(merged_weights(actor))
        with annotate("ppo_fast/vllm_generate"):
            replies = self._engine.generate(prompt_ids, [common | {"seed": int(seed)} for seed in seeds], on_tokens)
        _check(replies)
        return _rollout(prompt_ids, replies, pad_id, min_new_tokens, eos_ids).to(actor.device)


def _require_processed(engine: Engine) -> None:
    """A token that is the only one allowed has the log-prob 0 where it was drawn, and 0 for at most one token else."""
    alone = [{"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "ignore_eos": True, "allowed_token_ids": [token]}
             for token in (0, 1)]  # fmt: skip
    worst = max(abs(reply.logprobs[0]) for reply in engine.generate([[0], [0]], alone, None))
    if not worst < 1e-3:
        raise UserError(
            "vLLM's log-probs aren't those of the distribution it samples from (a token that was the only one allowed "
            f"got {worst:.3f} nats, not 0); start it with --logprobs-mode processed_logprobs"
        )


def _check(replies: list[Reply]) -> None:
    for reply in replies:
        if reply.reason not in ("stop", "length") or not reply.ids or len(reply.ids) != len(reply.logprobs):
            raise UserError(
                f"vLLM ended a reply of {len(reply.ids)} tokens and {len(reply.logprobs)} log-probs with "
                f"{reply.reason!r}, not with stop or length; see its log"
            )
        if not all(map(math.isfinite, reply.logprobs)):
            raise FloatingPointError("vLLM's log-probs aren't finite")


def _rollout(
    prompt_ids: list[list[int]], replies: list[Reply], pad_id: int, min_new_tokens: int, eos_ids: tuple[int, ...]
) -> Rollout:
    prompts, prompt_mask = pad_prompts(prompt_ids, pad_id)
    width = max(len(reply.ids) for reply in replies)
    ids = torch.tensor([reply.ids + [pad_id] * (width - len(reply.ids)) for reply in replies])
    lengths = torch.tensor([len(reply.ids) for reply in replies])
    return Rollout(
        token_ids=torch.cat([prompts, ids], dim=1),
        prompt_mask=prompt_mask,
        response_mask=torch.arange(width) < lengths[:, None],
        logprobs=torch.tensor([reply.logprobs + [0.0] * (width - len(reply.ids)) for reply in replies]),
        finished=torch.tensor([reply.reason == "stop" for reply in replies]),
        min_new_tokens=min_new_tokens,
        excluded_ids=tuple(eos_ids),
    )
