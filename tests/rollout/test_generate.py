"""The decode loop against transformers: ids, log-probs, stop rules, and what a reply may depend on."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ppo_fast import ops
from ppo_fast.models.roles import Actor, build_roles
from ppo_fast.rollout import generate

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi")
PROMPTS = [[5, 11, 29, 15], [31], [7, 7, 40, 9, 12, 60, 33], [52, 20], [9, 8, 7]]
STEPS = 12
PAD, EOS = 0, 1


def _uniforms(rows: int = len(PROMPTS), steps: int = STEPS, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _sample(actor, prompts=PROMPTS, uniforms=None, *, temperature=1.0, eos_ids=(EOS,), pad_id=PAD, **more):
    uniforms = _uniforms(len(prompts)) if uniforms is None else uniforms
    return generate(
        actor, prompts, max_new_tokens=uniforms.shape[1], temperature=temperature, eos_ids=eos_ids, pad_id=pad_id,
        uniforms=uniforms, **more,
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
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    adapted = Actor(get_peft_model(tiny_model(), config).get_base_model())
    rollout = _sample(adapted, temperature=0.8)
    for row, reply in enumerate(rollout.completion_ids()):
        expected = _full_logprobs(adapted.model, PROMPTS[row], reply, 0.8)
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
    """Of 400 replies to one prompt, drawn at evenly spaced numbers: every count within one of its expectation."""
    actor = Actor(tiny_model())
    uniforms = (torch.arange(400, dtype=torch.float64)[:, None] + 0.5) / 400
    rollout = _sample(actor, [PROMPTS[0]] * 400, uniforms, temperature=0.9)
    with torch.no_grad():
        logits = actor.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    expected = 400 * (logits / 0.9).softmax(-1)
    counts = rollout.response_ids[:, 0].bincount(minlength=64)
    assert (counts - expected).abs().max() <= 1
    assert (counts > 0).sum() > 10


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
    last = int(_sample(actor, eos_ids=()).response_ids[0, 4])
    rollout = _sample(actor, PROMPTS[:1], _uniforms()[:1, :5], eos_ids=(last,))
    assert rollout.lengths.tolist() == [5]
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
    rollout = _sample(Actor(tiny_model()), uniforms=_uniforms(steps=1), eos_ids=())
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
        alone = _sample(actor, [prompt], _uniforms()[row : row + 1], temperature=temperature, eos_ids=(eos,))
        assert alone.completion_ids()[0] == together.completion_ids()[row]
        assert alone.finished[0] == together.finished[row]
        length = int(alone.lengths[0])
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row, :length], rtol=0, atol=2e-5)


def test_equal_numbers_give_equal_replies(tiny_model):
    actor = Actor(tiny_model())
    first, second = _sample(actor), _sample(actor)
    assert torch.equal(first.token_ids, second.token_ids)
    assert torch.equal(first.logprobs, second.logprobs)
    rows = _sample(actor, [PROMPTS[0]] * 3, _uniforms()[[2, 4, 2]], eos_ids=())
    assert torch.equal(rows.response_ids[0], rows.response_ids[2])
    assert not torch.equal(rows.response_ids[0], rows.response_ids[1])


def test_the_global_generator_is_not_used(tiny_model):
    actor = Actor(tiny_model())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    _sample(actor)
    assert torch.equal(torch.get_rng_state(), state)


def test_position_ids_count_real_tokens(tiny_model):
    """Of the prompt first, then one more a step, whatever the padding; keys of padding are masked."""
    actor = Actor(tiny_model())
    eos = _common_eos(actor, 1.0)
    calls = []
    hook = actor.model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append((kwargs["position_ids"].clone(), kwargs["attention_mask"].clone())),
        with_kwargs=True,
    )
    rollout = _sample(actor, eos_ids=(eos,))
    hook.remove()
    positions, mask = calls[0]
    for row, prompt in enumerate(PROMPTS):
        assert positions[row, -len(prompt) :].tolist() == list(range(len(prompt)))
        assert mask[row].tolist() == [0] * (7 - len(prompt)) + [1] * len(prompt)
    for step, (positions, mask) in enumerate(calls[1:]):
        assert torch.equal(mask.bool(), rollout.attention_mask[:, : 7 + step + 1])
        for row, prompt in enumerate(PROMPTS):
            if rollout.response_mask[row, step]:
                assert positions[row].tolist() == [len(prompt) + step]
    assert len(calls) == rollout.response_mask.shape[1]


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


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_ids": [[3, 4], []]}, "at least one token"),
        ({"prompt_ids": []}, "at least one token"),
        ({"temperature": -0.1}, "temperature must be >= 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be >= 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be >= 0 and finite, got inf"),
        ({"max_new_tokens": 0, "uniforms": torch.zeros(2, 0)}, "max_new_tokens must be >= 1, got 0"),
        ({"uniforms": torch.zeros(2, 5)}, r"uniforms has shape \(2, 5\), expected \(2, 4\)"),
        ({"uniforms": torch.zeros(3, 4)}, r"uniforms has shape \(3, 4\), expected \(2, 4\)"),
        ({"uniforms": torch.zeros(8)}, r"uniforms has shape \(8,\), expected \(2, 4\)"),
    ],
)
def test_bad_input(changed, message, tiny_model):
    good = {
        "prompt_ids": [[3, 4], [5]], "max_new_tokens": 4, "temperature": 1.0, "eos_ids": (EOS,), "pad_id": PAD,
        "uniforms": torch.zeros(2, 4, dtype=torch.float64),
    }  # fmt: skip
    actor = Actor(tiny_model())
    generate(actor, **good)
    with pytest.raises(ValueError, match=message):
        generate(actor, **{**good, **changed})
