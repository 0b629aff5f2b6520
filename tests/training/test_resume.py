"""Interrupted and resumed equals uninterrupted, to the bit, and nothing that was written is lost."""

import json
import shutil

import pytest
import torch
from transformers import TrainerCallback

from ppo_fast.errors import UserError
from ppo_fast.training import checkpoint


class StopAfter(TrainerCallback):
    """Stands for a machine that dies: no checkpoint of its own."""

    def __init__(self, iteration):
        self._iteration = iteration

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == self._iteration:
            raise KeyboardInterrupt


def weights(trainer):
    named = trainer.roles.policy_parameters | trainer.roles.value_parameters
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def metric_lines(folder):
    """metrics.jsonl without what depends on the clock or the process."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "elapsed"))} for line in lines]


VARIANTS = {
    "lora": ({}, {}),
    "full": ({"lora": False}, {}),
    "head": ({"trainer": {"value_model": "head"}}, {}),
    "adaptive_kl": ({}, {"kl_target": 0.01, "kl_horizon": 64, "lr_scheduler_type": "cosine"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted_to_the_bit(make_trainer, tmp_path, variant):
    arguments, config = VARIANTS[variant]
    whole = make_trainer(**arguments, **config, output_dir=str(tmp_path / "whole"))
    whole.train()

    arguments = {**arguments, "trainer": {**arguments.get("trainer", {}), "callbacks": [StopAfter(3)]}}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(**arguments, **config, output_dir=str(tmp_path / "cut")).train()
    arguments["trainer"].pop("callbacks")
    resumed = make_trainer(**arguments, **config, output_dir=str(tmp_path / "cut"))
    state = resumed.train(resume_from_checkpoint=True)

    assert state.global_step == whole.iterations == 4
    for name, expected in weights(whole).items():
        assert torch.equal(weights(resumed)[name], expected), name
    assert metric_lines(tmp_path / "cut") == metric_lines(tmp_path / "whole")
    for file in sorted((tmp_path / "whole" / "completions").iterdir()):
        assert (tmp_path / "cut" / "completions" / file.name).read_text() == file.read_text()


def test_metrics_of_the_interrupted_run_are_kept_beside(make_trainer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make_trainer(trainer={"callbacks": [StopAfter(3)]}).train()
    folder = tmp_path / "run"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "torn')  # a line the machine died in
    before = (folder / "metrics.jsonl").read_text().splitlines()
    make_trainer().train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert (folder / "metrics.superseded-0.jsonl").read_text().splitlines() == before[2:]
    assert [line["iteration"] for line in metric_lines(folder)] == [1, 2, 3, 4]
    record = json.loads((folder / "run_record.json").read_text())
    assert record["resumed_from"].endswith("checkpoint-2")
    assert record["finished"] is not None


def test_an_existing_run_is_never_overwritten(make_trainer, tmp_path):
    make_trainer(total_episodes=8).train()
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match="is not empty; choose another output_dir, or continue"):
        make_trainer(total_episodes=8).train()
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_checkpoints_rotate_only_after_the_new_one_is_whole(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(save_steps=1, save_total_limit=2, total_episodes=24)
    trainer.train()
    assert [p.name for p in checkpoint.find(tmp_path / "run")] == ["checkpoint-2", "checkpoint-3"]

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fails)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint()
    assert [p.name for p in checkpoint.find(tmp_path / "run")] == ["checkpoint-2", "checkpoint-3"]
    assert not list((tmp_path / "run").glob(".*partial"))


def test_a_checkpoint_can_be_read_without_running_its_code(make_trainer, tmp_path):
    make_trainer(total_episodes=8).train()
    folder = tmp_path / "run" / "checkpoint-1"
    assert torch.load(folder / "trainer_state.pt", weights_only=True)["iteration"] == 1
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} <= {".pt", ".safetensors", ".json", ".jinja"}


def test_a_checkpoint_of_another_kind_is_named(make_trainer, tmp_path):
    make_trainer(total_episodes=8).train()
    shutil.move(tmp_path / "run", tmp_path / "lora")
    with pytest.raises(UserError, match="of a LoRA run"):
        make_trainer(lora=False).train(resume_from_checkpoint=str(tmp_path / "lora" / "checkpoint-1"))
    with pytest.raises(UserError, match="is not a checkpoint"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "lora"))
    with pytest.raises(UserError, match="holds no checkpoint to resume from"):
        make_trainer().train(resume_from_checkpoint=True)


def test_an_adapter_checkpoint_loads_in_peft(make_trainer, tmp_path, tiny_model_dir):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(total_episodes=8)
    trainer.train()
    ids = torch.arange(5, 12)[None]
    with trainer.roles.policy.activated(), torch.no_grad():
        expected = trainer.roles.policy.model(ids).logits
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    loaded = PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoint-1" / "policy").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected)
        assert not torch.allclose(loaded.get_base_model().base_model(ids).last_hidden_state.sum(), expected.sum())
