"""The trainer as its users call it."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from ppo_fast.errors import UserError
from ppo_fast.training import PPOConfig, PPOTrainer
from ppo_fast.training.callbacks import ProgressCallback

ALWAYS = {
    "iteration", "episodes", "elapsed_s", "lr",
    "objective/kl", "objective/kl_p95", "objective/kl_max", "objective/scores", "objective/rlhf_reward",
    "objective/non_score_reward", "objective/entropy", "objective/kl_coef", "policy/entropy_avg", "policy/clipfrac_avg",
    "policy/outside_avg", "policy/approxkl_avg", "policy/approxkl_k3_avg", "val/ratio", "val/ratio_var",
    "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "advantages/mean", "advantages/std", "advantages/min",
    "advantages/max", "completions/mean_length", "completions/finished_frac", "reward/unscored", "reward/mean",
    "rollout/logp_diff_p99", "rollout/logp_diff_max", "rollout/tokens", "time/rollout", "time/score", "time/update",
    "perf/peak_memory_rollout", "perf/peak_memory_score", "perf/peak_memory_update", "perf/tokens_per_second",
}  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("lora", "trainer", "config"),
    [
        (True, {}, {}),
        (True, {"value_model": "head"}, {"gradient_checkpointing": True}),
        (True, {"ref_model": "none"}, {"kl_coef": 0.0}),
        (False, {}, {"objective": "cispo", "aggregation": "sequence_mean"}),
        (False, {"value_model": "head"}, {"truncation": "bootstrap", "missing_eos_penalty": None}),
        (True, {}, {"kl_in": "loss", "kl_estimator": "k3", "old_logprobs": "rescored", "dual_clip": 3.0}),
        (True, {}, {"truncation": "mask", "response_length": 40, "whiten_rewards": True, "cliprange_value": None}),
    ],
)
def test_a_run_leaves_a_whole_folder(make_trainer, tmp_path, lora, trainer, config):
    made = make_trainer(lora=lora, trainer=trainer, total_episodes=16, **config)
    made.train()
    folder = tmp_path / "run"
    written = lines(folder)
    assert [line["iteration"] for line in written] == [1, 2]
    missing = ALWAYS - set(written[-1])
    if trainer.get("ref_model") == "none":
        missing -= {"objective/kl", "objective/kl_p95", "objective/kl_max"}
    assert not missing
    assert all(torch.isfinite(torch.tensor(float(v))) for line in written for v in line.values())
    rows = [json.loads(line) for line in (folder / "completions" / "iteration-00002.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"prompt", "completion", "score", "rewards", "finished", "length"} == set(rows[0])
    record = json.loads((folder / "run_record.json").read_text())
    assert record["cost"]["tokens"] == sum(line["rollout/tokens"] for line in written)
    assert record["finished"]
    assert (folder / "checkpoint-2" / "trainer_state.pt").exists()
    assert not list(folder.rglob("*.partial"))


def test_metrics_agree_with_the_completions(make_trainer, tmp_path):
    make_trainer(total_episodes=8).train()
    line = lines(tmp_path / "run")[0]
    text = (tmp_path / "run" / "completions" / "iteration-00001.jsonl").read_text()
    rows = [json.loads(row) for row in text.splitlines()]
    assert line["completions/mean_length"] == pytest.approx(sum(r["length"] for r in rows) / 8)
    assert line["rollout/tokens"] == sum(r["length"] for r in rows)
    assert line["completions/finished_frac"] == sum(r["finished"] for r in rows) / 8
    assert line["objective/scores"] == pytest.approx(sum(r["score"] for r in rows) / 8, rel=1e-6)
    assert line["reward/mean"] == pytest.approx(sum(r["rewards"]["length_reward"] for r in rows) / 8, rel=1e-6)
    for row in rows:
        assert row["score"] == pytest.approx(row["rewards"]["length_reward"] - 0.5 * (not row["finished"]), abs=1e-6)
    # Before any update the policy is the reference.
    assert line["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert line["objective/rlhf_reward"] == pytest.approx(
        line["objective/scores"] + line["objective/non_score_reward"], abs=1e-6
    )


def test_callbacks_hear_events_and_progress(make_trainer):
    class Listener(ProgressCallback):
        def __init__(self):
            self.events, self.phases = [], {}

        def on_train_begin(self, args, state, control, **kwargs):
            self.events.append(("begin", state.max_steps))

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.events.append(("log", logs["iteration"]))

        def on_save(self, args, state, control, **kwargs):
            self.events.append(("save", state.global_step))

        def on_train_end(self, args, state, control, **kwargs):
            self.events.append(("end", state.global_step))

        def on_progress(self, phase, done, total):
            self.phases[phase] = (done, total)

    listener = Listener()
    make_trainer(total_episodes=16, trainer={"callbacks": [listener, TrainerCallback()]}).train()
    assert listener.events == [("begin", 2), ("log", 1), ("log", 2), ("save", 2), ("end", 2)]
    assert set(listener.phases) == {"rollout", "score", "update"}
    for phase in ("score", "update"):
        assert listener.phases[phase][0] == listener.phases[phase][1] > 0


def test_a_callback_can_stop_the_run_and_it_is_saved(make_trainer, tmp_path):
    class Stop(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            control.should_training_stop = True

    make_trainer(trainer={"callbacks": [Stop()]}).train()
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_a_reward_that_fails_at_first_leaves_nothing_behind(make_trainer, tmp_path):
    def broken(**_):
        raise ZeroDivisionError("oops")

    with pytest.raises(UserError, match="'broken' raised ZeroDivisionError: oops"):
        make_trainer(trainer={"reward_funcs": broken}).train()
    assert not (tmp_path / "run").exists()


def test_unscored_replies_are_counted_and_their_text_is_kept(make_trainer, tmp_path):
    def half(completion_ids, **_):
        return [None if i % 2 else 1.0 * len(ids) for i, ids in enumerate(completion_ids)]

    make_trainer(trainer={"reward_funcs": half}, total_episodes=8).train()
    assert lines(tmp_path / "run")[0]["reward/unscored"] == 4
    rows = (tmp_path / "run" / "completions" / "iteration-00001.jsonl").read_text().splitlines()
    assert [json.loads(row)["score"] is None for row in rows] == [False, True] * 4


def test_a_batch_without_any_score_is_passed_over(make_trainer, tmp_path, caplog):
    calls = []

    def only_once(completion_ids, **_):
        calls.append(1)
        return [len(ids) if len(calls) == 1 else None for ids in completion_ids]

    trainer = make_trainer(trainer={"reward_funcs": only_once}, total_episodes=16, save_steps=1)
    trainer.train()
    first, second = (
        load_file(tmp_path / "run" / f"checkpoint-{i}" / "policy" / "adapter_model.safetensors") for i in (1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [line["reward/unscored"] for line in lines(tmp_path / "run")] == [0, 8]
    assert "no reply of this batch of 8 got a score" in caplog.text


def test_a_first_batch_without_any_score_is_refused(make_trainer, tmp_path):
    def never(completion_ids, **_):
        return [None] * len(completion_ids)

    with pytest.raises(UserError, match="no reply of the first batch got a score: never returned None for all 8"):
        make_trainer(trainer={"reward_funcs": never}).train()
    assert not (tmp_path / "run").exists()


def test_a_policy_that_diverges_stops_the_run(make_trainer, tmp_path):
    with pytest.raises(UserError, match=r"the policy has diverged: after [123] iterations"):
        make_trainer(learning_rate=1e30).train()
    assert all("NaN" not in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())


def test_an_update_without_one_finite_gradient_stops_the_run(make_trainer, monkeypatch):
    from ppo_fast.training import trainer as module

    original = module.shape

    def poisoned(*args, **kwargs):
        experience = original(*args, **kwargs)
        return dataclasses.replace(experience, returns=experience.returns * float("inf"))

    monkeypatch.setattr(module, "shape", poisoned)
    with pytest.raises(UserError, match="no optimizer step of iteration 1 had a finite gradient"):
        make_trainer().train()


@pytest.mark.parametrize("where", ["file/sub", "x" * 300])
def test_an_output_dir_that_cannot_be_written_is_refused_at_once(make_trainer, tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="output_dir"):
        make_trainer(output_dir=str(tmp_path / where)).train()


def test_a_full_disk_is_named_before_anything_is_written(make_trainer, tmp_path, monkeypatch):
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10, 10))
    with pytest.raises(UserError, match="0 MiB free and the run's checkpoints need"):
        make_trainer().train()
    assert not (tmp_path / "run").exists()


def test_old_call_forms_are_answered_with_the_new_one(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"args came first.*PPOTrainer\(model, reward_funcs, args, train_dataset"):
        PPOTrainer(args, "model")
    with pytest.raises(UserError, match="reward_model= is now an entry of reward_funcs"):
        PPOTrainer("model", args=args, train_dataset=[{"prompt": "a"}], reward_model=object())
    with pytest.raises(UserError, match="unknown argument 'policy'"):
        PPOTrainer("model", args=args, policy=object())
    with pytest.raises(UserError, match="args is missing"):
        PPOTrainer("model")
    with pytest.raises(UserError, match="train_dataset is missing"):
        PPOTrainer("model", None, args)


@pytest.mark.parametrize("lora", [False, True])
def test_a_reward_model_scores_prompt_and_reply(make_trainer, tiny_model_dir, tiny_tokenizer, lora):
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    if lora:
        adapter = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
        classifier = get_peft_model(classifier, adapter)
    trainer = make_trainer(
        trainer={"reward_funcs": classifier, "reward_processing_classes": [tiny_tokenizer]}, total_episodes=8
    )
    prompts, ids = trainer._draw_prompts()
    rollout = trainer._rollout(ids)
    completions, scores = trainer._score(prompts, rollout)
    for prompt, completion, total in zip(prompts, completions, scores.total, strict=True):
        encoded = tiny_tokenizer(prompt.text + completion, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            assert total == pytest.approx(float(classifier(**encoded).logits), abs=1e-5)


def test_a_reward_model_takes_as_many_replies_at_a_time_as_it_is_told(make_trainer, tiny_model_dir, tiny_tokenizer):
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    rows = []
    classifier.register_forward_pre_hook(lambda *a: rows.append(len(a[2]["input_ids"])), with_kwargs=True)
    settings = {"reward_funcs": classifier, "reward_processing_classes": [tiny_tokenizer]}
    found = []
    for together in (None, 3):
        trainer = make_trainer(trainer=settings, total_episodes=8, local_rollout_forward_batch_size=together)
        prompts, ids = trainer._draw_prompts()
        found.append(trainer._score(prompts, trainer._rollout(ids))[1].total)
    assert rows == [8, 3, 3, 2]
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_value_adapter_settings_may_differ(make_trainer):
    trainer = make_trainer(
        trainer={"value_peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    )
    shapes = {p.shape for n, p in trainer.roles.value_parameters.items() if "lora_A" in n}
    assert {shape[0] for shape in shapes} == {2}
    assert all("q_proj" in n for n in trainer.roles.value_parameters if "lora" in n)


def test_sampling_settings_of_the_model_are_overridden_with_a_word(make_trainer, caplog, monkeypatch):
    from transformers import AutoModelForCausalLM, GenerationConfig

    make_trainer()
    assert "generation_config" not in caplog.text
    original = AutoModelForCausalLM.from_pretrained

    def with_top_k(*args, **kwargs):
        model = original(*args, **kwargs)
        model.generation_config = GenerationConfig(top_k=7, repetition_penalty=1.3, do_sample=True, eos_token_id=1)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_top_k)
    make_trainer()
    assert "generation_config sets {'top_k': 7, 'repetition_penalty': 1.3}, which is not applied" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"top_k": 5},
        {"top_p": 0.6, "old_logprobs": "rescored"},
        {"top_k": 20, "top_p": 0.8, "kl_in": "loss", "kl_estimator": "k3"},
        {"rollout_slots": 3, "stop_strings": ["the", "cold door"]},
        {"min_new_tokens": 4, "response_length": 12},
        {"min_new_tokens": 4, "response_length": 12, "old_logprobs": "rescored", "entropy_coef": 0.01},
        {"min_new_tokens": 4, "response_length": 12, "top_k": 64},
        {"rollout_dtype": "bfloat16"},
    ],
)
def test_sampling_settings_reach_training(make_trainer, config, tmp_path):
    """The step-0 check refuses a run whose log-probs aren't the sampler's; the first iteration has no KL."""
    make_trainer(total_episodes=16, **config).train()
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    exact = "rollout_dtype" not in config
    assert first["rollout/logp_diff_max"] < (2e-5 if exact else 0.5)
    assert abs(first["objective/kl"]) < (1e-4 if exact else 1)
    assert second["objective/kl"] != first["objective/kl"]
    cut = "top_k" in config or "top_p" in config
    assert first.get("rollout/kept_at_limit") == (0.0 if cut else None)
    record = json.loads((tmp_path / "run" / "run_record.json").read_text())
    sampling = record["sampling"]
    assert (sampling["top_k"], sampling["top_p"]) == (config.get("top_k"), config.get("top_p"))
    rows = [json.loads(line) for path in (tmp_path / "run" / "completions").iterdir() for line in path.open()]
    if "min_new_tokens" in config:
        assert sampling["min_new_tokens"] == 4
        assert min(row["length"] for row in rows) >= 5  # EOS itself is the fifth at the earliest
    if "stop_strings" in config:
        assert any("the" in row["completion"] for row in rows)
        assert all(row["finished"] for row in rows if "the" in row["completion"])
        assert all(row["completion"].split().count("the") <= 1 for row in rows)


def test_a_model_whose_eos_cannot_be_excluded_is_refused_at_once(make_trainer, tiny_model, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny_model("gemma2"))
    with pytest.raises(UserError, match=r"caps its logits.*leave min_new_tokens at 0"):
        make_trainer(min_new_tokens=2)


@pytest.mark.parametrize("lora", [True, False])
def test_a_model_that_arrives_in_bfloat16_is_held_to_the_bounds_of_bfloat16(make_trainer, tmp_path, lora):
    make_trainer(lora=lora, model_dtype=torch.bfloat16, total_episodes=16).train()
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 1e-3 < first["rollout/logp_diff_max"] < 0.3
    assert second["objective/kl"] != first["objective/kl"]


@pytest.mark.parametrize(
    ("lora", "config"),
    [(True, {"old_logprobs": "rescored"}), (False, {"top_p": 0.7, "min_new_tokens": 2, "kl_in": "loss"})],
)
def test_a_model_that_arrives_in_float64_is_trained(make_trainer, tmp_path, lora, config):
    make_trainer(lora=lora, model_dtype=torch.float64, total_episodes=16, **config).train()
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["rollout/logp_diff_max"] < 1e-6
    assert second["objective/kl"] != first["objective/kl"]


def test_no_prompts_to_reply_to_are_named(make_trainer):
    with pytest.raises(UserError, match="there are no prompts to reply to; give at least one"):
        make_trainer().generate_replies([], seed=1)


def test_a_model_that_cannot_generate_is_refused_at_once(make_trainer, tiny_model, monkeypatch):
    monkeypatch.setattr(type(tiny_model()), "_is_stateful", True)
    with pytest.raises(UserError, match="remembers more than keys and values"):
        make_trainer()
