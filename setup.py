"""Builds csrc/ into ppo_fast._C and installs kernels/ as ppo_fast.kernels; everything else stands in pyproject.toml.

The extension is compiled against the headers of the torch that is installed in the environment pip works for, found by
path: torch itself is never imported, so build isolation needs no second torch. Only its stable C ABI is used, so that
one cp310-abi3 library serves every Python from 3.10 and every torch from 2.10. Without torch, without a compiler or
where compiling fails, ppo_fast is installed as pure Python, says so in one line and runs its ops in plain PyTorch;
PPO_FAST_REQUIRE_EXT=1 makes that an error.

PPO_FAST_SANITIZE=1 compiles it with AddressSanitizer and UndefinedBehaviorSanitizer, any finding of which ends the
process: `make sanitize` does that, into a folder of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
REQUIRED = os.environ.get("PPO_FAST_REQUIRE_EXT") == "1"
SANITIZE = os.environ.get("PPO_FAST_SANITIZE") == "1"
OLDEST_TORCH = (2, 10)  # the first whose stable ABI has parallel_for
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Pythons have none
# Division by zero is left out: floating-point numbers define it, and the kernels mean it.
SANITIZERS = [
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
]


class CannotBuildError(Exception):
    """Why the extension can't be built here."""


def find_torch() -> Path:
    """The folder of the installed torch package."""
    places = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("purelib", "platlib")]
    if sys.prefix == sys.base_prefix:  # in a virtual environment the user's own packages are out of sight
        places.append(Path(site.getusersitepackages()) / "torch")
    spec = importlib.util.find_spec("torch")  # finds it anywhere else on the path, without running it
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent)
    found = next((place for place in places if (place / "include" / "torch").is_dir()), None)
    if found is None:
        raise CannotBuildError(
            f"torch is not installed in {places[0].parent}; install it there first, or pass --no-build-isolation"
        )
    header = found / "include" / "torch" / "headeronly" / "version.h"
    text = header.read_text() if header.is_file() else ""
    version = tuple(int(n) for n in re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", text))
    if version < OLDEST_TORCH:
        raise CannotBuildError(f"the torch in {found} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    return found


def extension() -> Extension:
    if sys.platform == "win32":
        raise CannotBuildError("Windows is not supported yet")
    torch = find_torch()
    macros = [("TORCH_TARGET_VERSION", "0x020a000000000000")]
    if LIMITED_API:
        macros.append(("Py_LIMITED_API", "0x030A0000"))
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
    return Extension(
        "ppo_fast._C",
        sources,
        depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h")],
        define_macros=macros,
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],  # no rpath: the process has loaded it by the time it loads this
        language="c++",
        py_limited_api=LIMITED_API,
        optional=not REQUIRED,
        extra_compile_args=[
            # After the flags that Python was built with, so these win.
            "-std=c++17",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            # Values never depend on a compiler's choice to fuse a multiplication and an addition.
            "-ffp-contract=off",
            # Nobody reads errno or floating-point exception flags here; both stand in the way of vectorisation.
            "-fno-math-errno",
            "-fno-trapping-math",
            "-isystem",
            str(torch / "include"),
            *(SANITIZERS if SANITIZE else []),
        ],
        extra_link_args=SANITIZERS if SANITIZE else [],
    )


class BuildExtension(build_ext):
    """Compiles the sources of the extension side by side, and says in one line if it had to be left out."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                parts = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for part in parts for name in part]

        self.compiler.compile = compile_side_by_side
        try:
            super().build_extension(ext)
        except Exception as error:  # setuptools skips an optional extension; the compiler has said its own piece
            if not REQUIRED:
                left_out(f"compiling failed: {error}")
            raise
        finally:
            self.compiler.compile = compile_all


def left_out(reason: str) -> None:
    print(f"ppo_fast: C++ kernels left out, ops run in plain PyTorch: {reason}", file=sys.stderr)


try:
    extensions = [extension()]
except CannotBuildError as error:
    if REQUIRED:
        raise SystemExit(f"PPO_FAST_REQUIRE_EXT=1, but {error}") from None
    left_out(str(error))
    extensions = []

setup(
    packages=find_packages(include=["ppo_fast", "ppo_fast.*"]),
    package_data={
        "ppo_fast": ["py.typed"],
        "ppo_fast.recipes": ["*.yaml", "*.jsonl", "*.txt", "*.json"],
        "ppo_fast.evaluation": ["*.yaml", "*.jsonl", "*.txt", "*.json"],
    },
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if extensions and LIMITED_API else {},
)
