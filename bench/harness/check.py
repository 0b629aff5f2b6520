"""Values before times: a variant that computes something else is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from harness.case import TOLERANCE, Case, Expected, Variant


class WrongValuesError(Exception):
    """A variant's results are not the case's."""


def relative_error(got: Tensor, expected: Expected) -> float:
    """The largest absolute difference over the scale. NaN, or another shape, is infinitely wrong."""
    part = got if expected.pick is None else got[expected.pick]
    if part.shape != expected.value.shape:
        return math.inf
    scale = float(expected.value.abs().max()) if expected.scale is None else expected.scale
    error = float((part.double() - expected.value).abs().max())
    return math.inf if math.isnan(error) else error / (scale or 1.0)


def check_values(
    case: Case, variant: Variant, results: Mapping[str, Tensor], reference: Mapping[str, Expected]
) -> float:
    """The largest relative error over the variant's results.

    Raises WrongValuesError where it is too large, where nothing was returned, or something the reference doesn't know.
    """
    where = f"{case.key}, {variant.name}"
    if not results or not results.keys() <= reference.keys():
        raise WrongValuesError(f"{where}: returned {sorted(results)}, can be checked: {sorted(reference)}")
    errors = {name: relative_error(value.detach(), reference[name]) for name, value in results.items()}
    name = max(errors, key=lambda name: errors[name])
    tolerance = TOLERANCE[case.dtype] if variant.tolerance is None else variant.tolerance
    if not errors[name] <= tolerance:
        raise WrongValuesError(f"{where}: {name} is off by {errors[name]:.2e} of its scale, allowed is {tolerance:.0e}")
    return errors[name]
