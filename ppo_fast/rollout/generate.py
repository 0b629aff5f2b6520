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
from typing import Any

import torch
from torch import Tensor

from ppo_fast import ops
from ppo_fast.models.head import Head
from ppo_fast.models.roles import Actor
from ppo_fast.models.tokens import pad_prompts
from ppo_fast.profiling import annotate
from ppo_fast.rollout.batch import Rollout
from ppo_fast.rollout.packed import packed_linears, packs
from ppo_fast.rollout.slots import Pass, SlotCache, check_cache
from ppo_fast.rollout.stops import StopStrings

MOST_SLOTS = 64
"""Replies that run at a time unless told otherwise: as many rows as `small_linear` takes in one reading of a weight."""

MOST_KEPT = 1024
"""Tokens that top-k and top-p leave at most: each is stored with its position, and scored again in training."""

PREFILL_TOKENS = 192
"""Prompt tokens in one pass. The products gain nothing from more, and activations take memory."""


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
            vocabulary, a temperature that is negative or not finite, a top_k or top_p out of range, lengths or slots
            below 1, not one seed and limit per reply, a dtype that can't be had.
        UserError: the model has no cache of keys and values, or more than that.
    """
    limits = [max_new_tokens] * len(prompt_ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    head = actor.head
    _check_arguments(prompt_ids, limits, seeds, min_new_tokens, slots)
    _check_cut(temperature, top_k, top_p)
    _check_model(actor, head, prompt_ids, limits, min_new_tokens, eos_ids)
    if dtype is not None:
        if not packs(actor.device):
            raise ValueError(f"dtype {dtype} needs the C++ kernels on a CPU; leave it out, or load the model in it")
        head = dataclasses.replace(head, weight=head.weight.to(dtype))

    replies = [
        _Reply(tuple(prompt), int(seed), limit) for prompt, seed, limit in zip(prompt_ids, seeds, limits, strict=True)
    ]
    capacity = max(len(reply.prompt) + reply.limit - 1 for reply in replies)
    batch = _Batch(actor, replies, SlotCache(min(slots or MOST_SLOTS, len(replies)), capacity))
    cut = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampler = _Sampler(head, cut, eos_ids, min_new_tokens, stop_strings)
    packed = packed_linears(actor.model.base_model, dtype) if packs(actor.device) else contextlib.nullcontext()
    with actor.activated(), batch.cache.attached(actor.model), packed, annotate("ppo_fast/decode"):
        while batch.fill():
            sampler.draw(batch.running, batch.step())
            if on_tokens is not None:
                on_tokens(len(batch.running))
            batch.drop(sampler.ended)
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


class _Batch:
    """Who runs in which slot, and who waits."""

    def __init__(self, actor: Actor, replies: list[_Reply], cache: SlotCache) -> None:
        self.cache = cache
        self.running: list[_Reply] = []  # reply i is in slot i
        self._body, self._device = actor.model.base_model, actor.device
        self._waiting: dict[tuple[int, ...], deque[_Reply]] = {}  # by prompt
        for reply in replies:
            self._waiting.setdefault(reply.prompt, deque()).append(reply)

    def fill(self) -> bool:
        """Gives the free slots to those who wait. False when nobody is left."""
        new, copies = [], []
        while self._waiting and len(self.running) < self.cache.slots:
            reply, slot = self._next(next(iter(self._waiting))), len(self.running)
            source = next((i for i, other in enumerate(self.running) if other.prompt == reply.prompt), None)
            if source is None:
                new.append(slot)
            else:
                copies.append((source, slot, reply.fed))
            self.running.append(reply)
        self._compute_prompts(new)
        for copy in copies:
            self.cache.copy(*copy)
        return bool(self.running)

    def step(self) -> Tensor:
        """Feeds each running reply its last token; the hidden states [n, H] that decide the next."""
        ids = [[reply.ids[-1] if reply.ids else reply.prompt[-1]] for reply in self.running]
        columns = [reply.fed for reply in self.running]
        for reply in self.running:
            reply.fed += 1
        return self._forward(ids, list(range(len(ids))), columns, max(columns) + 1, running=True)[:, 0]

    def drop(self, ended: Callable[[_Reply], bool]) -> None:
        """Takes out the replies that have ended. From the last slot on, so that the one moved up has been asked."""
        for slot in reversed(range(len(self.running))):
            reply = self.running[slot]
            if not ended(reply):
                continue
            if reply.prompt in self._waiting:  # the prompt's columns are there
                self.running[slot] = self._next(reply.prompt)
                continue
            last = self.running.pop()
            if last is not reply:
                self.running[slot] = last
                self.cache.copy(len(self.running), slot, last.fed)

    def _next(self, prompt: tuple[int, ...]) -> _Reply:
        queue = self._waiting[prompt]
        reply = queue.popleft()
        if not queue:
            del self._waiting[prompt]
        reply.fed = len(prompt) - 1
        return reply

    def _compute_prompts(self, slots: list[int]) -> None:
        """Fills the cache with the prompts of these slots, but for each one's last token."""
        slots = sorted(slots, key=lambda slot: self.running[slot].fed, reverse=True)
        while slots and (longest := self.running[slots[0]].fed):
            count = max(1, PREFILL_TOKENS // longest)
            rows, slots = slots[:count], slots[count:]
            prompts = [self.running[slot].prompt[:-1] for slot in rows]
            ids = [[*prompt, *[prompt[-1] if prompt else 0] * (longest - len(prompt))] for prompt in prompts]
            for start in range(0, longest, PREFILL_TOKENS):
                part = [row[start : start + PREFILL_TOKENS] for row in ids]
                self._forward(part, rows, [start] * len(rows), start + len(part[0]))

    def _forward(
        self, ids: list[list[int]], slots: list[int], columns: list[int], end: int, running: bool = False
    ) -> Tensor:
        tokens, rows, first = (torch.tensor(values, device=self._device) for values in (ids, slots, columns))
        return self.cache.forward(self._body, tokens, Pass(rows, first, tokens.shape[1], end, running))


class _Sampler:
    """What is drawn from the hidden states, and when that ends a reply."""

    def __init__(
        self,
        head: Head,
        cut: dict[str, Any],  # temperature, top_k, top_p
        eos_ids: tuple[int, ...],
        min_new_tokens: int,
        stop_strings: StopStrings | None,
    ) -> None:
        self._weight, self._arguments = head.weight, head.kwargs() | cut
        self._eos_ids, self._min_new_tokens, self._stop_strings = eos_ids, min_new_tokens, stop_strings
        self._cuts = cut["top_k"] is not None or cut["top_p"] not in (None, 1)
        if min_new_tokens:
            bias = torch.zeros(len(head.weight), device=head.weight.device) if head.bias is None else head.bias.float()
            self._bias_without_eos = bias.index_fill(
                0, torch.tensor(eos_ids, dtype=torch.int64, device=bias.device), -torch.inf
            )

    def draw(self, replies: list[_Reply], hidden: Tensor) -> None:
        """One more token for each."""
        early = [len(reply.ids) < self._min_new_tokens for reply in replies]
        if any(early):
            # Two products, for as long as replies of both kinds run together.
            rows = torch.tensor(early, device=hidden.device)
            self._draw([r for r, e in zip(replies, early, strict=True) if e], hidden[rows], bias=self._bias_without_eos)
            replies, hidden = [r for r, e in zip(replies, early, strict=True) if not e], hidden[~rows]
        if replies:
            self._draw(replies, hidden)

    def _draw(self, replies: list[_Reply], hidden: Tensor, **without_eos: Tensor) -> None:
        keys = torch.tensor([[reply.seed, len(reply.ids)] for reply in replies], device=hidden.device)
        try:
            ids, logprobs, *kept = ops.linear_sample(
                hidden, self._weight, keys=keys, return_kept=self._cuts, **self._arguments | without_eos
            )
        except ValueError as error:  # every argument has been checked: a row without a distribution
            raise FloatingPointError(f"the model has no next token to give: {error}") from error
        if kept:
            counts = (kept[0] >= 0).sum(1).tolist()
            narrow = kept[0][:, : max(counts)].to(torch.int32)
            for reply, row, count in zip(replies, narrow, counts, strict=True):
                reply.kept.append(row[:count])
        for reply, token, logprob in zip(replies, ids.tolist(), logprobs.tolist(), strict=True):
            reply.ids.append(token)
            reply.logprobs.append(logprob)

    def ended(self, reply: _Reply) -> bool:
        """By EOS, by a stop string, or at the limit; the first two make it finished."""
        reply.finished = reply.ids[-1] in self._eos_ids or (
            self._stop_strings is not None
            and len(reply.ids) >= self._min_new_tokens
            and self._stop_strings.end(reply.ids)
        )
        return reply.finished or len(reply.ids) == reply.limit


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
