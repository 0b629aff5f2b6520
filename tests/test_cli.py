"""The command line on a tiny random model: the demo's three commands, and what it answers to bad input."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from ppo_fast import cli


@pytest.fixture
def recipe(tmp_path, tiny_model_dir, tiny_tokenizer):
    words = [w for w in sorted(tiny_tokenizer.get_vocab()) if w.isalpha()]
    rows = [json.dumps({"prompt": " ".join(words[i : i + 3]), "kind": "x"}) for i in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.py").write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [sum(c[0]['content'].count(v) for v in 'aeiou') / 10 for c in completions]\n"
        "def broken(prompts, completions, **columns):\n    raise RuntimeError('no vowels today')\n"
        "def short(prompts, completions, **columns):\n    return [0.0]\n"
    )
    settings = {
        "model": str(tiny_model_dir),
        "data": {"prompts": "prompts.jsonl", "template": "{prompt}", "heldout": 6},
        "rewards": ["mine.py:vowels"],
        "judge": "mine.py:vowels",
        "lora": {"r": 4, "alpha": 8},
        "eval": {"replies_per_prompt": 2, "seed": 5, "batch_size": 4},
        "ppo": {
            "output_dir": str(tmp_path / "unused"), "total_episodes": 16, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "num_mini_batches": 2, "num_ppo_epochs": 2, "response_length": 6,
            "temperature": 1.0, "missing_eos_penalty": 0.5, "learning_rate": 1e-3, "save_steps": 1,
        },
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"

    def write(**changes):
        file.write_text(yaml.safe_dump(settings | changes))
        return str(file)

    return write


def test_the_demos_three_commands(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert cli.main(["train", "--config", recipe(), "--output-dir", str(run), "--set", "ppo.seed=7"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["ppo"]["seed"] == 7
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    # Nothing of the recipe's own folder is needed any more but the files that the run names by their full path.
    (tmp_path / "recipe.yaml").unlink()
    assert cli.main(["eval", str(run)]) == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert "reward" in json.dumps(evaluation)
    assert cli.main(["report", str(run)]) == 0
    report = (run / "report.html").read_text()
    assert "<svg" in report
    assert "http-equiv" not in report
    for outside in ('src="http', 'href="http', "@import", "url(http"):
        assert outside not in report
    output = capsys.readouterr()
    assert str(run) in output.out
    assert "Traceback" not in output.err


def test_eval_pairs_the_same_random_numbers(recipe, tmp_path):
    """At a learning rate of zero both sides are the same policy, so every pair is the same reply."""
    run = tmp_path / "run"
    flags = ["--set", "ppo.learning_rate=0", "--set", "ppo.value_learning_rate=1e-3"]
    assert cli.main(["train", "--config", recipe(), "--output-dir", str(run), *flags]) == 0
    assert cli.main(["eval", str(run)]) == 0
    from ppo_fast.evaluation.heldout import load

    evaluation = load(run / "evaluation.json")
    assert len(evaluation.before) == 12
    assert [r.completion for r in evaluation.before] == [r.completion for r in evaluation.after]
    assert max(abs(r.kl) for r in evaluation.after) < 1e-3


def test_resume_goes_on_from_the_newest_checkpoint(recipe, tmp_path):
    run = tmp_path / "run"
    config = recipe()
    assert cli.main(["train", "--config", config, "--output-dir", str(run)]) == 0
    shutil.rmtree(run / "checkpoint-2")
    first = (run / "metrics.jsonl").read_text().splitlines()
    assert cli.main(["train", "--config", config, "--output-dir", str(run), "--resume"]) == 0
    second = (run / "metrics.jsonl").read_text().splitlines()
    assert first[0] == second[0]
    drop = lambda line: {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/", "elapsed"))}  # noqa: E731
    assert drop(first[1]) == drop(second[1])


def bad_inputs():
    def data(**changes):
        return {"data": {"prompts": "prompts.jsonl", "heldout": 6} | changes}

    return {
        "missing model": ({"model": "./no/such/model"}, [], "no/such/model"),
        "missing data": (data(prompts="nowhere.jsonl"), [], "no dataset file"),
        "no prompt column": (data(prompts="mine.jsonl"), [], "has no 'prompt' column"),
        "reward raises": ({"rewards": ["mine.py:broken"]}, [], "'broken' raised RuntimeError: no vowels today"),
        "reward of wrong length": ({"rewards": ["mine.py:short"]}, [], "returned 1 scores for 8 completions"),
        "missing reward": ({"rewards": ["mine.py:nothing"]}, [], "has no function 'nothing'"),
        "missing module": ({"rewards": ["no_such_module:f"]}, [], "can't be imported"),
        "no reward": ({"rewards": []}, [], "no reward function is given"),
        "unknown section": ({"modle": "x"}, [], "unknown key 'modle' in section 'the recipe'; did you mean 'model'"),
        "unknown key": ({}, ["--set", "ppo.kl_coeff=1"], "unknown key 'kl_coeff'.*did you mean 'kl_coef'"),
        "unknown lora key": ({"lora": {"rank": 8}}, [], "unknown key 'rank' in section 'lora'"),
        "does not divide": ({}, ["--set", "ppo.num_mini_batches=3"], "don't divide into num_mini_batches = 3"),
        "override without value": ({}, ["--set", "ppo.seed"], "has no '='"),
        "template without slot": (data(template="Go on."), [], "has no {prompt}"),
        "heldout too many": (data(heldout=20), [], "heldout = 20 of 20"),
        "prompt too long": ({}, ["--set", "ppo.response_length=126"], "the model's context"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_gets_one_sentence_and_exit_code_2(recipe, tmp_path, capsys, case):
    changes, flags, message = bad_inputs()[case]
    (tmp_path / "mine.jsonl").write_text('{"question": "why"}\n')
    run = tmp_path / "run"
    assert cli.main(["train", "--config", recipe(**changes), "--output-dir", str(run), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ppo-fast: ")
    assert captured.err.count("\n") == 1
    import re

    assert re.search(message.replace("{", r"\{").replace("(", r"\("), captured.err), captured.err
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "nowhere.yaml"], "no configuration file"),
        (["eval", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_missing_folders_are_named(capsys, arguments, message):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_broken_yaml_is_named(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("a: [1")
    assert cli.main(["train", "--config", str(tmp_path / "r.yaml")]) == 2
    assert "isn't valid YAML" in capsys.readouterr().err


def test_a_second_run_into_the_same_folder_is_refused(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "mine.txt").write_text("precious")
    assert cli.main(["train", "--config", recipe(), "--output-dir", str(run)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in run.iterdir()] == ["mine.txt"]


def test_the_console_script_is_installed():
    result = subprocess.run(
        [sys.executable, "-m", "ppo_fast.cli", "train"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "--config" in result.stderr


def test_the_shipped_recipe_is_valid():
    from pathlib import Path

    import ppo_fast
    from ppo_fast.training.recipe import load_recipe

    recipe = load_recipe(Path(ppo_fast.__file__).parent / "recipes" / "sentiment.yaml")
    assert len(recipe.prompts) + len(recipe.heldout) >= 300
    assert 24 <= recipe.ppo.response_length <= 48
    assert recipe.ppo.missing_eos_penalty
