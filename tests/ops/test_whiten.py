from __future__ import annotations

import pytest
import torch

from ppo_fast.ops import backends, masked_mean, whiten


def batch(dtype=torch.float32):
    mask = torch.rand(4, 9) > 0.3
    mask[-1] = False
    return torch.where(mask, 3 * torch.randn(4, 9, dtype=dtype) + 5, torch.nan), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_values(dtype, shift_mean):
    x, mask = batch(dtype)
    got = whiten(x, mask, shift_mean=shift_mean)
    live = x[mask].double()
    expected = (live - live.mean()) / live.std(correction=0) + (0 if shift_mean else live.mean())
    assert got.dtype == dtype
    assert torch.allclose(got[mask].double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-12)
    assert torch.equal(got[~mask], torch.zeros_like(got[~mask]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_every_backend_is_plain_pytorch(cpu_backend, dtype, shift_mean):
    """Rows of 41 with runs of eight live tokens and holes beside them; NaN wherever a token is masked."""
    mask = torch.rand(3, 41) > 0.1
    mask[0, 3:29], mask[0, 29] = True, False
    x = torch.where(mask, 3 * torch.randn(3, 41, dtype=dtype) + 5, torch.nan)
    live = x[mask].double()
    moments = torch.stack([mask.sum().double(), live.sum(), (live - live.mean()).square().sum()])
    got = whiten(x, mask, shift_mean=shift_mean, moments=moments)
    with backends.force("eager"):
        expected = whiten(x, mask, shift_mean=shift_mean, moments=moments)
    assert torch.allclose(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert not got[~mask].any()


def test_opcheck(opcheck):
    x, mask = batch()
    opcheck(torch.ops.ppo_fast.whiten, (x.nan_to_num(), mask, torch.tensor([20.0, 7.0, 30.0]).double(), True))


def test_by_hand():
    """1 and 3: mean 2, population std 1."""
    x, mask = torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[True, True, False]])
    assert torch.equal(whiten(x, mask), torch.tensor([[-1.0, 1.0, 0.0]]))
    assert torch.equal(whiten(x, mask, shift_mean=False), torch.tensor([[1.0, 3.0, 0.0]]))


def test_equal_values_become_zero():
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert not whiten(torch.full((1, 4), 7.0), mask).any()
    assert torch.equal(whiten(torch.full((1, 4), 7.0), mask, shift_mean=False), torch.full((1, 4), 7.0))


def test_a_mean_far_from_zero_costs_no_digits():
    x = (torch.randn(2, 500) * 0.5 + 1e4).double().float()
    live = x.double()
    expected = (live - live.mean()) / live.std(correction=0)
    assert torch.allclose(whiten(x, torch.ones(2, 500, dtype=torch.bool)).double(), expected, rtol=1e-6, atol=1e-7)


def test_moments_of_the_whole_batch():
    """Half a batch, whitened with the moments of the whole, is half of the whitened batch."""
    x, mask = batch()
    live = x[mask].double()
    moments = torch.stack([mask.sum().double(), live.sum(), (live - live.mean()).square().sum()])
    whole = whiten(x, mask)
    assert torch.allclose(whiten(x[:2], mask[:2], moments=moments), whole[:2], rtol=1e-6)
    assert torch.allclose(
        whiten(x[:2], mask[:2], moments=moments, shift_mean=False),
        torch.where(mask[:2], whole[:2] + live.mean().float(), 0.0),
        rtol=1e-6,
    )


def test_no_live_token_and_detached():
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    got = whiten(x, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(got, torch.zeros(2, 3))
    assert not got.requires_grad


def test_whiten_arguments():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        whiten(x, mask.float())
    with pytest.raises(TypeError, match="x must be float32"):
        whiten(x.long(), mask)
    with pytest.raises(ValueError, match=r"mask must have the shape of x, \[2, 3\], got \[2, 2\]"):
        whiten(x, mask[:, :2])
    with pytest.raises(ValueError, match=r"moments must have the shape \[3\]"):
        whiten(x, mask, moments=torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_mean(dtype):
    x, mask = batch(dtype)
    x.requires_grad_()
    mean = masked_mean(x, mask)
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(mean.double(), x[mask].double().mean(), rtol=2 * torch.finfo(mean.dtype).eps)
    mean.backward()
    expected = torch.where(mask, 1 / mask.sum(), 0.0).to(dtype)
    assert torch.allclose(x.grad, expected, rtol=torch.finfo(dtype).eps)
    assert not x.grad[~mask].any()


def test_masked_mean_takes_any_shape():
    x = torch.tensor([1.0, 2.0, 6.0])
    assert masked_mean(x, torch.tensor([True, False, True])) == 3.5
    assert masked_mean(x[None, None], torch.tensor([[[True, True, True]]])) == 3.0


def test_masked_mean_of_nothing():
    with pytest.raises(ValueError, match="mask must have a live position"):
        masked_mean(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 3))
