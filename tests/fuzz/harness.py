"""How the properties run: their number of examples, and the op on every CPU path.

`make test` runs 60 examples of each property, nearly the same ones every time: Hypothesis mixes in constants of the
modules loaded so far, which depend on the tests a worker ran before. PPO_FAST_FUZZ=N draws N new ones over all
properties (`make fuzz`: 100,000); a failing example is printed as the call that made it, and kept in .hypothesis for
the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from ppo_fast.ops import backends

from .oracle import same_bits

PROPERTIES = sum(file.read_text().count("\n@given(") for file in Path(__file__).parent.glob("test_*.py"))
EXAMPLES = int(os.environ.get("PPO_FAST_FUZZ", "0"))
examples = settings(
    max_examples=-(-EXAMPLES // PROPERTIES) if EXAMPLES else 60,
    derandomize=not EXAMPLES,
    database=settings.default.database if EXAMPLES else None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

PATHS = [name for name in backends.available() if name != "triton"]


def stat_of(dtype: str | torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in ("float64", torch.float64) else torch.float32


def wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value that the op computes with, in float64."""
    return x.to(dtype).double()


def on_every_path(op: str, run: Callable[[], tuple[Tensor, ...]]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The results of ``run`` on each path; our own kernels must give the same bits for one and for two threads."""
    for name in PATHS:
        with backends.force(name):
            torch.set_num_threads(1)
            got = run()
            if backends()[op]["cpu"] != "eager":
                torch.set_num_threads(2)
                again = run()
                torch.set_num_threads(1)
                for i, (a, b) in enumerate(zip(got, again, strict=True)):
                    assert same_bits(a, b), f"{op} on {name}: result {i} depends on the number of threads"
            yield f"{op} on {name}", got


@contextmanager
def eager() -> Iterator[None]:
    with backends.force("eager"):
        torch.set_num_threads(1)
        yield
