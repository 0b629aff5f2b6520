from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import PPOStats, backends, ppo_loss

OPS = torch.ops.ppo_fast
LIVE = torch.ones(1, 1, dtype=torch.bool)


def formula(logp, old, adv, mask, *, low=0.2, high=0.2, dual=None, objective="ppo", entropy=None, entropy_coef=0.0,
            ref=None, kl_coef=0.0, kl="k3", aggregation="token_mean", normalizer=None) -> Tensor:  # fmt: skip
    """The loss from its definition, token by token over the live ones, in whatever dtype it is given."""
    rows = []
    for b in range(logp.shape[0]):
        row = []
        for t in mask[b].nonzero()[:, 0].tolist():
            ratio, A = (logp[b, t] - old[b, t]).exp(), adv[b, t]
            if objective == "cispo":
                token = -ratio.detach().clamp(max=1 + high) * A * logp[b, t]
            else:
                token = torch.max(-ratio * A, -ratio.clamp(1 - low, 1 + high) * A)
                if dual is not None and A < 0:
                    token = torch.min(token, -dual * A)
            if entropy is not None:
                token = token - entropy_coef * entropy[b, t]
            if ref is not None:
                d = logp[b, t] - ref[b, t]
                token = token + kl_coef * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kl]
            row.append(token)
        rows.append(torch.stack(row) if row else logp[b, :0])
    tokens = torch.cat(rows)
    normalizer = None if normalizer is None else float(normalizer)
    if aggregation == "token_mean":
        return tokens.sum() / (normalizer or len(tokens))
    if aggregation == "sequence_mean":
        means = torch.stack([row.mean() for row in rows if len(row)])
        return means.sum() / (normalizer or len(means))
    return tokens.sum() / (normalizer or mask.numel())


def batch(B=3, T=7, dtype=torch.float32, spread=0.4) -> dict[str, Tensor]:
    """Ratios on both sides of both bounds, a mask with holes and one dead row, NaN wherever it is False."""
    mask = torch.rand(B, T) > 0.25
    mask[0, :2] = True
    mask[-1] = False
    logp = -2 * torch.rand(B, T, dtype=dtype) - 0.1
    data = {
        "logp": logp,
        "old": logp + spread * torch.randn(B, T, dtype=dtype),
        "adv": torch.randn(B, T, dtype=dtype),
        "entropy": torch.rand(B, T, dtype=dtype),
        "ref": logp + spread * torch.randn(B, T, dtype=dtype),
    }
    return {"mask": mask, **{name: torch.where(mask, x, torch.nan) for name, x in data.items()}}


def gradients(function, data: dict[str, Tensor], dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """(loss, d_logprobs, d_entropy) with the data in ``dtype`` and an upstream gradient of ``scale``."""
    d = {k: v if k == "mask" else v.to(dtype) for k, v in data.items()}
    d["logp"].requires_grad_()
    d["entropy"].requires_grad_()
    loss = function(d)
    grads = torch.autograd.grad(scale * loss, [d["logp"], d["entropy"]], materialize_grads=True, allow_unused=True)
    return loss.detach(), *grads


SETTINGS = {
    "plain": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.3},
    "no upper bound": {"clip_high": math.inf},
    "dual clip": {"dual_clip": 1.2},
    "cispo": {"objective": "cispo", "clip_high": 0.1},
    "entropy": {"entropy_coef": 0.3},
    "k1": {"kl_coef": 0.5, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.5, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.5},
    "everything": {"dual_clip": 1.5, "entropy_coef": 0.1, "kl_coef": 0.2, "kl_estimator": "k2"},
    "cispo, everything": {"objective": "cispo", "entropy_coef": 0.1, "kl_coef": 0.2},
}
NAMES = {"clip_low": "low", "clip_high": "high", "dual_clip": "dual", "kl_estimator": "kl"}


def both(keywords: dict) -> tuple:
    """The op and the formula under the same settings, as functions of `batch`."""
    needs = {name: keywords.get(f"{name}_coef", 0) != 0 for name in ("entropy", "kl")}

    def op(d):
        given = {"entropy": d["entropy"]} if needs["entropy"] else {}
        given |= {"ref_logprobs": d["ref"]} if needs["kl"] else {}
        return ppo_loss(d["logp"], d["old"], d["adv"], d["mask"], **given, **keywords)[0]

    def exact(d):
        given = {"entropy": d["entropy"]} if needs["entropy"] else {}
        given |= {"ref": d["ref"]} if needs["kl"] else {}
        translated = {NAMES.get(k, k): v for k, v in keywords.items()}
        return formula(d["logp"], d["old"], d["adv"], d["mask"], **given, **translated)

    return op, exact


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients(cpu_backend, as_exact_as, name, dtype):
    data = batch(dtype=dtype)
    op, exact = both(SETTINGS[name])
    got = gradients(op, data, dtype)
    expected = gradients(exact, data, torch.float64)
    baseline = gradients(exact, data, dtype)
    mask = data["mask"]
    as_exact_as(got[0], baseline[0], expected[0], scale=1.0)  # the size of one token's loss
    for i in (1, 2):
        as_exact_as(got[i][mask], baseline[i][mask], expected[i][mask])
        assert torch.equal(got[i][~mask], torch.zeros_like(got[i][~mask]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
@pytest.mark.parametrize("normalizer", [None, 17, 2.5, torch.tensor(11), torch.tensor(3.5, dtype=torch.float64)])
def test_aggregation(cpu_backend, as_exact_as, aggregation, normalizer):
    data = batch(B=4)
    op, exact = both({"aggregation": aggregation, "normalizer": normalizer})
    got, baseline = gradients(op, data, torch.float32), gradients(exact, data, torch.float32)
    expected = gradients(exact, data, torch.float64)
    as_exact_as(got[0], baseline[0], expected[0], scale=1.0)  # the size of one token's loss
    as_exact_as(got[1][data["mask"]], baseline[1][data["mask"]], expected[1][data["mask"]])


def test_aggregation_by_hand(cpu_backend):
    """Ratio 1 and advantages -1, -2, -3 | -5: the token losses are 1, 2, 3 | 5."""
    zeros, mask = torch.zeros(3, 4), torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    adv = -torch.tensor([[1.0, 2, 9, 3], [9, 5, 9, 9], [9, 9, 9, 9]])

    def loss(**keywords):
        return ppo_loss(zeros, zeros, adv, mask, **keywords)[0].item()

    assert loss() == pytest.approx(11 / 4)
    assert loss(aggregation="sequence_mean") == pytest.approx((2 + 5) / 2)
    assert loss(aggregation="sequence_sum_constant") == pytest.approx(11 / 12)
    assert loss(normalizer=22) == pytest.approx(0.5)
    assert loss(aggregation="sequence_mean", normalizer=7) == pytest.approx(1)
    assert loss(aggregation="sequence_sum_constant", normalizer=3 * 32) == pytest.approx(11 / 96)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_micro_batches_add_up_to_the_batch(cpu_backend, dtype, exact):
    """The sums to what the dtype of their terms carries."""
    data = batch(B=6, dtype=dtype)
    keys = ("logp", "old", "adv", "mask")
    whole, stats = ppo_loss(*(data[k] for k in keys))
    count = data["mask"].sum()
    parts = [ppo_loss(*(data[k][i : i + 2] for k in keys), normalizer=count) for i in (0, 2, 4)]
    assert torch.allclose(sum(loss for loss, _ in parts), whole, rtol=1e-6)
    merged = parts[0][1].merge(parts[1][1]).merge(parts[2][1])
    for name in PPOStats._fields[:-1]:
        assert torch.allclose(getattr(merged, name), getattr(stats, name), rtol=exact, atol=exact), name


def one(ratio: float, advantage: float, **keywords) -> tuple[float, float, PPOStats]:
    """(loss, dloss/dlogprob, stats) of a single token whose old log-prob is 0."""
    logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    loss, stats = ppo_loss(logp, torch.zeros_like(logp), torch.full_like(logp, advantage), LIVE, **keywords)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient.item(), stats


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "flat", "outside"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),  # the slope at ratio 1 is not zero
        (1.0, -2.0, 2.0, 2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.3, 2.0, -2.4, 0.0, 1, 1),
        (1.3, -2.0, 2.6, 2.6, 0, 1),  # outside, but not flat
        (0.7, 2.0, -1.4, -1.4, 0, 1),
        (0.7, -2.0, 1.6, 0.0, 1, 1),
        (1.3, 0.0, 0.0, 0.0, 0, 1),  # no advantage: no gradient, and not called flat
        (0.7, 0.0, 0.0, 0.0, 0, 1),
    ],
)
def test_clip_cases(cpu_backend, ratio, advantage, loss, gradient, flat, outside):
    got_loss, got_gradient, stats = one(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_gradient == pytest.approx(gradient, abs=1e-12)
    assert (stats.flat.item(), stats.outside.item()) == (flat, outside)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_on_the_bound_the_gradient_passes(cpu_backend, advantage):
    """ratio exp(0) = 1 and an interval of no width: exactly on both bounds, as PyTorch's clamp and max have it."""
    loss, gradient, stats = one(1.0, advantage, clip_low=0.0, clip_high=0.0)
    assert (loss, gradient) == (-advantage, -advantage)
    assert stats.flat == stats.outside == 0


def test_dual_clip(cpu_backend):
    assert one(5.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert one(5.0, -2.0, dual_clip=3.0)[2].flat == 1
    assert one(2.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert one(5.0, 2.0, dual_clip=3.0)[:2] == pytest.approx((-2.4, 0.0))  # positive advantage: the ordinary clip
    assert one(0.5, -2.0, dual_clip=3.0)[:2] == pytest.approx((1.6, 0.0))


def test_cispo(cpu_backend):
    """The weight is capped, the gradient never cut: +2.4 = 1.2 * 2 in the text that maximises."""
    logp = torch.tensor([[math.log(1.3)]]).requires_grad_()
    loss, stats = ppo_loss(logp, torch.zeros(1, 1), torch.full((1, 1), 2.0), LIVE, objective="cispo", clip_high=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-2.4 * math.log(1.3), rel=1e-6)
    assert logp.grad.item() == pytest.approx(-2.4, rel=1e-6)
    assert (stats.flat.item(), stats.outside.item()) == (0, 1)
    _, gradient, stats = one(0.1, -2.0, objective="cispo", clip_low=0.2)
    assert gradient == pytest.approx(0.2)  # no lower bound
    assert stats.outside == 0


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_that_overflows(cpu_backend, objective, advantage):
    """exp(1000) = inf: a clipped or silent token still has a finite loss, and no NaN in its gradient."""
    logp = torch.full((1, 1), -1.0, requires_grad=True)
    loss, stats = ppo_loss(logp, torch.full((1, 1), -1001.0), torch.full((1, 1), advantage), LIVE, objective=objective)
    loss.backward()
    expected = {"ppo": (-1.2, 0.0), "cispo": (1.2, -1.2)}[objective]
    assert loss.item() == pytest.approx(expected[0] * advantage, rel=1e-6)
    assert logp.grad.item() == pytest.approx(expected[1] * advantage, rel=1e-6)
    assert stats.outside == 1


def test_kl_estimators_by_hand(cpu_backend):
    """logp - ref = ln 2: k1 = 0.6931, k2 = 0.2402, k3 = 1/2 - 1 + 0.6931 = 0.1931, slopes 1, ln 2, 1 - 1/2."""
    ln2 = math.log(2)
    values, slopes = {"k1": ln2, "k2": ln2**2 / 2, "k3": ln2 - 0.5}, {"k1": 1.0, "k2": ln2, "k3": 0.5}
    for name in ("k1", "k2", "k3"):
        logp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        loss, stats = ppo_loss(
            logp, torch.zeros(1, 1), torch.zeros(1, 1), LIVE,
            ref_logprobs=torch.full((1, 1), -ln2, dtype=torch.float64), kl_coef=3.0, kl_estimator=name,
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(3 * values[name], rel=1e-12)
        assert logp.grad.item() == pytest.approx(3 * slopes[name], rel=1e-12)
        assert stats.ref_kl.item() == pytest.approx(values[name], rel=1e-12)


def test_statistics(cpu_backend):
    data = batch(B=5, T=9)
    mask = data["mask"]
    _, stats = ppo_loss(
        data["logp"], data["old"], data["adv"], mask, entropy=data["entropy"], ref_logprobs=data["ref"],
        kl_estimator="k2",
    )  # fmt: skip
    logp, old, adv, entropy, ref = (data[k][mask].double() for k in ("logp", "old", "adv", "entropy", "ref"))
    d = logp - old
    ratio = d.exp()
    clipped = ratio.clamp(0.8, 1.2)
    expected = {
        "count": len(d),
        "loss": torch.max(-ratio * adv, -clipped * adv).sum(),
        "flat": ((ratio > 1.2) & (adv > 0)).sum() + ((ratio < 0.8) & (adv < 0)).sum(),
        "outside": (ratio != clipped).sum(),
        "ratio_dev": (ratio - 1).sum(),
        "ratio_dev_sq": (ratio - 1).square().sum(),
        "k1": (-d).sum(),
        "k2": d.square().sum() / 2,
        "k3": (d.exp() - 1 - d).sum(),
        "ref_kl": (logp - ref).square().sum() / 2,
        "entropy": entropy.sum(),
    }
    assert stats._fields == (*expected, "log_ratios")
    for name, value in expected.items():
        got = getattr(stats, name)
        assert got.dtype == torch.float64
        assert got.shape == ()
        assert not got.requires_grad
        assert got.item() == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    assert expected["flat"] > 0
    assert expected["outside"] > expected["flat"]

    n = len(d)
    means = {
        "loss_mean": expected["loss"] / n,
        "flat_fraction": expected["flat"] / n,
        "outside_fraction": expected["outside"] / n,
        "ratio_mean": ratio.mean(),
        "ratio_var": ratio.var(correction=0),
        "approx_kl_k1": (old - logp).mean(),
        "approx_kl_k2": expected["k2"] / n,
        "approx_kl_k3": expected["k3"] / n,
        "ref_kl_mean": expected["ref_kl"] / n,
        "entropy_mean": entropy.mean(),
    }
    for name, value in means.items():
        assert getattr(stats, name).item() == pytest.approx(float(value), rel=1e-5), name

    assert stats.log_ratios is None


def test_statistics_near_ratio_one_keep_their_digits(cpu_backend):
    """d = 1e-5: k3 is 5e-11, of which exp(d) - 1 - d keeps no digit in float32, and expm1(d) - d only two."""
    logp = torch.full((1, 64), 1e-5)
    _, stats = ppo_loss(logp, torch.zeros(1, 64), torch.ones(1, 64), torch.ones(1, 64, dtype=torch.bool))
    d = logp[0, 0].double()
    assert stats.k3.item() == pytest.approx(64 * (d**2 / 2 + d**3 / 6).item(), rel=1e-4)
    assert stats.ratio_dev.item() == pytest.approx(64 * torch.expm1(d).item(), rel=1e-4)
    assert stats.k2.item() == pytest.approx(32 * d.item() ** 2, rel=1e-5)


def test_surrogate_in_the_statistics_is_alone(cpu_backend):
    """loss_mean knows no entropy bonus, no KL, no normalizer."""
    data = batch()
    arguments = [data[k] for k in ("logp", "old", "adv", "mask")]
    plain = ppo_loss(*arguments)[1].loss
    loaded = ppo_loss(*arguments, entropy=data["entropy"], entropy_coef=1.0, ref_logprobs=data["ref"], kl_coef=1.0,
                      normalizer=1000)[1].loss  # fmt: skip
    assert torch.allclose(plain, loaded, rtol=1e-12)


@pytest.mark.parametrize("name", ["logp", "old", "adv", "ref"])
@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_nan_at_a_live_token_propagates(cpu_backend, name, objective):
    data = batch()
    data[name][0, 0] = torch.nan
    op, _ = both({"objective": objective, "entropy_coef": 0.1, "kl_coef": 0.1})
    loss, gradient, _ = gradients(op, data, torch.float32)
    assert loss.isnan()
    assert gradient[0, 0].isnan()
    assert gradient.isnan().sum() == 1


def test_nan_entropy_propagates_to_the_loss(cpu_backend):
    data = batch()
    data["entropy"][0, 0] = torch.nan
    op, _ = both({"entropy_coef": 0.1})
    assert gradients(op, data, torch.float32)[0].isnan()


def test_nan_in_the_log_prob_of_a_token_without_advantage_propagates(cpu_backend):
    data = batch()
    data["logp"][0, 0], data["adv"][0, 0] = torch.nan, 0.0
    op, _ = both({})
    assert gradients(op, data, torch.float32)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(cpu_backend, dtype):
    data = {k: v if k == "mask" else v.to(dtype) for k, v in batch().items()}
    logp = data["logp"].clone().requires_grad_()
    loss, _ = ppo_loss(logp, data["old"], data["adv"], data["mask"])
    (gradient,) = torch.autograd.grad(loss, logp)
    wide = {k: v if k == "mask" else v.float() for k, v in data.items()}
    wide["logp"].requires_grad_()
    expected, _ = ppo_loss(wide["logp"], wide["old"], wide["adv"], wide["mask"])
    (wide_gradient,) = torch.autograd.grad(expected, wide["logp"])
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, wide_gradient.to(dtype))


def test_non_contiguous_inputs(cpu_backend):
    data = batch(B=4, T=6)
    keys = ("logp", "old", "adv", "mask")
    expected = ppo_loss(*(data[k] for k in keys), entropy=data["entropy"], entropy_coef=0.1)
    turned = {k: v.T.contiguous().T for k, v in data.items()}
    got = ppo_loss(*(turned[k] for k in keys), entropy=turned["entropy"], entropy_coef=0.1)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1][:-1], expected[1][:-1], strict=True))


class TestNoLiveToken:
    arguments = (torch.full((2, 3), torch.nan),) * 3 + (torch.zeros(2, 3, dtype=torch.bool),)

    def test_zero_with_a_normalizer(self, cpu_backend):
        logp = self.arguments[0].clone().requires_grad_()
        for aggregation in ("token_mean", "sequence_mean", "sequence_sum_constant"):
            loss, stats = ppo_loss(logp, *self.arguments[1:], normalizer=4, aggregation=aggregation)
            (gradient,) = torch.autograd.grad(loss, logp)
            assert loss == 0
            assert not gradient.any()
            assert not any(getattr(stats, name) for name in PPOStats._fields[:-1])

    @pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
    def test_an_error_without(self, aggregation):
        with pytest.raises(ValueError, match="mask must have a live token"):
            ppo_loss(*self.arguments, aggregation=aggregation)

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    def test_empty_tensors(self, cpu_backend, shape):
        empty = torch.zeros(shape)
        assert ppo_loss(empty, empty, empty, empty.bool(), normalizer=1)[0] == 0
        with pytest.raises(ValueError, match="mask must have a live token"):
            ppo_loss(empty, empty, empty, empty.bool())

    def test_nan_where_it_cannot_be_seen(self):
        def losses(*arguments):
            names = ("token_mean", "sequence_mean", "sequence_sum_constant")
            return torch.stack([ppo_loss(*arguments, aggregation=name)[0] for name in names])

        compiled = torch.compile(losses, fullgraph=True, backend="eager")
        assert compiled(*self.arguments).isnan().all()
        zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        assert compiled(zeros, zeros, zeros + 1, mask).tolist() == [-1, -1, -1]


class TestArguments:
    good = (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))

    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({"clip_low": -0.1}, r"clip_low must lie in \[0, 1\], got -0.1"),
            ({"clip_low": 1.1}, "clip_low must lie in"),
            ({"clip_low": math.nan}, "clip_low must lie in"),
            ({"clip_high": -0.1}, "clip_high must be >= 0"),
            ({"clip_high": math.nan}, "clip_high must be >= 0"),
            ({"dual_clip": 1.0}, "dual_clip must be finite and > 1, got 1.0"),
            ({"dual_clip": math.inf}, "dual_clip must be finite and > 1"),
            ({"dual_clip": 3.0, "objective": "cispo"}, "dual_clip belongs to objective 'ppo'"),
            ({"objective": "gspo"}, "objective must be one of 'ppo', 'cispo', got 'gspo'"),
            ({"kl_estimator": "k4"}, "kl_estimator must be one of 'k1', 'k2', 'k3', got 'k4'"),
            ({"aggregation": "mean"}, "aggregation must be one of"),
            ({"entropy_coef": -1.0}, "entropy_coef must be finite and >= 0, got -1.0"),
            ({"entropy_coef": math.inf}, "entropy_coef must be finite"),
            ({"kl_coef": math.nan}, "kl_coef must be finite"),
            ({"kl_coef": -0.1}, "kl_coef must be finite and >= 0"),
            ({"entropy_coef": 0.1}, "entropy must be given"),
            ({"kl_coef": 0.1}, "ref_logprobs must be given"),
            ({"normalizer": 0}, "normalizer must be finite and > 0, got 0"),
            ({"normalizer": math.nan}, "normalizer must be finite and > 0"),
            ({"normalizer": torch.tensor(-1.0)}, "normalizer must be finite and > 0"),
            ({"normalizer": torch.ones(1)}, "normalizer must be a number or a 0-d tensor"),
            ({"entropy": torch.zeros(2, 4)}, r"entropy must have the shape of logprobs, \[2, 3\], got \[2, 4\]"),
            ({"ref_logprobs": torch.zeros(3)}, "ref_logprobs must have the shape of logprobs"),
        ],
    )
    def test_values(self, keywords, message):
        with pytest.raises(ValueError, match=message):
            ppo_loss(*self.good, **keywords)

    def test_tensors(self):
        logp, old, adv, mask = self.good
        with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
            ppo_loss(logp, old, adv, mask.long())
        with pytest.raises(TypeError, match="advantages must be float32"):
            ppo_loss(logp, old, adv.long(), mask)
        with pytest.raises(TypeError, match="old_logprobs must be a tensor, got float"):
            ppo_loss(logp, 0.0, adv, mask)
        with pytest.raises(ValueError, match=r"logprobs must have the shape \[B, T\], got \[3\]"):
            ppo_loss(logp[0], old[0], adv[0], mask[0])
        with pytest.raises(ValueError, match="mask must have the shape of logprobs"):
            ppo_loss(logp, old, adv, mask[:, :2])
        with pytest.raises(ValueError, match="advantages must be on the device of logprobs, cpu, got meta"):
            ppo_loss(logp, old, adv.to("meta"), mask)


class TestAutograd:
    def test_constants_receive_no_gradient(self, cpu_backend):
        tensors = [torch.randn(2, 3).requires_grad_() for _ in range(4)]
        logp, old, adv, ref = tensors
        loss, _ = ppo_loss(logp, old, adv, torch.ones(2, 3, dtype=torch.bool), ref_logprobs=ref, kl_coef=0.1)
        loss.backward()
        assert logp.grad is not None
        assert old.grad is adv.grad is ref.grad is None

    def test_gradcheck(self, cpu_backend):
        data = {k: v if k == "mask" else torch.nan_to_num(v) for k, v in batch(dtype=torch.float64).items()}

        def loss(logp, entropy):
            return ppo_loss(logp, data["old"], data["adv"], data["mask"], entropy=entropy, entropy_coef=0.1,
                            ref_logprobs=data["ref"], kl_coef=0.2, dual_clip=1.3)[0]  # fmt: skip

        assert torch.autograd.gradcheck(loss, (data["logp"].requires_grad_(), data["entropy"].requires_grad_()))

    def test_upstream_scale_and_second_backward(self, cpu_backend):
        data = batch()
        logp = data["logp"].clone().requires_grad_()
        loss, _ = ppo_loss(logp, data["old"], data["adv"], data["mask"])
        (first,) = torch.autograd.grad(loss, logp, retain_graph=True)
        (third,) = torch.autograd.grad(-3 * loss, logp, retain_graph=True)
        (again,) = torch.autograd.grad(loss, logp)
        assert torch.equal(first, again)
        assert torch.allclose(third, -3 * first)

    def test_the_gradient_is_given_away_only_where_no_backward_follows(self, cpu_backend):
        """What is received may be added to: with the graph kept that must not reach the next backward."""
        data = {k: v if k == "mask" else torch.nan_to_num(v) for k, v in batch().items()}
        logp, entropy = data["logp"].requires_grad_(), data["entropy"].requires_grad_()
        loss, _ = ppo_loss(logp, data["old"], data["adv"], data["mask"], entropy=entropy, entropy_coef=0.1)
        first = torch.autograd.grad(loss, [logp, entropy], retain_graph=True)
        expected = [gradient.clone() for gradient in first]
        for gradient in first:
            gradient.add_(1)
        again = torch.autograd.grad(loss, [logp, entropy])
        assert all(map(torch.equal, again, expected))
        assert len({x.data_ptr() for x in (*first, *again)}) == 4

    def test_double_backward_raises(self, cpu_backend):
        data = batch()
        logp = data["logp"].clone().requires_grad_()
        loss, _ = ppo_loss(logp, data["old"], data["adv"], data["mask"])
        (gradient,) = torch.autograd.grad(loss, logp, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward through ppo_fast::ppo_loss is not supported"):
            (gradient.nan_to_num().square().sum() + logp.nan_to_num().sum()).backward()

    def test_no_grad_and_inference_mode(self, cpu_backend):
        data = batch()
        arguments = [data[k] for k in ("logp", "old", "adv", "mask")]
        arguments[0].requires_grad_()
        expected, stats = ppo_loss(*arguments)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got, got_stats = ppo_loss(*arguments)
                fresh, _ = ppo_loss(arguments[0] + 0, *arguments[1:])  # an inference tensor
            assert not got.requires_grad
            assert torch.equal(got, expected)
            assert torch.equal(fresh, expected)
            assert torch.equal(got_stats.k3, stats.k3)

    def test_autocast_changes_nothing(self, cpu_backend):
        data = batch()
        op, _ = both(SETTINGS["everything"])
        expected = gradients(op, data, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = gradients(op, data, torch.float32)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    def test_compiles_to_one_graph(self):
        data = batch()
        mask = data["mask"]

        def loss(logp, entropy, old, adv, normalizer):
            loss, stats = ppo_loss(
                logp * 1.5, old, adv, mask, entropy=entropy, entropy_coef=0.1, ref_logprobs=old, kl_coef=0.1,
                normalizer=normalizer,
            )  # fmt: skip
            return 2 * loss, stats

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        fastest = [name for name in backends.available() if name != "triton"][-1]
        for normalizer, backend in ((None, "eager"), (torch.tensor(9), fastest)):
            logp, entropy = data["logp"].clone().requires_grad_(), data["entropy"].clone().requires_grad_()
            inputs = (logp, entropy, data["old"], data["adv"], normalizer)
            with backends.force(backend):
                expected, stats = loss(*inputs)
                got, got_stats = compiled(*inputs)
            assert torch.allclose(got, expected)
            assert isinstance(got_stats, PPOStats)
            for a, b in zip(got_stats[:-1], stats[:-1], strict=True):
                assert torch.allclose(a, b)
            for a, b in zip(
                torch.autograd.grad(got, [logp, entropy]), torch.autograd.grad(expected, [logp, entropy]), strict=True
            ):
                assert torch.allclose(a[mask], b[mask])
                assert not a[~mask].any()

    @pytest.mark.parametrize("full", [False, True])
    def test_opcheck(self, opcheck, full):
        data = {k: v if k == "mask" else torch.nan_to_num(v) for k, v in batch(2, 4).items()}
        logp, entropy = data["logp"].requires_grad_(), data["entropy"].requires_grad_()
        optional = (entropy, data["ref"]) if full else (None, None)
        arguments = (logp, data["old"], data["adv"], data["mask"], torch.ones(2), *optional, 0.2, 0.2,
                     1.5 if full else None, 0, 0.1 * full, 0.1 * full, 3)  # fmt: skip
        assert [x.requires_grad for x in OPS.ppo_loss(*arguments)] == [True, False, False, False]
        opcheck(OPS.ppo_loss, arguments)
        opcheck(OPS.ppo_loss_backward, (torch.tensor(2.0), torch.randn(2, 4), torch.randn(2, 4)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch(data):
    """Random shapes, masks and settings, on every CPU path, against the formula in float64."""
    B, T = data.draw(st.integers(1, 4), label="B"), data.draw(st.integers(1, 40), label="T")
    name = data.draw(st.sampled_from(sorted(SETTINGS)), label="settings")
    aggregation = data.draw(st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_constant"]))
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    tensors = batch(B + 1, T + 1, torch.float64, spread=data.draw(st.sampled_from([1e-3, 0.3, 3.0]), label="spread"))
    op, exact = both({**SETTINGS[name], "aggregation": aggregation})
    expected = gradients(exact, tensors, torch.float64)
    for backend in [backend for backend in backends.available() if backend != "triton"]:
        with backends.force(backend):
            got = gradients(op, tensors, torch.float64)
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(a, b.nan_to_num(), rtol=1e-11, atol=1e-12), backend
