from __future__ import annotations

import math

import pytest
import torch

from ppo_fast.ops import shape_rewards


def batch(dtype=torch.float32):
    """Masks that end early, have holes, are full and are empty; NaN wherever nothing may be read."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    logp, ref, extra = (torch.where(mask, torch.randn(4, 5, dtype=dtype), torch.nan) for _ in range(3))
    scores = torch.tensor([1.0, -2.0, 0.5, torch.nan], dtype=dtype)
    return scores, logp, ref, mask, extra


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_the_definition(estimator, dtype):
    scores, logp, ref, mask, extra = batch(dtype)
    got = shape_rewards(scores, logp, ref, mask, kl_coef=0.3, kl_estimator=estimator, token_rewards=extra)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for b in range(4):
        live = mask[b].nonzero()[:, 0].tolist()
        for t in live:
            d = float(logp[b, t].double() - ref[b, t].double())
            k = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
            expected[b, t] = -0.3 * k + float(extra[b, t]) + (float(scores[b]) if t == live[-1] else 0.0)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)
    assert not got[~mask].any()


def test_by_hand():
    """Two tokens, log-ratios 0.1 and -0.2 to the reference, beta 0.5, score 1: -0.05 and 0.1 + 1."""
    got = shape_rewards(
        torch.tensor([1.0]), torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.1, -1.8, 9.0]]),
        torch.tensor([[True, True, False]]), kl_coef=0.5,
    )  # fmt: skip
    assert torch.allclose(got, torch.tensor([[-0.05, 1.1, 0.0]]))


def test_the_score_falls_on_the_last_live_token():
    scores, logp, _, mask, _ = batch()
    got = shape_rewards(scores, logp, None, mask, kl_coef=0.0)
    expected = torch.zeros(4, 5)
    expected[0, 2], expected[1, 3], expected[2, 4] = 1.0, -2.0, 0.5
    assert torch.equal(got, expected)


def test_without_a_kl_coefficient_the_reference_is_not_read():
    scores, logp, _, mask, _ = batch()
    got = shape_rewards(scores, logp, torch.full_like(logp, torch.nan), mask, kl_coef=0.0)
    assert torch.equal(got, shape_rewards(scores, logp, None, mask, kl_coef=0.0))


def test_16_bit_and_detached():
    scores, logp, ref, mask, _ = batch()
    got = shape_rewards(scores, logp.bfloat16().requires_grad_(), ref.bfloat16(), mask, kl_coef=0.1)
    expected = shape_rewards(scores, logp.bfloat16().float(), ref.bfloat16().float(), mask, kl_coef=0.1)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty(shape):
    x = torch.zeros(shape)
    assert shape_rewards(torch.ones(shape[0]), x, x, x.bool(), kl_coef=0.1).shape == shape


def test_arguments():
    scores, logp, ref, mask, extra = batch()
    with pytest.raises(ValueError, match=r"ref_logprobs must be given where kl_coef is not 0, got None with 0\.1"):
        shape_rewards(scores, logp, None, mask, kl_coef=0.1)
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="kl_coef must be finite and >= 0"):
            shape_rewards(scores, logp, ref, mask, kl_coef=bad)
    with pytest.raises(ValueError, match="kl_estimator must be one of"):
        shape_rewards(scores, logp, ref, mask, kl_coef=0.1, kl_estimator="kl")
    with pytest.raises(ValueError, match=r"scores must have the shape of the rows of logprobs, \[4\], got \[4, 1\]"):
        shape_rewards(scores[:, None], logp, ref, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="token_rewards must have the shape of logprobs"):
        shape_rewards(scores, logp, ref, mask, kl_coef=0.1, token_rewards=extra[:, :2])
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        shape_rewards(scores, logp, ref, mask.long(), kl_coef=0.1)
