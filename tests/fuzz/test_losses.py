"""ppo_loss and value_loss: value, sums and gradients as near to float64 as plain PyTorch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import ppo_loss, value_loss

from .harness import eager, examples, on_every_path, stat_of, wide
from .oracle import judge
from .policy import POLICY_SETTINGS, at_bounds, fitting, near_bounds
from .strategies import TokenCase, Tokens, token_cases


@examples
@given(case=token_cases(), drawn=POLICY_SETTINGS, extras=st.sampled_from(["none", "entropy", "reference", "both"]))
def test_ppo_loss(case: TokenCase, drawn: dict[str, object], extras: str) -> None:
    tokens, stat = Tokens(case), stat_of(case.dtype)
    live, eps = tokens.mask, torch.finfo(stat_of(case.dtype)).eps
    drawn = fitting(drawn, live)
    new = tokens.normal() + case.offset
    spread = case.scale * tokens.normal().clamp(-2.5, 2.5)
    logprobs, old = tokens.put(new, case.dtype), tokens.put(new - spread)
    advantages = tokens.put(tokens.normal() * (tokens.normal() > -1))
    entropy = tokens.put(tokens.normal().abs()) if extras in ("entropy", "both") else None
    reference = tokens.put(new - 0.3 * tokens.normal()) if extras in ("reference", "both") else None
    if entropy is None:
        drawn["entropy_coef"] = 0.0
    if reference is None:
        drawn["kl_coef"] = 0.0

    def result(dtype: torch.dtype) -> tuple[Tensor, ...]:
        values = [
            None if x is None else x.detach().to(stat).to(dtype)
            for x in (logprobs, entropy, old, advantages, reference)
        ]
        return _policy_loss(*values, live, drawn)

    def run() -> tuple[Tensor, ...]:
        return _policy_loss(
            logprobs.detach(), None if entropy is None else entropy.detach(), old, advantages, reference, live, drawn
        )

    with eager():
        loss, sums, d_logprobs, *d_entropy = result(torch.float64)
        near = result(stat)
    narrow = torch.finfo(logprobs.dtype).eps
    n, o, a = (torch.where(live, wide(x, stat), 0.0) for x in (logprobs, old, advantages))
    d, r = n - o, torch.where(live, n - o, -torch.inf).exp()
    # The log-ratio is one rounded difference; its error is a relative one of the ratio.
    wrong = 4 + d.abs()
    at = at_bounds(d[live], 8 * eps * (1 + d[live].abs()), drawn)
    kl = torch.zeros_like(d) if reference is None else torch.where(live, n - wide(reference, stat), 0.0)
    kl = (-kl).expm1().abs() + kl.abs() * (1 + kl.abs() + (-kl).exp())
    ent = torch.zeros_like(d) if entropy is None else torch.where(live, wide(entropy, stat).abs(), 0.0)
    high = 1 + min(float(drawn["clip_high"]), 10.0)
    token = (r + high) * a.abs() * wrong * (1 + n.abs() * (drawn["objective"] == "cispo"))
    weight = {"token_mean": 1 / max(1, int(live.sum()))}.get(str(drawn["aggregation"]), 1.0)
    if drawn["normalizer"] is not None:
        weight = 1.0
    terms = (token + drawn["kl_coef"] * kl * 4 + drawn["entropy_coef"] * ent).nan_to_num(0.0)
    dev = torch.where(live, d.expm1().abs() + r * d.abs() + r * eps, 0.0)
    slack = [0, token.sum(), at, at, (dev * wrong).sum(), (r * dev * wrong + dev * dev).sum(), d.abs().sum(),
             (d * d).sum(), (dev + d.abs()).sum(), 4 * kl.sum(), ent.sum()]  # fmt: skip
    slack = torch.tensor([float(s) for s in slack], dtype=torch.float64) * torch.tensor(
        [1, 1, 1 / eps, 1 / eps] + [1] * 7
    )
    eps_of_sum = eps + 1e-16 * live.numel() ** 0.5
    for path, (got, got_sums, got_d, *got_e) in on_every_path("ppo_loss", run):
        judge(f"{path}: sums", got_sums.to(stat), sums, near[1], eps_of_sum * slack)
        judge(f"{path}: loss", got, loss, near[0], eps_of_sum * weight * terms.sum())
        assert not got_d[~live].any()
        fine = live & ~near_bounds(d, 8 * eps * (1 + d.abs()), drawn)
        own = eps * (wrong * d_logprobs.abs() + 4 * weight * drawn["kl_coef"] * kl) + narrow * d_logprobs.abs()
        # Autograd's derivative of k3 is 1 - exp(-d) with the roundings of the 1, also where it is the exact value.
        own = own + torch.finfo(torch.float64).eps * weight * drawn["kl_coef"]
        judge(f"{path}: d_logprobs", got_d[fine], d_logprobs[fine], near[2][fine], own[fine])
        for x, wanted in zip(got_e, d_entropy, strict=True):
            assert not x[~live].any()
            judge(f"{path}: d_entropy", x, wanted, None, (eps + torch.finfo(x.dtype).eps) * wanted.abs())


def _policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    old: Tensor,
    advantages: Tensor,
    reference: Tensor | None,
    live: Tensor,
    drawn: dict[str, object],
) -> tuple[Tensor, ...]:
    """loss, sums [11], d_logprobs, and d_entropy if there is one."""
    asked = [x.requires_grad_() for x in (logprobs, entropy) if x is not None]
    loss, stats = ppo_loss(logprobs, old, advantages, live, entropy=entropy, ref_logprobs=reference, **drawn)
    return loss.detach(), torch.stack(stats[:11]), *torch.autograd.grad(loss, asked)


@examples
@given(
    case=token_cases(),
    clip_range=st.sampled_from([None, 0.2, 0.0, 1e-3, float("inf")]),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_constant"]),
    normalizer=st.sampled_from([None, 3.0]),
)
def test_value_loss(case: TokenCase, clip_range: float | None, aggregation: str, normalizer: float | None) -> None:
    tokens, stat = Tokens(case), stat_of(case.dtype)
    live, eps = tokens.mask, torch.finfo(stat).eps
    normalizer = normalizer if live.any() else 3.0
    base = case.scale * tokens.normal() + case.offset
    values = tokens.put(base, case.dtype)
    old, returns = (tokens.put(base + 0.3 * case.scale * tokens.normal()) for _ in range(2))

    def result(dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        v, o, r = (x.detach() if dtype is None else x.to(stat).to(dtype) for x in (values, old, returns))
        v.requires_grad_()
        loss, stats = value_loss(v, o, r, live, clip_range=clip_range, aggregation=aggregation, normalizer=normalizer)
        return loss.detach(), torch.stack(stats), torch.autograd.grad(loss, v)[0]

    with eager():
        loss, sums, d_values = result(torch.float64)
        near = result(stat)
    v, o, r = (torch.where(live, wide(x, stat), 0.0) for x in (values, old, returns))
    size = torch.maximum(torch.maximum(v.abs(), o.abs()), r.abs())
    clip = 0.0 if clip_range is None or clip_range == float("inf") else clip_range
    bounded = v if clip_range is None else v.clamp(o - clip_range, o + clip_range)
    # Where the two squares may come out in either order.
    error = 4 * eps * (size + clip)
    tie = live & (((v - r).abs() - (bounded - r).abs()).abs() <= error) & (bounded != v)
    tie |= live & (((v - o).abs() - clip).abs() <= error)
    squares = torch.maximum((v - r).abs(), (bounded - r).abs()) * (size + clip) * 2
    largest = near[2].abs().amax() if near[2].numel() else 0.0
    for path, (got, got_sums, got_d) in on_every_path("value_loss", lambda: result(None)):
        assert got_sums[0] == live.sum()
        assert (got_sums[2] - sums[2]).abs() <= tie.sum(), path
        allowed = torch.stack([squares.sum(), squares.sum(), tie.sum() / eps, squares.sum()])
        judge(f"{path}: sums", got_sums.to(stat), sums, None, eps * allowed)
        judge(
            f"{path}: loss",
            got,
            loss,
            near[0],
            eps * 2 * loss.abs() + eps * float(loss / sums[1] if sums[1] else 1) * squares.sum(),
        )
        assert not got_d[~live].any()
        fine = live & ~tie
        slack = (torch.finfo(got_d.dtype).eps + 2 * eps) * d_values.abs() + eps * size * _weight_of(d_values, v - r)
        judge(f"{path}: d_values", got_d[fine], d_values[fine], None, slack[fine])
        assert float(got_d.abs().amax() if got_d.numel() else 0.0) <= 2 * float(largest) + 1e-3


def _weight_of(d_values: Tensor, error: Tensor) -> Tensor:
    """The weight of each token, from its gradient ``weight * error``."""
    return torch.where(error == 0, 0.0, d_values / torch.where(error == 0, 1.0, error)).abs()
