"""The peer of bench_iteration.py does what its name says, and the bars are judged the right way round."""

from __future__ import annotations

import torch
from peft import LoraConfig

import bench_iteration
from plain_ppo import PlainPPO


def test_the_peer_trains_policy_and_critic_on_replies_of_full_length(tiny_model):
    torch.manual_seed(0)
    model = tiny_model("llama")
    trainer = PlainPPO(model, lambda task: LoraConfig(r=4, target_modules="all-linear", task_type=task), 0.7)
    before = [p.detach().clone() for p in trainer.trained]
    seen = []

    def reward(replies):
        seen.append(replies)
        return (replies % 7 == 0).float().mean(1)

    prompts = torch.randint(5, 20, (4, 6))
    stages = trainer.iterate(prompts, 5, reward, epochs=2, minibatches=2, kl_coef=0.05)
    assert list(stages.seconds) == list(stages.peak_bytes) == list(bench_iteration.STAGES)
    assert seen[0].shape == (4, 5)
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.trained, strict=True)]
    assert sum(moved) > len(moved) / 2

    ids = torch.cat([prompts, seen[0]], 1)
    with torch.no_grad():
        logprobs, entropy = trainer.logprobs(ids, 5, entropy=True)
        table = (trainer.policy(input_ids=ids).logits[:, 5:-1].double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), table.gather(-1, seen[0][..., None])[..., 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(table.exp() * table).sum(-1).mean(), rtol=1e-5, atol=1e-5)


def test_bars_of_speed_and_memory():
    def part(seconds: float, peak: int) -> list[list[dict]]:
        stages = dict.fromkeys(bench_iteration.STAGES, seconds / 3)
        one = {"seconds": stages, "peak_bytes": dict.fromkeys(bench_iteration.STAGES, peak)}
        first = {"seconds": dict.fromkeys(bench_iteration.STAGES, 100.0), "peak_bytes": one["peak_bytes"]}
        return [[first, one]]

    found = bench_iteration.summary(
        {"plain": part(30, 1000), "ours": part(20, 400), "ours, checkpointed": part(31, 350)}
    )
    assert [(round(row["measured"], 2), row["met"]) for row in bench_iteration.judged(found)] == [
        (1.5, True),
        (0.4, True),
        (0.35, False),
        (0.97, False),
    ]
