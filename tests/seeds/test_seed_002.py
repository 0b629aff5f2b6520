"""The worked numbers of seeds/002: the four clip cases, the value clip, GAE on the geothermal reply, reward scales."""

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


# Section 8.2: the ratio and L^CPI


def test_l_cpi_term_0_130_over_0_100_is_1_30_and_1_95(dtype, exact, surrogate):
    old, new, advantage = row([math.log(0.100)], dtype), row([math.log(0.130)], dtype), row([1.5], dtype)
    moved = surrogate(new, old, advantage, **NO_CLIP)
    exact(-moved.loss, 1.95)
    exact(moved.gradient, [[-1.95]])
    if moved.stats is not None:
        exact(moved.stats.ratio_mean, 1.30)
    start = surrogate(old, old, advantage, **NO_CLIP)
    exact(-start.loss, 1.5)
    exact(start.gradient, [[-1.5]])  # weaker at the start than after the move


def test_the_first_step_is_a_reinforce_step(dtype, exact, policy_loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).to(dtype)
    token_ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    advantages = torch.tensor([[1.5, -0.8, 0.3], [-2.0, 0.0, 0.7]], dtype=dtype)

    leaf = logits.double().clone().requires_grad_()
    logprobs = leaf.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    (-(advantages.double() * logprobs).mean()).backward()  # L^PG

    result = policy_loss(logits, token_ids, logprobs.detach().to(dtype), advantages)
    exact(result.gradient, leaf.grad)
    exact(result.loss, -advantages.double().mean())  # while its value is that of L^CPI


# Section 8.4: the clipped objective. The printed table comes from log-probs rounded to three decimals (log p_old =
# -2.303 as the text says): its ratios 1.301 and 1.501 are not 1.30 and 1.50.

CASES = {
    "good_pushed_up": {
        "log_p": -2.040, "p": 0.130, "advantage": 1.5, "flat": True,
        "table": ("1.301", "1.951", "1.800", "1.800", "0.000"), "prose": (1.30, 1.95, 1.80, 1.80, 0.0),
    },
    "good_went_down": {
        "log_p": -2.408, "p": 0.090, "advantage": 1.5, "flat": False,
        "table": ("0.900", "1.350", "1.350", "1.350", "1.350"), "prose": (0.90, 1.35, 1.35, 1.35, 1.35),
    },
    "bad_pushed_down": {
        "log_p": -2.659, "p": 0.070, "advantage": -0.8, "flat": True,
        "table": ("0.700", "-0.560", "-0.640", "-0.640", "0.000"), "prose": (0.70, -0.56, -0.64, -0.64, 0.0),
    },
    "bad_went_up": {
        "log_p": -1.897, "p": 0.150, "advantage": -0.8, "flat": False,
        "table": ("1.501", "-1.201", "-0.960", "-1.201", "-1.201"), "prose": (1.50, -1.20, -0.96, -1.20, -1.20),
    },
}  # fmt: skip


def clip_case_columns(surrogate, new, old, advantage):
    """ratio, r*A, clip(r)*A, min, d objective / d log p: each from the loss, none from a formula of the test."""
    ratio = -surrogate(new, old, torch.ones_like(advantage), **NO_CLIP).loss
    unclipped = -surrogate(new, old, advantage, **NO_CLIP).loss
    selected = surrogate(new, old, advantage)
    # min(a, b) for A, max(a, b) from -A; their sum less a is the other term.
    larger = surrogate(new, old, -advantage).loss
    clipped = -selected.loss + larger - unclipped
    return ratio, unclipped, clipped, -selected.loss, -selected.gradient, selected.stats


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_four_clip_cases_as_printed(dtype, printed, surrogate, case):
    new, old, advantage = row([case["log_p"]], dtype), row([-2.303], dtype), row([case["advantage"]], dtype)
    columns = clip_case_columns(surrogate, new, old, advantage)
    for got, text in zip(columns[:5], case["table"], strict=True):
        printed(got, text)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_four_clip_cases_from_p_old_0_100(dtype, exact, surrogate, case):
    new, old = row([math.log(case["p"])], dtype), row([math.log(0.100)], dtype)
    *columns, gradient, stats = clip_case_columns(surrogate, new, old, row([case["advantage"]], dtype))
    for got, expected in zip(columns, case["prose"][:4], strict=True):
        exact(got, expected)
    exact(gradient, [[case["prose"][4]]])
    if case["flat"]:
        assert gradient.item() == 0.0
    if stats is not None:
        exact(stats.flat_fraction, float(case["flat"]))


def test_four_clip_cases_in_one_batch(dtype, exact, surrogate):
    """Three ratios of four are outside [0.8, 1.2], two terms are flat: the two definitions of clip fraction differ."""
    new = row([math.log(case["p"]) for case in CASES.values()], dtype)
    old = row([math.log(0.100)] * 4, dtype)
    advantages = row([case["advantage"] for case in CASES.values()], dtype)
    result = surrogate(new, old, advantages)
    exact(result.loss, -(1.80 + 1.35 - 0.64 - 1.20) / 4)
    exact(result.gradient, [[0.0, -1.35 / 4, 0.0, 1.20 / 4]])
    if result.stats is not None:
        ratios = [1.30, 0.90, 0.70, 1.50]
        exact(result.stats.outside_fraction, 0.75)  # this text's clipfrac
        exact(result.stats.flat_fraction, 0.5)
        exact(result.stats.ratio_mean, 1.10)
        exact(result.stats.approx_kl_k3, sum((r - 1) - math.log(r) for r in ratios) / 4)  # its approx_kl
        exact(result.stats.approx_kl_k1, -sum(math.log(r) for r in ratios) / 4)
        exact(result.stats.approx_kl_k2, sum(math.log(r) ** 2 / 2 for r in ratios) / 4)


def test_a_good_token_that_fell_below_0_8_keeps_its_gradient(dtype, exact, surrogate):
    result = surrogate(row([math.log(0.070)], dtype), row([math.log(0.100)], dtype), row([1.5], dtype))
    exact(-result.loss, 1.05)  # 0.7 * 1.5, the smaller one beside 0.8 * 1.5
    exact(-result.gradient, [[1.05]])


def test_loss_of_the_code_listing(dtype, exact, surrogate):
    generator = torch.Generator().manual_seed(1)
    old = -0.2 - 3 * torch.rand(4, 7, generator=generator, dtype=torch.float64)
    new = (old + 0.5 * torch.randn(4, 7, generator=generator, dtype=torch.float64)).clamp(max=-0.05)
    A = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 7, generator=generator) < 0.7

    new_lp = new.clone().requires_grad_()
    ratio = torch.exp(new_lp - old)
    pg1 = -A * ratio
    pg2 = -A * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    pg_loss = (torch.max(pg1, pg2) * mask).sum() / mask.sum()
    pg_loss.backward()
    assert (new_lp.grad[mask] == 0).any()
    assert (new_lp.grad[mask] != 0).any()

    result = surrogate(new.to(dtype), old.to(dtype), A.to(dtype), mask)
    exact(result.loss, pg_loss)
    exact(result.gradient, new_lp.grad)


# Section 8.5: the value loss


def test_value_clip_0_36_has_no_gradient(dtype, exact):
    values = row([0.50], dtype).requires_grad_()
    loss, stats = ops.value_loss(values, row([0.10], dtype), row([0.90], dtype), live(1), clip_range=0.2)
    loss.backward()
    exact(2 * loss, 0.36)
    assert values.grad.item() == 0.0
    exact(stats.clipped_fraction, 1.0)


def test_value_error_0_16_without_the_clip(dtype, exact):
    values = row([0.50], dtype).requires_grad_()
    loss, stats = ops.value_loss(values, row([0.10], dtype), row([0.90], dtype), live(1), clip_range=None)
    loss.backward()
    exact(2 * loss, 0.16)
    exact(values.grad, [[-0.40]])
    exact(stats.clipped_fraction, 0.0)


def test_value_clip_is_pessimistic_on_both_sides(dtype, exact):
    """Beside 0.36: a value still within 0.2 of the old one, and one that moved 0.3 away from its target."""
    values = row([0.25, -0.20], dtype).requires_grad_()
    loss, stats = ops.value_loss(
        values, row([0.10, 0.10], dtype), row([0.90, 0.90], dtype), live(2), clip_range=0.2, normalizer=1.0
    )
    loss.backward()
    exact(loss, 0.5 * 0.65**2 + 0.5 * 1.10**2)  # 1.10^2 is larger than the clipped 1.00^2
    exact(values.grad, [[-0.65, -1.10]])
    exact(stats.clipped_fraction, 0.0)


# Section 8.6: GAE on the geothermal reply. Rows t = 0, 1, 3, 6, 8, 9, 10 of eleven are printed.

LOGPROBS = [-0.095, -0.000, -6.890, -0.896, -0.011, -0.017, -0.019]


def test_normalised_reward_of_6_037_is_0_843(dtype, printed):
    """Policy and reference agree on every token, so the score at the last token is the only reward."""
    score = torch.tensor([(6.037 - 4.496) / 1.828], dtype=dtype)
    logprobs = row(LOGPROBS, dtype)
    rewards = ops.shape_rewards(score, logprobs, logprobs.clone(), live(7), kl_coef=0.05)
    assert torch.equal(rewards[0, :-1], torch.zeros(6, dtype=dtype))
    printed(rewards[0, -1], "0.843")


def test_geothermal_last_rows_1_807_4_697_7_155(dtype, exact, printed):
    rewards = row([0.0, 0.0, 0.843], dtype)
    values = row([-6.637, -3.944, -0.964], dtype)
    residuals, _ = ops.gae(rewards, values, live(3), gamma=1.0, lam=0.0)
    printed(residuals, "2.693", "2.980", "1.807")
    advantages, returns = ops.gae(rewards, values, live(3), gamma=1.0, lam=0.95)
    printed(advantages, "7.155", "4.697", "1.807")
    printed(returns, "0.518", "0.753", "0.843")
    exact(advantages, [[2.693 + 0.95 * (2.980 + 0.95 * 1.807), 2.980 + 0.95 * 1.807, 1.807]])


def test_geothermal_two_steps_back_from_4_696_is_7_154(dtype, printed):
    """The text goes on from the 4.696 its script printed: V(s_9) + 4.696 as the value after ' Energy' and '.'."""
    values = row([-6.637, -3.944], dtype)
    after = torch.tensor([-3.944 + 4.696], dtype=dtype)
    advantages, _ = ops.gae(torch.zeros_like(values), values, live(2), gamma=1.0, lam=0.95, bootstrap_values=after)
    printed(advantages, "7.154", "4.696")


def test_geothermal_first_rows_0_350_from_6_572(dtype, printed):
    values = row([-1.652, -7.545], dtype)
    after = torch.tensor([-7.545 + 6.572], dtype=dtype)
    advantages, returns = ops.gae(
        torch.zeros_like(values), values, live(2), gamma=1.0, lam=0.95, bootstrap_values=after
    )
    printed(advantages, "0.350", "6.572")
    printed(returns, "-1.302", "-0.973")


@pytest.mark.parametrize(
    ("value", "advantage", "expected"),
    [
        (-1.652, 0.350, "-1.302"),
        (-7.545, 6.572, "-0.973"),
        (-4.920, 4.262, "-0.658"),
        (-4.706, 4.606, "-0.100"),
        (-6.637, 7.155, "0.518"),
        (-0.964, 1.807, "0.843"),
    ],
    ids=["The", "topic", "this", "Ge", "Energy", "im_end"],
)
def test_geothermal_returns_are_advantage_plus_value(dtype, printed, value, advantage, expected):
    """The seventh row, '.', prints 0.753 for 0.752: its advantage 4.696 is rounded; the chain above has it."""
    after = torch.tensor([value + advantage], dtype=dtype)
    advantages, returns = ops.gae(
        row([0.0], dtype), row([value], dtype), live(1), gamma=1.0, lam=0.95, bootstrap_values=after
    )
    printed(advantages, str(advantage))
    printed(returns, expected)


def test_log_prob_of_minus_6_890_is_probability_0_001(dtype, printed):
    logits = torch.tensor([[-6.890, math.log(-math.expm1(-6.890))]], dtype=dtype) + 3.0
    logprobs, _ = ops.selected_logprobs(logits, torch.tensor([0]), return_entropy=True)
    printed(logprobs, "-6.890")
    printed(logprobs.exp(), "0.001")


def test_whitening_forgets_an_offset_shared_by_every_advantage(dtype, exact):
    advantages = torch.tensor([[7.155, 4.697, 1.807], [6.572, 0.350, float("nan")]], dtype=dtype)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    whitened = ops.whiten(advantages, mask)
    numbers = [7.155, 4.697, 1.807, 6.572, 0.350]
    mean = sum(numbers) / 5
    std = math.sqrt(sum((a - mean) ** 2 for a in numbers) / 5)
    a, b, c, d, e = ((x - mean) / std for x in numbers)
    exact(whitened, [[a, b, c], [d, e, 0.0]])
    exact(ops.whiten(advantages + 4.0, mask), whitened)


# Section 8.8: the details


def test_kl_of_10_nats_at_0_05_costs_half_a_standard_deviation(dtype, exact):
    old, reference = row([-0.5] * 4, dtype), row([-3.0] * 4, dtype)  # 2.5 nats a token
    rewards = ops.shape_rewards(torch.zeros(1, dtype=dtype), old, reference, live(4), kl_coef=0.05)
    exact(rewards, [[-0.125] * 4])
    exact(rewards.sum(), -0.5)


def test_kl_of_3_5_nats_at_0_05_costs_0_17(dtype, exact, printed):
    old, reference = row([-0.5] * 7, dtype), row([-1.0] * 7, dtype)
    rewards = ops.shape_rewards(torch.zeros(1, dtype=dtype), old, reference, live(7), kl_coef=0.05)
    exact(rewards.sum(), -0.175)
    printed(rewards.sum(), "-0.17")  # 0.175, cut: exactly half a unit


def test_a_reply_without_eos_scores_minus_1_at_its_own_last_token(dtype, exact):
    """A finished reply of two tokens beside one that ran into the limit, each score at the row's last live token."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, -0.5, -0.5]], dtype=dtype)
    reference = torch.tensor([[-1.2, -1.9, float("nan")], [-0.5, -0.5, -0.5]], dtype=dtype)
    rewards = ops.shape_rewards(torch.tensor([0.843, -1.0], dtype=dtype), old, reference, mask, kl_coef=0.05)
    exact(rewards, [[-0.01, 0.843 + 0.005, 0.0], [0.0, 0.0, -1.0]])


@pytest.mark.parametrize("fused", [False, True], ids=["selected_logprobs", "linear_selected_logprobs"])
def test_temperature_0_7_divides_the_logits_or_the_first_ratio_is_not_1(dtype, exact, fused):
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(1, 6, 9, generator=generator, dtype=torch.float64).to(dtype)
    token_ids = torch.randint(9, (1, 6), generator=generator)

    def score(temperature):
        if fused:
            return ops.linear_selected_logprobs(
                logits, torch.eye(9, dtype=dtype), token_ids, temperature=temperature, return_entropy=True
            )[0]
        return ops.selected_logprobs(logits, token_ids, temperature=temperature, return_entropy=True)[0]

    def reference(temperature):
        return (logits.double() / temperature).log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)

    old = score(0.7)
    exact(old, reference(0.7))
    advantages = torch.ones_like(old)
    _, stats = ops.ppo_loss(score(0.7), old, advantages, live(6))
    assert stats.ratio_mean.item() == 1.0
    _, stats = ops.ppo_loss(score(1.0), old, advantages, live(6))
    mismatched = (reference(1.0) - reference(0.7)).exp().mean()
    assert abs(mismatched - 1) > 0.1
    exact(stats.ratio_mean, mismatched)


def test_three_ways_to_average_weigh_a_long_reply_differently(dtype, exact):
    """Detail 8 on two replies of 3 tokens and 1: per-token mean, per-reply mean, constant divisor 2 * 3."""
    logprobs = torch.full((2, 3), -1.0, dtype=dtype)
    advantages = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]], dtype=dtype)
    mask = torch.tensor([[True, True, True], [True, False, False]])

    def run(**keywords):
        leaf = logprobs.clone().requires_grad_()
        loss, _ = ops.ppo_loss(leaf, logprobs, advantages, mask, **keywords)
        loss.backward()
        return loss, leaf.grad

    loss, gradient = run(aggregation="token_mean")
    exact(loss, -16 / 4)
    exact(gradient, [[-1 / 4, -2 / 4, -3 / 4], [-10 / 4, 0.0, 0.0]])
    loss, gradient = run(aggregation="sequence_mean")
    exact(loss, -(2 + 10) / 2)
    exact(gradient, [[-1 / 6, -2 / 6, -3 / 6], [-10 / 2, 0.0, 0.0]])
    loss, gradient = run(aggregation="sequence_sum_constant", normalizer=6.0)
    exact(loss, -16 / 6)
    exact(gradient, [[-1 / 6, -2 / 6, -3 / 6], [-10 / 6, 0.0, 0.0]])
