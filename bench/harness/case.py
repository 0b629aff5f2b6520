"""What is measured, as data: a case is a shape and a dtype, a variant a function on its inputs, a bar a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Largest error allowed, relative to the scale of what is compared. Bounds for code that rounds logits or probabilities
# to the dtype, as the peers do; a variant that promises more says so.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}


def identity(inputs: Any) -> Any:
    """The default of what a variant does before the clock starts."""
    return inputs


@dataclass(frozen=True)
class Work:
    """The least that must be done, whatever the method: operations, or bytes to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Expected:
    """A right answer in float64."""

    value: Tensor
    pick: Any = None
    """Index of the part of the variant's output that ``value`` is; None for all of it."""
    scale: float | None = None
    """What an error is relative to; None for the largest absolute value."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the case."""

    name: str
    run: Callable[[Any], dict[str, Tensor]]
    """What is timed. Returns named results, each of which the case's reference knows."""
    prepare: Callable[[Any], Any] = identity
    """Makes the argument of ``run`` out of the case's inputs before each call; not timed."""
    work: Work = Work()
    tolerance: float | None = None
    """Largest relative error; None for TOLERANCE of the case's dtype."""
    missing: str | None = None
    """Why it can't run here; it is then reported as missing, never left out."""


@dataclass(frozen=True)
class Case:
    """Variants that are timed against each other on the same inputs."""

    name: str
    """Unique: op, what, shape; the dtype is added."""
    dtype: torch.dtype
    inputs: Callable[[int], Any]
    """Makes one set of inputs from a seed."""
    reference: Callable[[Any], Mapping[str, Expected]]
    variants: Sequence[Variant]
    copies: int = 1
    """Sets of inputs to go round, so that none is still in a cache when its turn comes; see `copies_beyond_cache`."""
    first_rows: Callable[[Any], Any] = identity
    """Cuts the inputs down to what warms code up before memory is measured, without showing the op its full size."""
    memory: Sequence[str] = ()
    """Variants whose peak memory is measured too."""
    seconds: float = 15.0
    """Rounds are repeated for about so long, but at least ``rounds`` times."""
    rounds: int = 5
    long: bool = False
    """Left out of a quick run."""

    @property
    def key(self) -> str:
        return f"{self.name} {DTYPES[self.dtype]}"


Kind = Literal["time", "memory", "ratio growth", "memory growth"]


@dataclass(frozen=True)
class Bar:
    """A figure to reach: one row of the table."""

    op: str
    row: str
    """The work and its shape, for the reader."""
    case: str
    """`Case.key`."""
    of: str
    """The variant that is judged."""
    limit: float
    against: str = ""
    """The baseline, for the reader."""
    to: Sequence[str] = ()
    """The baseline: variants whose times add up."""
    sense: Literal["at most", "at least"] = "at most"
    """At most ``limit`` times the baseline's time, or at least ``limit`` times faster than the baseline."""
    kind: Kind = "time"
    """Memory is in MB (10^6 bytes) beyond what was resident before the call. Growth is by how much the figure exceeds
    that of the case ``since``."""
    since: str = ""
    less: tuple[float, float] = (0.0, 0.0)
    """MB of results that must be returned in any case, in ``case`` and in ``since``; taken off before memory growth."""
    beside: Sequence[str] = field(default=())
    """Another baseline whose figure is printed beside: the ``out=`` forms."""
