"""One decode step: the last token of every running reply in, its next one and the log-prob of that out.

Whatever a step reads or leaves behind lies where it lay in the step before: tokens, columns and keys of the noise in
one buffer, the cache, the results. In between nothing waits for the device, no value reaches the host, no shape hangs
on one. So a GPU's step is captured as a CUDA graph: launching its kernels one by one takes the host longer than running
them takes the GPU at so few rows. On a CPU the same step runs as it stands, for the rows and columns that there are.

Captured by hand. A graph replays the kernels of the plain step, bit for bit: log-probs stay as near to training's as
they were. ``torch.compile(mode="reduce-overhead")`` would fuse other kernels with other roundings, take minutes of
compiling, and trip over what stands in a model while it samples: adapters, hooks, the attention of `slots`.

Shapes. A graph has fixed ones. Rows and columns are rounded up to 1, 2, 3, 4, 6, 8, 12, ..., at most half as much
again, and columns start at 64: 10 replies over 1000 columns run as 12 over 1024. What is masked has the weight 0; rows
nobody needs write into slots nobody runs in. The first step of a shape runs plainly, which gets done what is done once
(compiling, workspaces), the second is captured, the others are replayed. Graphs live as long as their rollout and its
cache; when keys and values move to where there is more room, all of them go. They share one pool of memory, which
nothing in it outlives: results are copied to buffers outside.

Run on CPUs, on fake CUDA tensors, and with recorded operations replayed in place of a graph; not run on a GPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_fast.models.head import Head
from ppo_fast.rollout.batch import MOST_KEPT
from ppo_fast.rollout.slots import Pass, SlotCache

_FEWEST_COLUMNS = 64
_aten = torch.ops.aten


class Row(NamedTuple):
    """What a step needs of the reply in a slot."""

    token: int  # its last one, prompt included
    column: int  # where that belongs
    seed: int
    position: int  # in the reply, of the token to be drawn
    early: bool  # EOS is excluded


_NOBODY = Row(0, 0, 0, 0, False)


class Drawn(NamedTuple):
    """On the host, one for each row."""

    ids: list[int]
    logprobs: list[float]
    kept: tuple[Tensor, ...]  # int32 [number kept] each, no more memory than that; none if nothing is cut


class Sampler:
    """`ops.linear_sample` with everything but hidden states and keys laid ready, for ``rows`` of them at most."""

    def __init__(
        self,
        head: Head,
        rows: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        banned_early: Sequence[int],
    ) -> None:
        self._head = head
        V, device = head.weight.shape[0], head.weight.device
        self.dtype = torch.float64 if head.weight.dtype == torch.float64 else torch.float32
        self._share = 1.0 if top_p is None else float(top_p)
        self.most_kept = 0 if top_k is None and self._share == 1 else min(top_k or MOST_KEPT, V)
        self._temperature = (
            None if temperature == 1 else torch.full((rows,), temperature, dtype=self.dtype, device=device)
        )
        self._bias = None if head.bias is None else head.bias.to(self.dtype).contiguous()
        bias = torch.zeros(V, dtype=self.dtype, device=device) if self._bias is None else self._bias
        banned = torch.tensor(banned_early, dtype=torch.int64, device=device)
        self._early_bias = bias.index_fill(0, banned, -torch.inf) if banned_early else self._bias

    def __call__(self, hidden: Tensor, keys: Tensor, early: Tensor, some: bool, every: bool) -> Sequence[Tensor]:
        """ids, log-probs and kept ids, [n], [n] and [n, most_kept]; NaN for a row without a distribution.

        ``early`` [n] says which rows have EOS excluded; ``some`` or ``every`` one of them is known on the host.
        """
        if every or not some:
            return self._draw(hidden, keys, self._early_bias if every else self._bias)
        # Two products, for as long as replies of both kinds run together.
        free, banned = (self._draw(hidden, keys, bias) for bias in (self._bias, self._early_bias))
        return [torch.where(early.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(free, banned, strict=True)]

    def _draw(self, hidden: Tensor, keys: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        # Not through ops.linear_sample, whose checks look at the result.
        temperature = None if self._temperature is None else self._temperature[: len(hidden)]
        ids, logprobs, _, kept = torch.ops.ppo_fast.linear_sample.default(
            hidden.to(self._head.weight.dtype), self._head.weight, bias, temperature, keys,
            self._head.softcap, float(self._head.logit_scale), self.most_kept, self._share, False, self.most_kept > 0,
        )  # fmt: skip
        return ids, logprobs, kept


class _Shape(NamedTuple):
    """What must be the same for a graph to serve again."""

    rows: int
    end: int  # columns read
    some_early: bool
    all_early: bool


def rung(n: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least ``n``."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


class DecodeStep:
    """A step of all running replies, reply i in slot i; ``captured`` as graphs, where there are any, or plain."""

    def __init__(
        self, body: nn.Module, cache: SlotCache, sampler: Sampler, device: torch.device, *, captured: bool
    ) -> None:
        self._body, self._cache, self._sampler, self._device = body, cache, sampler, device
        self._inputs = torch.zeros(cache.slots, len(_NOBODY), dtype=torch.int64, device=device)
        self._results = [
            torch.zeros(cache.slots, dtype=torch.int64, device=device),
            torch.zeros(cache.slots, dtype=sampler.dtype, device=device),
            torch.zeros(cache.slots, sampler.most_kept, dtype=torch.int64, device=device),
        ]
        self._graphs = Graphs(self._compute, device) if captured else None

    def __call__(self, rows: Sequence[Row]) -> Drawn:
        """One more token for each."""
        n, end = len(rows), max(row.column for row in rows) + 1
        early = [row.early for row in rows]
        shape = _Shape(n, end, any(early), all(early))
        if self._graphs is not None:
            columns = rung(max(end, _FEWEST_COLUMNS))
            shape = shape._replace(rows=min(rung(n), self._cache.slots), end=min(columns, self._cache.capacity))
        self._inputs[: shape.rows].copy_(torch.tensor([*rows, *[_NOBODY] * (shape.rows - n)]))
        self._cache.reserve(shape.end)
        if self._graphs is None:
            self._compute(shape)
        else:
            self._graphs(shape, self._cache.moves)
        ids, logprobs, kept = (result[:n] for result in self._results)
        return Drawn(ids.tolist(), logprobs.tolist(), _sets(kept.to("cpu", torch.int32)))

    def _compute(self, shape: _Shape) -> None:
        """From buffers to buffers: nothing here may wait for the device."""
        inputs = self._inputs[: shape.rows]
        slots = torch.arange(shape.rows, device=self._device)
        now = Pass(slots, inputs[:, 1], 1, shape.end, running=True)
        hidden = self._cache.forward(self._body, inputs[:, :1], now)[:, 0]
        drawn = self._sampler(hidden, inputs[:, 2:4].contiguous(), inputs[:, 4] > 0, *shape[2:])
        for result, new in zip(self._results, drawn, strict=True):
            result[: shape.rows].copy_(new)


def _sets(kept: Tensor) -> tuple[Tensor, ...]:
    """The ids >= 0 of each row of int32 [n, most kept]."""
    inside = kept >= 0
    return kept[inside].split(inside.sum(1).tolist()) if kept.shape[1] else ()


# ---------------------------------------------------------------------------------------------------------- CUDA graphs


def has_graphs(device: torch.device) -> bool:
    """Whether steps can be captured there."""
    return device.type == "cuda"


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


class Capture:
    """Makes graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What launches the kernels of ``run`` again. Captured, they haven't run yet."""
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device)
        # Other threads (a data loader's, a progress bar's) may go on calling CUDA.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capturing:
            run()
        return graph.replay


class Graphs:
    """Runs ``compute(shape)``, from a shape's second time on as a graph, unless it can't be one."""

    def __init__(self, compute: Callable[[_Shape], None], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._possible: bool | None = None
        self._forget(0)

    def _forget(self, moves: int) -> None:
        self._moves, self._seen = moves, set[_Shape]()
        self._replays: dict[_Shape, Callable[[], None]] = {}
        self._capture: Capture | None = None  # a pool ends with the last of its graphs

    def __call__(self, shape: _Shape, moves: int) -> None:
        """``moves`` counts how often the addresses that ``compute`` uses have changed."""
        if moves != self._moves:
            self._forget(moves)
        if self._possible is None:
            self._possible = self._watch(shape)
        elif not self._possible:
            self._compute(shape)
        elif shape in self._replays:
            self._replays[shape]()
        elif shape in self._seen:
            self._capture = self._capture or Capture(self._device)
            self._replays[shape] = replay = self._capture(lambda: self._compute(shape))
            replay()
        else:
            self._seen.add(shape)
            self._compute(shape)

    def _watch(self, shape: _Shape) -> bool:
        with Waits(self._device) as waits:
            self._compute(shape)
        if waits.found:
            warnings.warn(
                f"decode steps run without CUDA graphs: the model's forward pass waits for the GPU in "
                f"{', '.join(sorted(waits.found))}",
                stacklevel=2,
            )
        self._seen.add(shape)
        return not waits.found


class Waits(TorchDispatchMode):
    """Collects the operations that no graph can hold: the host reads a value, a shape hangs on one, data comes from
    another device. Of an op with an implementation in Python it sees the call alone."""

    _INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
    _COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten.where.self)
    _TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if func in self._INDEXING:
            waits = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        else:
            waits = bool(self._TAGS & set(func.tags))
        # Of other devices a number may be read at the launch, but for what copies it.
        strangers = [x for x in tensors if x.device != self._device and (x.dim() or func in self._COPIES)]
        if waits or strangers:
            self.found.add(str(func))
        return out
