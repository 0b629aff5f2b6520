"""Interrupted and resumed equals uninterrupted, to the bit, and nothing that was written is lost."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from ppo_fast.errors import UserError
from ppo_fast.training import checkpoint, update


class StopAfter(TrainerCallback):
    """Stands for a machine that dies: no checkpoint of its own."""

    def __init__(self, iteration):
        self._iteration = iteration

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == self._iteration:
            raise KeyboardInterrupt


def other_reward(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def wider_lora():
    return LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


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
    "adapter on the head": (
        {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")}},
        {},
    ),
    "cut": ({}, {"top_p": 0.7, "rollout_slots": 3}),
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


@pytest.mark.parametrize("lora", [True, False])
def test_a_trainer_interrupted_in_an_update_resumes_to_the_bit(make_trainer, tmp_path, monkeypatch, lora):
    """By itself: the gradients of the minibatch it was in are gone."""
    whole = make_trainer(lora=lora, output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = make_trainer(lora=lora, output_dir=str(tmp_path / "cut"))
    original, calls = update._backward, []

    def interrupted(*arguments):
        calls.append(original(*arguments))
        if len(calls) == 9:  # the first of the third iteration
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(update, "_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resumed.train()
    assert resumed.state.global_step == 2
    resumed.train(resume_from_checkpoint=True)
    for name, expected in weights(whole).items():
        assert torch.equal(weights(resumed)[name], expected), name


def test_metrics_of_the_interrupted_run_are_kept_beside(make_trainer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make_trainer(trainer={"callbacks": [StopAfter(3)]}).train()
    folder = tmp_path / "run"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "torn')  # a line the machine died in
    before = (folder / "metrics.jsonl").read_text().splitlines()
    make_trainer().train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert (folder / "superseded-0" / "metrics.jsonl").read_text().splitlines() == before[2:]
    assert (folder / "superseded-0" / "iteration-00003.jsonl").is_file()
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
    with pytest.raises(UserError, match=r"checkpoint-3 can't be written .*No space left"):
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
    with pytest.raises(UserError, match="made with adapters = "):
        make_trainer(lora=False, total_episodes=8).train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match="is not a checkpoint"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "run"))
    shutil.move(tmp_path / "run", tmp_path / "moved")
    with pytest.raises(UserError, match="holds no checkpoint"):
        make_trainer().train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match="belongs to another run"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-1"))


def test_later_checkpoints_of_an_abandoned_run_are_put_aside(make_trainer, tmp_path):
    make_trainer(save_steps=1).train()
    folder = tmp_path / "run"
    assert [p.name for p in checkpoint.find(folder)] == [f"checkpoint-{i}" for i in (1, 2, 3, 4)]
    with pytest.raises(KeyboardInterrupt):
        make_trainer(save_steps=1, trainer={"callbacks": [StopAfter(3)]}).train(
            resume_from_checkpoint=str(folder / "checkpoint-1")
        )
    assert [p.name for p in checkpoint.find(folder)] == ["checkpoint-1", "checkpoint-2"]
    assert {p.name for p in checkpoint.find(folder / "superseded-0")} == {
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
    }
    assert sorted(p.name for p in (folder / "completions").iterdir())[-1] == "iteration-00003.jsonl"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.5}, "made with learning_rate = 0.001, and it is 0.5 now"),
        ({"temperature": 0.5}, "made with temperature = 0.9, and it is 0.5 now"),
        ({"total_episodes": 64}, "made with total_episodes = 32"),
        ({"trainer": {"train_dataset": [{"prompt": "the hotel"}]}}, "made with data = "),
        ({"trainer": {"reward_funcs": other_reward}}, r"made with rewards = \['length_reward'\]"),
        # The same shapes, another policy: only the recorded settings can tell.
        ({"trainer": {"peft_config": wider_lora()}}, "made with adapters = "),
        ({"trainer": {"value_model": "head"}}, "made with adapters = "),
    ],
)
def test_a_run_is_resumed_with_its_own_settings(make_trainer, tmp_path, change, message):
    with pytest.raises(KeyboardInterrupt):
        make_trainer(trainer={"callbacks": [StopAfter(3)]}).train()
    with pytest.raises(UserError, match=message):
        make_trainer(**change).train(resume_from_checkpoint=True)
    make_trainer(save_steps=3, save_total_limit=5).train(resume_from_checkpoint=True)  # these may change


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("trainer_state.pt", b""),
        ("trainer_state.pt", b"garbage"),
        ("trainer_state.pt", None),
        ("value_head.safetensors", b""),
        ("policy/adapter_model.safetensors", b"x" * 40),
        ("policy/adapter_model.safetensors", None),
    ],
)
def test_a_damaged_checkpoint_is_named(make_trainer, tmp_path, file, content):
    make_trainer(total_episodes=8).train()
    damaged = tmp_path / "run" / "checkpoint-1" / file
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2] if content is None else content)
    with pytest.raises(UserError, match=r"checkpoint-1' can't be read .*damaged"):
        make_trainer(total_episodes=8).train(resume_from_checkpoint=True)


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
