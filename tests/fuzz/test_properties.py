"""What must hold for any input: on every CPU path the op is as near to its float64 definition as plain PyTorch.

`make test` runs a few hundred examples, nearly the same ones every time: Hypothesis mixes in constants of the modules
loaded so far, which depend on the tests a worker ran before. PPO_FAST_FUZZ=N draws N new ones over all properties
(`make fuzz`: 100,000); a failing example is printed as the call that made it, and kept in .hypothesis for the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import (
    backends,
    gae,
    linear_ppo_loss,
    linear_selected_logprobs,
    linear_token_loss,
    ppo_loss,
    selected_logprobs,
    value_loss,
    whiten,
)

from .oracle import TIMES, HeadRows, head_rows, judge, same_bits, softmax_rows
from .strategies import (
    ROW_LAYOUTS,
    LinearCase,
    LogitsCase,
    LogitsInputs,
    TokenCase,
    Tokens,
    generator,
    linear_cases,
    linear_inputs,
    logits_cases,
    logits_inputs,
    token_cases,
)

PROPERTIES = 8
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


@pytest.fixture(autouse=True, scope="module")
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stat_of(dtype: str | torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in ("float64", torch.float64) else torch.float32


def temperatures(temperature: float | Tensor, stat: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """One a token, as the op computes with it."""
    return torch.as_tensor(temperature, dtype=stat).expand(shape)


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


# ------------------------------------------------------------------------------------------------- selected_logprobs


def _check_logits(
    case: LogitsCase, x: LogitsInputs, run: Callable[[], tuple[Tensor, ...]], op: str = "selected_logprobs"
) -> None:
    """``run`` gives log-probs, entropy and gradient."""
    logits = x.logits.tensor
    stat = stat_of(case.dtype)
    eps, out_eps = torch.finfo(stat).eps, torch.finfo(logits.dtype).eps
    live = torch.ones(case.shape, dtype=torch.bool) if x.mask is None else x.mask
    rows, ids = logits[live], x.ids[live]
    c = x.c[live] if case.upstream != "entropy" else torch.zeros_like(x.c[live])
    e = x.e[live] if case.upstream != "logprobs" else torch.zeros_like(x.e[live])
    t = temperatures(x.temperature, stat, case.shape)[live]
    exact = softmax_rows(rows.double() / t.double()[:, None], ids, c.double(), e.double())
    near = softmax_rows(rows.to(stat) / t[:, None], ids, c, e)

    z = rows.double() / t.double()[:, None]
    largest = torch.where(z.isfinite(), z, 0.0).abs().amax(1).clamp(min=1.0) if z.numel() else z.new_zeros(len(z))
    # z is rounded where the temperature isn't 1; its maximum and the log-sum-exp are, in any case, at their own size.
    spread = torch.where((t == 1) & z.isfinite().any(1), exact.entropy.abs() + 1, largest)
    unavoidable = eps * torch.maximum(spread, torch.nan_to_num(exact.logprobs.abs(), posinf=0.0))
    size = torch.maximum(largest, torch.nan_to_num(exact.lse.abs(), posinf=0.0))
    of_gradient = (
        exact.size / t.double()[:, None] * eps * (4 + size[:, None]) + out_eps * exact.gradient.abs() / t[:, None]
    )
    # A probability below the normal numbers is cut off.
    of_gradient = of_gradient + 8 * torch.finfo(stat).tiny * (c.abs() + e.abs() * 100)[:, None] / t[:, None]

    broken = z.isnan().any(1)
    for path, (logprobs, entropy, gradient) in on_every_path(op, run):
        for name, y in (("log-probs", logprobs), ("entropy", entropy)):
            assert not y[~live].any(), f"{path}: {name} at masked positions"
        assert not gradient[~live].any(), f"{path}: gradient at masked positions"
        logprobs, entropy, gradient = logprobs[live], entropy[live], gradient[live]
        assert not (logprobs > 0).any(), f"{path}: a log-prob above 0"
        assert not (entropy < 0).any(), f"{path}: an entropy below 0"
        judge(f"{path}: log-probs", logprobs, exact.logprobs, near.logprobs, unavoidable)
        judge(f"{path}: entropy", entropy, exact.entropy, near.entropy, unavoidable)
        assert gradient[broken].isnan().any(1).all(), f"{path}: NaN of the logits is lost in the gradient"
        fine = ~broken
        judge(
            f"{path}: gradient",
            gradient[fine],
            (exact.gradient / t.double()[:, None])[fine],
            (near.gradient / t[:, None]).to(gradient.dtype)[fine],
            of_gradient[fine],
        )


def _logits_gradient(case: LogitsCase, x: LogitsInputs, logits: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """The gradient of the logits for what arrives at the log-probs, the entropy, or both."""
    pairs = {
        "both": ((logprobs, x.c), (entropy, x.e)),
        "logprobs": ((logprobs, x.c),),
        "entropy": ((entropy, x.e),),
    }
    outputs, upstream = zip(*pairs[case.upstream], strict=True)
    (gradient,) = torch.autograd.grad(outputs, logits, upstream)
    return gradient


@examples
@given(case=logits_cases())
def test_selected_logprobs(case: LogitsCase) -> None:
    x = logits_inputs(case)

    def run() -> tuple[Tensor, ...]:
        logits = x.logits.tensor.detach().requires_grad_()
        logprobs, entropy = selected_logprobs(
            logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True
        )
        gradient = _logits_gradient(case, x, logits, logprobs, entropy)
        return logprobs.detach(), entropy.detach(), gradient

    _check_logits(case, x, run)


@examples
@given(case=logits_cases(ROW_LAYOUTS))
def test_inplace_backward(case: LogitsCase) -> None:
    """The gradient lands in the storage of the logits, and nothing around them is touched."""
    x = logits_inputs(case)
    outside = torch.ones_like(x.logits.storage, dtype=torch.bool)
    x.logits.view(outside).fill_(False)

    def run() -> tuple[Tensor, ...]:
        storage = x.logits.storage.clone().requires_grad_() * 1.0
        logits = x.logits.view(storage)
        # A view of one dimension less than three is unsqueezed by the op; all of ROW_LAYOUTS can be overwritten, unless
        # merging the leading dimensions takes a copy.
        try:
            logprobs, entropy = selected_logprobs(
                logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True, inplace_backward=True
            )
        except ValueError as error:
            assert "inplace_backward needs logits" in str(error)  # noqa: PT017
            assert len(case.shape) > 2
            logprobs, entropy = selected_logprobs(
                logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True
            )
        gradient = _logits_gradient(case, x, logits, logprobs, entropy)
        if gradient.data_ptr() == logits.data_ptr() and logits.numel():
            assert storage.detach()[outside].isnan().all()
        return logprobs.detach(), entropy.detach(), gradient

    _check_logits(case, x, run)


# ------------------------------------------------------------------------------------------------------ output layer


class Layer:
    """The tensors of a case with gradients where they are trainable, and its live rows for the oracle."""

    def __init__(self, case: LinearCase) -> None:
        self.case, self.x = case, linear_inputs(case)
        self.stat = stat_of(case.dtype)
        self.live = torch.ones(case.shape, dtype=torch.bool) if self.x.mask is None else self.x.mask

    def keywords(self) -> dict[str, object]:
        case, x = self.case, self.x
        return {
            "temperature": x.temperature, "softcap": case.softcap, "logit_scale": case.logit_scale,
            "kept_ids": x.kept_ids,
        }  # fmt: skip

    def leaves(self) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """hidden, weight, bias, and those of them that a gradient is asked for."""
        tensors = [None if t is None else t.detach() for t in self.x[:3]]
        asked = []
        for t, trainable in zip(tensors, self.case.trainable, strict=True):
            if t is not None and trainable:
                asked.append(t.requires_grad_())
        return tensors[0], tensors[1], tensors[2], asked

    def rows(self, dtype: torch.dtype, c: Tensor, e: Tensor) -> HeadRows:
        """The live rows in ``dtype``, from the values in the dtype of the weight."""
        x, live = self.x, self.live
        t = temperatures(x.temperature, self.stat, self.case.shape)[live]
        return head_rows(
            x.hidden[live].to(x.weight.dtype).to(dtype),
            x.weight.to(dtype),
            x.ids[live],
            c.to(dtype),
            e.to(dtype),
            bias=None if x.bias is None else x.bias.to(dtype),
            temperature=t.to(dtype),
            softcap=self.case.softcap,
            logit_scale=self.case.logit_scale,
            kept_ids=None if x.kept_ids is None else x.kept_ids[live],
        )

    def value_error(self, exact: HeadRows) -> Tensor:
        """[n] what roundings do to a log-prob or an entropy."""
        s = exact.softmax
        own = 1 + s.entropy + torch.nan_to_num(s.logprobs.abs(), posinf=0.0)
        return torch.finfo(self.stat).eps * (exact.logits_error + own)

    def judge_gradients(
        self, path: str, gradients: tuple[Tensor, ...], exact: HeadRows, near: HeadRows, drift: Tensor
    ) -> None:
        """``drift [n, V]``: what the gradient by the products may be off by for reasons of its own (an inexact c)."""
        x, live = self.x, self.live
        hidden, weight = x.hidden[live].to(x.weight.dtype).double(), x.weight.double()
        eps = torch.finfo(self.stat).eps
        drift = drift + eps * exact.raw_error + eps * exact.raw.abs()
        narrow = torch.finfo(x.weight.dtype).eps  # the gradient by the products is rounded to it once
        # And may vanish below its normal numbers.
        drift = drift + 2 * torch.finfo(self.stat).tiny * (1 + exact.reach)[:, None]
        if x.weight.dtype == torch.float16:  # after scaling by a power of two, but small elements still vanish
            drift = drift + 2.0**-38 * exact.raw.abs().amax() if exact.raw.numel() else drift
        # Dot products of AVX512-BF16 take operands below the normal numbers for zero.
        lost = torch.finfo(self.stat).tiny * exact.raw.abs()
        found = list(gradients)
        names = ("hidden", "weight", "bias")
        for name, tensor, trainable in zip(names, self.x[:3], self.case.trainable, strict=True):
            if tensor is None or not trainable:
                continue
            got = found.pop(0)
            assert got.dtype == tensor.dtype
            own = torch.finfo(got.dtype).eps
            if name == "hidden":
                assert not got[~live].any(), f"{path}: d_hidden at masked positions"
                got, wanted, yardstick = got[live], exact.d_hidden, near.d_hidden
                rounded = (exact.raw.square() @ weight.square()).sqrt()
                unavoidable = narrow * rounded + drift @ weight.abs() + lost.sum(1, keepdim=True)
            elif name == "weight":
                wanted, yardstick = exact.d_weight, near.d_weight
                rounded = (exact.raw.square().T @ hidden.square()).sqrt()
                unavoidable = narrow * rounded + drift.T @ hidden.abs() + lost.sum(0)[:, None]
            else:
                wanted, yardstick = exact.d_bias, near.d_bias
                unavoidable = drift.sum(0) + eps * exact.raw.abs().sum(0)
            # The product itself is rounded on the way, and its result once more.
            unavoidable = unavoidable + max(own, torch.finfo(x.weight.dtype).eps) * wanted.abs()
            judge(f"{path}: d_{name}", got, wanted, yardstick.to(x.weight.dtype).to(got.dtype), unavoidable)
        assert not found


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


class Policy:
    """Old and reference log-probs about the exact ones of a layer, and the settings of a policy loss."""

    def __init__(self, layer: Layer, seed: int) -> None:
        g, shape, live = generator(seed), layer.case.shape, layer.live
        nothing = torch.zeros(int(live.sum()), dtype=torch.float64)
        self.logprobs = layer.rows(torch.float64, nothing, nothing).softmax.logprobs
        base = torch.zeros(shape, dtype=torch.float64)
        base[live] = torch.nan_to_num(self.logprobs, neginf=-20.0)

        def near(spread: float) -> Tensor:
            x = base + spread * torch.randn(shape, generator=g, dtype=torch.float64)
            return x.masked_fill(~live, torch.nan).to(layer.stat)

        self.old, self.reference = near(0.3), near(0.5)
        self.advantages = torch.randn(shape, generator=g).masked_fill(~live, torch.nan)
        self.advantages[torch.rand(shape, generator=g) < 0.1] = 0.0


POLICY_SETTINGS = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["ppo", "ppo", "cispo"]),
        "clip_low": st.sampled_from([0.2, 0.0, 1.0]),
        "clip_high": st.sampled_from([0.2, 0.28, 0.0, float("inf")]),
        "dual_clip": st.sampled_from([None, None, 1.5, 3.0]),
        "entropy_coef": st.sampled_from([0.0, 0.01, 1.0]),
        "kl_coef": st.sampled_from([0.0, 0.05, 1.0]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "aggregation": st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_constant"]),
        "normalizer": st.sampled_from([None, None, 7.5, "tensor"]),
    }
)


def _settings(drawn: dict[str, object], live: Tensor) -> dict[str, object]:
    """Settings that go together: dual clip with PPO alone, a normalizer where no token is live."""
    drawn = dict(drawn)
    if drawn["objective"] == "cispo":
        drawn["dual_clip"] = None
    if drawn["normalizer"] == "tensor" or (drawn["normalizer"] is None and not live.any()):
        drawn["normalizer"] = torch.tensor(11.0)
    return drawn


def _near_bounds(difference: Tensor, error: Tensor, drawn: dict[str, object]) -> Tensor:
    """Tokens whose log-ratio may fall on either side of a bound."""
    bounds = [1 - drawn["clip_low"], 1 + drawn["clip_high"], drawn["dual_clip"] or 1.0]
    at = torch.zeros_like(difference, dtype=torch.bool)
    for bound in bounds:
        at |= (difference - torch.tensor(bound, dtype=torch.float64).log()).abs() <= error
    return at


def _at_bounds(difference: Tensor, error: Tensor, drawn: dict[str, object]) -> int:
    return int(_near_bounds(difference, error, drawn).sum())


@examples
@given(case=linear_cases(matrix=True), drawn=POLICY_SETTINGS, with_reference=st.booleans(), backward=st.booleans())
def test_linear_ppo_loss(case: LinearCase, drawn: dict[str, object], with_reference: bool, backward: bool) -> None:
    layer = Layer(case)
    live, stat = layer.live, layer.stat
    policy, drawn = Policy(layer, case.seed + 2), _settings(drawn, live)
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
        at = _at_bounds(policy.logprobs - policy.old[live].double(), error, drawn)
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


# ---------------------------------------------------------------------------------------------------- token-level ops


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value that the op computes with, in float64."""
    return x.to(dtype).double()


@examples
@given(case=token_cases(), drawn=POLICY_SETTINGS, extras=st.sampled_from(["none", "entropy", "reference", "both"]))
def test_ppo_loss(case: TokenCase, drawn: dict[str, object], extras: str) -> None:
    tokens, stat = Tokens(case), stat_of(case.dtype)
    live, eps = tokens.mask, torch.finfo(stat_of(case.dtype)).eps
    drawn = _settings(drawn, live)
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
    n, o, a = (torch.where(live, _wide(x, stat), 0.0) for x in (logprobs, old, advantages))
    d, r = n - o, torch.where(live, n - o, -torch.inf).exp()
    # The log-ratio is one rounded difference; its error is a relative one of the ratio.
    wrong = 4 + d.abs()
    at = _at_bounds(d[live], 8 * eps * (1 + d[live].abs()), drawn)
    kl = torch.zeros_like(d) if reference is None else torch.where(live, n - _wide(reference, stat), 0.0)
    kl = (-kl).expm1().abs() + kl.abs() * (1 + kl.abs() + (-kl).exp())
    ent = torch.zeros_like(d) if entropy is None else torch.where(live, _wide(entropy, stat).abs(), 0.0)
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
        fine = live & ~_near_bounds(d, 8 * eps * (1 + d.abs()), drawn)
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
    v, o, r = (torch.where(live, _wide(x, stat), 0.0) for x in (values, old, returns))
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
    size = torch.where(live, _wide(values, stat).abs() + _wide(rewards, stat).abs(), 0.0)
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
