"""README's tables are what bench/results says, and its Python runs as written."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_tables_match_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")  # where a script there finds what it imports
    render = runpy.run_path(str(ROOT / "bench" / "readme.py"))["render"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert render(text) == text


def test_every_committed_interval_of_the_demo_excludes_zero():
    for seed in json.loads((ROOT / "bench" / "results" / "demo.json").read_text())["seeds"]:
        differences = seed["summary"]["differences"]
        for name in ("reward", "penalised", "judge"):
            assert differences[name]["interval"]["low"] > 0, (seed["seed"], name)
        assert differences["reward"]["interval"]["estimate"] >= 0.3


def test_every_committed_run_in_trl_is_stocks_own_and_its_head_takes_at_most_0_4_of_the_time():
    result = json.loads((ROOT / "bench" / "results" / "trl.json").read_text())
    assert set(result["summary"]) == {"grpo-full", "grpo-lora", "rloo-full", "rloo-lora"}
    for case, row in result["summary"].items():
        ours, both = result["parts"][case]["ours"], result["parts"][case]["both"]
        steps = len(ours["steps"])
        assert steps == both["served"] == 5, case
        assert ours["calls"]["frozen" if case.endswith("lora") else "trained"] == steps
        assert ours["left_to_trl"] == 0
        assert row["ratio"]["head"] <= 0.4, case
        assert row["gradient_error"] <= 1e-5, case
        assert row["loss_difference"] <= 1e-5, case


def test_the_trainer_in_ten_lines(tmp_path, tiny_model_dir):
    settings = "total_episodes=8, per_device_train_batch_size=4, gradient_accumulation_steps=2"
    changes = {
        '"path/or/hub-id"': repr(str(tiny_model_dir)),
        '"runs/short"': repr(str(tmp_path / "run")),
        "total_episodes=512": settings,
    }
    source = next(block for block in BLOCKS if "PPOTrainer(" in block)
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    exec(compile(source, "README.md", "exec"), {})
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_the_ops_in_ten_lines(tiny_model_dir, capsys):
    generator = torch.Generator().manual_seed(0)
    batch, prompt_length, length = 3, 4, 5
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    input_ids = torch.randint(5, 30, (batch, prompt_length + length), generator=generator)
    noise = lambda: torch.randn(batch, length, generator=generator)  # noqa: E731
    names = {
        "model": model,
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "prompt_length": prompt_length,
        "response_ids": input_ids[:, prompt_length:],
        "mask": torch.ones(batch, length, dtype=torch.bool),
        "scores": torch.tensor([1.0, 0.0, -1.0]),
        "old_logprobs": noise() - 4.0,
        "ref_logprobs": noise() - 4.0,
        "old_values": noise(),
        "values": noise().requires_grad_(),
    }
    exec(compile(next(b for b in BLOCKS if "linear_ppo_loss" in b), "README.md", "exec"), names)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.lm_head.weight.grad.abs().max() > 0
    assert len(capsys.readouterr().out.split()) >= 3


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_recipe_is_valid(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(30)))
    (tmp_path / "my_rewards.py").write_text("def short(completions, **_):\n    return [0.0] * len(completions)\n")
    from ppo_fast.training.recipe import load_recipe

    recipe = load_recipe(tmp_path / "recipe.yaml", ["ppo.output_dir=run"])
    assert (len(recipe.prompts), len(recipe.heldout), recipe.lora.r) == (10, 20, 16)
    assert (recipe.ppo.learning_rate, recipe.rewards[0].__name__) == (1e-4, "short")
