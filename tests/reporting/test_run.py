"""Reading a run folder, and what is said when it isn't one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_fast.errors import UserError
from ppo_fast.evaluation.heldout import Evaluation
from ppo_fast.reporting.run import load_run

MakeRun = Callable[..., Path]


def test_a_finished_run_is_read_whole(make_run: MakeRun, evaluation: Evaluation) -> None:
    run = load_run(make_run(evaluation, iterations=5))
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3, 4, 5]
    assert run.config == {"ppo": {"learning_rate": 2e-4, "kl_coef": 0.02}}
    assert run.record["model"]["name"] == "SmolLM2-135M-Instruct"
    assert run.evaluation == evaluation
    assert run.has_completions(5)
    assert not run.has_completions(4)
    assert len(run.completions(5)) == 4
    with pytest.raises(UserError, match=r"iteration 4 were not kept"):
        run.completions(4)


def test_an_unfinished_run_is_read_too(make_run: MakeRun) -> None:
    folder = make_run(iterations=2)
    (folder / "run_record.json").write_text('{"finished": null}')
    assert len(load_run(folder).metrics) == 2


def test_a_run_without_evaluation(make_run: MakeRun) -> None:
    assert load_run(make_run()).evaluation is None


def test_the_later_of_two_rows_of_an_iteration_is_kept(make_run: MakeRun) -> None:
    folder = make_run(iterations=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 2, "objective/scores": 7.0}) + "\n")
    run = load_run(folder)
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3]
    assert run.metrics[1] == {"iteration": 2, "objective/scores": 7.0}


def test_text_with_odd_line_separators_is_one_row(make_run: MakeRun) -> None:
    folder = make_run(iterations=2)
    path = folder / "completions" / "iteration-00001.jsonl"
    path.write_text(json.dumps({"completion": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_run(folder).completions(1) == [{"completion": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.yaml").unlink(), "holds no config.yaml, so it is not a run"),
        (lambda f: (f / "metrics.jsonl").unlink(), "has not written one iteration yet"),
        (
            lambda f: (f / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera'),
            "line 2 of .*metrics.jsonl is not JSON",
        ),
        (lambda f: (f / "metrics.jsonl").write_text("3\n"), "line 1 of .*metrics.jsonl is not a JSON object"),
        (lambda f: (f / "metrics.jsonl").write_text("{}\n"), "a row without an iteration"),
        (lambda f: (f / "run_record.json").write_text("{"), "run_record.json is not JSON"),
        (lambda f: (f / "config.yaml").write_text("a: [1"), "config.yaml is not YAML"),
        (lambda f: (f / "config.yaml").write_text(""), "config.yaml holds no settings"),
        (lambda f: (f / "evaluation.json").write_text("{}"), "run `ppo-fast eval` again"),
    ],
)
def test_what_is_not_a_finished_run_is_refused(
    damage: Callable[[Path], object], message: str, make_run: MakeRun
) -> None:
    folder = make_run(iterations=4)
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_run(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        load_run(tmp_path / "nowhere")
