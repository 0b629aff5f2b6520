"""gae, its moments, and the whitening of its advantages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import gae, whiten

from .harness import eager, examples, on_every_path, stat_of, wide
from .oracle import judge
from .strategies import TokenCase, Tokens, token_cases


@examples
@given(
    case=token_cases(longest=600),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    bootstrap=st.booleans(),
    shift_mean=st.booleans(),
)
def test_gae_and_whiten(case: TokenCase, gamma: float, lam: float, bootstrap: bool, shift_mean: bool) -> None:
    tokens = Tokens(case)
    live, dtypes = tokens.mask, []
    rewards = tokens.put(case.scale * tokens.normal(), case.dtype)
    values = tokens.put(tokens.normal() + case.offset)
    last = torch.randn(case.B, generator=tokens.g).to(values.dtype) if bootstrap else None
    stat = stat_of(torch.promote_types(rewards.dtype, values.dtype))
    eps = torch.finfo(stat).eps
    dtypes = torch.float64, stat

    with eager():
        exact, near = (
            gae(*(x.to(stat).to(dtype) for x in (rewards, values)), live, gamma=gamma, lam=lam,
                bootstrap_values=None if last is None else last.to(dtype), return_moments=True)
            for dtype in dtypes
        )  # fmt: skip
    size = torch.where(live, wide(values, stat).abs() + wide(rewards, stat).abs(), 0.0)
    size = size.amax(1, keepdim=True) if size.numel() else size

    def run() -> tuple[Tensor, ...]:
        return gae(rewards, values, live, gamma=gamma, lam=lam, bootstrap_values=last, return_moments=True)

    for path, (advantages, returns, moments) in on_every_path("gae", run):
        for name, got, wanted, yardstick in zip(
            ("advantages", "returns"), (advantages, returns), exact[:2], near[:2], strict=True
        ):
            assert not got[~live].any()
            reach = wanted.abs()
            if stat == torch.float64 and reach.numel():  # the recursion's own roundings, a random walk over the row
                reach = reach.amax(1, keepdim=True) * max(1.0, case.T**0.5 / 4)
            judge(f"{path}: {name}", got, wanted, yardstick, eps * (2 * size + reach))
        a = advantages[live].double()
        wanted = torch.stack([live.sum(), a.sum(), (a - a.mean()).square().sum() if a.numel() else a.sum()])
        scale = torch.stack([torch.tensor(0.0), a.abs().sum(), wanted[2] + a.square().sum() * 1e-9])
        if a.numel():
            assert ((moments - wanted).abs() <= 1e-6 * scale + 1e-300).all(), f"{path}: {moments} for {wanted}"
        _check_whitening(path, advantages, live, moments, shift_mean)


def _check_whitening(path: str, x: Tensor, live: Tensor, moments: Tensor, shift_mean: bool) -> None:
    """From its own moments and from those of gae, which are the same."""
    values = x[live].double()
    if not values.numel():
        assert not whiten(x, live).any()
        return
    mean = values.mean()
    std = (values - mean).square().mean().sqrt()
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    wanted[live] = (values - mean) / std.clamp(min=1e-8) + (0.0 if shift_mean else mean)
    slack = 2e-16 * values.abs().amax() / std.clamp(min=1e-8)
    eps = torch.finfo(x.dtype).eps
    for given_moments in (None, moments):
        got = whiten(x, live, shift_mean=shift_mean, moments=given_moments)
        assert got.dtype == x.dtype
        assert not got[~live].any()
        # The moments of a row are taken about one of its advantages, which may be far from their mean.
        relative = eps + 1e-16 * values.numel() + 1e-7 * (std < 1e-6)
        judge(f"{path}, whiten", got, wanted, None, relative * wanted.abs() + 4 * slack)
