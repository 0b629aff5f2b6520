"""The worked numbers of seeds/003: its three-step GAE, its clip table, CISPO's +2.4, and its six sanity checks."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_fast import ops

NO_CLIP = {"clip_low": 1.0, "clip_high": 100.0}


def row(numbers, dtype):
    return torch.tensor([numbers], dtype=dtype)


def live(count):
    return torch.ones(1, count, dtype=torch.bool)


# Sections 1 and 8, check 1: the score-function gradient of an enumerated bandit


@pytest.mark.parametrize("baseline", [0.0, 0.37, -5.0])
@pytest.mark.parametrize(
    ("logits", "rewards"),
    [([0.2, -0.4], [1.0, 0.0]), ([0.3, -1.1, 0.6], [1.0, -0.5, 0.25])],
    ids=["two_answers", "three_actions"],
)
def test_check_1_enumerated_bandit_gradient(dtype, exact, policy_loss, logits, rewards, baseline):
    """Each action once, weighted by its probability: the expected score-function estimate, and no baseline in it."""
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    expected_reward = leaf.softmax(-1).dot(torch.tensor(rewards, dtype=torch.float64))
    expected_reward.backward()

    count = len(logits)
    probabilities = leaf.detach().softmax(-1)
    weights = probabilities * (torch.tensor(rewards, dtype=torch.float64) - baseline)
    result = policy_loss(
        torch.tensor(logits, dtype=dtype).expand(1, count, count),
        torch.arange(count).unsqueeze(0),
        probabilities.log().to(dtype).unsqueeze(0),
        weights.to(dtype).unsqueeze(0),
        normalizer=1.0,
    )
    exact(-result.gradient.double().sum((0, 1)), leaf.grad)
    exact(-result.loss, expected_reward.detach() - baseline)


def test_expected_reward_of_the_good_answer_is_its_probability(dtype, exact, policy_loss):
    """Rewards 1 and 0: J = p, and dJ/dz is p(1 - p) and -p(1 - p)."""
    p = 0.3
    logits = torch.tensor([[[math.log(p / (1 - p)), 0.0]] * 2], dtype=dtype)
    old = row([math.log(p), math.log(1 - p)], dtype)
    weighted_rewards = row([p * 1.0, (1 - p) * 0.0], dtype)
    result = policy_loss(logits, torch.tensor([[0, 1]]), old, weighted_rewards, normalizer=1.0)
    exact(-result.loss, p)
    exact(-result.gradient.double().sum((0, 1)), [p * (1 - p), -p * (1 - p)])


# Section 2: a reward of 8 against two forecasts, and what a signed advantage does to the logits


def test_reward_of_8_against_forecasts_of_7_and_9(dtype, exact):
    """One reply, two prefixes: +1 where 7 was expected, -1 where 9 was."""
    advantages, returns = ops.gae(row([0.0, 8.0], dtype), row([7.0, 9.0], dtype), live(2), gamma=1.0, lam=1.0)
    exact(advantages, [[1.0, -1.0]])
    exact(returns, [[8.0, 8.0]])


@pytest.mark.parametrize("advantage", [1.7, -1.7])
def test_loss_gradient_by_the_logits_is_advantage_times_p_minus_one_hot(dtype, exact, policy_loss, advantage):
    z = torch.tensor([0.5, -0.2, 1.1, 0.0], dtype=torch.float64)
    p = z.softmax(-1)
    old = p[2].log().to(dtype).reshape(1, 1)
    result = policy_loss(z.to(dtype).reshape(1, 1, 4), torch.tensor([[2]]), old, row([advantage], dtype))
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    exact(result.gradient[0, 0], advantage * (p - one_hot))
    # Descent on it raises the selected logit and lowers the others for A > 0; all reversed for A < 0.
    raised = (-result.gradient[0, 0] * advantage > 0).tolist()
    assert raised == [False, False, True, False]


# Section 3: GAE


def test_three_step_residuals_advantages_and_targets_0_895_0_95_1_0(dtype, exact, printed):
    """Rewards (0, 0, 1), values (0.2, 0.4, 0.5), terminal value 0; the targets fix gamma = 1 and lambda = 0.9."""
    rewards, values = row([0.0, 0.0, 1.0], dtype), row([0.2, 0.4, 0.5], dtype)
    residuals, _ = ops.gae(rewards, values, live(3), gamma=1.0, lam=0.0)
    exact(residuals, [[0.2, 0.1, 0.5]])
    advantages, targets = ops.gae(rewards, values, live(3), gamma=1.0, lam=0.9)
    exact(advantages, [[0.695, 0.55, 0.5]])
    exact(targets, [[0.895, 0.95, 1.0]])
    printed(targets, "0.895", "0.95", "1.0")


def test_three_step_targets_do_not_come_from_whitened_advantages(dtype, exact):
    rewards, values = row([0.0, 0.0, 1.0], dtype), row([0.2, 0.4, 0.5], dtype)
    advantages, targets = ops.gae(rewards, values, live(3), gamma=1.0, lam=0.9)
    whitened = ops.whiten(advantages, live(3))
    exact(whitened.double().sum(), 0.0)
    exact(whitened.double().square().mean(), 1.0)
    exact(targets, [[0.895, 0.95, 1.0]])
    current = row([0.3, 0.3, 0.3], dtype).requires_grad_()
    loss, _ = ops.value_loss(current, values, targets, live(3), clip_range=None)
    loss.backward()
    exact(current.grad, [[(0.3 - 0.895) / 3, (0.3 - 0.95) / 3, (0.3 - 1.0) / 3]])


def test_check_6_lambda_1_telescopes_to_return_minus_value(dtype, exact):
    """A random complete episode of nine steps, discounted: every intermediate value cancels."""
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(1, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(1, 9, generator=generator, dtype=torch.float64)
    gamma = 0.9
    advantages, returns = ops.gae(rewards.to(dtype), values.to(dtype), live(9), gamma=gamma, lam=1.0)
    discounted = [sum(gamma ** (k - t) * rewards[0, k].item() for k in range(t, 9)) for t in range(9)]
    exact(returns, [discounted])
    exact(advantages, [[g - v for g, v in zip(discounted, values[0].tolist(), strict=True)]])


def test_three_step_telescoping_with_lambda_1(dtype, exact):
    rewards, values = row([0.0, 0.0, 1.0], dtype), row([0.2, 0.4, 0.5], dtype)
    advantages, targets = ops.gae(rewards, values, live(3), gamma=1.0, lam=1.0)
    exact(advantages, [[0.8, 0.6, 0.5]])
    exact(targets, [[1.0, 1.0, 1.0]])


# Section 4: the ratio


def test_probability_0_10_to_0_13_is_ratio_1_3(dtype, exact, surrogate):
    result = surrogate(row([math.log(0.13)], dtype), row([math.log(0.10)], dtype), row([1.0], dtype), **NO_CLIP)
    exact(-result.loss, 1.3)
    exact(-result.gradient, [[1.3]])


def test_importance_sampling_identity_at_a_fixed_state(dtype, exact, surrogate):
    """Samples in the exact proportions of old = (1/2, 1/4, 1/4); the weighted mean is the mean under the new policy."""
    old = row([0.50, 0.50, 0.25, 0.25], dtype).log()
    new = row([0.20, 0.20, 0.30, 0.50], dtype).log()
    f = [3.0, 3.0, -1.0, 2.0]
    result = surrogate(new, old, row(f, dtype), **NO_CLIP)
    exact(-result.loss, 0.20 * 3.0 + 0.30 * -1.0 + 0.50 * 2.0)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_check_2_a_ratio_of_1_is_not_a_constant(dtype, exact, surrogate, advantage):
    logprobs = row([math.log(0.3)], dtype)
    result = surrogate(logprobs, logprobs, row([advantage], dtype))
    exact(-result.loss, advantage)
    exact(-result.gradient, [[advantage]])


@pytest.mark.parametrize("fused", [False, True], ids=["ppo_loss", "linear_ppo_loss"])
def test_check_2_the_denominator_is_fixed_even_if_it_is_the_numerator(dtype, exact, fused):
    """old_logprobs that carry the current policy's graph: differentiating both sides would give a slope of 0."""
    hidden = torch.tensor([[[0.4, -0.3, 0.1]]], dtype=dtype).requires_grad_()
    weight, token_ids = torch.eye(3, dtype=dtype), torch.tensor([[1]])
    logprobs = hidden.log_softmax(-1)[..., 1]
    if fused:
        loss, _ = ops.linear_ppo_loss(hidden, weight, token_ids, logprobs, row([2.0], dtype), live(1))
    else:
        loss, _ = ops.ppo_loss(logprobs, logprobs, row([2.0], dtype), live(1))
    loss.backward()
    p = hidden.detach()[0, 0].double().softmax(-1)
    exact(-hidden.grad[0, 0], 2.0 * (torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) - p))


# Section 5: the four cases


@pytest.mark.parametrize(
    ("advantage", "ratio", "selected", "gradient"),
    [
        (2.0, 1.3, 2.4, 0.0),
        (2.0, 0.7, 1.4, 1.4),
        (-2.0, 0.7, -1.6, 0.0),
        (-2.0, 1.3, -2.6, -2.6),
    ],
    ids=["increased_enough", "still_increase", "decreased_enough", "still_decrease"],
)
def test_check_3_directional_clipping(dtype, exact, surrogate, advantage, ratio, selected, gradient):
    old = row([math.log(0.2)], dtype)
    result = surrogate(row([math.log(0.2 * ratio)], dtype), old, row([advantage], dtype))
    exact(-result.loss, selected)
    exact(-result.gradient, [[gradient]])
    if gradient == 0.0:
        assert result.gradient.item() == 0.0
    if result.stats is not None:
        exact(result.stats.outside_fraction, 1.0)  # all four ratios are outside the interval,
        exact(result.stats.flat_fraction, float(gradient == 0.0))  # half of the terms are flat


# Section 6: the log-ratio to the reference


def test_sequence_log_ratio_is_the_sum_over_tokens_and_may_be_negative(dtype, exact):
    logprobs, reference = row([-1.0, -0.5, -2.0], dtype), row([-0.7, -0.9, -1.4], dtype)
    rewards = ops.shape_rewards(torch.zeros(1, dtype=dtype), logprobs, reference, live(3), kl_coef=1.0)
    exact(rewards, [[0.3, -0.4, 0.6]])
    exact(-rewards.sum(), -0.5)


# Section 7: stop-gradient and CISPO


def test_check_5_stop_gradient_keeps_the_first_derivative_and_changes_the_value(dtype, exact, surrogate):
    """r * A against sg(r) * A * log p, unclipped on both sides, at three ratios."""
    old = row([math.log(0.2)] * 3, dtype)
    ratios, advantages = [0.6, 1.0, 1.7], [2.0, -1.5, 0.8]
    logprobs = [math.log(0.2 * r) for r in ratios]
    new = row(logprobs, dtype)
    ppo = surrogate(new, old, row(advantages, dtype), **NO_CLIP)
    detached = surrogate(new, old, row(advantages, dtype), objective="cispo", **NO_CLIP)
    exact(detached.gradient, ppo.gradient)
    exact(ppo.gradient, [[-r * a / 3 for r, a in zip(ratios, advantages, strict=True)]])
    exact(-ppo.loss, sum(r * a for r, a in zip(ratios, advantages, strict=True)) / 3)
    exact(-detached.loss, sum(r * a * lp for r, a, lp in zip(ratios, advantages, logprobs, strict=True)) / 3)


def test_without_stop_gradient_the_product_rule_adds_a_term(dtype, exact):
    """d(r A log p) / d log p = r A (1 + log p), through a loss function of one's own."""
    p, ratio, advantage = 0.26, 1.3, 2.0
    hidden = torch.tensor([[p, 0.5, 0.24]], dtype=torch.float64).log().to(dtype).requires_grad_()

    def token_loss(logprobs, entropy, old, advantages):
        return -(logprobs - old).exp() * advantages * logprobs

    loss = ops.linear_token_loss(
        hidden,
        torch.eye(3, dtype=dtype),
        torch.tensor([0]),
        token_loss,
        (torch.tensor([math.log(p / ratio)], dtype=dtype), torch.tensor([advantage], dtype=dtype)),
        mask=torch.tensor([True]),
    )
    loss.backward()
    slope = ratio * advantage * (1 + math.log(p))
    exact(-loss, ratio * advantage * math.log(p))
    exact(-hidden.grad, [[slope * (1 - p), -slope * 0.5, -slope * 0.24]])


def test_check_4_cispo_keeps_plus_2_4_where_ppo_clip_has_zero(dtype, exact, surrogate):
    new, old, advantage = row([math.log(0.26)], dtype), row([math.log(0.20)], dtype), row([2.0], dtype)
    clipped = surrogate(new, old, advantage)
    assert clipped.gradient.item() == 0.0
    cispo = surrogate(new, old, advantage, objective="cispo")
    exact(-cispo.gradient, [[2.4]])
    exact(-cispo.loss, 2.4 * math.log(0.26))


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(0.5, 2.0, 1.0), (1.1, 2.0, 2.2), (1.3, -2.0, -2.4), (0.5, -2.0, -1.0)],
    ids=["no_lower_bound", "inside", "cap_for_negative", "no_lower_bound_for_negative"],
)
def test_check_4_cispo_caps_the_weight_from_above_only(dtype, exact, surrogate, ratio, advantage, gradient):
    old = row([math.log(0.2)], dtype)
    result = surrogate(row([math.log(0.2 * ratio)], dtype), old, row([advantage], dtype), objective="cispo")
    exact(-result.gradient, [[gradient]])


# Sections 8 and 9: what a batch must hold


def test_eos_is_an_action_prompt_and_padding_are_not(dtype, exact, policy_loss):
    """Two prompt tokens, two reply tokens, a generated EOS, and padding with the very same id."""
    eos = 3
    token_ids = torch.tensor([[5, 1, 4, 2, eos, eos]])
    mask = torch.tensor([[False, False, True, True, True, False]])
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 6, 6, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    old = logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    result = policy_loss(logits.to(dtype), token_ids, old.to(dtype), torch.full((1, 6), 1.5, dtype=dtype), mask)
    one_hot = torch.nn.functional.one_hot(token_ids, 6)
    exact(result.gradient, 1.5 * (p - one_hot) / 3 * mask.unsqueeze(-1))
    exact(result.loss, -1.5)


def test_ratios_leave_1_on_a_frozen_batch(dtype, exact):
    """Section 8: three updates on one saved batch of an enumerated three-action bandit, unclipped then clipped."""
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().to(dtype)
    actions = torch.tensor([[0, 1, 2]])
    advantages = row([-0.4, 0.2, 0.7], dtype)
    logits = old.clone().requires_grad_()
    outside = []
    for _ in range(3):
        logprobs, _ = ops.selected_logprobs(logits.expand(1, 3, 3), actions, return_entropy=True)
        loss, stats = ops.ppo_loss(logprobs, old.unsqueeze(0), advantages, live(3))
        expected = logits.detach().double().log_softmax(-1) - old.double()
        exact(stats.ratio_mean, expected.exp().mean())
        exact(stats.approx_kl_k1, -expected.mean())
        outside.append(stats.outside_fraction.item())
        logits.grad = None
        loss.backward()
        with torch.no_grad():
            logits -= 1.5 * logits.grad
    assert outside[0] == 0.0
    assert outside[-1] > 0.0
