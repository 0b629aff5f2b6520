"""The decode loop: prompts enter free slots, then every running reply gets one token a step.

A prompt is computed once for all replies to it, except for its last token: that is the first one a reply feeds to the
decode step, so that every draw of every reply is made by the same code. A reply that ends leaves its slot to another
reply to its prompt or to the next prompt that waits. When nobody waits, the last running reply is copied over, and the
batch is a row smaller from then on; the copy takes about a hundredth of a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_fast.models.head import Head
from ppo_fast.models.roles import Actor
from ppo_fast.models.tokens import pad_prompts
from ppo_fast.profiling import annotate
from ppo_fast.rollout.batch import MOST_KEPT, Rollout
from ppo_fast.rollout.linears import small_linears, swaps
from ppo_fast.rollout.slots import Pass, SlotCache, check_cache
from ppo_fast.rollout.step import DecodeStep, Row, Sampler, has_graphs
from ppo_fast.rollout.stops import StopStrings

MOST_SLOTS = 64
"""Replies that run at a time unless told otherwise: as many rows as `small_linear` takes in one reading of a weight."""

PREFILL_TOKENS, PREFILL_TOKENS_GPU = 192, 4096
"""Prompt tokens in one pass. A CPU's products gain nothing from more, and activations take memory; not measured on a
GPU, whose products want a few thousand rows."""

LOWEST_TEMPERATURE = 1e-6
"""But for 0. Logits of a few hundred, divided by it, stay far from the end of float32."""


@torch.no_grad()
def generate(
    actor: Actor,
    prompt_ids: list[list[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float,
    eos_ids: tuple[int, ...],
    pad_id: int,
    seeds: Sequence[int],
    top_k: int | None = None,
    top_p: float | None = None,
    min_new_tokens: int = 0,
    stop_strings: StopStrings | None = None,
    slots: int | None = None,
    dtype: torch.dtype | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Rollout:
    """One reply to each prompt, sampled from ``softmax(logits / temperature)``, cut by top-k, then by top-p.

    Token ``t`` of a reply is decided by its prompt, its own key ``(seed, t)`` and the weights. The other prompts, their
    number and order, how many slots there are and who shares a batch with whom enter through rounding alone: our
    kernels (linear layers, a decode step's attention, the draw) give a row the same bits in any company, PyTorch's
    operations between them and its attention over prompts don't always. Two tokens closer than that (some 1e-6 of a
    logit in float32) may then change places, and the reply goes on from there. One call repeated gives the same bits,
    with the same number of threads.

    Args:
        actor: whose distribution is sampled.
        prompt_ids: ``B`` token lists, none of them empty. Equal ones are computed once.
        temperature: 0 is greedy.
        top_k, top_p: as `ops.linear_sample` has them: top-p implies ``top_k = MOST_KEPT``.
        max_new_tokens: the longest reply, in tokens, EOS included; one number, or one per reply.
        eos_ids: each of them ends a reply. None at all is allowed.
        seeds: one int64 per reply.
        min_new_tokens: before so many tokens EOS is excluded from the distribution, and no stop string ends a reply.
        stop_strings: texts that end a reply, too.
        slots: replies that run at a time, the others wait; None for all, up to ``MOST_SLOTS``.
        dtype: bfloat16 multiplies by weights rounded to it, on CPUs with the C++ extension; None for the weights' own.
            The rest is computed as it is, and log-probs are those of the distribution that is sampled from.
        on_tokens: called after each step with the number of tokens that step added.

    Returns:
        The rollout in the order of the prompts, on the actor's device, log-probs in float32 (of the greedy choice at
        temperature 1 when ``temperature`` is 0).

    Raises:
        FloatingPointError: logits are NaN or infinite.
        ValueError: no prompt or an empty one, one that leaves no room in the model's context, an id outside the
            vocabulary, a temperature that is negative, not finite, or between 0 and ``LOWEST_TEMPERATURE``, a top_k or
            top_p out of range, lengths or slots below 1, not one seed and limit per reply, a dtype that can't be had.
        UserError: the model has no cache of keys and values, or more than that.
    """
    limits = [max_new_tokens] * len(prompt_ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    head = actor.head
    _check_arguments(prompt_ids, limits, seeds, min_new_tokens, slots)
    _check_cut(temperature, top_k, top_p)
    _check_model(actor, head, prompt_ids, limits, min_new_tokens, eos_ids)
    if dtype is not None:
        if not swaps(actor.device):
            raise ValueError(f"dtype {dtype} needs the C++ kernels on a CPU; leave it out, or load the model in it")
        head = dataclasses.replace(head, weight=head.weight.to(dtype))

    replies = [
        _Reply(tuple(prompt), int(seed), limit) for prompt, seed, limit in zip(prompt_ids, seeds, limits, strict=True)
    ]
    capacity = max(len(reply.prompt) + reply.limit - 1 for reply in replies)
    cache = SlotCache(min(slots or MOST_SLOTS, len(replies)), capacity)
    banned = eos_ids if min_new_tokens else ()
    sampler = Sampler(head, cache.slots, temperature=temperature, top_k=top_k, top_p=top_p, banned_early=banned)
    device = actor.device
    step = DecodeStep(actor.model.base_model, cache, sampler, device, captured=has_graphs(device))
    batch = _Batch(actor, replies, cache, step, _Ends(eos_ids, min_new_tokens, stop_strings))
    linears = small_linears(actor.model.base_model, dtype) if swaps(actor.device) else contextlib.nullcontext()
    with actor.activated(), cache.attached(actor.model), linears, annotate("ppo_fast/decode"):
        while batch.fill():
            batch.step()
            if on_tokens is not None:
                on_tokens(len(batch.running))
            batch.drop()
    return dataclasses.replace(
        _rollout(replies, pad_id, actor.device), min_new_tokens=min_new_tokens, excluded_ids=tuple(eos_ids)
    )


@dataclass
class _Reply:
    prompt: tuple[int, ...]
    seed: int
    limit: int
    fed: int = 0
    """Tokens in the cache: of the prompt, then its own."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Under top-k or top-p, int32 ids of the set that each token was drawn from."""
    finished: bool = False


@dataclass(frozen=True)
class _Ends:
    """What ends a reply."""

    eos_ids: tuple[int, ...]
    min_new_tokens: int
    stop_strings: StopStrings | None

    def bans_eos(self, reply: _Reply) -> bool:
        """For the next token."""
        return len(reply.ids) < self.min_new_tokens and bool(self.eos_ids)

    def ended(self, reply: _Reply) -> bool:
        """By EOS, by a stop string, or at the limit; the first two make it finished."""
        reply.finished = reply.ids[-1] in self.eos_ids or (
            self.stop_strings is not None and len(reply.ids) >= self.min_new_tokens and self.stop_strings.end(reply.ids)
        )
        return reply.finished or len(reply.ids) == reply.limit


class _Batch:
    """Who runs in which slot, and who waits."""

    def __init__(self, actor: Actor, replies: list[_Reply], cache: SlotCache, step: DecodeStep, ends: _Ends) -> None:
        self.running: list[_Reply] = []  # reply i is in slot i
        self._body, self._device = actor.model.base_model, actor.device
        self._cache, self._step, self._ends = cache, step, ends
        self._waiting: dict[tuple[int, ...], deque[_Reply]] = {}  # by prompt
        for reply in replies:
            self._waiting.setdefault(reply.prompt, deque()).append(reply)

    def fill(self) -> bool:
        """Gives the free slots to those who wait. False when nobody is left."""
        new, copies = [], []
        while self._waiting and len(self.running) < self._cache.slots:
            reply, slot = self._next(next(iter(self._waiting))), len(self.running)
            source = next((i for i, other in enumerate(self.running) if other.prompt == reply.prompt), None)
            if source is None:
                new.append(slot)
            else:
                copies.append((source, slot, reply.fed))
            self.running.append(reply)
        self._compute_prompts(new)
        for copy in copies:
            self._cache.copy(*copy)
        return bool(self.running)

    def step(self) -> None:
        """One more token for each running reply."""
        drawn = self._step(
            [
                Row(
                    token=reply.ids[-1] if reply.ids else reply.prompt[-1],
                    column=reply.fed,
                    seed=reply.seed,
                    position=len(reply.ids),
                    early=self._ends.bans_eos(reply),
                )
                for reply in self.running
            ]
        )
        for reply, token, logprob in zip(self.running, drawn.ids, drawn.logprobs, strict=True):
            if math.isnan(logprob):
                raise FloatingPointError(
                    f"the model has no next token to give: after {reply.fed + 1} tokens its logits hold NaN or +inf, "
                    "or are all -inf"
                )
            reply.fed += 1
            reply.ids.append(token)
            reply.logprobs.append(logprob)
        for reply, kept in zip(self.running, drawn.kept, strict=False):
            reply.kept.append(kept)

    def drop(self) -> None:
        """Takes out the replies that have ended. From the last slot on, so that the one moved up has been asked."""
        for slot in reversed(range(len(self.running))):
            reply = self.running[slot]
            if not self._ends.ended(reply):
                continue
            if reply.prompt in self._waiting:  # the prompt's columns are there
                self.running[slot] = self._next(reply.prompt)
                continue
            last = self.running.pop()
            if last is not reply:
                self.running[slot] = last
                self._cache.copy(len(self.running), slot, last.fed)

    def _next(self, prompt: tuple[int, ...]) -> _Reply:
        queue = self._waiting[prompt]
        reply = queue.popleft()
        if not queue:
            del self._waiting[prompt]
        reply.fed = len(prompt) - 1
        return reply

    def _compute_prompts(self, slots: list[int]) -> None:
        """Fills the cache with the prompts of these slots, but for each one's last token."""
        at_once = PREFILL_TOKENS if self._device.type == "cpu" else PREFILL_TOKENS_GPU
        slots = sorted(slots, key=lambda slot: self.running[slot].fed, reverse=True)
        while slots and (longest := self.running[slots[0]].fed):
            count = max(1, at_once // longest)
            rows, slots = slots[:count], slots[count:]
            prompts = [self.running[slot].prompt[:-1] for slot in rows]
            ids = [[*prompt, *[prompt[-1] if prompt else 0] * (longest - len(prompt))] for prompt in prompts]
            for start in range(0, longest, at_once):
                part = [row[start : start + at_once] for row in ids]
                tokens, where, first = (
                    torch.tensor(values, device=self._device) for values in (part, rows, [start] * len(rows))
                )
                length = tokens.shape[1]
                self._cache.forward(self._body, tokens, Pass(where, first, length, start + length, running=False))


def _rollout(replies: list[_Reply], pad_id: int, device: torch.device) -> Rollout:
    prompts, prompt_mask = pad_prompts([list(reply.prompt) for reply in replies], pad_id)
    width = max(len(reply.ids) for reply in replies)
    ids = torch.tensor([reply.ids + [pad_id] * (width - len(reply.ids)) for reply in replies])
    logprobs = torch.tensor([reply.logprobs + [0.0] * (width - len(reply.ids)) for reply in replies])
    lengths = torch.tensor([len(reply.ids) for reply in replies])
    rollout = Rollout(
        token_ids=torch.cat([prompts, ids], dim=1),
        prompt_mask=prompt_mask,
        response_mask=torch.arange(width) < lengths[:, None],
        logprobs=logprobs,
        finished=torch.tensor([reply.finished for reply in replies]),
        kept_ids=_padded_sets([reply.kept for reply in replies], width),
    )
    return rollout.to(device)


def _padded_sets(sets: list[list[Tensor]], width: int) -> Tensor | None:
    """int64 [B, width, widest set], filled up with -1; None if nothing was cut."""
    widest = max((len(kept) for row in sets for kept in row), default=0)
    if not widest:
        return None
    padded = torch.full((len(sets), width, widest), -1, dtype=torch.int64)
    for row, kept_sets in enumerate(sets):
        for t, kept in enumerate(kept_sets):
            padded[row, t, : len(kept)] = kept
    return padded


def _check_arguments(
    prompt_ids: list[list[int]],
    limits: list[int],
    seeds: Sequence[int],
    min_new_tokens: int,
    slots: int | None,
) -> None:
    if min((len(ids) for ids in prompt_ids), default=0) == 0:
        raise ValueError(f"prompt_ids must hold prompts of at least one token, got {prompt_ids}")
    for name, values in (("max_new_tokens", limits), ("seeds", seeds)):
        if len(values) != len(prompt_ids):
            raise ValueError(f"{name} must hold one number per prompt, {len(prompt_ids)}, got {len(values)}")
    if min(limits) < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {min(limits)}")
    if not 0 <= min_new_tokens <= min(limits):
        raise ValueError(f"min_new_tokens must be from 0 to max_new_tokens = {min(limits)}, got {min_new_tokens}")
    if slots is not None and slots < 1:
        raise ValueError(f"slots must be >= 1, got {slots}")


def _check_cut(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be >= 0 and finite, got {temperature}")
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, got {temperature}")
    if top_k is not None and not 1 <= top_k <= MOST_KEPT:
        raise ValueError(f"top_k must be from 1 to {MOST_KEPT}, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


def _check_model(
    actor: Actor,
    head: Head,
    prompt_ids: list[list[int]],
    limits: list[int],
    min_new_tokens: int,
    eos_ids: tuple[int, ...],
) -> None:
    check_cache(actor.model)
    context = getattr(actor.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    for prompt, limit in zip(prompt_ids, limits, strict=True):
        if len(prompt) + limit > context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens {limit} don't fit the model's context of "
                f"{context}"
            )
    if min_new_tokens and head.softcap is not None:  # which would bring the -inf of a banned token back
        raise ValueError("min_new_tokens needs a head without softcap; leave it at 0 for this model")
    vocabulary = head.weight.shape[0]
    for name, ids in (("prompt_ids", [token for prompt in prompt_ids for token in prompt]), ("eos_ids", eos_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{name} has the id {wrong}, outside of the model's vocabulary of {vocabulary}")
