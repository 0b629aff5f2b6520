"""Where the keys and values of running replies lie: one slot each, from its first column on, allocated once.

A reply's token ``t`` stands in column ``t`` of its slot, whatever the lengths of its neighbours. So nothing is ever
padded on the left, nothing grows by concatenation, a reply enters and leaves without touching the others, and a reply
to the same prompt starts from a copy of the prompt's columns. Prompts enter as one causal block, padded on the right:
what padding leaves behind in a slot is overwritten before the mask lets anyone see it.

transformers writes into such a cache through its own interface. Its attention and its masks, though, take every row to
be equally far; `SlotCache.attached` puts `attend` in their place, where the model has a seam for that.

On a GPU in 16 bits the blocks of prompts go through FlashAttention-2 (Dao 2023, arXiv:2307.08691) where the extra
``flash`` is installed: beside PyTorch's own kernel it takes pieces of a prompt, windows and softcaps without a mask.
Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ppo_fast.errors import UserError

_ATTENTION = "ppo_fast_slots"
_COLUMNS = 64  # that a cache has beyond its first prompts, at least


class Pass:
    """One forward pass: which slots it writes, from which column on, and how far it reads."""

    def __init__(
        self,
        slots: Tensor,  # int64 [n]
        first: Tensor,  # int64 [n], the column of each row's first new token
        length: int,  # new tokens in each row
        end: int,  # columns read, the new ones included
        running: bool,  # a decode step: slots 0 to n - 1, one token each, from any columns; else all from the same one
    ) -> None:
        self.slots = slots
        self.running = running
        self.length = length
        self.end = end
        self.from_the_start = end == length  # reads nothing but what it writes
        self.positions = first[:, None] + torch.arange(length, device=first.device)  # [n, length]
        self.lengths = first + length  # [n]
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._cells: dict[tuple[int, int], Tensor] = {}

    def visible(self, window: int | None) -> Tensor:
        """bool [n, 1, length, end]: the columns that each new token attends to."""
        columns = torch.arange(self.end, device=self.slots.device)
        position = self.positions[:, None, :, None]
        seen = columns <= position
        return seen if window is None else seen & (columns > position - window)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as what is added to the scores, 0 or -inf. Made once for all layers."""
        if (window, dtype) not in self._biases:
            hidden = ~self.visible(window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[window, dtype] = zeros.masked_fill_(hidden, -torch.inf)
        return self._biases[window, dtype]

    def cells(self, heads: int, capacity: int) -> Tensor:
        """Of a decode step: where its heads lie in ``[slots * heads * capacity]``, int64 [n * heads]."""
        if (heads, capacity) not in self._cells:
            head = torch.arange(heads, device=self.slots.device)
            self._cells[heads, capacity] = ((self.slots[:, None] * heads + head) * capacity + self.positions).flatten()
        return self._cells[heads, capacity]


_CURRENT: ContextVar[Pass] = ContextVar("pass")


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[slots, heads, capacity, head size]``."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__()
        self._slots, self._capacity = slots, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Columns for the pass at hand. Zeros: a masked column has the weight 0, and 0 * NaN would come through."""
        self.keys, self.values = (self._zeros(x, _CURRENT.get().end) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new columns, and returns the columns that the pass reads, ``[n, heads, end, head size]``."""
        now = _CURRENT.get()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            if now.running:
                cells = now.cells(new.shape[1], cache.shape[2])
                cache.view(-1, new.shape[3]).index_copy_(0, cells, new.reshape(-1, new.shape[3]))
            else:
                cache[:, :, now.end - now.length : now.end].index_copy_(0, now.slots, new)
        if now.from_the_start:
            return key_states, value_states
        rows = slice(len(now.slots)) if now.running else now.slots
        return self.keys[rows, :, : now.end], self.values[rows, :, : now.end]

    def _zeros(self, like: Tensor, end: int) -> Tensor:
        # Half as much again, so that the copies of all growths together stay below three times the result.
        columns = min(self._capacity, max(end + _COLUMNS, end * 3 // 2))
        return like.new_zeros(self._slots, like.shape[1], columns, like.shape[3])

    def grow(self, end: int) -> None:
        """Moves keys and values to where there is room for ``end`` columns."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(old, end)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _CURRENT.get().end, 0

    def get_seq_length(self) -> int:
        now = _CURRENT.get()
        return now.end - now.length

    def get_max_length(self) -> int:
        return self._capacity

    def copy(self, source: int, target: int, length: int) -> None:
        """The first ``length`` columns of one slot into another."""
        for cache in (self.keys, self.values):
            cache[target, :, :length] = cache[source, :, :length]


class SlotCache(Cache):
    """A transformers cache of ``slots`` rows that needn't be equally far, of ``capacity`` columns at most."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.moves = 0
        """How often keys and values have been moved: whoever has their addresses then has the wrong ones."""
        super().__init__(layer_class_to_replicate=functools.partial(_SlotLayer, slots, capacity))

    def copy(self, source: int, target: int, length: int) -> None:
        """The first ``length`` columns of one slot into another, in all layers."""
        for layer in self.layers:
            layer.copy(source, target, length)

    def reserve(self, end: int) -> None:
        """Room for ``end`` columns in every layer."""
        if self.layers and self.layers[0].keys.shape[2] < end:  # all have been made in one pass
            for layer in self.layers:
                layer.grow(end)
            self.moves += 1

    @contextlib.contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """The model attends through `attend` inside, if it lets its attention be chosen at all."""
        if not model._supports_attention_backend:
            yield
            return
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        before = [(config, config._attn_implementation) for config in configs]
        try:
            for config in configs:
                config._attn_implementation = _ATTENTION
            yield
        finally:
            for config, name in before:
                config._attn_implementation = name

    @torch.no_grad()
    def forward(self, body: nn.Module, ids: Tensor, now: Pass) -> Tensor:
        """Hidden states ``[n, length, H]`` of ``ids`` ``[n, length]``, whose keys and values are cached."""
        self.reserve(now.end)
        # For models with attention of their own, who know what is causal. Others (GPT-2) look for padding without it,
        # and wait for the device with that.
        filled = now.visible(None)[:, 0, -1].long()
        token = _CURRENT.set(now)
        try:
            return body(
                input_ids=ids, attention_mask=filled, position_ids=now.positions, use_cache=True,
                **{cache_keyword(body): self},
            ).last_hidden_state  # fmt: skip
        finally:
            _CURRENT.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,  # [n, heads, length, head size]
    key: Tensor,  # [n, key heads, end, head size]
    value: Tensor,  # [n, key heads, end, value size]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention, an implementation for transformers' ``AttentionInterface``: ``[n, length, heads, value size]``.

    One new token a row meets each key head once with all its query heads as rows, so that keys are never repeated.
    """
    now = _CURRENT.get()
    n, heads, length, _ = query.shape
    if now.running and has_decode_kernel(query.device):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = torch.ops.ppo_fast.decode_attention.default(
            query, key, value, now.lengths, scale, sliding_window or 0, softcap or 0.0
        )
        return out[:, None], None
    if not now.running and (flash := _flash_attention()) and _flash_takes(query, value):
        # Its causal mask is aligned to the last key, which is the last query's own here, in pieces of a prompt too.
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        states = (x.transpose(1, 2) for x in (query, key, value))
        out = flash(*states, softmax_scale=scaling, causal=True, window_size=window, softcap=softcap or 0.0)
        return out, None
    key_heads = key.shape[1]
    if length == 1:
        query = query.view(n, key_heads, heads // key_heads, -1)
    elif heads != key_heads:
        key, value = (x.repeat_interleave(heads // key_heads, dim=1) for x in (key, value))
    causal = length > 1 and now.from_the_start and (sliding_window is None or sliding_window >= length)
    if softcap is not None:
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap) + now.bias(sliding_window, scores.dtype)
        out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    else:
        bias = None if causal else now.bias(sliding_window, query.dtype)
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=causal, scale=scaling)
    return out.reshape(n, heads, length, -1).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, attend)


def has_decode_kernel(device: torch.device) -> bool:
    """Whether a decode step's attention has a kernel of ours there, which reads no further than each row's own end."""
    return device.type == "cpu"


@functools.cache
def _flash_attention() -> Callable[..., Tensor] | None:
    """The kernel of the extra ``flash``, if that is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_func

    return flash_attn_func


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    """Its limits: GPU, 16 bits, heads of at most 256, those of keys and values alike."""
    size = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and half and size <= 256 and value.shape[-1] == size


@functools.cache
def _parameters_of(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def cache_keyword(body: nn.Module) -> str:
    """What the body's forward calls its cache.

    Raises:
        UserError: it takes none.
    """
    # transformers renames past_key_values to cache within 5.x, and drops the old name in 5.40.
    known = _parameters_of(type(body).forward)
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise UserError(f"{type(body).__name__} has no cache of keys and values, which generation needs; use another model")


def check_cache(model: PreTrainedModel) -> None:
    """Whether replies can be generated slot by slot.

    Raises:
        UserError: the model caches no keys and values, or something beside them.
    """
    cache_keyword(model.base_model)
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    local = "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo, by columns
    sinks = any("sink" in name for name, _ in model.named_parameters())
    if kinds or local or sinks or model._is_stateful:
        what = ", ".join(sorted(kinds)) or ("local attention" if local else "attention sinks" if sinks else "a state")
        raise UserError(
            f"{type(model).__name__} remembers more than keys and values of full or sliding attention ({what}), which "
            "ppo_fast can't generate with; use another model"
        )
