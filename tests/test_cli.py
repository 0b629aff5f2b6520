"""The command line on a tiny random model: the demo's three commands, and what it answers to bad input."""

import errno
import json
import os
import re
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

    def evaluation(**changes):
        return {"eval": changes}

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
        "reply too long": ({}, ["--set", "ppo.response_length=172"], "is 44 tokens longer than the model's context"),
        "reply fills context": ({}, ["--set", "ppo.response_length=128"], "fills the model's context"),
        "rank 0": ({"lora": {"r": 0}}, [], "lora.r is 0; it must be a whole number, at least 1"),
        "rank abc": ({"value_lora": {"r": "abc"}}, [], "value_lora.r is 'abc'"),
        "alpha abc": ({"lora": {"alpha": "abc"}}, [], "lora.alpha is 'abc'; it must be a number"),
        "targets 3": ({"lora": {"target_modules": [3]}}, [], "lora.target_modules is .3."),
        "targets none": ({"lora": {"target_modules": []}}, [], "lora.target_modules is ..;"),
        "no such target": (
            {"lora": {"target_modules": ["nope"]}},
            [],
            "can't work with this model .*nope.*target_modules",
        ),
        "no such value target": ({"value_lora": {"target_modules": ["nope"]}}, [], "value_peft_config can't work"),
        "layers x": ({"lora": {"layers_to_transform": ["x"]}}, [], "lora.layers_to_transform is .'x'."),
        "lora is text": ({"lora": "yes"}, [], "section 'lora' of the recipe is 'yes'"),
        "lora is false": ({"lora": False}, [], "section 'lora' of the recipe is False"),
        "prompts null": (data(prompts=None), [], "data.prompts is None; set it to the name"),
        "prompts 3": (data(prompts=3), [], "data.prompts is 3; it must be text"),
        "prompts list": (data(prompts=["a"]), [], "data.prompts is .'a'.; it must be text"),
        "heldout abc": (data(heldout="abc"), [], "data.heldout is 'abc'; it must be a whole number"),
        "heldout 1.5": (data(heldout=1.5), [], "data.heldout is 1.5"),
        "heldout negative": (data(heldout=-1), [], "data.heldout is -1; it must be a whole number, at least 0"),
        "template 3": (data(template=3), [], "data.template is 3; it must be text"),
        "rewards 3": ({"rewards": 3}, [], "rewards is 3; it must be a list"),
        "rewards null inside": ({"rewards": [None]}, [], "rewards is .None.; it must be a list"),
        "reward without module": ({"rewards": [":f"]}, [], "':f' names no function"),
        "reward file is broken": ({"rewards": ["bad.py:f"]}, [], "bad.py:f' can't be imported .SyntaxError"),
        "reward file exits": ({"rewards": ["exits.py:f"]}, [], "exits.py:f' can't be imported .SystemExit: 3"),
        "judge 3": ({"judge": 3}, [], "judge is 3; it must be text"),
        "judge without function": ({"judge": "mine.py"}, [], "'mine.py' names no function"),
        "model 3": ({"model": 3}, [], "model is 3; it must be text"),
        "value_model 3": ({"value_model": 3}, [], "value_model is 3; it must be text"),
        "eval seed abc": (evaluation(seed="abc"), [], "eval.seed is 'abc'"),
        "eval seed null": (evaluation(seed=None), [], "eval.seed is None"),
        "eval seed large": (evaluation(seed=2**32), [], "eval.seed is 4294967296; .* below 4294967296"),
        "eval replies 0": (evaluation(replies_per_prompt=0), [], "eval.replies_per_prompt is 0"),
        "eval replies x": (evaluation(replies_per_prompt="x"), [], "eval.replies_per_prompt is 'x'"),
        "eval batch 0": (evaluation(batch_size=0), [], "eval.batch_size is 0"),
        "override not YAML": ({}, ["--set", "ppo.seed={"], "--set 'ppo.seed={' isn't valid YAML"),
        "override no date": ({}, ["--set", "ppo.seed=2026-13-45"], "--set 'ppo.seed=2026-13-45' isn't valid YAML"),
        "ppo is a value": ({}, ["--set", "ppo=3"], "section 'ppo' of the recipe is 3"),
        "override in a value": ({}, ["--set", "model.x=3"], "'model' is a value"),
        "seed -1": ({}, ["--set", "ppo.seed=-1"], "seed is -1; it must be from 0"),
        "unknown tracker": ({}, ["--set", "ppo.report_to=nope"], "report_to is 'nope'.*; install it, or use none"),
        "prompts not UTF-8": (data(prompts="latin.jsonl"), [], "isn't UTF-8 text"),
        "lone surrogate": (data(prompts="half.jsonl"), [], "the prompt in row 1 .* half of a surrogate pair"),
        "checkpoint nowhere": ({}, ["--resume", "checkpoint-4"], "'checkpoint-4' is not a checkpoint"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_gets_one_sentence_and_exit_code_2(recipe, tmp_path, capsys, case):
    changes, flags, message = bad_inputs()[case]
    (tmp_path / "mine.jsonl").write_text('{"question": "why"}\n')
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "schön"}\n'.encode("latin-1"))
    (tmp_path / "half.jsonl").write_text('{"prompt": "a \\ud800"}\n')
    run = tmp_path / "run"
    assert cli.main(["train", "--config", recipe(**changes), "--output-dir", str(run), *flags]) == 2
    captured = capsys.readouterr()
    assert re.search(message.replace("{", r"\{").replace("(", r"\("), the_sentence(captured.err)), captured.err
    assert not run.exists()


def the_sentence(printed):
    """The last line, the only one but for the announcement of what takes long."""
    *before, last = printed.splitlines()
    assert not before or (len(before) == 1 and before[0].startswith("loading the model ")), printed
    assert last.startswith("ppo-fast: ")
    return last


def train(config, run, *flags):
    return cli.main(["train", "--config", config, "--output-dir", str(run), *flags])


def no_training(monkeypatch):
    """What :func:`cli._train` hands to the trainer is kept in the list, and nothing is trained."""
    seen = []

    class Trainer:
        def train(self, **arguments):
            seen.append(arguments)

    monkeypatch.setattr(cli, "_trainer", lambda recipe, callbacks=(): seen.append(recipe) or Trainer())
    return seen


@pytest.mark.parametrize("name", ["2026", "null", "out/a: b", "{"])
def test_names_on_the_command_line_are_not_yaml(recipe, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    seen = no_training(monkeypatch)
    assert train(recipe(), name, "--model", name) == 0
    assert (seen[0].ppo.output_dir, seen[0].model) == (name, name)


@pytest.mark.parametrize(("section", "expected"), [({}, (16, 32)), ({"r": 3}, (3, 6)), (None, None)])
def test_an_empty_lora_section_is_lora(recipe, tmp_path, monkeypatch, section, expected):
    seen = no_training(monkeypatch)
    assert train(recipe(lora=section, value_lora=section), tmp_path / "run") == 0
    for made in (seen[0].lora, seen[0].value_lora):
        assert (made and (made.r, made.lora_alpha)) == expected


def test_an_override_fills_a_section_that_is_null(recipe, tmp_path, monkeypatch):
    seen = no_training(monkeypatch)
    assert train(recipe(lora=None), tmp_path / "run", "--set", "lora.r=8") == 0
    assert seen[0].lora.r == 8


def test_models_that_are_folders_are_kept_by_their_full_path(recipe, tmp_path, tiny_model_dir, monkeypatch):
    for name in ("policy", "critic", "scorer", "here"):
        shutil.copytree(tiny_model_dir, tmp_path / ("elsewhere" if name == "here" else ".") / name)
    monkeypatch.chdir(tmp_path / "elsewhere")
    seen = no_training(monkeypatch)
    config = recipe(model="policy", value_model="critic", rewards=["scorer", "nobody/hub-id"])
    assert train(config, "run") == 0
    full = str(tmp_path / "policy"), str(tmp_path / "critic"), [str(tmp_path / "scorer"), "nobody/hub-id"]
    assert (seen[0].model, seen[0].value_model, seen[0].rewards) == full
    assert tuple(seen[0].settings[key] for key in ("model", "value_model", "rewards")) == full
    assert train(config, "run", "--model", "here") == 0
    assert seen[2].model == str(tmp_path / "elsewhere" / "here")


def test_a_bare_checkpoint_name_is_looked_up_in_the_run(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "checkpoint-4").mkdir()
    seen = no_training(monkeypatch)
    for flags in (["--resume", "checkpoint-4"], ["--resume", "checkpoint-5"], ["--resume"], []):
        assert train(recipe(), run, *flags) == 0
    resumed = [arguments["resume_from_checkpoint"] for arguments in seen[1::2]]
    assert resumed == [str(run / "checkpoint-4"), "checkpoint-5", True, False]


def test_a_chat_without_a_chat_template_is_refused(recipe, tmp_path, tiny_model_dir, capsys):
    from transformers import AutoTokenizer

    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(base).chat_template is None
    assert train(recipe(model="base"), tmp_path / "run") == 2
    assert "the tokenizer has no chat template; drop data.template" in the_sentence(capsys.readouterr().err)


def test_a_recipe_that_is_not_utf8_is_named(tmp_path, capsys):
    (tmp_path / "r.yaml").write_bytes(b"model: sch\xf6n\n")
    assert train(str(tmp_path / "r.yaml"), tmp_path / "run") == 2
    assert "isn't UTF-8 text (at byte 10)" in the_sentence(capsys.readouterr().err)


def test_a_run_made_in_python_is_not_evaluated_from_the_shell(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("ppo: {output_dir: x}\n")
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "was made from Python" in the_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["prompts.jsonl/run", "n" * 300, "n" * 300 + "/run"])
def test_an_output_dir_that_cannot_be_is_named(recipe, tmp_path, capsys, name):
    assert train(recipe(), tmp_path / name) == 2
    assert str(tmp_path / name.split("/")[0]) in the_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EIO])
def test_a_file_of_the_run_that_cannot_be_written_is_named(recipe, tmp_path, capsys, monkeypatch, number):
    run = tmp_path / "run"

    def fail(recipe, callbacks=()):
        raise OSError(number, os.strerror(number), str(run / "metrics.jsonl"))

    monkeypatch.setattr(cli, "_trainer", fail)
    assert train(recipe(), run) == 2
    sentence = the_sentence(capsys.readouterr().err)
    assert f"can't write '{run}/metrics.jsonl' ({os.strerror(number)}); choose another output_dir" in sentence


def test_an_error_that_is_no_users_fault_is_not_hidden(recipe, tmp_path, monkeypatch):
    def fail(recipe, callbacks=()):
        raise OSError(errno.EIO, "no file of ours", "/proc/elsewhere")

    monkeypatch.setattr(cli, "_trainer", fail)
    with pytest.raises(OSError, match="no file of ours"):
        train(recipe(), tmp_path / "run")


def test_an_interrupt_promises_no_checkpoint(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_quieten_libraries", interrupt)  # while transformers is imported
    assert cli.main(["report", "nowhere"]) == 130
    assert "goes on from the last checkpoint, if one was written" in the_sentence(capsys.readouterr().err)


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
