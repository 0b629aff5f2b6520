"""The decode loop against transformers: ids, log-probs, stop rules, and what a reply may depend on."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ppo_fast import ops
from ppo_fast.errors import UserError
from ppo_fast.models.layers import fuse_layers
from ppo_fast.models.roles import Actor, build_roles
from ppo_fast.rollout import StopStrings, generate, swaps

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi")
PROMPTS = [[5, 11, 29, 15], [31], [7, 7, 40, 9, 12, 60, 33], [52, 20], [9, 8, 7]]
STEPS = 12
PAD, EOS = 0, 1


def _sample(actor, prompts=PROMPTS, seeds=None, *, steps=STEPS, temperature=1.0, eos_ids=(EOS,), pad_id=PAD, **more):
    return generate(
        actor, prompts, max_new_tokens=steps, temperature=temperature, eos_ids=eos_ids, pad_id=pad_id,
        seeds=range(len(prompts)) if seeds is None else seeds, **more,
    )  # fmt: skip


def _common_eos(actor, temperature: float) -> int:
    """A token that ends some of the replies but not all, and none at its first token."""
    replies = _sample(actor, temperature=temperature, eos_ids=()).completion_ids()
    for token in sorted({token for ids in replies for token in ids} - {ids[0] for ids in replies}):
        if any(token not in ids for ids in replies):
            return token
    raise AssertionError("no such token; choose other prompts")


@torch.no_grad()
def _full_logprobs(model, prompt: list[int], reply: list[int], temperature: float) -> torch.Tensor:
    """From one unpadded forward of transformers over prompt and reply."""
    logits = model(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]


# Against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_those_of_transformers(family, tiny_model):
    """Prompts of 1 to 7 tokens padded on the left; one reply at least ends by itself, one at the limit."""
    model = tiny_model(family)
    actor = Actor(model)
    eos = _common_eos(actor, 0.0)
    got = _sample(actor, temperature=0.0, eos_ids=(eos,))
    ids, mask = got.token_ids[:, : got.prompt_length], got.prompt_mask
    expected = tiny_model(family).generate(
        ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=STEPS, eos_token_id=eos, pad_token_id=PAD
    )
    assert torch.equal(got.token_ids, expected)
    assert 0 < int(got.finished.sum()) < len(PROMPTS)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_full_forward(family, temperature, tiny_model):
    """SEMANTICS.md allows 1e-4 nats at the 99th percentile and 1e-3 at most; float32 at this size stays well below."""
    actor = Actor(tiny_model(family))
    rollout = _sample(actor, temperature=temperature)
    gaps = [
        rollout.logprobs[row, : len(reply)] - _full_logprobs(actor.model, PROMPTS[row], reply, temperature)
        for row, reply in enumerate(rollout.completion_ids())
    ]
    assert torch.cat(gaps).abs().max() < 2e-5
    assert rollout.logprobs[rollout.response_mask].min() < -1  # far from a point mass


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_training(family, tiny_model):
    """The step-0 check: one padded forward without a cache, and the op that training uses."""
    actor = Actor(tiny_model(family))
    rollout = _sample(actor, temperature=0.8)
    with torch.no_grad():
        rescored = ops.linear_selected_logprobs(
            actor.hidden(rollout), actor.head.weight, rollout.response_ids, mask=rollout.response_mask, temperature=0.8,
            **actor.head.kwargs(),
        )  # fmt: skip
    torch.testing.assert_close(rescored, rollout.logprobs, rtol=0, atol=2e-5)


def test_an_adapter_on_the_head_samples_too(tiny_model):
    """The roles fold it into the head; sampling and training must mean the same distribution, other than the base's."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    adapted = Actor(get_peft_model(tiny_model(), config).get_base_model())
    rollout = _sample(adapted, temperature=0.8)
    exact = copy.deepcopy(adapted.model).double()  # transformers in float32 is the less exact of the two
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(exact, PROMPTS[row], reply, 0.8)
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)].double(), expected, rtol=0, atol=2e-5)
        bare = _full_logprobs(tiny_model(), PROMPTS[row], reply, 0.8)
        assert (bare - expected).abs().max() > 0.05


def test_greedy_logprobs_are_those_at_temperature_1(tiny_model):
    actor = Actor(tiny_model())
    rollout = _sample(actor, temperature=0.0)
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(actor.model, PROMPTS[row], reply, 1.0)
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)].double(), expected, rtol=0, atol=2e-5)


def test_first_tokens_follow_the_models_distribution(tiny_model):
    """Of 4000 replies to one prompt; the chi-square statistic's own 99.99% quantile at 8 degrees is 31.8."""
    actor = Actor(tiny_model())
    rollout = _sample(actor, [PROMPTS[0]] * 4000, steps=1, temperature=0.9)
    with torch.no_grad():
        logits = actor.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    expected, order = (4000 * (logits / 0.9).softmax(-1)).sort(descending=True)
    counts = rollout.response_ids[:, 0].bincount(minlength=64)[order].double()
    assert expected[7] > 5
    expected, counts = (torch.cat([x[:8], x[8:].sum()[None]]) for x in (expected, counts))
    assert 0.4 < ((counts - expected).square() / expected).sum() < 31.8


def test_16_bit_models(tiny_model):
    """Log-probs are float32 of float32 logits; the states behind them have 8 bits."""
    actor = Actor(tiny_model().to(torch.bfloat16))
    rollout = _sample(actor)
    assert rollout.logprobs.dtype == torch.float32
    gaps = [
        rollout.logprobs[row, : len(reply)] - _full_logprobs(actor.model, PROMPTS[row], reply, 1.0)
        for row, reply in enumerate(rollout.completion_ids())
    ]
    assert torch.cat(gaps).abs().mean() < 0.05


# What comes out --------------------------------------------------------------------------------------------------


def _check_contract(rollout, eos_ids: tuple[int, ...], pad_id: int, limit: int) -> None:
    lengths = rollout.lengths.tolist()
    width = rollout.response_mask.shape[1]
    assert width == max(lengths) <= limit
    assert rollout.response_ids.shape == rollout.logprobs.shape == rollout.response_mask.shape
    for row, length in enumerate(lengths):
        ids = rollout.response_ids[row].tolist()
        assert rollout.response_mask[row].tolist() == [True] * length + [False] * (width - length)
        assert ids[length:] == [pad_id] * (width - length)
        assert not any(token in eos_ids for token in ids[: length - 1])
        assert bool(rollout.finished[row]) == (ids[length - 1] in eos_ids)
        assert rollout.finished[row] or length == limit
        assert (rollout.logprobs[row, :length] < 0).all()
        assert not rollout.logprobs[row, length:].any()
    left = rollout.prompt_length
    for row, prompt in enumerate(PROMPTS):
        assert rollout.token_ids[row, :left].tolist() == [pad_id] * (left - len(prompt)) + prompt
        assert rollout.prompt_mask[row].tolist() == [False] * (left - len(prompt)) + [True] * len(prompt)


@pytest.mark.parametrize("pad_id", [PAD, EOS, "eos", 41])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_contract(family, pad_id, tiny_model):
    """EOS is an action of its own; lengths come from generation, so that the pad id may be EOS or any other token."""
    actor = Actor(tiny_model(family))
    eos = _common_eos(actor, 1.0)
    pad_id = eos if pad_id == "eos" else pad_id
    rollout = _sample(actor, eos_ids=(eos,), pad_id=pad_id)
    _check_contract(rollout, (eos,), pad_id, STEPS)
    assert 0 < int(rollout.finished.sum()) < len(PROMPTS)
    other = _sample(actor, eos_ids=(eos,), pad_id=PAD)
    assert rollout.completion_ids() == other.completion_ids()
    torch.testing.assert_close(rollout.logprobs, other.logprobs, rtol=0, atol=1e-5)


def test_several_eos_ids(tiny_model):
    actor = Actor(tiny_model())
    free = _sample(actor, eos_ids=())
    eos_ids = (int(free.response_ids[0, 3]), int(free.response_ids[1, 5]), 63)
    rollout = _sample(actor, eos_ids=eos_ids)
    _check_contract(rollout, eos_ids, PAD, STEPS)
    for row, reply in enumerate(free.completion_ids()):
        end = next((t + 1 for t, token in enumerate(reply) if token in eos_ids), STEPS)
        assert rollout.completion_ids()[row] == reply[:end]


def test_without_eos_ids_every_reply_runs_to_the_limit(tiny_model):
    rollout = _sample(Actor(tiny_model()), eos_ids=())
    assert rollout.lengths.tolist() == [STEPS] * len(PROMPTS)
    assert not rollout.finished.any()


def test_an_eos_at_the_limit_is_finished(tiny_model):
    actor = Actor(tiny_model())
    reply = _sample(actor, eos_ids=()).completion_ids()[0]
    new = max(t for t, token in enumerate(reply) if token not in reply[:t])
    rollout = _sample(actor, PROMPTS[:1], steps=new + 1, eos_ids=(reply[new],))
    assert rollout.lengths.tolist() == [new + 1]
    assert rollout.finished.tolist() == [True]


def test_generation_ends_with_the_last_reply(tiny_model):
    """No step beyond it is computed, and none is returned."""
    actor = Actor(tiny_model())
    everything = tuple(range(64))
    steps = []
    rollout = _sample(actor, eos_ids=everything, on_tokens=steps.append)
    assert steps == [len(PROMPTS)]
    assert rollout.response_mask.shape == (len(PROMPTS), 1)
    assert rollout.finished.all()


def test_one_token(tiny_model):
    rollout = _sample(Actor(tiny_model()), steps=1, eos_ids=())
    assert rollout.response_mask.shape == (len(PROMPTS), 1)


def test_on_tokens_adds_up_to_the_live_tokens(tiny_model):
    actor = Actor(tiny_model())
    eos = _common_eos(actor, 1.0)
    steps: list[int] = []
    rollout = _sample(actor, eos_ids=(eos,), on_tokens=steps.append)
    assert steps == rollout.response_mask.sum(0).tolist()
    assert sum(steps) == int(rollout.lengths.sum())
    assert all(type(count) is int for count in steps)


def test_nothing_has_a_gradient(tiny_model):
    rollout = _sample(Actor(tiny_model()))
    assert not rollout.logprobs.requires_grad


# What a reply depends on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_a_reply_depends_on_its_own_row_alone(family, temperature, tiny_model):
    """In a batch of five, with others ending before it, and alone."""
    actor = Actor(tiny_model(family))
    eos = _common_eos(actor, temperature)
    together = _sample(actor, temperature=temperature, eos_ids=(eos,))
    for row, prompt in enumerate(PROMPTS):
        alone = _sample(actor, [prompt], [row], temperature=temperature, eos_ids=(eos,))
        assert alone.completion_ids()[0] == together.completion_ids()[row]
        assert alone.finished[0] == together.finished[row]
        length = int(alone.lengths[0])
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row, :length], rtol=0, atol=2e-5)


def test_equal_numbers_give_equal_replies(tiny_model):
    actor = Actor(tiny_model())
    first, second = _sample(actor), _sample(actor)
    assert torch.equal(first.token_ids, second.token_ids)
    assert torch.equal(first.logprobs, second.logprobs)
    rows = _sample(actor, [PROMPTS[0]] * 3, [2, 4, 2], eos_ids=())
    assert torch.equal(rows.response_ids[0], rows.response_ids[2])
    assert not torch.equal(rows.response_ids[0], rows.response_ids[1])


def test_the_global_generator_is_not_used(tiny_model):
    actor = Actor(tiny_model())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    _sample(actor)
    assert torch.equal(torch.get_rng_state(), state)


# Adapters and modes ----------------------------------------------------------------------------------------------


@pytest.fixture
def roles(tiny_model):
    roles = build_roles(
        tiny_model(), peft_config=LoraConfig(r=4, target_modules="all-linear"), gradient_checkpointing=True
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (roles.policy_parameters | roles.value_parameters).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return roles


def test_each_actor_samples_with_its_own_adapter(roles, tiny_model):
    """With checkpointing set up, which must not cost the cache; and after a training forward."""
    roles.policy.hidden(_sample(roles.policy)).sum().backward()
    policy, reference = _sample(roles.policy), _sample(roles.reference)
    assert policy.completion_ids() != reference.completion_ids()
    bare = Actor(tiny_model())
    fuse_layers(bare.model)
    assert torch.equal(reference.token_ids, _sample(bare).token_ids)
    assert torch.equal(reference.logprobs, _sample(bare).logprobs)
    with torch.no_grad():
        for rollout, actor in ((policy, roles.policy), (reference, roles.reference)):
            for row, reply in enumerate(rollout.completion_ids()):
                with actor.activated():
                    expected = _full_logprobs(roles.policy.model, PROMPTS[row], reply, 1.0)
                torch.testing.assert_close(rollout.logprobs[row, : len(reply)].double(), expected, rtol=0, atol=2e-5)


def test_adapters_are_as_before_afterwards(roles):
    """What trains, and what is active: also when the caller's function raises in the middle."""

    def state():
        trained = {name for name, p in roles.adapters.named_parameters() if p.requires_grad}
        with torch.no_grad():
            return trained, roles.policy.model(input_ids=torch.tensor([[3, 4, 5]])).logits

    def fail(_):
        raise KeyboardInterrupt

    trained, logits = state()
    for actor in (roles.policy, roles.reference):
        _sample(actor)
        with pytest.raises(KeyboardInterrupt):
            _sample(actor, on_tokens=fail)
        trained_after, logits_after = state()
        assert trained_after == trained
        assert torch.equal(logits_after, logits)


# Slots -----------------------------------------------------------------------------------------------------------


def _same(rollout, other, atol: float = 2e-5) -> None:
    assert rollout.completion_ids() == other.completion_ids()
    assert torch.equal(rollout.finished, other.finished)
    torch.testing.assert_close(rollout.logprobs, other.logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "bloom"])
def test_fewer_slots_give_the_same_replies_in_the_same_order(family, slots, tiny_model):
    """Replies of 1 to 12 tokens by their own limits and an EOS: slots are refilled and the batch is compacted."""
    actor = Actor(tiny_model(family))
    prompts = PROMPTS + PROMPTS[::-1]
    limits = [12, 3, 9, 1, 12, 2, 12, 7, 12, 5]
    eos = _sample(actor, prompts, eos_ids=()).completion_ids()[0][4]
    together = _sample(actor, prompts, steps=limits, eos_ids=(eos,))
    assert all(length <= limit for length, limit in zip(together.lengths.tolist(), limits, strict=True))
    assert together.finished.any()
    _same(_sample(actor, prompts, steps=limits, eos_ids=(eos,), slots=slots), together)


def test_a_batch_can_be_split_merged_and_reordered(tiny_model):
    actor = Actor(tiny_model())
    together = _sample(actor)
    order = [3, 0, 4, 2, 1]
    shuffled = _sample(actor, [PROMPTS[i] for i in order], order)
    for first in (0, 2, 4):
        rows = range(first, min(first + 2, 5))
        part = _sample(actor, [PROMPTS[row] for row in rows], rows)
        assert part.completion_ids() == [together.completion_ids()[row] for row in rows]
    assert shuffled.completion_ids() == [together.completion_ids()[i] for i in order]


def _tokens_fed(actor) -> tuple[list[tuple[int, int]], torch.utils.hooks.RemovableHandle]:
    calls: list[tuple[int, int]] = []
    hook = actor.model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return calls, hook


@pytest.mark.parametrize("slots", [None, 2])
def test_equal_prompts_are_computed_once(slots, tiny_model):
    actor = Actor(tiny_model())
    prompts = [PROMPTS[2], PROMPTS[0]] * 4
    calls, hook = _tokens_fed(actor)
    rollout = _sample(actor, prompts, slots=slots, eos_ids=())
    hook.remove()
    rows = {"prompts": sum(rows for rows, length in calls if length > 1), "steps": sum(r for r, n in calls if n == 1)}
    assert rows == {"prompts": 2, "steps": 8 * STEPS}
    for row, prompt in enumerate(prompts):
        alone = _sample(actor, [prompt], [row], eos_ids=())
        assert alone.completion_ids()[0] == rollout.completion_ids()[row]


def test_no_step_computes_replies_that_have_ended(tiny_model):
    actor = Actor(tiny_model())
    calls, hook = _tokens_fed(actor)
    _sample(actor, steps=[1, 4, 2, 4, 3], eos_ids=())
    hook.remove()
    assert [rows for rows, length in calls if length == 1] == [5, 4, 3, 2]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_long_prompts_go_by_pieces(family, tiny_model, monkeypatch):
    """Pieces of 4 tokens, one of a single token among them, and the window of sliding attention across them."""
    actor = Actor(tiny_model(family))
    prompts = [[7, 7, 40, 9, 12, 60, 33, 8, 21, 22], [3, 9, 7], [4] * 17]
    whole = _sample(actor, prompts)
    monkeypatch.setattr(sys.modules["ppo_fast.rollout.generate"], "PREFILL_TOKENS", 4)
    _same(_sample(actor, prompts), whole)


def test_the_cache_grows(tiny_model, monkeypatch):
    """From 8 columns to 7 + 60."""
    monkeypatch.setattr("ppo_fast.rollout.slots._COLUMNS", 1)
    actor = Actor(tiny_model())
    rollout = _sample(actor, steps=60, eos_ids=(), slots=2)
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(actor.model, PROMPTS[row], reply, 1.0)
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)].double(), expected, rtol=0, atol=5e-5)


# Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite", "phi"])
def test_eos_is_excluded_before_min_new_tokens(family, tiny_model):
    """And log-probs there are those of the distribution without it."""
    actor = Actor(tiny_model(family))
    eos = _common_eos(actor, 1.0)
    free = _sample(actor, eos_ids=(eos,))
    rollout = _sample(actor, eos_ids=(eos,), min_new_tokens=9)
    assert any(eos in ids[:9] for ids in free.completion_ids())
    assert int(rollout.lengths.min()) > 9
    for row, reply in enumerate(rollout.completion_ids()):
        with torch.no_grad():
            logits = actor.model(input_ids=torch.tensor([PROMPTS[row] + reply])).logits[0, len(PROMPTS[row]) - 1 : -1]
        logits[:9, eos] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)], expected, rtol=0, atol=2e-5)


def test_stop_strings(tiny_model, tiny_tokenizer):
    """They may span tokens, and end a reply with the token that completes them; that is an action."""
    actor = Actor(tiny_model())
    free = _sample(actor, eos_ids=())
    words = [tiny_tokenizer.convert_ids_to_tokens(ids) for ids in free.completion_ids()]
    stops = StopStrings(tiny_tokenizer, (f"{words[0][4]} {words[0][5][:1]}", words[2][7]))
    rollout = _sample(actor, eos_ids=(), stop_strings=stops)
    for row, ids in enumerate(free.completion_ids()):
        ends = [n for n in range(1, STEPS + 1) if any(s in tiny_tokenizer.decode(ids[:n]) for s in stops.strings)]
        assert rollout.completion_ids()[row] == ids[: ends[0] if ends else STEPS]
        assert bool(rollout.finished[row]) == bool(ends)
    assert rollout.lengths[0] <= 6
    assert rollout.lengths[2] <= 8
    late = _sample(actor, eos_ids=(), stop_strings=stops, min_new_tokens=10)
    assert int(late.lengths.min()) >= 10


def test_a_stop_string_may_overlap_an_earlier_one(tiny_tokenizer):
    """Which didn't end the reply, before min_new_tokens."""
    the, a = tiny_tokenizer.convert_tokens_to_ids(["the", "a"])
    stops = StopStrings(tiny_tokenizer, ("the the",))
    assert stops.end([the, the])
    assert stops.end([the, the, the])
    assert not stops.end([the, the, a])


@pytest.mark.parametrize("strings", [(), ("",), ("a", 3)])
def test_bad_stop_strings(strings, tiny_tokenizer):
    with pytest.raises(ValueError, match="strings must hold texts"):
        StopStrings(tiny_tokenizer, strings)


# Top-k and top-p -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.5}])
def test_kept_sets_are_what_was_drawn_from(cut, tiny_model):
    """Log-probs are those of a full forward on the stored set, which is that of a sort in float64."""
    actor = Actor(tiny_model())
    rollout = _sample(actor, eos_ids=(), **cut, temperature=0.9, slots=2)
    for row, reply in enumerate(rollout.completion_ids()):
        with torch.no_grad():
            logits = actor.model(input_ids=torch.tensor([PROMPTS[row] + reply])).logits[0, len(PROMPTS[row]) - 1 : -1]
        for t, token in enumerate(reply):
            p, order = (logits[t].double() / 0.9).softmax(-1).sort(descending=True)
            p = p[: cut.get("top_k")] / p[: cut.get("top_k")].sum()
            p = p[: int((p.cumsum(0) < cut.get("top_p", 1)).sum()) + 1]
            kept = rollout.kept_ids[row, t][rollout.kept_ids[row, t] >= 0].tolist()
            assert sorted(kept) == sorted(order[: len(p)].tolist())
            expected = p[order.tolist().index(token)] / p.sum()
            assert float(rollout.logprobs[row, t]) == pytest.approx(float(expected.log()), abs=2e-5)
    assert _sample(actor).kept_ids is None


# Linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not swaps(torch.device("cpu")), reason="needs the C++ extension")
def test_bfloat16_weights_give_logprobs_of_the_rounded_policy(tiny_model):
    model = tiny_model()
    rollout = _sample(Actor(model), dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(layer.weight.bfloat16())
    for row, reply in enumerate(rollout.completion_ids()):
        gap = rollout.logprobs[row, : len(reply)] - _full_logprobs(model, PROMPTS[row], reply, 1.0)
        assert gap.abs().mean() < 0.05
    assert rollout.logprobs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_in_the_body_samples_too(dtype, tiny_model):
    """A product of its own, in float32 also beside 16 bits: nothing of a small adapter is lost."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model().to(dtype), config).get_base_model()
    rollout = _sample(Actor(model))
    gaps, moved = [], []
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(model, PROMPTS[row], reply, 1.0)
        gaps.append(rollout.logprobs[row, : len(reply)] - expected)
        moved.append(_full_logprobs(tiny_model().to(dtype), PROMPTS[row], reply, 1.0) - expected)
    assert torch.cat(gaps).abs().mean() < (2e-6 if dtype == torch.float32 else 0.1)
    assert torch.cat(moved).abs().mean() > 0.3


def test_an_adapter_on_a_weight_samples_too(tiny_model):
    """peft's ParamWrapper adapts a layer's weight while its own forward runs."""
    torch.manual_seed(0)
    names = ["self_attn.q_proj.weight", "mlp.up_proj.weight"]
    config = LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).get_base_model()
    rollout = _sample(Actor(model))
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(model, PROMPTS[row], reply, 1.0)
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)], expected.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_hooks_on_the_parts_of_an_adapted_layer_are_called(part, tiny_model):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).get_base_model()
    model.get_submodule(f"model.layers.0.mlp.up_proj.{part}").register_forward_hook(lambda _layer, _x, y: y + 1)
    rollout = _sample(Actor(model))
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(model, PROMPTS[row], reply, 1.0)
        torch.testing.assert_close(rollout.logprobs[row, : len(reply)], expected.float(), rtol=0, atol=2e-5)


def test_a_layer_in_two_places_is_as_before_afterwards(tiny_model):
    model = tiny_model()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    _sample(Actor(model))
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_are_as_before_afterwards(tiny_model):
    """Forwards and attention, also when the caller's function raises in the middle."""

    def fail(_):
        raise KeyboardInterrupt

    for family in ("llama", "gpt2"):
        actor = Actor(tiny_model(family))
        before = [(module.__dict__.get("forward"), module) for module in actor.model.modules()]
        attention = actor.model.config._attn_implementation
        hooked = actor.model.base_model.get_submodule("layers.0.mlp.up_proj" if family == "llama" else "h.0.mlp.c_fc")
        hooked.forward = own = hooked.forward
        with pytest.raises(KeyboardInterrupt):
            _sample(actor, on_tokens=fail)
        assert hooked.forward is own
        del hooked.forward
        _sample(actor)
        assert all(module.__dict__.get("forward") is forward for forward, module in before)
        assert actor.model.config._attn_implementation == attention


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_ids": [[3, 4], []]}, "at least one token"),
        ({"prompt_ids": []}, "at least one token"),
        ({"temperature": -0.1}, "temperature must be >= 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be >= 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be >= 0 and finite, got inf"),
        ({"temperature": 1e-39}, r"temperature must be 0 \(greedy\) or at least 1e-06, got 1e-39"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"top_k": 0}, "top_k must be from 1 to 1024, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": [4]}, "max_new_tokens must hold one number per prompt, 2, got 1"),
        ({"max_new_tokens": 127}, "a prompt of 2 tokens and max_new_tokens 127 don't fit the model's context of 128"),
        ({"min_new_tokens": 5}, "min_new_tokens must be from 0 to max_new_tokens = 4, got 5"),
        ({"min_new_tokens": -1}, "min_new_tokens must be from 0 to max_new_tokens = 4, got -1"),
        ({"seeds": [1, 2, 3]}, "seeds must hold one number per prompt, 2, got 3"),
        ({"slots": 0}, "slots must be >= 1, got 0"),
        ({"prompt_ids": [[3, 64], [5]]}, "prompt_ids has the id 64, outside of the model's vocabulary of 64"),
        ({"eos_ids": (1, -1)}, "eos_ids has the id -1, outside of the model's vocabulary of 64"),
    ],
)
def test_bad_input(changed, message, tiny_model):
    good = {
        "prompt_ids": [[3, 4], [5]], "max_new_tokens": 4, "temperature": 1.0, "eos_ids": (EOS,), "pad_id": PAD,
        "seeds": [3, 4],
    }  # fmt: skip
    actor = Actor(tiny_model())
    generate(actor, **good)
    with pytest.raises(ValueError, match=message):
        generate(actor, **{**good, **changed})


def test_min_new_tokens_under_a_softcap(tiny_model):
    with pytest.raises(ValueError, match="min_new_tokens needs a head without softcap"):
        _sample(Actor(tiny_model("gemma2")), min_new_tokens=2)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("openai-gpt", {}, "OpenAIGPTModel has no cache of keys and values"),
        ("mamba", {}, "remembers more than keys and values of full or sliding attention"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
    ],
)
def test_models_that_cannot_generate(family, settings, message, tiny_model):
    with pytest.raises(UserError, match=message):
        _sample(Actor(tiny_model(family, **settings)))
