"""The command line: ppo-fast train | eval | report."""

from __future__ import annotations

import argparse
import errno
import os
import re
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
    try:
        _quieten_libraries()
        arguments.run(arguments)
    except UserError as error:
        print(f"ppo-fast: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        sentence = _about_files(error, arguments)
        if sentence is None:
            raise
        print(f"ppo-fast: {sentence}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(
            "ppo-fast: interrupted; `ppo-fast train ... --resume` goes on from the last checkpoint, if one was written",
            file=sys.stderr,
        )
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

    model = arguments.model
    if model is not None and os.path.isdir(model):  # named from here, not from the recipe's folder
        model = os.path.realpath(model)
    recipe = load_recipe(arguments.config, arguments.set, model=model, output_dir=arguments.output_dir)
    arguments.writes = recipe.ppo.output_dir
    resume = arguments.resume
    if isinstance(resume, str):
        resume = _checkpoint(Path(recipe.ppo.output_dir), resume)
    _announce_loading(recipe)
    with LiveTable() as table:
        trainer = _trainer(recipe, callbacks=[table])
        trainer.train(resume_from_checkpoint=resume)
    print(f"\ntrained; the run is in {recipe.ppo.output_dir}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from ppo_fast.evaluation.evaluate import evaluate
    from ppo_fast.reporting.report import report_summary_lines
    from ppo_fast.reporting.run import load_run
    from ppo_fast.training import checkpoint
    from ppo_fast.training.recipe import load_recipe, read_settings

    folder = Path(arguments.run_folder)
    if not {"model", "data", "rewards"} & set(read_settings(folder / "config.yaml")):
        raise UserError(
            f"the run in {str(folder)!r} was made from Python and its config.yaml names no model, data or rewards; to "
            "evaluate from the shell, train from a recipe (ppo-fast train --config)"
        )
    recipe = load_recipe(folder / "config.yaml")
    named = arguments.checkpoint
    chosen = checkpoint.resolve(folder, True if named is None else _checkpoint(folder, named))
    _announce_loading(recipe)
    evaluate(_trainer(recipe), recipe, chosen, folder)
    print("\n".join(report_summary_lines(load_run(folder))))


def _report(arguments: argparse.Namespace) -> None:
    from ppo_fast.reporting.report import write_report

    print(f"report: {write_report(Path(arguments.run_folder))}")


def _checkpoint(run: Path, name: str) -> str:
    """A bare ``checkpoint-N`` is looked up in the run first; anything else is a path as it stands."""
    inside = run / name
    return str(inside) if re.fullmatch(r"checkpoint-\d+", name) and inside.is_dir() else name


def _announce_loading(recipe: Recipe) -> None:
    print(f"loading the model {recipe.model} ...", file=sys.stderr, flush=True)


def _about_files(error: OSError, arguments: argparse.Namespace) -> str | None:
    """The sentence for a disk or a folder that doesn't do what is asked of it; None for any other error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error}); free some space, then go on with --resume"
    if not isinstance(error.filename, str):
        return None
    place = os.path.abspath(error.filename)
    writes = getattr(arguments, "writes", None)
    if writes is not None and _related(place, os.path.abspath(writes)):
        return f"can't write {place!r} ({error.strerror}); choose another output_dir"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG):
        return f"can't use {place!r} ({error.strerror}); choose another place, or change its permissions"
    return None


def _related(place: str, folder: str) -> bool:
    """Whether one of the two is the other or holds it: creating a folder may fail at any of its parents."""
    return os.path.commonpath((place, folder)) in (place, folder)


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
