from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import backends, gae, whiten

OPS = torch.ops.ppo_fast


def by_definition(rewards, values, mask, gamma, lam, bootstrap=None) -> tuple[Tensor, Tensor]:
    """A_t as the sum over later live tokens of (gamma lam)^k delta, on each row's list of live tokens; float64."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for b in range(rewards.shape[0]):
        live = mask[b].nonzero()[:, 0].tolist()
        r, v = rewards[b, live].double().tolist(), values[b, live].double().tolist()
        v.append(0.0 if bootstrap is None else float(bootstrap[b]))
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(live))]
        for i, t in enumerate(live):
            advantages[b, t] = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(live)))
            returns[b, t] = advantages[b, t] + v[i]
    return advantages, returns


def batch(B=4, T=9, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, a mask with holes and one dead row, bootstrap values; NaN wherever nothing may be read."""
    mask = torch.rand(B, T) > 0.3
    mask[0] = True
    mask[-1] = False
    rewards, values = (torch.where(mask, torch.randn(B, T, dtype=dtype), torch.nan) for _ in range(2))
    bootstrap = torch.where(mask.any(1), torch.randn(B, dtype=dtype), torch.nan)
    return rewards, values, mask, bootstrap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("cut", [False, True])
def test_advantages_and_returns(cpu_backend, dtype, gamma, lam, cut):
    rewards, values, mask, bootstrap = batch(dtype=dtype)
    bootstrap = bootstrap if cut else None
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap)
    exact_advantages, exact_returns = by_definition(rewards, values, mask, gamma, lam, bootstrap)
    assert advantages.dtype == returns.dtype == dtype
    # 9 steps of a recursion whose terms are of the size of the largest value.
    tolerance = 9 * torch.finfo(dtype).eps * exact_returns.abs().max()
    assert (advantages - exact_advantages).abs().max() <= tolerance
    assert (returns - exact_returns).abs().max() <= tolerance
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_two_tokens_by_hand(cpu_backend):
    """delta = (0 + 0.5*0.6 - 0.4, 1 - 0.6) = (-0.1, 0.4); A = (-0.1 + 0.5*0.8*0.4, 0.4)."""
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.4, 0.6]]), torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.8
    )
    assert torch.allclose(advantages, torch.tensor([[0.06, 0.4]]))
    assert torch.allclose(returns, torch.tensor([[0.46, 1.0]]))


def test_a_hole_costs_no_discount(cpu_backend):
    """The same three tokens, next to each other and spread out."""
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.1, 0.7]])
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)
    wide_rewards, wide_values = torch.full((1, 7), torch.nan), torch.full((1, 7), torch.nan)
    wide_rewards[mask], wide_values[mask] = rewards[0], values[0]
    bootstrap = torch.tensor([0.3])
    close = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.8, bootstrap_values=bootstrap)
    spread = gae(wide_rewards, wide_values, mask, gamma=0.9, lam=0.8, bootstrap_values=bootstrap)
    for a, b in zip(close, spread, strict=True):
        assert torch.equal(b[mask], a[0])


def test_bootstrap_by_hand(cpu_backend):
    """One token: A = r + gamma V(s_T) - V = 1 + 0.5*2 - 0.25."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    advantages, returns = gae(torch.ones(1, 1), torch.full((1, 1), 0.25), mask, gamma=0.5, lam=0.9,
                              bootstrap_values=torch.tensor([2.0]))  # fmt: skip
    assert (advantages.item(), returns.item()) == (1.75, 2.0)


def test_nan_at_a_live_token_stays_in_its_row_and_its_past(cpu_backend):
    rewards, values = torch.randn(2, 4), torch.randn(2, 4)
    rewards[0, 2] = torch.nan
    advantages, _ = gae(rewards, values, torch.ones(2, 4, dtype=torch.bool))
    assert advantages.isnan().tolist() == [[True, True, True, False], [False] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments(cpu_backend, dtype):
    rewards, values, mask, _ = batch(B=5, T=40, dtype=dtype)
    rewards = rewards + 100  # a mean far from zero: the sum of squares minus its square would lose all digits
    advantages, _, moments = gae(rewards, values, mask, lam=0.0, return_moments=True)
    live = advantages[mask].double()
    expected = torch.stack([torch.tensor(float(len(live))).double(), live.sum(), (live - live.mean()).square().sum()])
    assert moments.dtype == torch.float64
    assert torch.allclose(moments, expected, rtol=1e-9, atol=0)


def test_moments_of_one_token_and_of_none(cpu_backend):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for count in (0, 1):
        mask[0, 1] = count == 1
        _, _, moments = gae(torch.full((2, 3), 2.0), torch.zeros(2, 3), mask, return_moments=True)
        assert moments.tolist() == [count, 2.0 * count, 0.0]


def test_moments_whiten_as_the_advantages_do(cpu_backend):
    rewards, values, mask, _ = batch(B=5, T=20)
    advantages, _, moments = gae(rewards, values, mask, return_moments=True)
    assert torch.allclose(whiten(advantages, mask, moments=moments), whiten(advantages, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_float32(cpu_backend, dtype):
    rewards, values, mask, bootstrap = batch()
    narrow = gae(rewards.to(dtype), values.to(dtype), mask, bootstrap_values=bootstrap.to(dtype))
    wide = gae(rewards.to(dtype).float(), values.to(dtype).float(), mask, bootstrap_values=bootstrap.to(dtype).float())
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_mixed_dtypes_take_the_wider(cpu_backend):
    rewards, values, mask, _ = batch()
    assert gae(rewards, values.double(), mask)[0].dtype == torch.float64
    assert gae(rewards.bfloat16(), values, mask)[0].dtype == torch.float32


def test_non_contiguous_inputs(cpu_backend):
    rewards, values, mask, bootstrap = batch()
    expected = gae(rewards, values, mask, bootstrap_values=bootstrap)
    got = gae(rewards.T.contiguous().T, values.T.contiguous().T, mask.T.contiguous().T,
              bootstrap_values=torch.stack([bootstrap, bootstrap], 1)[:, 0])  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (1, 300), (70, 1)])
def test_edges_of_the_shape(cpu_backend, shape):
    rewards, values, mask = torch.randn(shape), torch.randn(shape), torch.rand(shape) > 0.5
    advantages, returns, moments = gae(rewards, values, mask, return_moments=True)
    exact_advantages, exact_returns = by_definition(rewards, values, mask, 1.0, 0.95)
    assert torch.allclose(advantages.double(), exact_advantages, rtol=0, atol=1e-4)
    assert torch.allclose(returns.double(), exact_returns, rtol=0, atol=1e-4)
    assert moments[0] == mask.sum()


def test_the_result_is_detached(cpu_backend):
    rewards, values = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    results = gae(rewards, values, mask, return_moments=True)
    assert not any(x.requires_grad for x in results)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gae(rewards, values, mask)[0], results[0])


def test_arguments():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for name in ("gamma", "lam"):
        for bad in (-0.01, 1.01, math.nan):
            with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got {bad}"):
                gae(x, x, mask, **{name: bad})
    with pytest.raises(TypeError, match=r"mask must be torch.bool \(True = live\), got torch.float32"):
        gae(x, x, mask.float())
    with pytest.raises(TypeError, match="values must be float32"):
        gae(x, x.long(), mask)
    with pytest.raises(ValueError, match=r"rewards must have the shape \[B, T\], got \[3\]"):
        gae(x[0], x[0], mask[0])
    with pytest.raises(ValueError, match=r"values must have the shape of rewards, \[2, 3\], got \[2, 2\]"):
        gae(x, x[:, :2], mask)
    with pytest.raises(ValueError, match=r"mask must have the shape of rewards, \[2, 3\], got \[1, 3\]"):
        gae(x, x, mask[:1])
    with pytest.raises(ValueError, match=r"bootstrap_values must have the shape of the rows of rewards, \[2\]"):
        gae(x, x, mask, bootstrap_values=torch.zeros(2, 1))


def test_compiles_to_one_graph():
    rewards, values, mask, bootstrap = batch()

    def advantages_and_moments(rewards, values, mask, bootstrap):
        return gae(rewards * 2, values, mask, gamma=0.9, bootstrap_values=bootstrap, return_moments=True)

    compiled = torch.compile(advantages_and_moments, fullgraph=True, backend="aot_eager")
    expected = advantages_and_moments(rewards, values, mask, bootstrap)
    for a, b in zip(compiled(rewards, values, mask, bootstrap), expected, strict=True):
        assert torch.allclose(a, b)


def test_opcheck(opcheck):
    rewards, values, mask, bootstrap = (torch.nan_to_num(x) if x.is_floating_point() else x for x in batch())
    opcheck(OPS.gae, (rewards, values, mask, 1.0, 0.95, None))
    opcheck(OPS.gae, (rewards, values, mask, 0.9, 0.95, bootstrap))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch(data):
    """Random shapes, masks and discounts, on every CPU path, against the definition in float64."""
    B, T = data.draw(st.integers(1, 6), label="B"), data.draw(st.integers(1, 40), label="T")
    gamma, lam = (data.draw(st.floats(0, 1), label=name) for name in ("gamma", "lam"))
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    rewards, values, mask, bootstrap = batch(B, T, torch.float64)
    expected = by_definition(rewards, values, mask, gamma, lam, bootstrap)
    for name in [name for name in backends.available() if name != "triton"]:
        with backends.force(name):
            got = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap)
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-11, atol=1e-11), name
