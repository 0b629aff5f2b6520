"""The linear ops with gradients: log-probs, losses and all three gradients as near to float64 as plain PyTorch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import linear_ppo_loss, linear_selected_logprobs, linear_token_loss, ppo_loss

from .harness import eager, examples, on_every_path
from .layer import Layer
from .oracle import TIMES, HeadRows, judge
from .policy import POLICY_SETTINGS, Policy, at_bounds, fitting
from .strategies import LinearCase, generator, linear_cases


def _upstream(layer: Layer) -> tuple[Tensor, Tensor]:
    g = generator(layer.case.seed + 1)
    c, e = (torch.randn(layer.case.shape, generator=g, dtype=torch.float64).to(layer.stat) for _ in range(2))
    c[torch.rand(c.shape, generator=g) < 0.2] = 0.0
    e[c == 0] = 0.0  # a row without any gradient
    return c, e


@examples
@given(case=linear_cases(nan_rows=True), return_entropy=st.booleans())
def test_linear_selected_logprobs(case: LinearCase, return_entropy: bool) -> None:
    layer = Layer(case)
    c, e = _upstream(layer)
    if not return_entropy:
        e = torch.zeros_like(e)
    live = layer.live
    exact, near = (layer.rows(dtype, c[live], e[live]) for dtype in (torch.float64, layer.stat))
    unavoidable = layer.value_error(exact)
    broken = exact.softmax.logprobs.isnan()

    def run() -> tuple[Tensor, ...]:
        hidden, weight, bias, asked = layer.leaves()
        out = linear_selected_logprobs(
            hidden, weight, layer.x.ids, mask=layer.x.mask, bias=bias, return_entropy=return_entropy, **layer.keywords()
        )
        out = out if isinstance(out, tuple) else (out,)
        masked = [u if layer.x.mask is None else u.masked_fill(~live, torch.nan) for u in (c, e)][: len(out)]
        gradients = torch.autograd.grad(out, asked, masked) if asked else ()
        return *(y.detach() for y in out), *gradients

    for path, (logprobs, *rest) in on_every_path("linear_selected_logprobs", run):
        assert not logprobs[~live].any()
        assert not (logprobs > 0).any(), f"{path}: a log-prob above 0"
        judge(f"{path}: log-probs", logprobs[live], exact.softmax.logprobs, near.softmax.logprobs, unavoidable)
        if return_entropy:
            entropy = rest.pop(0)
            assert not entropy[~live].any()
            assert not (entropy < 0).any(), f"{path}: an entropy below 0"
            judge(f"{path}: entropy", entropy[live], exact.softmax.entropy, near.softmax.entropy, unavoidable)
        if not broken.any():
            layer.judge_gradients(path, tuple(rest), exact, near, torch.zeros_like(exact.raw))
        elif case.trainable[0]:
            d_hidden = rest[0][live]
            arrives = (c[live] != 0) | (e[live] != 0)
            assert d_hidden[broken & arrives].isnan().all()
            assert d_hidden[~broken].isfinite().all()


@examples
@given(case=linear_cases(matrix=True), drawn=POLICY_SETTINGS, with_reference=st.booleans(), backward=st.booleans())
def test_linear_ppo_loss(case: LinearCase, drawn: dict[str, object], with_reference: bool, backward: bool) -> None:
    layer = Layer(case)
    live, stat = layer.live, layer.stat
    policy, drawn = Policy(layer, case.seed + 2), fitting(drawn, live)
    if not with_reference:
        drawn["kl_coef"] = 0.0
    reference = policy.reference if with_reference else None
    nothing = torch.zeros(int(live.sum()), dtype=torch.float64)
    values = layer.rows(torch.float64, nothing, nothing)
    error = 2 * TIMES * layer.value_error(values) + 2 * torch.finfo(stat).eps * (1 + torch.nan_to_num(
        policy.logprobs.abs(), posinf=0.0
    ))  # fmt: skip

    def spread(x: Tensor) -> Tensor:
        full = torch.zeros(case.shape, dtype=torch.float64)
        full[live] = x
        return full

    def loss_of(shift: Tensor) -> tuple[Tensor, Tensor, Tensor, object]:
        """loss, c, e, statistics in float64, the log-probs moved by ``shift``."""
        logprobs = spread(policy.logprobs + shift).requires_grad_()
        entropy = spread(values.softmax.entropy).requires_grad_()
        with eager():
            loss, stats = ppo_loss(
                logprobs, policy.old, policy.advantages, live, entropy=entropy, ref_logprobs=reference, **drawn
            )
            c, e = torch.autograd.grad(loss, (logprobs, entropy))
        return loss.detach(), c[live], e[live], stats

    loss, c, e, stats = loss_of(nothing)
    expected_ratios = torch.where(live, spread(policy.logprobs) - policy.old.double(), 0.0)
    moved = torch.maximum(*((loss_of(sign * error)[1] - c).abs() for sign in (1, -1)))
    exact, near = (layer.rows(dtype, c, e) for dtype in (torch.float64, stat))
    # dloss/dlogprob is a function of an inexact log-prob: its own error moves the whole row.
    unit = layer.rows(torch.float64, torch.ones_like(c), torch.zeros_like(e))
    drift = (moved + torch.finfo(stat).eps * c.abs())[:, None] * unit.raw.abs()
    drift = drift + 4 * torch.finfo(stat).eps * exact.raw.abs()
    # CISPO's ratio is a factor of the log-prob.
    reach = 1 + torch.nan_to_num(policy.logprobs.abs(), posinf=0.0) * (drawn["objective"] == "cispo")
    loss_error = ((c.abs() + moved) * reach * error + e.abs() * error).sum() + 8 * torch.finfo(stat).eps * loss.abs()
    infinite = policy.logprobs.isinf().any()
    upstream = 3.0 if backward else 1.0

    def run() -> tuple[Tensor, ...]:
        hidden, weight, bias, asked = layer.leaves()
        got, got_stats = linear_ppo_loss(
            hidden, weight, layer.x.ids, policy.old, policy.advantages, live, bias=bias, ref_logprobs=reference,
            chunk_tokens=case.chunk_tokens, **layer.keywords(), **drawn,
        )  # fmt: skip
        gradients = torch.autograd.grad(got * upstream, asked) if asked else ()
        return got.detach(), torch.stack(got_stats[:11]), got_stats.log_ratios, *gradients

    for path, (got, sums, log_ratios, *gradients) in on_every_path("linear_ppo_loss", run):
        assert sums[0] == live.sum()
        if infinite:
            continue
        at = at_bounds(policy.logprobs - policy.old[live].double(), error, drawn)
        assert (sums[2] - stats.flat).abs() <= at, path
        assert (sums[3] - stats.outside).abs() <= at, path
        judge(f"{path}: log-ratios", log_ratios, expected_ratios, None, spread(error))
        assert (sums[10] - stats.entropy).abs() <= error.sum(), path
        judge(f"{path}: loss", got, loss, None, loss_error + 1e-30)
        layer.judge_gradients(
            path, tuple(gradients), *(_times(rows, upstream) for rows in (exact, near)), drift * upstream
        )


def _times(rows: HeadRows, factor: float) -> HeadRows:
    return rows._replace(
        **{k: getattr(rows, k) * factor for k in ("raw", "raw_error", "reach", "d_hidden", "d_weight", "d_bias")}
    )


def squared_error(
    logprobs: Tensor, entropy: Tensor, target: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A smooth loss that nobody has a kernel for."""
    loss = weights[:, 0] * (0.5 * (logprobs - target).square() - 0.1 * entropy)
    return loss, {"distance": logprobs - target, "entropy": entropy}


@examples
@given(case=linear_cases(), entropy_grad=st.booleans())
def test_linear_token_loss(case: LinearCase, entropy_grad: bool) -> None:
    layer = Layer(case)
    live, stat = layer.live, layer.stat
    policy = Policy(layer, case.seed + 3)
    weights = torch.rand(*case.shape, 2, generator=generator(case.seed + 4)).masked_fill(~live[..., None], torch.nan)
    nothing = torch.zeros(int(live.sum()), dtype=torch.float64)
    values = layer.rows(torch.float64, nothing, nothing)
    error = 2 * TIMES * layer.value_error(values)
    if policy.logprobs.isinf().any():
        return
    w = weights[live][:, 0].double()
    distance = policy.logprobs - policy.old[live].double()
    c, e = w * distance, -0.1 * w if entropy_grad else torch.zeros_like(w)
    exact, near = (layer.rows(dtype, c, e) for dtype in (torch.float64, stat))
    unit = layer.rows(torch.float64, torch.ones_like(c), torch.zeros_like(c))
    eps = torch.finfo(stat).eps
    drift = (w * error + 2 * eps * c.abs())[:, None] * unit.raw.abs() + 4 * eps * exact.raw.abs()
    terms = 0.5 * w * distance.square(), 0.1 * w * values.softmax.entropy
    loss_error = (w * (distance.abs() + error + 0.1) * error).sum() + 8 * eps * sum(t.sum() for t in terms)

    def run() -> tuple[Tensor, ...]:
        hidden, weight, bias, asked = layer.leaves()
        loss, aux = linear_token_loss(
            hidden, weight, layer.x.ids, squared_error, (policy.old, weights), mask=layer.x.mask, bias=bias,
            entropy_grad=entropy_grad, chunk_tokens=case.chunk_tokens, **layer.keywords(),
        )  # fmt: skip
        return loss.detach(), aux["distance"], aux["entropy"], *(torch.autograd.grad(loss, asked) if asked else ())

    for path, (loss, got_distance, got_entropy, *gradients) in on_every_path("linear_token_loss", run):
        judge(f"{path}: loss", loss, terms[0].sum() - terms[1].sum(), None, loss_error + 1e-30)
        for name, got, wanted in (
            ("distance", got_distance, distance), ("entropy", got_entropy, values.softmax.entropy)
        ):  # fmt: skip
            assert not got[~live].any()
            judge(f"{path}: {name}", got[live], wanted, None, error)
        layer.judge_gradients(path, tuple(gradients), exact, near, drift)
