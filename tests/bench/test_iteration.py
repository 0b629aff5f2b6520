"""The peers of bench_iteration.py do what their names say, and the bars are judged the right way round."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig

import bench_iteration
import iteration_parts
import readme
import trl_ppo
from bench_iteration import PARTS
from plain_ppo import PlainPPO


def _lora(task):
    return LoraConfig(r=4, target_modules="all-linear", task_type=task)


@pytest.mark.parametrize("logits", ["all", "reply"])
def test_the_peer_trains_policy_and_critic_on_replies_of_full_length(tiny_model, logits):
    torch.manual_seed(0)
    model = tiny_model("llama")
    seen_logits = []
    model.lm_head.register_forward_hook(lambda _, __, out: seen_logits.append(out.shape[1]))
    trainer = PlainPPO(model, _lora, 0.7, logits=logits)
    before = [p.detach().clone() for p in trainer.trained]
    seen = []

    def reward(replies):
        seen.append(replies)
        return (replies % 7 == 0).float().mean(1)

    prompts = torch.randint(5, 20, (4, 6))
    stages = trainer.iterate(prompts, 5, reward, epochs=2, minibatches=2, kl_coef=0.05)
    assert list(stages.seconds) == list(stages.peak_bytes) == list(iteration_parts.STAGES)
    assert seen[0].shape == (4, 5)
    assert set(seen_logits[-6:]) == {11 if logits == "all" else 6}  # twice in the score stage, four minibatches
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.trained, strict=True)]
    assert sum(moved) > len(moved) / 2

    ids = torch.cat([prompts, seen[0]], 1)
    with torch.no_grad():
        logprobs, entropy = trainer.logprobs(ids, 5, entropy=True)
        table = (trainer.policy(input_ids=ids).logits[:, 5:-1].double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), table.gather(-1, seen[0][..., None])[..., 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(table.exp() * table).sum(-1).mean(), rtol=1e-5, atol=1e-5)


def test_the_peer_in_bf16(tiny_model):
    torch.manual_seed(0)
    trainer = PlainPPO(tiny_model("llama").to(torch.bfloat16), _lora, 0.7)
    stages = trainer.iterate(
        torch.randint(5, 20, (4, 6)), 5, lambda replies: replies.float().mean(1), epochs=1, minibatches=2, kl_coef=0.05
    )
    assert list(stages.seconds) == list(iteration_parts.STAGES)


def _rounds(seconds: float, peak: int) -> list[list[dict]]:
    stages = dict.fromkeys(iteration_parts.STAGES, seconds / 3)
    one = {"seconds": stages, "peak_bytes": dict.fromkeys(iteration_parts.STAGES, peak)}
    first = {"seconds": dict.fromkeys(iteration_parts.STAGES, 100.0), "peak_bytes": one["peak_bytes"]}
    return [[first, one]]


HEAD = {"machine": {"processor": "P", "threads": 2}, "versions": {"torch": "2", "transformers": "5"}}


def _of(result, key):
    return {(row["part"], row["figure"]): row[key] for row in result["bars"] if row["measured"] is not None}


def test_bars_of_speed_and_memory():
    rounds = {"plain": _rounds(30, 1000), "ours": _rounds(20, 400), "ours-checkpointed": _rounds(31, 350)}
    result = bench_iteration.merged({}, "monday", HEAD, rounds)
    checkpointed = bench_iteration.PARTS["ours-checkpointed"].title
    expected = {
        ("ours", "seconds"): (1.5, True),
        ("ours", "peak_bytes"): (0.4, True),
        (checkpointed, "seconds"): (30 / 31, False),
        (checkpointed, "peak_bytes"): (0.35, False),
    }
    assert _of(result, "measured") == pytest.approx({key: measured for key, (measured, _) in expected.items()})
    assert _of(result, "met") == {key: met for key, (_, met) in expected.items()}
    assert {row["met"] for row in result["bars"] if row["measured"] is None} == {None}
    assert "2 of 8 bars met, 4 not measured" in readme.iteration(result)


def test_parts_of_two_runs_are_not_compared():
    first = bench_iteration.merged({}, "monday", HEAD, {"plain": _rounds(30, 1000), "trl": _rounds(60, 9000)})
    second = bench_iteration.merged(first, "tuesday", HEAD, {"ours": _rounds(20, 400)})
    assert _of(second, "measured") == {}
    assert [row["run"] for row in second["summary"].values()] == ["monday", "tuesday", "monday"]
    assert "**" not in readme.iteration(second)

    pair = {"plain": _rounds(40, 1000), "ours": _rounds(20, 400), "trl": _rounds(60, 9000)}
    third = bench_iteration.merged(second, "wednesday", HEAD, pair)
    assert _of(third, "measured") == {("ours", "seconds"): 2.0, ("ours", "peak_bytes"): 0.4}
    assert list(third["runs"]) == ["wednesday"]  # nothing is left of the others
    assert json.loads(json.dumps(third)) == third


def test_every_part_with_a_bar_has_a_peer_on_the_same_work():
    for part in PARTS.values():
        assert bool(part.bars) <= bool(part.peer)
        if part.peer is not None:
            assert (PARTS[part.peer].work, PARTS[part.peer].dtype) == (part.work, part.dtype)
            assert PARTS[part.peer].peer is None


def test_a_job_for_trl_survives_its_pipe():
    values = {"str": "x", "int": 3, "float": 0.1, "list[float]": [0.1], "list[list[int]]": [[1, 2]]}
    job = trl_ppo.Job(**{field.name: values[field.type] for field in fields(trl_ppo.Job)})
    assert trl_ppo.Job(**json.loads(job.json())) == job


def test_another_trl_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="no TRL in the environment"):
        bench_iteration.trl_versions(tmp_path / "python")
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"trl": "1.0.0", "transformers": "5.0.0"}\'\n')
    fake.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"TRL 1\.0\.0, expected 0\.22\.2"):
        bench_iteration.trl_versions(fake)
