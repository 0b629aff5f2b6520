"""The clipped policy loss of PPO, its gradient and every statistic of the update in one pass over [B, T]."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_fast.ops import _eager
from ppo_fast.ops._aggregation import nan_without_tokens, row_weights
from ppo_fast.ops._checks import (
    check_coefficient,
    check_float_like,
    check_fraction,
    check_mask,
    check_matrix,
    check_number,
    choose,
)
from ppo_fast.ops._library import (
    define,
    define_loss_backward,
    differentiable,
    may_give_away,
    stat_dtype,
    sum_dtype,
)
from ppo_fast.profiling import annotate

OBJECTIVES = {"ppo": _eager.PPO, "cispo": _eager.CISPO}
KL_ESTIMATORS = {"k1": 1, "k2": 2, "k3": 3}
PPO_SUMS = ("count", "loss", "flat", "outside", "ratio_dev", "ratio_dev_sq", "k1", "k2", "k3", "ref_kl", "entropy")


class PPOStats(NamedTuple):
    """Sums over live tokens, so that micro-batches and ranks add up: 0-d float64, detached. Means are properties.

    r is the ratio new / old of a token's probabilities, and d' = old - new log-prob in k1, k2, k3.
    """

    count: Tensor  # type: ignore[assignment]  # live tokens; shadows tuple.count
    loss: Tensor  # the surrogate alone, unweighted: no entropy bonus, no KL, no normalizer
    flat: Tensor  # tokens whose gradient the clip (or the dual clip) sets to zero
    outside: Tensor  # tokens whose ratio lies out of the interval, whatever the sign of the advantage
    ratio_dev: Tensor  # r - 1
    ratio_dev_sq: Tensor  # (r - 1)^2; infinite from log-ratios of 44 nats on, where float32 ends
    k1: Tensor  # nats
    k2: Tensor
    k3: Tensor
    ref_kl: Tensor  # the chosen estimator with d' = log-prob - reference log-prob; 0 without a reference
    entropy: Tensor  # nats; 0 without entropies
    # [B, T] new - old log-probs, 0 at masked positions; flat after merge. None from `ppo_loss`, whose caller has both.
    log_ratios: Tensor | None = None

    @property
    def loss_mean(self) -> Tensor:
        """Mean surrogate loss per token."""
        return self.loss / self.count

    @property
    def flat_fraction(self) -> Tensor:
        """Share of tokens with a zero gradient by the clip: TRL's clipfrac."""
        return self.flat / self.count

    @property
    def outside_fraction(self) -> Tensor:
        """Share of tokens whose ratio lies out of the interval: clipfrac in seeds/000 and seeds/002."""
        return self.outside / self.count

    @property
    def ratio_mean(self) -> Tensor:
        """Mean ratio."""
        return 1.0 + self.ratio_dev / self.count

    @property
    def ratio_var(self) -> Tensor:
        """Population variance of the ratio."""
        return (self.ratio_dev_sq / self.count - (self.ratio_dev / self.count) ** 2).clamp(min=0.0)

    @property
    def approx_kl_k1(self) -> Tensor:
        """Approximate KL(old, new) by k1, nats per token."""
        return self.k1 / self.count

    @property
    def approx_kl_k2(self) -> Tensor:
        """Approximate KL(old, new) by k2, nats per token: TRL's approxkl."""
        return self.k2 / self.count

    @property
    def approx_kl_k3(self) -> Tensor:
        """Approximate KL(old, new) by k3, nats per token: approx_kl of seeds/002."""
        return self.k3 / self.count

    @property
    def ref_kl_mean(self) -> Tensor:
        """Mean KL to the reference by the chosen estimator, nats per token."""
        return self.ref_kl / self.count

    @property
    def entropy_mean(self) -> Tensor:
        """Mean entropy, nats per token."""
        return self.entropy / self.count

    def merge(self, other: PPOStats) -> PPOStats:
        """The statistics of both batches together."""
        sums = [getattr(self, name) + getattr(other, name) for name in PPO_SUMS]
        log_ratios = None
        if self.log_ratios is not None and other.log_ratios is not None:
            log_ratios = torch.cat([self.log_ratios.flatten(), other.log_ratios.flatten()])
        return PPOStats(*sums)._replace(log_ratios=log_ratios)


def check_ppo_settings(
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    objective: str,
    entropy_coef: float,
    kl_coef: float,
    kl_estimator: str,
    has_entropy: bool,
    has_reference: bool,
) -> None:
    """Raise ValueError for a setting of the policy loss that makes no sense."""
    choose("objective", objective, OBJECTIVES)
    choose("kl_estimator", kl_estimator, KL_ESTIMATORS)
    check_fraction("clip_low", clip_low)
    check_number("clip_high", clip_high)
    if not clip_high >= 0:
        raise ValueError(f"clip_high must be >= 0, got {clip_high}")
    if dual_clip is not None:
        check_number("dual_clip", dual_clip)
        if objective != "ppo":
            raise ValueError(f"dual_clip belongs to objective 'ppo', got objective {objective!r}")
        if not 1 < dual_clip < math.inf:
            raise ValueError(f"dual_clip must be finite and > 1, got {dual_clip}")
    check_coefficient("entropy_coef", entropy_coef)
    check_coefficient("kl_coef", kl_coef)
    if entropy_coef and not has_entropy:
        raise ValueError(f"entropy must be given where entropy_coef is not 0, got None with {entropy_coef}")
    if kl_coef and not has_reference:
        raise ValueError(f"ref_logprobs must be given where kl_coef is not 0, got None with {kl_coef}")


def ppo_loss(
    logprobs: Tensor,  # [B, T]
    old_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True = live
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    objective: str = "ppo",
    entropy: Tensor | None = None,  # [B, T]
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,  # [B, T]
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    aggregation: str = "token_mean",
    normalizer: float | Tensor | None = None,
) -> tuple[Tensor, PPOStats]:
    """The policy loss to minimise, and the statistics of the update.

    Per live token, with ``r = exp(logprobs - old_logprobs)`` and A the advantage,
    ``loss = surrogate - entropy_coef * entropy + kl_coef * k(logprobs - ref_logprobs)``.

    Args:
        logprobs: of the chosen tokens under the current policy, in nats. float32, bfloat16, float16 or float64;
            computed in float32 (float64 for float64), as is everything else.
        old_logprobs, advantages, ref_logprobs: constants: they receive no gradient, even if they require one.
        mask: where False nothing is read, and gradients are exactly 0; it may have holes.
        clip_low, clip_high: the interval of the ratio is [1 - clip_low, 1 + clip_high]; clip_low in [0, 1], clip_high
            >= 0 (infinity for no upper bound).
        dual_clip: where A < 0, the loss is at most ``-dual_clip * A`` (> 1; objective ``"ppo"`` only).
        objective: ``"ppo"``: ``-min(r A, clip(r) A)``. ``"cispo"``: ``-sg(min(r, 1 + clip_high)) A logprobs``; it has
            no lower bound, so that "outside" counts the upper one alone.
        entropy: of the current distribution, differentiated; needed where entropy_coef is not 0.
        entropy_coef, kl_coef: finite and >= 0.
        kl_estimator: ``"k1"`` d, ``"k2"`` d^2 / 2, ``"k3"`` exp(-d) - 1 + d, with d = logprobs - ref_logprobs. k1 as a
            loss has zero expected gradient on-policy.
        aggregation: ``"token_mean"``: sum / live tokens. ``"sequence_mean"``: mean over rows of the rows' token means.
            ``"sequence_sum_constant"``: sum / (B * T).
        normalizer: replaces that count (live tokens, rows with live tokens, B * T) by a global one, so that
            micro-batches and ranks add up: a positive number or 0-d tensor.

    Returns:
        the loss, 0-d, and `PPOStats` without ``log_ratios``. With no live token: 0 if a normalizer is given.

    Raises:
        TypeError, ValueError: for an argument of the wrong type, shape, device or range; and for no live token without
            a normalizer where that can be seen without a synchronisation (CPU, not compiled), else the loss is NaN.

    Sources: PPO, Schulman et al. 2017, eq. 7. Dual clip, Ye et al. 2020, eq. 5. CISPO, MiniMax-M1 2025, eq. 4. The KL
    estimators, Schulman, "Approximating KL Divergence", 2020. Double backward is an error.
    """
    check_matrix("logprobs", logprobs)
    check_float_like("old_logprobs", old_logprobs, logprobs, "logprobs")
    check_float_like("advantages", advantages, logprobs, "logprobs")
    check_mask(mask, logprobs.shape, logprobs.device, "logprobs")
    if entropy is not None:
        check_float_like("entropy", entropy, logprobs, "logprobs")
    if ref_logprobs is not None:
        check_float_like("ref_logprobs", ref_logprobs, logprobs, "logprobs")
    check_ppo_settings(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        objective=objective,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        has_entropy=entropy is not None,
        has_reference=ref_logprobs is not None,
    )
    with annotate("ppo_fast::ppo_loss"):
        dtype = stat_dtype(logprobs.dtype)
        weights = row_weights(mask, aggregation, normalizer, dtype)
        loss, _, _, sums = torch.ops.ppo_fast.ppo_loss(
            logprobs.to(dtype).contiguous(),
            old_logprobs.detach().to(dtype).contiguous(),
            advantages.detach().to(dtype).contiguous(),
            mask.contiguous(),
            weights,
            None if entropy is None else entropy.to(dtype).contiguous(),
            None if ref_logprobs is None else ref_logprobs.detach().to(dtype).contiguous(),
            float(clip_low),
            float(clip_high),
            None if dual_clip is None else float(dual_clip),
            OBJECTIVES[objective],
            float(entropy_coef),
            float(kl_coef),
            KL_ESTIMATORS[kl_estimator],
        )
        return nan_without_tokens(loss, mask, normalizer), PPOStats(*sums.unbind(0))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logprobs, entropy = inputs[0], inputs[5]
    _, d_logprobs, d_entropy, sums = output
    ctx.save_for_backward(logprobs, d_logprobs, entropy, d_entropy)
    ctx.mark_non_differentiable(d_logprobs, d_entropy, sums)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *rest: Tensor | None) -> Any:
    logprobs, d_logprobs, entropy, d_entropy = ctx.saved_tensors
    gradients: list[Tensor | None] = [None] * 14
    if grad_loss is None:
        return tuple(gradients)
    one = may_give_away(grad_loss)
    scale = torch.ops.ppo_fast.ppo_loss_backward
    if ctx.needs_input_grad[0]:
        gradients[0] = d_logprobs if one else scale(grad_loss, d_logprobs, logprobs)
    if ctx.needs_input_grad[5]:
        gradients[5] = d_entropy if one else scale(grad_loss, d_entropy, entropy)
    return tuple(gradients)


def _fake(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    row_weights: Tensor,
    entropy: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_entropy = logprobs.new_empty(0) if entropy is None else torch.empty_like(entropy)
    sums = logprobs.new_empty(len(PPO_SUMS), dtype=sum_dtype(logprobs.device))
    return logprobs.new_empty(()), torch.empty_like(logprobs), d_entropy, sums


define(
    "ppo_loss(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor mask, Tensor row_weights, "
    "Tensor? entropy, Tensor? ref_logprobs, float clip_low, float clip_high, float? dual_clip, int objective, "
    "float entropy_coef, float kl_coef, int kl_estimator) -> (Tensor, Tensor, Tensor, Tensor)",
    _eager.ppo_loss,
    _fake,
)
define_loss_backward("ppo_loss")
differentiable("ppo_loss", _backward, _setup_context)
