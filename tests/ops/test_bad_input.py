"""Every argument of every op, given what it can't be: a TypeError, ValueError or IndexError that names it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ppo_fast import ops

MATRIX, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
IDS = torch.zeros(2, 3, dtype=torch.long)
KEYS = torch.zeros(2, 2, dtype=torch.long)


def wrong_floats(*shape: int, optional: bool = False) -> list[Any]:
    """For a floating-point tensor of this shape."""
    good = torch.zeros(shape)
    wrong_dtypes = [good.to(dtype) for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)]
    wrong_shapes = [torch.zeros(7, *shape), torch.zeros(*shape[:-1], 9), torch.zeros(())]
    return [1.0, good.tolist(), good.numpy(), *wrong_dtypes, *wrong_shapes, good.to("meta"), good.to_sparse()] + (
        [] if optional else [None]
    )


def wrong_numbers(*out_of_range: Any, optional: bool = False) -> list[Any]:
    """For a number: no other type, no tensor, no bool."""
    wrong_types = ["1", True, 1j, [1.0], torch.tensor(0.5), torch.ones(2)]
    return [*wrong_types, math.nan, *out_of_range] + ([] if optional else [None])


WRONG_MASKS = [
    1,
    MASK.tolist(),
    MASK.float(),
    MASK.long(),
    MASK.T,
    torch.tensor(True),
    MASK.to("meta"),
    MASK.to_sparse(),
]
WRONG_NAMES = [None, "x", 1, ["ppo"]]
LAYER = {
    "hidden": [*wrong_floats(2, 3, 4), torch.zeros(4)],
    "weight": [
        *wrong_floats(5, 4),
        torch.zeros(0, 4),
        torch.zeros(5, 0),
        torch.zeros(5, 4, 1),
    ],
    "bias": wrong_floats(5, optional=True),
    "token_ids": [
        *(None, 3, IDS.tolist(), IDS.float(), IDS.bool(), IDS.cfloat(), IDS.T, IDS[0, 0]),
        *(IDS + 5, IDS - 1, IDS + 2**40, IDS.to("meta"), IDS.to_sparse()),
        torch.full((2, 3), 2**63 + 5, dtype=torch.uint64),
    ],
    "temperature": [
        *(None, "1", True, 1j, [1.0], 0, -1, math.nan, math.inf, -math.inf, 1e-320, 1e-45, 1e39),
        *(torch.tensor(x) for x in (0.0, -1.0, math.nan, math.inf, 1e-45)),
        *(torch.full((2, 3), x, dtype=torch.float64) for x in (1e-300, 1e300)),
        *(MASK, MATRIX.cfloat() + 1, torch.ones(7), torch.ones(2, 3, 1)),
        *(torch.ones(2, 3, device="meta"), torch.ones(2, 3).to_sparse()),
    ],
    "softcap": wrong_numbers(0, -1, math.inf, 1e-46, 1e300, optional=True),
    "logit_scale": wrong_numbers(0, -1, math.inf, 1e-60, 1e300),
    "mask": WRONG_MASKS,
    "kept_ids": [
        *(1, MATRIX[..., None], MASK[..., None], IDS, IDS[..., None].short(), IDS[:, :2, None], IDS[..., :0, None]),
        *(IDS[..., None].to("meta"), IDS[..., None].to_sparse(), IDS[..., None] + 1, IDS[..., None] - 1),
        *(torch.tensor(kept).expand(2, 3, 2) for kept in ([0, 0], [0, 5], [0, -2])),
    ],
}
LOSS = {
    "old_logprobs": wrong_floats(2, 3),
    "advantages": wrong_floats(2, 3),
    "ref_logprobs": wrong_floats(2, 3, optional=True),
    "mask": [None, *WRONG_MASKS, ~MASK],
    "clip_low": wrong_numbers(-0.1, 1.1),
    "clip_high": wrong_numbers(-0.1),
    "dual_clip": wrong_numbers(1.0, 0.5, math.inf, optional=True),
    "objective": WRONG_NAMES,
    "entropy_coef": wrong_numbers(-0.1, math.inf),
    "kl_coef": [*wrong_numbers(-0.1, math.inf)],
    "kl_estimator": WRONG_NAMES,
    "aggregation": WRONG_NAMES,
    "normalizer": ["1", True, 1j, [1.0], 0, -1, math.nan, math.inf, torch.tensor(0.0), torch.ones(1)],
}
WRONG = {
    "selected_logprobs": {
        "logits": [x for x in wrong_floats(2, 3, 5) if getattr(x, "shape", None) != (2, 3, 9)] + [torch.zeros(2, 3, 0)],
        **{name: LAYER[name] for name in ("token_ids", "temperature", "mask")},
    },
    "linear_selected_logprobs": LAYER,
    "linear_sample": {
        **{name: LAYER[name] for name in ("weight", "bias", "softcap", "logit_scale")},
        "hidden": [*wrong_floats(2, 4), torch.zeros(4), torch.zeros(2, 3, 4)],
        "temperature": [
            *(None, "1", False, 0j, [1.0], -1, math.nan, math.inf, -math.inf, 1e-320, 1e-45, 1e39),
            *(torch.tensor(x) for x in (-1.0, math.nan, math.inf, 1e-45)),
            torch.full((2,), 1e-300, dtype=torch.float64),
            *(MASK[:, 0], torch.ones(3), torch.ones(2, 1), torch.ones(2, device="meta"), torch.ones(2).to_sparse()),
        ],
        "top_k": [0, -1, 6.0, "3", True, torch.tensor(3), 2**63, math.nan],
        "top_p": wrong_numbers(0, -0.1, 1.1, math.inf, optional=True),
        "keys": [
            *(None, 3, KEYS.tolist(), KEYS.float(), KEYS.int(), KEYS[:1], KEYS[:, :1], KEYS[0], KEYS[None]),
            *(KEYS.to("meta"), KEYS.to_sparse()),
        ],
        "max_kept": [None, 0, -1, 2.0, "3", True],
    },
    "linear_token_loss": LAYER
    | {
        "token_loss": [None, "ppo", 1],
        "rows": [None, 1, "ab", MATRIX, [1.0], [MATRIX.T], [MATRIX.to("meta")], [MATRIX.to_sparse()]],
        "chunk_tokens": [0, -1, 2.0, True, "x", 10**30],
    },
    "linear_ppo_loss": LAYER | LOSS | {"chunk_tokens": [0, -1, 2.0, True, "x", 10**30]},
    "ppo_loss": {"logprobs": wrong_floats(2, 3), "entropy": wrong_floats(2, 3, optional=True), **LOSS},
    "value_loss": {
        **{name: wrong_floats(2, 3) for name in ("values", "old_values", "returns")},
        "clip_range": wrong_numbers(-0.1, optional=True),
        **{name: LOSS[name] for name in ("mask", "aggregation", "normalizer")},
    },
    "gae": {
        **{name: wrong_floats(2, 3) for name in ("rewards", "values")},
        "bootstrap_values": wrong_floats(2, optional=True),
        "mask": [None, *WRONG_MASKS],
        **{name: wrong_numbers(-0.1, 1.1) for name in ("gamma", "lam")},
    },
    "shape_rewards": {
        "scores": wrong_floats(2),
        **{name: wrong_floats(2, 3) for name in ("logprobs", "ref_logprobs")},
        "token_rewards": wrong_floats(2, 3, optional=True),
        "mask": [None, *WRONG_MASKS],
        "kl_coef": wrong_numbers(-0.1, math.inf),
        "kl_estimator": WRONG_NAMES,
    },
    "whiten": {"x": wrong_floats(2, 3), "mask": [None, *WRONG_MASKS], "moments": wrong_floats(3, optional=True)},
    "masked_mean": {"x": wrong_floats(2, 3), "mask": [None, *WRONG_MASKS, ~MASK]},
    "group_advantages": {
        "scores": [x for x in wrong_floats(4) if not getattr(x, "is_meta", False)],
        "group_size": [None, "2", 0, -2, 3, 2.0, True, math.nan],
        "scale": WRONG_NAMES,
        "correction": [None, "1", -1, 2, 1.5, math.nan],
        "eps": wrong_numbers(-1, math.inf),
    },
}
ROWS = {"hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(5, 4), "token_ids": IDS}
POLICY = {"old_logprobs": MATRIX, "advantages": MATRIX, "mask": MASK}
RIGHT: dict[str, dict[str, Any]] = {
    "selected_logprobs": {"logits": torch.zeros(2, 3, 5), "token_ids": IDS},
    "linear_selected_logprobs": ROWS,
    "linear_sample": {"hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "keys": KEYS},
    "linear_token_loss": {**ROWS, "token_loss": lambda logprobs, entropy, *rows: logprobs},
    "linear_ppo_loss": {**ROWS, **POLICY},
    "ppo_loss": {"logprobs": MATRIX, **POLICY},
    "value_loss": {"values": MATRIX, "old_values": MATRIX, "returns": MATRIX, "mask": MASK},
    "gae": {"rewards": MATRIX, "values": MATRIX, "mask": MASK},
    "shape_rewards": {"scores": MATRIX[:, 0], "logprobs": MATRIX, "ref_logprobs": MATRIX, "mask": MASK, "kl_coef": 0.1},
    "whiten": {"x": MATRIX, "mask": MASK},
    "masked_mean": {"x": MATRIX, "mask": MASK},
    "group_advantages": {"scores": torch.zeros(4), "group_size": 2},
}


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in WRONG for argument in WRONG[name]])
def test_the_message_names_the_argument(name, argument):
    op = getattr(ops, name)
    op(**RIGHT[name])
    for wrong in WRONG[name][argument]:
        with pytest.raises((TypeError, ValueError, IndexError), match=rf"\b{argument}\b"):
            op(**{**RIGHT[name], argument: wrong})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_not_finite_is_arithmetic_and_no_error(value):
    """-inf bans a token; what has no logarithm is NaN, never a number."""
    bias = torch.zeros(5)
    bias[1] = value
    logprobs, entropy = ops.linear_selected_logprobs(**ROWS, bias=bias, return_entropy=True)
    expected = -math.log(4) if value == -math.inf else math.nan
    for x in (logprobs, -entropy):
        torch.testing.assert_close(x, torch.full((2, 3), expected), equal_nan=True, rtol=1e-6, atol=0)


def test_constants_that_require_a_gradient_receive_none():
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    constants = {name: torch.randn(2, 3, requires_grad=True) for name in ("old_logprobs", "advantages", "ref_logprobs")}
    temperature = torch.tensor(0.7, requires_grad=True)
    loss, _ = ops.linear_ppo_loss(
        **{**RIGHT["linear_ppo_loss"], "hidden": hidden, **constants}, kl_coef=0.1, temperature=temperature
    )
    loss.backward()
    assert hidden.grad is not None
    assert all(x.grad is None for x in (*constants.values(), temperature))
