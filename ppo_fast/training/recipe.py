"""A run as YAML: model, data, rewards, adapters and PPO settings, checked key by key before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig

from ppo_fast.errors import UserError
from ppo_fast.training.config import SEEDS, PPOConfig, check_keys
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
_MODEL = "a path, a hub id, or the name of a shipped model"


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


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, model: str | None = None, output_dir: str | None = None
) -> Recipe:
    """Reads a recipe; ``overrides`` are ``section.key=value`` (``ppo.seed=2``, ``model=...``), values as YAML.

    ``model`` and ``output_dir`` replace the recipe's, as they stand.

    Raises:
        UserError: the first thing in it that can't work.
    """
    path = Path(path)
    settings = read_settings(path)
    for override in overrides:
        _override(settings, override)
    if model is not None:
        settings["model"] = model
    if output_dir is not None:
        settings["ppo"] = {**_section(settings, "ppo"), "output_dir": output_dir}
    return parse_recipe(settings, path.parent)


def read_settings(path: Path) -> dict[str, Any]:
    """What a YAML file holds, unchecked.

    Raises:
        UserError: there is no such file, or it can't be read as a mapping.
    """
    if not path.is_file():
        raise UserError(f"there is no configuration file {str(path)!r}; give a YAML file, see ppo_fast/recipes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} isn't UTF-8 text (at byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{str(path)!r} can't be read ({error.strerror}); give a YAML file, see ppo_fast/recipes"
        ) from error
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that doesn't exist
        raise UserError(f"{str(path)!r} isn't valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{str(path)!r} holds no settings; see ppo_fast/recipes for the form")
    return settings


def parse_recipe(settings: dict[str, Any], folder: Path) -> Recipe:
    """Checks ``settings``; relative file names in them are looked up in ``folder``, then in the working directory."""
    check_keys(settings, _SECTIONS, "the recipe")
    for section, known in _SECTIONS.items():
        if isinstance(known, set):
            check_keys(_section(settings, section), dict.fromkeys(known), section)
    model, value_model = (_text(settings.get(name), name, _MODEL) for name in ("model", "value_model"))
    if not model:
        raise UserError("the recipe names no model; set model: to a path or hub id")
    data = _section(settings, "data")
    if "prompts" not in data:
        raise UserError("the recipe names no prompts; set data.prompts to a JSONL file")
    if not _text(data["prompts"], "data.prompts", "the name of a JSONL file"):
        raise UserError(f"data.prompts is {data['prompts']!r}; set it to the name of a JSONL file")
    template = _text(data.get("template"), "data.template", "text with {prompt} in it, or null")
    _require_integer(data.get("heldout", 0), "data.heldout", at_least=0)
    ppo = PPOConfig.from_mapping(_section(settings, "ppo"))
    evaluation = _evaluation(_section(settings, "eval"))
    lora, value_lora = (_lora(name, settings) for name in ("lora", "value_lora"))
    rewards = _rewards(settings.get("rewards"))
    judge = _text(settings.get("judge"), "judge", "module:name or file.py:name")
    prompts_file = _find(data["prompts"], folder)
    prompts = [_templated(prompt, template) for prompt in read_prompts(prompts_file)]
    train, heldout = split_prompts(prompts, data.get("heldout", 0))
    # The run keeps a copy of the recipe in its own folder; the files it names must be found from there too.
    rewards = [_absolute(name, folder) for name in rewards]
    model = _model(model, folder)
    settings = {
        **settings,
        "model": model,
        "data": {**data, "prompts": str(prompts_file.resolve())},
        "rewards": rewards,
    }
    if value_model and value_model != "head":
        settings["value_model"] = value_model = _model(value_model, folder)
    if judge:
        settings["judge"] = judge = _absolute(judge, folder)
    return Recipe(
        model=model,
        prompts=train,
        heldout=heldout,
        rewards=[name if _is_model(name) else _function(name, folder) for name in rewards],
        judge=_function(judge, folder) if judge else None,
        lora=lora,
        value_lora=value_lora,
        value_model=value_model or None,
        evaluation=evaluation,
        ppo=ppo,
        settings={**settings, "ppo": dataclasses.asdict(ppo)},
    )


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UserError(f"section {name!r} of the recipe is {section!r}; it must hold keys and values")
    return section


def _text(value: Any, name: str, wanted: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} is {value!r}; it must be text: {wanted}")
    return value


def _require_integer(value: Any, name: str, *, at_least: int, below: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least or (below and value >= below):
        bound = f" and below {below}" if below else ""
        raise UserError(f"{name} is {value!r}; it must be a whole number, at least {at_least}{bound}")


def _evaluation(section: Mapping[str, Any]) -> Evaluation:
    made = Evaluation(**section)
    _require_integer(made.replies_per_prompt, "eval.replies_per_prompt", at_least=1)
    _require_integer(made.batch_size, "eval.batch_size", at_least=1)
    _require_integer(made.seed, "eval.seed", at_least=0, below=SEEDS)
    return made


def _rewards(names: Any) -> list[str]:
    names = [] if names is None else [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"rewards is {names!r}; it must be a list of {_SECTIONS['rewards']}")
    return names


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"--set {override!r} has no '='; write section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            raise UserError(f"--set {override!r}: {section!r} is a value, {settings!r}, not a section; set it itself")
    try:
        settings[last] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that doesn't exist
        raise UserError(
            f"the value of --set {override!r} isn't valid YAML ({' '.join(str(error).split())}); put text in quotes"
        ) from error


def _templated(prompt: Prompt, template: str | None) -> Prompt:
    """The prompt as one user message of a chat, put into ``template``; unchanged without one."""
    if template is None:
        return prompt
    if "{prompt}" not in template:
        raise UserError(f"data.template {template!r} has no {{prompt}}; put it where the prompt shall stand")
    if not isinstance(prompt.prompt, str):
        raise UserError("data.template is for prompts that are text; these are chats already")
    return Prompt([{"role": "user", "content": template.replace("{prompt}", prompt.prompt)}], prompt.columns)


def _lora(name: str, recipe: Mapping[str, Any]) -> LoraConfig | None:
    """The adapter that section ``name`` asks for: null means none, an empty section one with the defaults."""
    if recipe.get(name) is None:
        return None
    settings = _section(recipe, name)
    rank = settings.get("r", 16)
    _require_integer(rank, f"{name}.r", at_least=1)
    alpha = settings.get("alpha", 2 * rank)
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise UserError(f"{name}.alpha is {alpha!r}; it must be a number above 0")
    targets, layers = settings.get("target_modules", "all-linear"), settings.get("layers_to_transform")
    if not targets or not (isinstance(targets, str) or _all_of(str, targets)):
        raise UserError(f"{name}.target_modules is {targets!r}; list names of the model's layers, or use all-linear")
    if layers is not None and type(layers) is not int and not (layers and _all_of(int, layers)):
        raise UserError(f"{name}.layers_to_transform is {layers!r}; list numbers of layers, from 0, or use null")
    try:
        return LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=targets,
            layers_to_transform=layers,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
    except (TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"section {name!r} of the recipe can't work ({message}); change it") from error


def _all_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _find(name: str, folder: Path) -> Path:
    beside = folder / name
    return beside if beside.exists() else Path(name)


def _model(name: str, folder: Path) -> str:
    """The full path of a model that is a folder here; anything else is a name for others to look up."""
    found = _find(name, folder)
    return str(found.resolve()) if found.is_dir() else name


def _is_model(name: str) -> bool:
    return _FUNCTION not in name or Path(name).is_dir()


def _absolute(name: str, folder: Path) -> str:
    if _is_model(name):
        return _model(name, folder)
    file, colon, function = name.rpartition(_FUNCTION)
    return f"{_find(file, folder).resolve()}{colon}{function}" if file.endswith(".py") else name


def _function(name: str, folder: Path) -> Callable[..., Any]:
    """The function at ``module:name`` or ``file.py:name``."""
    module_name, _, function_name = name.rpartition(_FUNCTION)
    if not module_name or not function_name:
        raise UserError(f"{name!r} names no function; write module:function or file.py:function")
    try:
        if module_name.endswith(".py"):
            module = _module_from_file(_find(module_name, folder))
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is run
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{name!r} can't be imported ({message}); write module:function or file.py:function") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{module_name!r} has no function {function_name!r}; write module:function or file.py:function")
    return function


def _module_from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"ppo_fast_recipe_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise OSError(f"there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
