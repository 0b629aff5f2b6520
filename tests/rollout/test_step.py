"""The decode step as GPUs run it: captured, replayed, rounded up in shape. Operations recorded on a CPU stand in for a
graph: replayed, they read and write the same memory, and nothing of the host's code runs again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ppo_fast.models.head import head_of
from ppo_fast.models.roles import Actor
from ppo_fast.ops._library import EAGER
from ppo_fast.rollout import generate, slots, step
from ppo_fast.rollout.slots import SlotCache
from ppo_fast.rollout.step import DecodeStep, Row, Sampler, Waits, rung

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi")
PROMPTS = [[5, 11, 29, 15], [31], [7, 7, 40, 9, 12, 60, 33], [52, 20], [9, 8, 7]]
PAD, EOS = 0, 1


class Tape(TorchDispatchMode):
    """Records operations; `replay` runs them again on the memory that was there before, and on what they make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        now: dict[int, Tensor] = {}

        def current(x: Any) -> Any:
            return now.get(id(x), x)

        for func, args, kwargs, out in self.operations:
            made = func(*tree_map(current, args), **tree_map(current, kwargs))
            now |= {id(x): y for x, y in zip(tree_leaves(out), tree_leaves(made), strict=True) if isinstance(x, Tensor)}


class Graphs:
    """What was captured and replayed."""

    def __init__(self) -> None:
        self.captured: list[int] = []  # in each pool
        self.replayed = 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Steps run as on a GPU: SDPA in place of the CPU's kernel, and tapes in place of CUDA graphs."""
    seen = Graphs()

    class Capture:
        def __init__(self, device: torch.device) -> None:
            seen.captured.append(0)

        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            seen.captured[-1] += 1
            with Tape() as tape:
                run()
            for func, _, _, out in tape.operations:  # a graph's kernels don't run while it is captured
                if func is torch.ops.aten.copy_.default:
                    out.fill_(-7)

            def replay() -> None:
                seen.replayed += 1
                tape.replay()

            return replay

    monkeypatch.setattr(sys.modules["ppo_fast.rollout.generate"], "has_graphs", lambda device: True)
    monkeypatch.setattr(step, "Capture", Capture)
    monkeypatch.setattr(slots, "has_decode_kernel", lambda device: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield seen


def _sample(
    actor: Actor, prompts: list[list[int]] = PROMPTS, *, steps: Any = 12, temperature: float = 1.0, **more: Any
):
    settings = {"eos_ids": (EOS,), "pad_id": PAD, "seeds": range(len(prompts))} | more
    return generate(actor, prompts, max_new_tokens=steps, temperature=temperature, **settings)


def _same(rollout: Any, other: Any) -> None:
    assert rollout.completion_ids() == other.completion_ids()
    assert torch.equal(rollout.finished, other.finished)
    torch.testing.assert_close(rollout.logprobs, other.logprobs, rtol=0, atol=2e-5)
    assert (rollout.kept_ids is None) == (other.kept_ids is None)
    if rollout.kept_ids is not None:
        assert torch.equal(rollout.kept_ids.sort().values, other.kept_ids.sort().values)


def test_rungs() -> None:
    assert [rung(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 64, 65, 97)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 16, 24, 32, 64, 96, 128,
    ]  # fmt: skip
    assert all(n <= rung(n) <= 1.5 * n for n in range(1, 2000))


# Replays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_those_of_transformers(family, tiny_model, graphs):
    model = tiny_model(family)
    got = _sample(Actor(model), temperature=0.0, eos_ids=())
    ids, mask = got.token_ids[:, : got.prompt_length], got.prompt_mask
    expected = tiny_model(family).generate(
        ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=PAD
    )
    assert torch.equal(got.token_ids, expected)
    assert graphs.captured == [1]
    assert graphs.replayed == 11


LIMITS = [12, 3, 9, 1, 12, 2, 12, 7, 12, 5]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("mistral", {}),
        ("bloom", {}),
        ("llama", {"top_p": 0.7}),
        ("qwen2", {"top_k": 5, "temperature": 0.7}),
        ("llama", {"min_new_tokens": 4, "steps": 12}),
        ("phi", {"min_new_tokens": 4, "steps": 12, "top_p": 0.8}),
    ],
)
def test_rounding_up_changes_nothing(family, more, tiny_model, graphs, monkeypatch):
    """10 replies through 7 slots, then 6, 5, ... rows, against 10 at once in exact shapes, the CPU's way."""
    actor = Actor(tiny_model(family))
    prompts = PROMPTS + PROMPTS[::-1]
    settings = {"steps": LIMITS} | more
    replayed = _sample(actor, prompts, **settings, slots=7)
    assert graphs.replayed > 3
    monkeypatch.undo()
    _same(replayed, _sample(actor, prompts, **settings))


@pytest.mark.parametrize("columns", [1, 64])
def test_graphs_are_few_and_go_when_the_cache_moves(columns, tiny_model, graphs, monkeypatch):
    """Columns from 64 to 96 and 127; a cache with little room to spare moves in between."""
    monkeypatch.setattr(slots, "_COLUMNS", columns)
    monkeypatch.setattr(step, "_FEWEST_COLUMNS", 8)
    actor = Actor(tiny_model())
    replayed = _sample(actor, steps=[100, 60, 120, 100, 30], eos_ids=())
    # 8, 12, 16, ... columns with 5 rows, fewer later; 120 steps in all.
    assert len(graphs.captured) > 1
    assert sum(graphs.captured) < 20
    assert graphs.replayed > 80
    monkeypatch.undo()
    _same(replayed, _sample(actor, steps=[100, 60, 120, 100, 30], eos_ids=()))


def test_replays_have_the_bits_of_plain_steps(tiny_model, graphs, monkeypatch):
    actor = Actor(tiny_model())
    replayed = _sample(actor, eos_ids=(), slots=3)
    assert graphs.replayed > 10
    monkeypatch.setattr(step, "Capture", lambda device: lambda run: run)
    plain = _sample(actor, eos_ids=(), slots=3)
    assert torch.equal(replayed.token_ids, plain.token_ids)
    assert torch.equal(replayed.logprobs, plain.logprobs)


def test_a_diverged_model_is_an_error(tiny_model, graphs):
    """On every device: a captured step can't look at its result."""
    actor = Actor(tiny_model())
    actor.model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="no next token to give: after 4 tokens its logits hold NaN"):
        _sample(actor, PROMPTS[:1])


# What a graph can't hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: bool((x > 1).any()), True),
        (lambda x: x[x > 1], True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.to("meta"), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x.index_put_((x > 1,), x.new_zeros(())), True),
        (lambda x: x[torch.tensor([0, 1])], False),
        (lambda x: x[None].expand(2, 4).softmax(-1).masked_fill(x > 1, 0.5), False),
        (lambda x: torch.where(x > 1, x, torch.nan), False),
    ],
)
def test_waits(operation, waits):
    with Waits(torch.device("cpu")) as mode:
        operation(torch.arange(4.0))
    assert bool(mode.found) == waits


def test_a_model_that_waits_is_not_captured(tiny_model, graphs):
    """Dynamic RoPE asks how long the longest row is."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    actor = Actor(tiny_model("llama", rope_parameters=rope))
    with pytest.warns(UserWarning, match=r"without CUDA graphs: the model's forward pass waits .*_local_scalar_dense"):
        rollout = _sample(actor, temperature=0.0, eos_ids=())
    assert not graphs.captured
    for row, prompt in enumerate(PROMPTS):
        expected = actor.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=PAD
        )
        assert rollout.completion_ids()[row] == expected[0, len(prompt) :].tolist()


CUTS = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"banned_early": (1,)}]


def _sampler(model: Any, rows: int, **cut: Any) -> Sampler:
    return Sampler(head_of(model), rows, **{"temperature": 1.0, "top_k": None, "top_p": None, "banned_early": ()} | cut)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_no_value(family, tiny_model):
    """On the meta device, whose values nobody can read; and nothing comes from another one."""
    meta = torch.device("meta")
    with meta, torch.no_grad():
        model = tiny_model(family)
        cache = SlotCache(8, 200)
        sampler = _sampler(model, 8, top_p=0.9, banned_early=(1,))
        decode = DecodeStep(model.base_model, cache, sampler, meta, captured=False)
        with cache.attached(model):
            decode._compute(step._Shape(6, 96, True, False))
            with Waits(meta) as waits:
                decode._compute(step._Shape(6, 96, True, False))
    assert not waits.found


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_sampling_reads_no_value(cut, tiny_model, monkeypatch):
    """Inside linear_sample too, as it is on GPUs: in torch operations, but for the kernel of the race."""
    called = []

    def linear_sample(*arguments: Any) -> Any:
        called.append(len(arguments))
        return EAGER["linear_sample"](*arguments)

    with torch.device("meta"), torch.no_grad():
        sampler = _sampler(tiny_model("phi"), 6, **cut)
        hidden, keys, early = torch.empty(4, 32), torch.empty(4, 2, dtype=torch.int64), torch.empty(4, dtype=torch.bool)
        op = type("op", (), {"default": staticmethod(linear_sample)})
        monkeypatch.setattr(torch.ops.ppo_fast, "linear_sample", op)
        with Waits(torch.device("meta")) as waits:
            drawn = sampler(hidden, keys, early, bool(cut.get("banned_early")), False)
    assert called
    assert [x.shape[0] for x in drawn] == [4, 4, 4]
    assert not waits.found


def test_nothing_a_step_makes_outlives_it(tiny_model):
    """But the cache: the tensors that are left are buffers that were there before."""
    model = tiny_model()
    cache = SlotCache(4, 100)
    with torch.no_grad(), cache.attached(model):
        sampler = _sampler(model, 4, top_k=3)
        decode = DecodeStep(model.base_model, cache, sampler, torch.device("cpu"), captured=False)
        rows = [Row(5, 0, 1, 0, False), Row(6, 0, 2, 0, False)]
        decode(rows)
        before = {id(x) for x in _tensors(decode)}
        addresses = sorted(x.data_ptr() for x in _tensors(decode))
        decode([row._replace(column=1, position=1) for row in rows])
        assert {id(x) for x in _tensors(decode)} == before
        assert sorted(x.data_ptr() for x in _tensors(decode)) == addresses


def _tensors(decode: DecodeStep) -> list[Tensor]:
    layers = [x for layer in decode._cache.layers for x in vars(layer).values() if isinstance(x, Tensor)]
    owned = [
        x for x in tree_leaves([vars(decode), vars(decode._sampler), vars(decode._cache)]) if isinstance(x, Tensor)
    ]
    return [*layers, *owned, *decode._body.parameters(), *decode._body.buffers()]


# Kept sets -------------------------------------------------------------------------------------------------------


def test_kept_sets_are_stored_at_their_own_size():
    """One wide set in a step doesn't make its neighbours' wide."""
    kept = torch.full((3, 1024), -1, dtype=torch.int32)
    kept[0, :1024], kept[1, :2], kept[2, :1] = torch.arange(1024), torch.tensor([5, 3]), 9
    sets = step._sets(kept)
    assert [len(x) for x in sets] == [1024, 2, 1]
    assert sets[1].tolist() == [5, 3]
    assert sets[1].untyped_storage().nbytes() == 4 * (1024 + 2 + 1)
    assert step._sets(kept[:, :0]) == ()


def test_the_share_of_kept_sets_that_met_the_limit(tiny_model, monkeypatch):
    """A limit of 3 tokens: sets of 3 are counted, smaller ones not."""
    actor = Actor(tiny_model())
    assert _sample(actor).kept_at_limit is None
    assert _sample(actor, top_p=0.8).kept_at_limit == 0.0
    wide = _sample(actor, top_p=0.8, eos_ids=())
    for module in (step, sys.modules["ppo_fast.rollout.batch"]):
        monkeypatch.setattr(module, "MOST_KEPT", 3)
    rollout = _sample(actor, top_p=0.8, eos_ids=())
    sizes = (rollout.kept_ids >= 0).sum(-1)
    assert 0 < rollout.kept_at_limit < 1
    assert rollout.kept_at_limit == pytest.approx(float((sizes == 3).double().mean()))
    assert (wide.kept_ids >= 0).sum(-1).max() > 3


# FlashAttention --------------------------------------------------------------------------------------------------


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """flash_attn's, from its documentation: [batch, length, heads, size], the mask aligned to the bottom right."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert causal
    assert dropout_p == 0.0
    lengths = q.shape[1], k.shape[1]
    at = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
    column = torch.arange(lengths[1])
    left, right = window_size
    seen = (column <= at) & (column <= at + right if right >= 0 else column >= 0)
    seen &= (column >= at - left) if left >= 0 else True
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_flash_attention_over_prompts(family, tiny_model, monkeypatch):
    """Whole prompts and pieces of them, windows, softcap, grouped heads, as flash_attn would be called."""
    actor = Actor(tiny_model(family))
    prompts = [[7, 7, 40, 9, 12, 60, 33, 8, 21, 22], [3, 9, 7], [4] * 17]
    plain = _sample(actor, prompts)
    calls = []

    def flash(*states: Tensor, **how: Any) -> Tensor:
        calls.append((states[0].shape[1], states[1].shape[1]))
        return flash_attn_func(*states, **how)

    monkeypatch.setattr(slots, "_flash_attention", lambda: flash)
    monkeypatch.setattr(slots, "_flash_takes", lambda query, value: True)
    for at_once in (192, 4):
        monkeypatch.setattr(sys.modules["ppo_fast.rollout.generate"], "PREFILL_TOKENS", at_once)
        calls.clear()
        _same(_sample(actor, prompts), plain)
        layers = actor.model.config.num_hidden_layers  # decode steps aren't among the calls
        pieces = [(16, 16)] if at_once == 192 else [(4, 4), (4, 8), (4, 12), (4, 16), (4, 4), (4, 8), (1, 9), (2, 2)]
        assert calls == [call for piece in pieces for call in [piece] * layers]


@pytest.mark.parametrize(
    ("dtype", "sizes", "takes"),
    [
        (torch.bfloat16, (64, 64), True),
        (torch.float16, (256, 256), True),
        (torch.float32, (64, 64), False),
        (torch.bfloat16, (64, 32), False),
        (torch.bfloat16, (320, 320), False),
    ],
)
def test_what_flash_attention_takes(dtype, sizes, takes):
    class OnGPU:
        device = torch.device("cuda")

        def __init__(self, size: int) -> None:
            self.dtype, self.shape = dtype, (1, 2, 3, size)

    assert slots._flash_takes(*map(OnGPU, sizes)) == takes
    assert not slots._flash_takes(*(torch.empty(1, 2, 3, size, dtype=dtype) for size in sizes))
