"""Decode steps as CUDA graphs; tests/rollout/test_step.py replays recorded operations where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from typing import Any

import pytest
import torch

from ppo_fast.models.roles import Actor
from ppo_fast.rollout import generate, slots, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; run by bench/gpu.sh")
PROMPTS = [[5, 11, 29, 15], [31], [7, 7, 40, 9, 12, 60, 33], [52, 20], [9, 8, 7]]
LIMITS = [30, 12, 90, 7, 60]


def sample(actor: Actor, **more: Any) -> Any:
    settings = {"max_new_tokens": LIMITS, "temperature": 0.8, "eos_ids": (), "pad_id": 0, "seeds": range(5)} | more
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # one says that steps weren't captured
        return generate(actor, PROMPTS, **settings)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each replay of a graph."""
    seen: list[int] = []

    class Counted(step.Capture):
        def __call__(self, run):
            replay = super().__call__(run)
            return lambda: (seen.append(1), replay())

    monkeypatch.setattr(step, "Capture", Counted)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "more",
    [{}, {"top_p": 0.9}, {"top_k": 5, "temperature": 0.0}, {"slots": 3}],
    ids=["plain", "top-p", "greedy", "slots"],
)
def test_replays_have_the_bits_of_plain_steps(family, dtype, more, tiny_model, replays, monkeypatch):
    """Rows fall, columns and the cache grow, slots are refilled."""
    monkeypatch.setattr(slots, "_COLUMNS", 8)
    actor = Actor(tiny_model(family).to("cuda", dtype))
    captured = sample(actor, **more)
    assert len(replays) > 40
    monkeypatch.setattr(step, "Capture", lambda device: lambda run: run)
    plain = sample(actor, **more)
    assert torch.equal(captured.token_ids, plain.token_ids)
    assert torch.equal(captured.logprobs, plain.logprobs)
    assert (captured.kept_ids is None) == (plain.kept_ids is None)
    if captured.kept_ids is not None:
        assert torch.equal(captured.kept_ids, plain.kept_ids)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_greedy_ids_equal_those_of_transformers(family, tiny_model, replays):
    model = tiny_model(family).to("cuda")
    got = sample(Actor(model), temperature=0.0, max_new_tokens=40, eos_ids=())
    assert len(replays) > 20
    ids, mask = got.token_ids[:, : got.prompt_length], got.prompt_mask
    expected = model.generate(
        ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(got.token_ids, expected)


def test_a_model_that_waits_is_not_captured(tiny_model, replays):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    actor = Actor(tiny_model("llama", rope_parameters=rope).to("cuda"))
    with pytest.raises(UserWarning, match="without CUDA graphs"):
        sample(actor)
    assert not replays


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_flash_attention_over_prompts(family, tiny_model, monkeypatch):
    """Prompts in pieces of 4 tokens; 16-bit keys and values, so a few hundredths of a nat."""
    monkeypatch.setattr(sys.modules["ppo_fast.rollout.generate"], "PREFILL_TOKENS_GPU", 4)
    actor = Actor(tiny_model(family).to("cuda", torch.bfloat16))
    with_flash = sample(actor, max_new_tokens=1)
    monkeypatch.setattr(slots, "_flash_attention", lambda: None)
    without = sample(actor, max_new_tokens=1)
    same = with_flash.token_ids[:, -1] == without.token_ids[:, -1]
    assert int(same.sum()) >= 3
    assert (with_flash.logprobs - without.logprobs)[same].abs().mean() < 0.05
