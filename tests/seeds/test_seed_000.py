"""The worked numbers of seeds/000: one four-token reply from rewards to the clipped objective, and its asides."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_fast import ops

# Table 3.1. The stored current_lp are six-decimal roundings of old_lp + log(RATIO).
OLD_LP = [-0.8, -1.0, -0.6, -1.2]
REF_LP = [-0.9, -0.8, -0.7, -1.0]
VALUES = [1.00, 0.90, 0.30, 0.10]
CURRENT_LP = [-1.156675, -1.0, -0.504690, -0.899895]
RATIOS = [0.70, 1.00, 1.10, 1.35]
# Table 3.2, every digit of which is exact.
REWARDS = [-0.02, 0.04, -0.02, 1.04]
RESIDUALS = [-0.12, -0.56, -0.22, 0.94]
ADVANTAGES = [-0.0446175, 0.07935, 0.673, 0.94]
RETURNS = [0.9553825, 0.97935, 0.973, 1.04]

LIVE = torch.ones(1, 4, dtype=torch.bool)
NO_CLIP = {"clip_low": 1.0, "clip_high": 100.0}


def row(numbers, dtype):
    return torch.tensor([numbers], dtype=dtype)


def exact_current_lp(dtype):
    return row([old + math.log(ratio) for old, ratio in zip(OLD_LP, RATIOS, strict=True)], dtype)


# Section 3.2: rewards


def test_kl_coefficient_scale_0_016_and_0_160(dtype, printed, exact):
    logprobs, reference = row([-0.20], dtype), row([-1.00], dtype)  # 0.80 nats apart
    mask = torch.ones(1, 1, dtype=torch.bool)
    no_score = torch.zeros(1, dtype=dtype)
    small = ops.shape_rewards(no_score, logprobs, reference, mask, kl_coef=0.02)
    large = ops.shape_rewards(no_score, logprobs, reference, mask, kl_coef=0.20)
    printed(small, "-0.016")
    printed(large, "-0.160")
    exact(small, [[-0.02 * 0.80]])
    exact(large, 10 * small.double())


def test_four_token_fixture_shaped_rewards(dtype, exact):
    score = torch.ones(1, dtype=dtype)
    rewards = ops.shape_rewards(score, row(OLD_LP, dtype), row(REF_LP, dtype), LIVE, kl_coef=0.20)
    exact(rewards, [REWARDS])


def test_task_score_of_1_stands_on_the_last_token_only(dtype, exact):
    score = torch.ones(1, dtype=dtype)
    exact(ops.shape_rewards(score, row(OLD_LP, dtype), row(REF_LP, dtype), LIVE, kl_coef=0.0), [[0.0, 0.0, 0.0, 1.0]])


def test_saved_gpt2_rows_have_zero_sampled_kl_before_training(dtype):
    logprobs = row([-3.148, -3.544, -0.932], dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = ops.shape_rewards(torch.zeros(1, dtype=dtype), logprobs, logprobs.clone(), mask, kl_coef=0.05)
    assert torch.equal(rewards, torch.zeros_like(rewards))


def test_one_sampled_log_ratio_can_be_negative_and_their_expectation_is_the_kl(dtype, exact):
    """Four samples in the exact proportions of old = (1/2, 1/4, 1/4), against new = (1/4, 1/4, 1/2)."""
    old = row([0.50, 0.50, 0.25, 0.25], dtype).log()
    new = row([0.25, 0.25, 0.25, 0.50], dtype).log()
    kl = 0.5 * math.log(2.0) + 0.25 * math.log(0.5)
    _, stats = ops.ppo_loss(new, old, torch.zeros_like(old), LIVE)
    exact(stats.approx_kl_k1, kl)
    exact(stats.approx_kl_k3, kl)  # its control variate r - 1 has mean 0 under old
    exact(stats.ratio_mean, 1.0)

    shaped = ops.shape_rewards(torch.zeros(1, dtype=dtype), old, new, LIVE, kl_coef=1.0)  # new as the reference
    assert shaped[0, 3] > 0 > shaped[0, 0]
    exact(shaped.mean(), -kl)
    _, stats = ops.ppo_loss(old, old, torch.zeros_like(old), LIVE, ref_logprobs=new, kl_coef=1.0, kl_estimator="k1")
    exact(stats.ref_kl_mean, kl)


# Section 3.3: residuals, advantages, returns, value loss


def test_four_token_fixture_residuals(dtype, exact):
    residuals, _ = ops.gae(row(REWARDS, dtype), row(VALUES, dtype), LIVE, gamma=1.0, lam=0.0)
    exact(residuals, [RESIDUALS])


def test_four_token_fixture_advantages(dtype, exact, printed):
    advantages, _ = ops.gae(row(REWARDS, dtype), row(VALUES, dtype), LIVE, gamma=1.0, lam=0.95)
    exact(advantages, [ADVANTAGES])
    printed(advantages, "-0.0446175", "0.0793500", "0.6730000", "0.9400000")
    exact(advantages[0, 2], -0.22 + 0.95 * 0.94)


def test_four_token_fixture_returns(dtype, exact, printed):
    _, returns = ops.gae(row(REWARDS, dtype), row(VALUES, dtype), LIVE, gamma=1.0, lam=0.95)
    exact(returns, [RETURNS])
    printed(returns, "0.9553825", "0.9793500", "0.9730000", "1.0400000")


def test_lambda_1_is_the_remaining_reward_minus_the_baseline(dtype, exact):
    advantages, returns = ops.gae(row(REWARDS, dtype), row(VALUES, dtype), LIVE, gamma=1.0, lam=1.0)
    remaining = [1.04, 1.06, 1.02, 1.04]  # sums of REWARDS from each token on
    exact(returns, [remaining])
    exact(advantages, [[r - v for r, v in zip(remaining, VALUES, strict=True)]])


def test_a_nonterminal_cutoff_bootstraps_from_the_next_value(dtype, exact):
    bootstrap = torch.tensor([0.5], dtype=dtype)
    advantages, returns = ops.gae(
        row(REWARDS, dtype), row(VALUES, dtype), LIVE, gamma=1.0, lam=0.95, bootstrap_values=bootstrap
    )
    expected = [a + 0.5 * 0.95**k for a, k in zip(ADVANTAGES, (3, 2, 1, 0), strict=True)]
    exact(advantages, [expected])
    exact(returns, [[a + v for a, v in zip(expected, VALUES, strict=True)]])


def test_saved_gpt2_rows_return_is_advantage_plus_value(dtype, exact, printed):
    """Three rows of a sixteen-token reply with zero reward; what followed enters as the value after the third."""
    values = row([0.296, 0.233, 0.265], dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    after = torch.tensor([0.265 - 0.147], dtype=dtype)
    advantages, returns = ops.gae(torch.zeros_like(values), values, mask, gamma=1.0, lam=0.95, bootstrap_values=after)
    exact(returns, advantages.double() + values.double())
    printed(advantages[0, 1:], "-0.108", "-0.147")
    printed(returns[0], "0.131", "0.125", "0.118")
    # The first advantage is -0.16527 from the three-decimal inputs, which may be half a unit off themselves.
    exact(advantages[0, 0], (0.233 - 0.296) + 0.95 * ((0.265 - 0.233) + 0.95 * -0.147))
    assert abs(advantages[0, 0].item() + 0.165) < 0.0005 + 0.001


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_value_loss_first_state_0_000995(dtype, exact, printed, clip_range):
    values = row(VALUES, dtype).requires_grad_()
    first = torch.tensor([[True, False, False, False]])
    loss, stats = ops.value_loss(values, row(VALUES, dtype), row(RETURNS, dtype), first, clip_range=clip_range)
    loss.backward()
    printed(loss, "0.000995")
    exact(loss, 0.5 * 0.0446175**2)
    exact(values.grad, [[0.0446175, 0.0, 0.0, 0.0]])  # V - R: descent lowers V towards its target
    exact(stats.clipped_fraction, 0.0)


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_value_loss_of_the_fixture_is_half_the_mean_squared_advantage(dtype, exact, clip_range):
    values = row(VALUES, dtype).requires_grad_()
    loss, stats = ops.value_loss(values, row(VALUES, dtype), row(RETURNS, dtype), LIVE, clip_range=clip_range)
    loss.backward()
    expected = 0.5 * sum(a * a for a in ADVANTAGES) / 4
    exact(loss, expected)
    exact(stats.loss_mean, expected)
    exact(values.grad, [[-a / 4 for a in ADVANTAGES]])


def test_rescaled_rewards_rescale_advantages_and_square_the_value_loss(dtype, exact):
    rewards, values = 3 * row(REWARDS, dtype), 3 * row(VALUES, dtype)
    advantages, returns = ops.gae(rewards, values, LIVE, gamma=1.0, lam=0.95)
    exact(advantages, [[3 * a for a in ADVANTAGES]])
    loss, _ = ops.value_loss(values, values, returns, LIVE, clip_range=None)
    exact(loss, 9 * 0.5 * sum(a * a for a in ADVANTAGES) / 4)


# Section 3.4: the policy gradient


def test_baseline_identity_expected_score_is_zero(dtype, exact):
    logits = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=dtype).requires_grad_()
    every_token = torch.arange(4)
    logprobs, _ = ops.selected_logprobs(logits.expand(4, 4), every_token, return_entropy=True)
    probabilities = logits.detach().double().softmax(-1)
    (2.5 * probabilities.to(dtype) * logprobs).sum().backward()  # 2.5: a baseline that doesn't see the action
    exact(logits.grad, [0.0] * 4)


@pytest.mark.parametrize(
    ("advantage", "logit", "probability"),
    [(0.60, "-0.3695", "0.4087"), (-0.60, "-0.4415", "0.3914")],
    ids=["good", "bad"],
)
def test_one_logit_step_reaches_0_4087_or_0_3914(dtype, exact, printed, policy_loss, advantage, logit, probability):
    q = math.log(0.40 / 0.60)
    printed(q, "-0.4055")
    logits = torch.tensor([[[q, 0.0]]], dtype=dtype)  # softmax of (q, 0) is (sigmoid(q), 1 - sigmoid(q))
    token_a = torch.zeros(1, 1, dtype=torch.int64)
    result = policy_loss(logits, token_a, row([math.log(0.40)], dtype), row([advantage], dtype))
    exact(result.gradient[0, 0, 0], -0.60 * advantage)  # -A (1 - pi(a)): 0.36 upwards for A = 0.60
    q_new = q - 0.10 * result.gradient[0, 0, 0].double()
    printed(q_new, logit)
    printed(torch.sigmoid(q_new), probability)


def test_slope_of_the_selected_log_prob_is_0_60(dtype, exact):
    logits = torch.tensor([[math.log(0.40 / 0.60), 0.0]], dtype=dtype).requires_grad_()
    logprobs, entropy = ops.selected_logprobs(logits, torch.tensor([0]), return_entropy=True)
    logprobs.sum().backward()
    exact(logprobs, [math.log(0.40)])
    exact(entropy, [-(0.40 * math.log(0.40) + 0.60 * math.log(0.60))])
    exact(logits.grad, [[0.60, -0.60]])


def test_on_policy_gradient_sums_tokens_and_divides_by_replies(dtype, exact, surrogate):
    """Equation 3.7 with B = 2 replies of 3 and 2 tokens; the surrogate's loss there is minus the same sum."""
    logprobs = torch.tensor([[-0.4, -1.1, -0.7], [-2.0, -0.3, -0.9]], dtype=dtype)
    advantages = torch.tensor([[0.5, -1.5, 2.0], [-0.25, 1.0, 9.0]], dtype=dtype)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    result = surrogate(logprobs, logprobs, advantages, mask, normalizer=2.0)
    exact(result.gradient, [[-0.25, 0.75, -1.0], [0.125, -0.5, 0.0]])
    exact(result.loss, -(0.5 - 1.5 + 2.0 - 0.25 + 1.0) / 2)


def test_only_current_log_probs_receive_a_gradient(dtype):
    current = exact_current_lp(dtype).requires_grad_()
    fixed = [row(OLD_LP, dtype), row(ADVANTAGES, dtype)]
    for x in fixed:
        x.requires_grad_()
    loss, _ = ops.ppo_loss(current, *fixed, LIVE)
    loss.backward()
    assert current.grad.abs().sum() > 0
    assert all(x.grad is None or not x.grad.any() for x in fixed)


# Section 3.5: ratios and clipping


def test_first_evaluation_ratio_is_exactly_1(dtype):
    old = row(OLD_LP, dtype)
    _, stats = ops.ppo_loss(old, old.clone(), row(ADVANTAGES, dtype), LIVE)
    assert stats.ratio_mean.item() == 1.0
    assert stats.ratio_var.item() == 0.0


def test_log_prob_gap_of_0_02_is_ratio_1_0202(dtype, exact, printed, surrogate):
    result = surrogate(row([-0.98], dtype), row([-1.00], dtype), row([1.0], dtype))
    printed(-result.loss, "1.0202")
    exact(-result.loss, math.exp(0.02))
    exact(result.gradient, [[-math.exp(0.02)]])
    if result.stats is not None:
        printed(result.stats.ratio_mean, "1.0202")


@pytest.mark.parametrize("t", range(4))
def test_four_token_fixture_ratios_from_the_stored_log_probs(dtype, printed, surrogate, t):
    """With A = 1 and no clip the objective is the ratio: 0.70, 1.00, 1.10, 1.35."""
    only_t = torch.arange(4).eq(t).unsqueeze(0)
    result = surrogate(row(CURRENT_LP, dtype), row(OLD_LP, dtype), torch.ones(1, 4, dtype=dtype), only_t, **NO_CLIP)
    printed(-result.loss, ("0.70", "1.00", "1.10", "1.35")[t])
    assert abs(-result.loss.item() - RATIOS[t]) < 1.35 * 5e-7 + 4e-7  # what rounding current_lp to 1e-6 allows


@pytest.mark.parametrize(
    ("t", "unclipped", "selected"),
    [
        (0, "-0.031232", "-0.035694"),
        (1, "0.079350", "0.079350"),
        (2, "0.740300", "0.740300"),
        (3, "1.269000", "1.128000"),
    ],
)
def test_four_token_fixture_selected_terms(dtype, exact, printed, surrogate, t, unclipped, selected):
    current, old, advantages = exact_current_lp(dtype), row(OLD_LP, dtype), row(ADVANTAGES, dtype)
    only_t = torch.arange(4).eq(t).unsqueeze(0)

    free = surrogate(current, old, advantages, only_t, **NO_CLIP)
    if t == 0:
        exact(-free.loss, 0.70 * -0.0446175)  # -0.03123225, printed as -0.031232
    printed(-free.loss, unclipped)
    slopes = torch.zeros(1, 4, dtype=torch.float64)
    slopes[0, t] = -RATIOS[t] * ADVANTAGES[t]
    exact(free.gradient, slopes)

    clipped = surrogate(current, old, advantages, only_t, clip_low=0.20, clip_high=0.20)
    exact(-clipped.loss, float(selected))
    flat = t in (0, 3)
    exact(clipped.gradient, torch.zeros_like(slopes) if flat else slopes)
    if clipped.stats is not None:
        exact(clipped.stats.loss_mean, -float(selected))
        exact(clipped.stats.flat_fraction, float(flat))
        exact(clipped.stats.outside_fraction, float(flat))
        exact(clipped.stats.ratio_mean, RATIOS[t])  # clipping leaves the ratio itself alone


def test_fixture_mean_0_477989(dtype, exact, printed, surrogate):
    result = surrogate(exact_current_lp(dtype), row(OLD_LP, dtype), row(ADVANTAGES, dtype))
    printed(-result.loss, "0.477989")
    exact(-result.loss, 0.477989)
    exact(result.gradient, [[0.0, -0.07935 / 4, -0.7403 / 4, 0.0]])
    if result.stats is not None:
        exact(result.stats.loss_mean, -0.477989)
        exact(result.stats.flat_fraction, 0.5)
        exact(result.stats.outside_fraction, 0.5)
        exact(result.stats.ratio_mean, sum(RATIOS) / 4)
        exact(result.stats.ratio_var, sum((r - 1.0375) ** 2 for r in RATIOS) / 4)


def test_stored_inputs_to_0_477989_in_one_chain(dtype, printed, surrogate):
    """Table 3.1 through rewards, GAE and the clipped objective, with the six-decimal current_lp."""
    old = row(OLD_LP, dtype)
    rewards = ops.shape_rewards(torch.ones(1, dtype=dtype), old, row(REF_LP, dtype), LIVE, kl_coef=0.20)
    advantages, _ = ops.gae(rewards, row(VALUES, dtype), LIVE, gamma=1.0, lam=0.95)
    result = surrogate(row(CURRENT_LP, dtype), old, advantages, clip_low=0.20, clip_high=0.20)
    printed(-result.loss, "0.477989")
