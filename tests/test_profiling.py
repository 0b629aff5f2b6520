"""One helper names every phase and op, for torch.profiler and for NVIDIA's tools."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ppo_fast import ops, profiling


def names_in(run) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return {event.key for event in profiler.key_averages()}


def test_ops_are_named():
    ones = torch.ones(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)

    def run():
        ops.gae(ones, ones, mask)
        ops.ppo_loss(ones, ones, ones, mask)
        ops.value_loss(ones, ones, ones, mask)
        ops.selected_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
        hidden, ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
        ops.linear_selected_logprobs(hidden, torch.zeros(5, 4), ids)
        ops.linear_ppo_loss(hidden, torch.zeros(5, 4), ids, ones, ones, mask)
        ops.linear_token_loss(hidden, torch.zeros(5, 4), ids, lambda logprobs, entropy: -logprobs)

    wanted = {"gae", "ppo_loss", "value_loss", "selected_logprobs", "linear_selected_logprobs", "linear_ppo_loss"}
    assert {f"ppo_fast::{name}" for name in wanted | {"linear_token_loss"}} <= names_in(run)


def test_phases_of_a_run_are_named(tmp_path, tiny_model_dir):
    from ppo_fast import PPOConfig, PPOTrainer

    args = PPOConfig(
        output_dir=str(tmp_path / "run"), response_length=4, per_device_train_batch_size=2, total_episodes=2,
        num_ppo_epochs=1,
    )  # fmt: skip
    prompts = [{"prompt": [{"role": "user", "content": "a"}]}] * 2
    trainer = PPOTrainer(str(tiny_model_dir), lambda completions, **_: [1.0] * len(completions), args, prompts)
    seen = names_in(trainer.train)
    phases = {"rollout", "decode", "score", "reference_forward", "value_forward", "update", "policy_forward"}
    assert {f"ppo_fast/{name}" for name in phases | {"policy_backward", "value_backward", "optimizer"}} <= seen


def test_nvtx_ranges_are_balanced_even_on_errors(monkeypatch):
    stack, pushed = [], []
    monkeypatch.setattr(profiling, "_nvtx", lambda: (lambda name: (stack.append(name), pushed.append(name)), stack.pop))

    def fails():
        with profiling.annotate("inner"):
            assert stack == ["outer", "inner"]
            raise ValueError("x")

    with profiling.annotate("outer"), pytest.raises(ValueError, match="x"):
        fails()
    assert (stack, pushed) == ([], ["outer", "inner"])


def test_nvtx_is_found_where_a_gpu_is(monkeypatch):
    profiling._nvtx.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        push, pop = profiling._nvtx()
        assert callable(push)
        assert callable(pop)
    finally:
        profiling._nvtx.cache_clear()
