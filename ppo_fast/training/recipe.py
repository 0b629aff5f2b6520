"""A run as YAML: model, data, rewards, adapters and PPO settings, checked key by key before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig

from ppo_fast.errors import UserError
from ppo_fast.training.config import PPOConfig, check_keys
from ppo_fast.training.data import Prompt, read_prompts, split_prompts

_LORA_KEYS = {"r", "alpha", "target_modules", "layers_to_transform"}
_SECTIONS = {
    "model": "path, hub id, or the name of a shipped model",
    "data": {"prompts", "template", "heldout"},
    "rewards": "functions as module:name or file.py:name, or reward model paths",
    "judge": "an independent scorer for eval, as module:name or file.py:name",
    "lora": _LORA_KEYS,
    "value_lora": _LORA_KEYS,
    "value_model": "null, head, or a path",
    "eval": {"replies_per_prompt", "seed", "batch_size"},
    "ppo": "PPOConfig",
}
_FUNCTION = ":"


@dataclass(frozen=True)
class Evaluation:
    """How ``ppo-fast eval`` samples on the held-out prompts."""

    replies_per_prompt: int = 2
    seed: int = 1000
    batch_size: int = 32


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. ``settings`` is what was written, with overrides: the run's config.yaml."""

    model: str
    prompts: list[Prompt]
    heldout: list[Prompt]
    rewards: list[Any]  # functions, or paths of reward models
    judge: Callable[..., Sequence[float | None]] | None
    lora: LoraConfig | None
    value_lora: LoraConfig | None  # None: as the policy's
    value_model: str | None
    evaluation: Evaluation
    ppo: PPOConfig
    settings: dict[str, Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe; ``overrides`` are ``section.key=value`` (``ppo.seed=2``, ``model=...``), values as YAML.

    Raises:
        UserError: the first thing in it that can't work.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no configuration file {str(path)!r}; give a YAML file, see ppo_fast/recipes")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{str(path)!r} isn't valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{str(path)!r} holds no settings; see ppo_fast/recipes for the form")
    for override in overrides:
        _override(settings, override)
    return parse_recipe(settings, path.parent)


def parse_recipe(settings: dict[str, Any], folder: Path) -> Recipe:
    """Checks ``settings``; relative file names in them are looked up in ``folder``, then in the working directory."""
    check_keys(settings, _SECTIONS, "the recipe")
    for section, known in _SECTIONS.items():
        if isinstance(known, set):
            check_keys(_section(settings, section), dict.fromkeys(known), section)
    if not settings.get("model"):
        raise UserError("the recipe names no model; set model: to a path or hub id")
    data, lora, value_lora = (_section(settings, name) for name in ("data", "lora", "value_lora"))
    if "prompts" not in data:
        raise UserError("the recipe names no prompts; set data.prompts to a JSONL file")
    ppo = PPOConfig.from_mapping(_section(settings, "ppo"))
    prompts_file = _find(data["prompts"], folder)
    prompts = [_templated(prompt, data.get("template")) for prompt in read_prompts(prompts_file)]
    train, heldout = split_prompts(prompts, data.get("heldout", 0))
    rewards = settings.get("rewards") or []
    rewards = [rewards] if isinstance(rewards, str) else rewards
    # The run keeps a copy of the recipe in its own folder; the files it names must be found from there too.
    rewards = [_absolute(name, folder) for name in rewards]
    settings = {**settings, "data": {**data, "prompts": str(prompts_file.resolve())}, "rewards": rewards}
    if settings.get("judge"):
        settings["judge"] = _absolute(settings["judge"], folder)
    return Recipe(
        model=settings["model"],
        prompts=train,
        heldout=heldout,
        rewards=[_function(name, folder) if _FUNCTION in name else name for name in rewards],
        judge=_function(settings["judge"], folder) if settings.get("judge") else None,
        lora=_lora("lora", lora) if lora else None,
        value_lora=_lora("value_lora", value_lora) if value_lora else None,
        value_model=settings.get("value_model"),
        evaluation=Evaluation(**_section(settings, "eval")),
        ppo=ppo,
        settings={**settings, "ppo": dataclasses.asdict(ppo)},
    )


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name) or {}
    if not isinstance(section, dict):
        raise UserError(f"section {name!r} of the recipe is {section!r}; it must hold keys and values")
    return section


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"--set {override!r} has no '='; write section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
        if not isinstance(settings, dict):
            raise UserError(f"--set {override!r}: {section!r} is a value, not a section")
    settings[last] = yaml.safe_load(value)


def _templated(prompt: Prompt, template: str | None) -> Prompt:
    """The prompt as one user message of a chat, put into ``template``; unchanged without one."""
    if template is None:
        return prompt
    if "{prompt}" not in template:
        raise UserError(f"data.template {template!r} has no {{prompt}}; put it where the prompt shall stand")
    if not isinstance(prompt.prompt, str):
        raise UserError("data.template is for prompts that are text; these are chats already")
    return Prompt([{"role": "user", "content": template.replace("{prompt}", prompt.prompt)}], prompt.columns)


def _lora(section: str, settings: dict[str, Any]) -> LoraConfig:
    rank = settings.get("r", 16)
    try:
        return LoraConfig(
            r=rank,
            lora_alpha=settings.get("alpha", 2 * rank),
            target_modules=settings.get("target_modules", "all-linear"),
            layers_to_transform=settings.get("layers_to_transform"),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"section {section!r} of the recipe can't work: {error}") from error


def _find(name: str, folder: Path) -> Path:
    beside = folder / name
    return beside if beside.exists() else Path(name)


def _absolute(name: str, folder: Path) -> str:
    file, colon, function = name.rpartition(_FUNCTION)
    return f"{_find(file, folder).resolve()}{colon}{function}" if file.endswith(".py") else name


def _function(name: str, folder: Path) -> Callable[..., Any]:
    """The function at ``module:name`` or ``file.py:name``."""
    module_name, _, function_name = name.rpartition(_FUNCTION)
    try:
        if module_name.endswith(".py"):
            module = _module_from_file(_find(module_name, folder))
        else:
            module = importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        raise UserError(f"{name!r} can't be imported ({error}); write module:function or file.py:function") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{module_name!r} has no function {function_name!r}; write module:function or file.py:function")
    return function


def _module_from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise OSError(f"there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
