"""Which implementation of an op runs where, and why; and how to make another one run.

Every op has a default in plain PyTorch for all devices. The C++ extension, if it is there and loads, binds the CPU key
and picks the best instruction set at run time. Triton kernels bind the CUDA key (ROCm's, too); they are imported at the
first call, so that a machine without a GPU never pays for them. A backend is forced by registering its function over
the dispatcher's entry and taking it away again: the public ops and autograd run unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ppo_fast.ops._library import EAGER, LIBRARY, NAMESPACE

# Registered op -> module of ppo_fast.kernels that has a function of that signature, and that name but for underscores
# in front.
_TRITON = {
    "selected_logprobs": "selected_logprobs",
    "selected_logprobs_backward": "selected_logprobs",
    "selected_logprobs_backward_": "selected_logprobs",
    "gae": "gae",
    "ppo_loss": "ppo_loss",
    "value_loss": "value_loss",
    "_head_forward": "linear_head",
    "_head_backward": "linear_head",
    "_kept_forward": "kept",
    "_kept_backward": "kept",
    "_draw": "linear_sample",
}
# Registered op -> the one inside its plain PyTorch implementation that has the kernel.
_TRITON_INSIDE = {"linear_sample": "_draw"}
_ISA_LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3}
_BEST = -1


def _has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


def _is_public(op: str) -> bool:
    return not op.startswith("_") and "backward" not in op


def _primitive(op: str) -> str:
    """The op whose path is that of ``op``."""
    return "_head_forward" if op.startswith("linear_") and op != "linear_sample" else op


def _has_triton(op: str) -> bool:
    return op in _TRITON or op in _TRITON_INSIDE


@functools.cache
def _triton_function(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"ppo_fast.kernels.{_TRITON[op]}"), op.lstrip("_"))


def _on_first_call(op: str) -> Callable[..., Any]:
    return lambda *arguments: _triton_function(op)(*arguments)


def _load_extension() -> str | None:
    """Load ppo_fast/_C*.so, which binds its kernels to the CPU key; None, or the reason why it isn't there."""
    package = Path(__file__).resolve().parent.parent
    files = sorted([*package.glob("_C*.so"), *package.glob("_C*.pyd")])
    if not files:
        reason = f"the C++ extension is not built (no _C*.so in {package})"
    else:
        try:
            torch.ops.load_library(str(files[0]))
            return None
        except (OSError, RuntimeError) as error:
            reason = f"the C++ extension does not load with torch {torch.__version__}: {error}"
    if os.environ.get("PPO_FAST_REQUIRE_EXT") == "1":
        raise ImportError(f"PPO_FAST_REQUIRE_EXT=1, but {reason}")
    return reason


def _isa_name(level: int) -> str:
    return next(name for name, value in _ISA_LEVELS.items() if value == level)


class Backends:
    """Call it to see what runs; ``force`` makes another path run. The instance is ``ppo_fast.backends``."""

    def __init__(self) -> None:
        self._why_not_cpp = _load_extension()
        self._why_not_triton = None if importlib.util.find_spec("triton") else "triton is not installed"
        self._best_isa = None if self._why_not_cpp else int(torch.ops.ppo_fast._set_isa(_BEST))
        self._isa = self._best_isa
        self._override: str | None = None
        self._override_library: torch.library.Library | None = None
        if self._why_not_triton is None:
            for op in _TRITON:
                LIBRARY.impl(op, _on_first_call(op), "CUDA")

    def __call__(self) -> dict[str, dict[str, str]]:
        """Per op the path that tensors of each kind of device take now, and under ``"why"`` the reason for it.

        ``{"gae": {"cpu": "avx512", "cuda": "triton"}, ..., "why": {"cpu": "...", "cuda": "..."}}``. A path is
        avx512_bf16, avx512, avx2 or portable (the C++ extension), triton, or eager (plain PyTorch). The linear ops take
        that of the output layer's products. ROCm counts as cuda; every other kind of device is eager.
        """
        cuda = self._why_not_triton or "triton is installed"
        if not torch.cuda.is_available():
            cuda += "; no CUDA device here"
        forced = "" if self._override is None else f"{self._override} is forced; "
        cpp = self._why_not_cpp
        if self._best_isa is not None:
            cpp = f"the C++ extension is loaded, the best instruction set of this CPU is {_isa_name(self._best_isa)}"
        table = {op: {"cpu": self._cpu_path(op), "cuda": self._cuda_path(op)} for op in EAGER if _is_public(op)}
        return {
            **table,
            "why": {"cpu": f"{forced}{cpp}", "cuda": f"{forced}{cuda}"},
        }

    def available(self) -> list[str]:
        """The names that ``force`` accepts on this machine: the CPU's paths from plain to fast, then triton."""
        names = ["eager"]
        if self._best_isa is not None:
            names += [name for name, level in _ISA_LEVELS.items() if level <= self._best_isa]
        return names if self._why_not_triton else [*names, "triton"]

    @contextlib.contextmanager
    def force(self, name: str) -> Iterator[None]:
        """Within the ``with`` block every op that has the backend ``name`` runs on it; the innermost block wins.

        ``"eager"``: plain PyTorch on every device. ``"portable"``, ``"avx2"``, ``"avx512"``, ``"avx512_bf16"``: C++
        at that instruction set, on CPU tensors. ``"triton"``: the Triton kernels on CPU tensors too, which needs
        TRITON_INTERPRET=1. Not thread-safe.

        Raises ValueError for a name that is unknown or not available here.
        """
        if name not in ("eager", *_ISA_LEVELS, "triton"):
            raise ValueError(f"backend must be one of eager, {', '.join(_ISA_LEVELS)}, triton, got {name!r}")
        if name not in self.available():
            reason = self._why_not_triton if name == "triton" else self()["why"]["cpu"]
            raise ValueError(f"backend {name!r} is not available here: {reason}")
        before = self._override, self._isa
        try:
            self._switch(*((None, _ISA_LEVELS[name]) if name in _ISA_LEVELS else (name, self._isa)))
            yield
        finally:
            self._switch(*before)

    def _switch(self, override: str | None, isa: int | None) -> None:
        if self._override_library is not None:
            self._override_library._destroy()  # the dispatcher falls back to what stood there before
            self._override_library = None
        self._override = override
        if override is not None:
            self._override_library = _register_over(override)
        if isa != self._isa and isa is not None:
            self._isa = int(torch.ops.ppo_fast._set_isa(isa))

    def _cpu_path(self, op: str) -> str:
        primitive = _primitive(op)
        if self._override == "eager" or (self._override == "triton" and _has_triton(primitive)):
            return self._override
        return "eager" if self._isa is None or not _has_kernel(primitive, "CPU") else _isa_name(self._isa)

    def _cuda_path(self, op: str) -> str:
        plain = self._override == "eager" or self._why_not_triton or not _has_triton(_primitive(op))
        return "eager" if plain else "triton"


def _register_over(name: str) -> torch.library.Library:
    """Register the Python implementations called ``name`` over the dispatcher's, until the library is destroyed."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*verrid", category=UserWarning)  # overriding is the purpose
        if name == "triton":
            for op in _TRITON:
                library.impl(op, _triton_function(op), "CPU")
            for op in _TRITON_INSIDE:
                library.impl(op, EAGER[op], "CPU")
        else:
            for op, function in EAGER.items():
                for key in ("CPU", "CUDA"):
                    if _has_kernel(op, key):
                        library.impl(op, function, key)
    return library


backends = Backends()
