from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ppo_fast.ops import _backends, _eager, _library, backends, gae

CPU_PATHS = ("eager", "portable", "avx2", "avx512", "avx512_bf16")


def arguments():
    return torch.randn(3, 5), torch.randn(3, 5), torch.ones(3, 5, dtype=torch.bool)


def test_every_op_names_its_path_and_the_reason():
    table = backends()
    why = table.pop("why")
    assert {"selected_logprobs", "ppo_loss", "value_loss", "gae"} <= set(table)
    for op, paths in table.items():
        assert set(paths) == {"cpu", "cuda"}, op
        assert paths["cpu"] in CPU_PATHS
        assert paths["cuda"] in ("triton", "eager")
    assert why["cpu"]
    assert why["cuda"]
    fastest = [name for name in backends.available() if name != "triton"][-1]
    assert table["gae"]["cpu"] == fastest
    assert (fastest == "eager") == ("extension" in why["cpu"] and "is loaded" not in why["cpu"])


@pytest.mark.skipif(backends.available()[:2] == ["eager"], reason="nothing to replace without the extension")
def test_force_eager_replaces_the_extension(monkeypatch):
    """Seen from outside by watching the function that the block registers."""
    calls = []

    def watched(*args):
        calls.append(args)
        return _eager.gae(*args)

    monkeypatch.setitem(_library.EAGER, "gae", watched)
    gae(*arguments())
    assert not calls
    with backends.force("eager"):
        gae(*arguments())
        assert len(calls) == 1
    gae(*arguments())
    assert len(calls) == 1


def test_paths_agree_and_force_restores(cpu_backend):
    inside = backends()
    assert inside["gae"]["cpu"] == cpu_backend
    rewards, values, mask = arguments()
    got = gae(rewards, values, mask)
    with backends.force("eager"):
        assert backends()["gae"]["cpu"] == "eager"
        expected = gae(rewards, values, mask)
    assert backends() == inside
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_innermost_block_wins():
    before = backends()
    names = [name for name in backends.available() if name != "triton"]
    for outer in names:
        for inner in names:
            with backends.force(outer):
                with backends.force(inner):
                    assert backends()["gae"]["cpu"] == inner
                    gae(*arguments())
                assert backends()["gae"]["cpu"] == outer
    assert backends() == before


def test_an_error_inside_the_block_restores_too():
    before = backends()
    with pytest.raises(ZeroDivisionError), backends.force("eager"):
        1 / 0  # noqa: B018
    assert backends() == before


def test_unknown_and_unavailable_names():
    with pytest.raises(ValueError, match=f"backend must be one of {', '.join(CPU_PATHS)}, triton, got 'cuda'"):
        backends.force("cuda").__enter__()
    for name in {*CPU_PATHS, "triton"} - set(backends.available()):
        with pytest.raises(ValueError, match=f"backend '{name}' is not available here: .+"):
            backends.force(name).__enter__()


@pytest.mark.parametrize("present", [False, True])
def test_an_extension_that_is_missing_or_broken(monkeypatch, tmp_path, present):
    """Gives its reason; with PPO_FAST_REQUIRE_EXT=1 it is an ImportError."""
    (tmp_path / "ops").mkdir()
    if present:
        (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(_backends, "__file__", str(tmp_path / "ops" / "_backends.py"))
    monkeypatch.delenv("PPO_FAST_REQUIRE_EXT", raising=False)
    reason = _backends._load_extension()
    assert (f"does not load with torch {torch.__version__}" if present else "is not built") in reason
    monkeypatch.setenv("PPO_FAST_REQUIRE_EXT", "1")
    with pytest.raises(ImportError, match="PPO_FAST_REQUIRE_EXT=1, but the C\\+\\+ extension"):
        _backends._load_extension()


def test_importing_the_package_is_light():
    code = (
        "import sys, ppo_fast; assert 'torch' not in sys.modules; "
        "import ppo_fast.ops; from ppo_fast import gae, backends; "
        "heavy = {'transformers', 'peft', 'accelerate'} & set(sys.modules); assert not heavy, heavy; "
        "assert callable(gae) and 'PPOTrainer' in dir(ppo_fast); "
        "assert not hasattr(ppo_fast, 'no_such_name')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
