"""The command line: ppo-fast train | eval | report."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_fast.errors import UserError

if TYPE_CHECKING:
    from ppo_fast.training.recipe import Recipe
    from ppo_fast.training.trainer import PPOTrainer

BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for input that the user can fix, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    _quieten_libraries()
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"ppo-fast: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"ppo-fast: the disk is full ({error}); free some space, then go on with --resume", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("ppo-fast: interrupted; `ppo-fast train ... --resume` goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ppo-fast", description="PPO with a critic for language models.")
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser("train", help="train a policy and a critic as a recipe says")
    train.add_argument("--config", required=True, help="the recipe, a YAML file")
    train.add_argument("--output-dir", help="folder of the run, in place of the recipe's ppo.output_dir")
    train.add_argument("--model", help="path or hub id, in place of the recipe's model")
    train.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one setting")
    train.add_argument(
        "--resume", nargs="?", const=True, default=False, metavar="CHECKPOINT",
        help="go on from the newest checkpoint of the run, or from the one named",
    )  # fmt: skip
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="compare the trained policy with its start on held-out prompts")
    evaluate.add_argument("run_folder", help="folder of the run")
    evaluate.add_argument("--checkpoint", help="a checkpoint-N folder; the run's newest otherwise")
    evaluate.set_defaults(run=_evaluate)

    report = commands.add_parser("report", help="write the run's report.html")
    report.add_argument("run_folder", help="folder of the run")
    report.set_defaults(run=_report)
    return parser


def _train(arguments: argparse.Namespace) -> None:
    from ppo_fast.reporting.console import LiveTable
    from ppo_fast.training.recipe import load_recipe

    overrides = list(arguments.set)
    for key, value in (("ppo.output_dir", arguments.output_dir), ("model", arguments.model)):
        if value is not None:
            overrides.append(f"{key}={value}")
    recipe = load_recipe(arguments.config, overrides)
    with LiveTable() as table:
        trainer = _trainer(recipe, callbacks=[table])
        trainer.train(resume_from_checkpoint=arguments.resume)
    print(f"\ntrained; the run is in {recipe.ppo.output_dir}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from ppo_fast.evaluation.evaluate import evaluate
    from ppo_fast.reporting.report import report_summary_lines
    from ppo_fast.reporting.run import load_run
    from ppo_fast.training import checkpoint
    from ppo_fast.training.recipe import load_recipe

    folder = Path(arguments.run_folder)
    recipe = load_recipe(folder / "config.yaml")
    chosen = checkpoint.resolve(folder, arguments.checkpoint or True)
    evaluate(_trainer(recipe), recipe, chosen, folder)
    print("\n".join(report_summary_lines(load_run(folder))))


def _report(arguments: argparse.Namespace) -> None:
    from ppo_fast.reporting.report import write_report

    print(f"report: {write_report(Path(arguments.run_folder))}")


def _trainer(recipe: Recipe, callbacks: Sequence[object] = ()) -> PPOTrainer:
    from ppo_fast.recipes.smollm2 import ensure_model
    from ppo_fast.training.trainer import PPOTrainer

    trainer = PPOTrainer(
        ensure_model(recipe.model), recipe.rewards, recipe.ppo,
        [prompt.row for prompt in recipe.prompts], [prompt.row for prompt in recipe.heldout] or None,
        value_model=recipe.value_model, peft_config=recipe.lora, value_peft_config=recipe.value_lora,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.journal.settings = recipe.settings
    trainer.journal.identity["model"]["name"] = recipe.model  # the name that was asked for, not a cache folder
    return trainer


def _quieten_libraries() -> None:
    """One progress display at a time: ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


if __name__ == "__main__":
    sys.exit(main())
