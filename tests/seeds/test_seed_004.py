"""The worked numbers of seeds/004: cross-entropy against PPO, two-token GAE with padding, the entropy bonus, group
advantages, and its tabular two-step PPO run through the public ops beside a plain float64 loop."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_fast import ops

NAN = float("nan")


def row(numbers, dtype):
    return torch.tensor([numbers], dtype=dtype)


def live(count):
    return torch.ones(1, count, dtype=torch.bool)


# From policy gradient to the clipped surrogate


@pytest.mark.parametrize(
    ("advantage", "ratio", "selected", "gradient"),
    [(2.0, 1.4, 2.4, 0.0), (-2.0, 0.6, -1.6, 0.0), (-2.0, 1.4, -2.8, -2.8), (2.0, 0.6, 1.2, 1.2)],
    ids=["no_more_credit_2_4", "no_more_credit_minus_1_6", "still_penalised_minus_2_8", "still_reinforced_1_2"],
)
def test_clip_cases_2_4_and_minus_1_6_and_minus_2_8(dtype, exact, surrogate, advantage, ratio, selected, gradient):
    old = row([math.log(0.25)], dtype)
    result = surrogate(row([math.log(0.25 * ratio)], dtype), old, row([advantage], dtype))
    exact(-result.loss, selected)
    exact(-result.gradient, [[gradient]])


# Cross-entropy versus PPO on logits (0.4, -0.2), action 0

P0 = math.exp(0.4) / (math.exp(0.4) + math.exp(-0.2))
CE_GRADIENT = [P0 - 1.0, 1.0 - P0]  # p - one_hot


@pytest.mark.parametrize(
    ("advantage", "old_probability", "factor"),
    [(2.0, P0, 2.0), (-2.0, P0, -2.0), (0.0, P0, 0.0), (2.0, P0 / 1.4, 0.0), (-2.0, P0 / 1.4, -2.0 * 1.4)],
    ids=["advantage_2", "advantage_minus_2", "advantage_0", "ratio_1_4_flat", "ratio_1_4_harmful"],
)
def test_ppo_gradient_as_a_multiple_of_cross_entropys(dtype, exact, policy_loss, advantage, old_probability, factor):
    logits = torch.tensor([[[0.4, -0.2]]], dtype=dtype)
    action = torch.zeros(1, 1, dtype=torch.int64)
    result = policy_loss(logits, action, row([math.log(old_probability)], dtype), row([advantage], dtype))
    exact(result.gradient[0, 0], [factor * g for g in CE_GRADIENT])
    if result.stats is not None:
        exact(result.stats.ratio_mean, P0 / old_probability)
        exact(result.stats.flat_fraction, float(advantage == 2.0 and old_probability != P0))


def test_cross_entropy_gradient_is_p_minus_one_hot(dtype, exact):
    logits = torch.tensor([[0.4, -0.2]], dtype=dtype).requires_grad_()
    logprobs, _ = ops.selected_logprobs(logits, torch.tensor([0]), return_entropy=True)
    (-logprobs).sum().backward()
    exact(logprobs, [math.log(P0)])
    exact(logits.grad, [CE_GRADIENT])


def test_surrogate_is_minus_ratio_times_advantage_not_minus_advantage_log_prob(dtype, exact, surrogate):
    old = row([math.log(0.4)], dtype)
    result = surrogate(row([math.log(0.44)], dtype), old, row([2.0], dtype))
    exact(result.loss, -1.1 * 2.0)
    exact(result.gradient, [[-1.1 * 2.0]])


# KL shaping


def test_kl_is_the_expected_log_ratio_and_single_ones_may_be_negative(dtype, exact):
    """A categorical distribution and a reference, every action enumerated through selected_logprobs."""
    z, w = [0.9, -0.4, 0.1], [0.2, 0.3, -0.5]
    actions = torch.arange(3)
    logp, entropy = ops.selected_logprobs(torch.tensor([z] * 3, dtype=dtype), actions, return_entropy=True)
    logq, _ = ops.selected_logprobs(torch.tensor([w] * 3, dtype=dtype), actions, return_entropy=True)
    p = torch.tensor(z, dtype=torch.float64).softmax(-1)
    q = torch.tensor(w, dtype=torch.float64).softmax(-1)
    log_ratios = logp.double() - logq.double()
    assert log_ratios.min() < 0 < log_ratios.max()
    kl = (p * (p / q).log()).sum()
    assert kl > 0
    exact((p * log_ratios).sum(), kl)
    exact(-entropy[0].double() - (p * logq.double()).sum(), kl)  # KL(p||q) = -H(p) - E_p[log q]

    weights = p.to(dtype).unsqueeze(0)  # the reward of each action, weighted by how often the policy takes it
    no_score = torch.zeros(1, dtype=dtype)
    rewards = ops.shape_rewards(no_score, logp.unsqueeze(0), logq.unsqueeze(0), live(3), kl_coef=0.1)
    exact((weights * rewards).sum(), -0.1 * kl)


# GAE by hand


def test_two_token_gae_0_74_0_6_and_0_94_1(dtype, exact, printed):
    rewards, values = row([0.0, 1.0], dtype), row([0.2, 0.4], dtype)
    residuals, _ = ops.gae(rewards, values, live(2), gamma=1.0, lam=0.0)
    exact(residuals, [[0.2, 0.6]])
    advantages, returns = ops.gae(rewards, values, live(2), gamma=1.0, lam=0.9)
    exact(advantages, [[0.74, 0.6]])
    exact(returns, [[0.94, 1.0]])
    printed(advantages, ".74", ".6")


@pytest.mark.parametrize("padding", [1, 3])
def test_nan_padding_gives_0_74_0_6_0_and_0_94_1_0(dtype, exact, padding):
    rewards = row([0.0, 1.0] + [NAN] * padding, dtype)
    values = row([0.2, 0.4] + [NAN] * padding, dtype)
    mask = torch.tensor([[True, True] + [False] * padding])
    advantages, returns = ops.gae(rewards, values, mask, gamma=1.0, lam=0.9)
    exact(advantages, [[0.74, 0.6] + [0.0] * padding])
    exact(returns, [[0.94, 1.0] + [0.0] * padding])


def test_nan_reward_at_a_live_action_is_not_erased(dtype, exact):
    """It reaches the advantages of that action and the ones before it, and no other row's."""
    rewards = torch.tensor([[0.0, NAN, 1.0], [0.0, 1.0, NAN]], dtype=dtype)
    values = torch.tensor([[0.2, 0.4, 0.3], [0.2, 0.4, NAN]], dtype=dtype)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = ops.gae(rewards, values, mask, gamma=1.0, lam=0.9)
    assert advantages.isnan().tolist() == [[True, True, False], [False, False, False]]
    assert returns.isnan().tolist() == [[True, True, False], [False, False, False]]
    exact(advantages[0, 2], 0.7)
    exact(advantages[1], [0.74, 0.6, 0.0])


def test_nan_value_at_a_live_action_is_not_erased(dtype):
    values = row([0.2, 0.4, NAN, 0.1], dtype)
    advantages, _ = ops.gae(row([0.0, 0.0, 0.0, 1.0], dtype), values, live(4), gamma=1.0, lam=0.9)
    assert advantages.isnan().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("bad", ["logprobs", "old_logprobs", "advantages"])
def test_nan_at_a_live_action_reaches_the_policy_loss(dtype, bad):
    inputs = {name: row([-1.0, -1.0], dtype) for name in ("logprobs", "old_logprobs", "advantages")}
    inputs[bad][0, 1] = NAN
    leaf = inputs["logprobs"].requires_grad_()
    loss, _ = ops.ppo_loss(**inputs, mask=live(2))
    loss.backward()
    assert loss.isnan()
    assert leaf.grad.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("clip_range", [None, 0.2])
@pytest.mark.parametrize("bad", ["values", "returns"])
def test_nan_at_a_live_action_reaches_the_value_loss(dtype, bad, clip_range):
    inputs = {name: row([0.1, 0.2], dtype) for name in ("values", "old_values", "returns")}
    inputs[bad][0, 1] = NAN
    leaf = inputs["values"].requires_grad_()
    loss, _ = ops.value_loss(**inputs, mask=live(2), clip_range=clip_range)
    loss.backward()
    assert loss.isnan()
    assert leaf.grad.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("bootstrap", [False, True], ids=["terminal", "bootstrap"])
def test_gae_against_a_scalar_recurrence(dtype, exact, bootstrap):
    """Ragged lengths, holes and an empty row, against sums of residuals written in plain Python numbers."""
    generator = torch.Generator().manual_seed(5)
    B, T, gamma, lam = 6, 11, 0.97, 0.9
    rewards = torch.randn(B, T, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(B, T, generator=generator, dtype=torch.float64).to(dtype)
    after = torch.randn(B, generator=generator, dtype=torch.float64).to(dtype)
    lengths = torch.tensor([11, 1, 7, 4, 10, 0])
    mask = torch.arange(T) < lengths.unsqueeze(1)
    mask[2, 3:5] = False
    mask[4, [0, 6, 8]] = False

    expected_advantages = torch.zeros(B, T, dtype=torch.float64)
    expected_returns = torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        steps = [t for t in range(T) if mask[b, t]]
        v = [values[b, t].item() for t in steps] + [after[b].item() if bootstrap else 0.0]
        residuals = [rewards[b, t].item() + gamma * v[i + 1] - v[i] for i, t in enumerate(steps)]
        for i, t in enumerate(steps):
            total = sum((gamma * lam) ** k * residuals[i + k] for k in range(len(steps) - i))
            expected_advantages[b, t] = total
            expected_returns[b, t] = total + v[i]

    advantages, returns = ops.gae(
        rewards.masked_fill(~mask, NAN),
        values.masked_fill(~mask, NAN),
        mask,
        gamma=gamma,
        lam=lam,
        bootstrap_values=after if bootstrap else None,
    )
    exact(advantages, expected_advantages)
    exact(returns, expected_returns)


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (-0.1, 0.9), (1.0, 1.1), (1.0, -0.1)])
def test_gamma_or_lambda_outside_0_1_is_refused(gamma, lam):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"gamma|lam"):
        ops.gae(x, x, live(2), gamma=gamma, lam=lam)


def test_mismatched_shapes_or_a_numeric_mask_are_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="values"):
        ops.gae(x, torch.zeros(1, 3), live(2))
    with pytest.raises(ValueError, match="mask"):
        ops.gae(x, x, live(3))
    with pytest.raises(TypeError, match="mask"):
        ops.gae(x, x, torch.ones(1, 2))


# Variable lengths


def test_score_stands_at_valid_length_minus_1(dtype, exact):
    lengths = torch.tensor([1, 3, 2])
    mask = torch.arange(3) < lengths.unsqueeze(1)
    logprobs = torch.full((3, 3), -1.0, dtype=dtype).masked_fill(~mask, NAN)
    rewards = ops.shape_rewards(torch.tensor([1.0, 2.0, 3.0], dtype=dtype), logprobs, logprobs, mask, kl_coef=0.1)
    exact(rewards, [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 3.0, 0.0]])


def test_padding_changes_neither_losses_nor_whitening(dtype, exact, surrogate):
    """The mean over valid entries: two columns of NaN more leave every number as it was."""
    new, old, advantages = [-0.9, -1.6, -0.4], [-1.0, -1.2, -0.7], [1.0, -2.0, 0.5]
    bare = surrogate(row(new, dtype), row(old, dtype), row(advantages, dtype))
    mask = torch.tensor([[True, True, True, False, False]])
    padded = surrogate(
        row([*new, -1.0, -1.0], dtype), row([*old, -1.0, -1.0], dtype), row([*advantages, 9.0, 9.0], dtype), mask
    )
    exact(padded.loss, bare.loss)
    exact(padded.gradient[:, :3], bare.gradient)
    exact(padded.gradient[:, 3:], [[0.0, 0.0]])

    x = row([*advantages, NAN, NAN], dtype)
    exact(ops.masked_mean(x, mask), (1.0 - 2.0 + 0.5) / 3)
    mean = -0.5 / 3
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / 3)
    exact(ops.whiten(x, mask), [[(a - mean) / std for a in advantages] + [0.0, 0.0]])
    exact(ops.whiten(row([0.6, 0.6], dtype), live(2)), [[0.0, 0.0]])  # no spread: the floor of 1e-8 divides zeros

    values = row([0.5, 0.1, 0.3, NAN, NAN], dtype).requires_grad_()
    zeros = row([0.0, 0.0, 0.0, NAN, NAN], dtype)
    loss, _ = ops.value_loss(values, zeros, zeros, mask, clip_range=None)
    loss.backward()
    exact(loss, 0.5 * (0.25 + 0.01 + 0.09) / 3)
    exact(values.grad, [[0.5 / 3, 0.1 / 3, 0.1, 0.0, 0.0]])


# The entropy bonus

P = [1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(2.0))]  # softmax of (2, 0)
H = -sum(p * math.log(p) for p in P)
HALF_LIVE = torch.tensor([[True, False]])


def entropy_step(policy_loss, dtype, entropy_coef):
    logits = torch.tensor([[[2.0, 0.0], [NAN, NAN]]], dtype=dtype)
    token_ids = torch.tensor([[1, 0]])
    old = row([math.log(P[1]), NAN], dtype)
    return policy_loss(logits, token_ids, old, row([0.0, NAN], dtype), HALF_LIVE, entropy_coef=entropy_coef)


def test_entropy_bonus_gradient_sign_and_nan_padding(dtype, exact, policy_loss):
    result = entropy_step(policy_loss, dtype, 0.05)
    exact(result.loss, -0.05 * H)
    exact(result.gradient, [[[0.05 * p * (math.log(p) + H) for p in P], [0.0, 0.0]]])
    assert result.gradient[0, 0, 0] > 0 > result.gradient[0, 0, 1]
    if result.stats is not None:
        exact(result.stats.entropy_mean, H)
        assert not result.stats.entropy_mean.requires_grad


def test_entropy_step_increases_entropy(dtype, policy_loss):
    result = entropy_step(policy_loss, dtype, 0.05)
    stepped = torch.tensor([[2.0, 0.0]], dtype=dtype) - 0.1 * result.gradient[:, 0]
    _, before = ops.selected_logprobs(torch.tensor([[2.0, 0.0]], dtype=dtype), torch.tensor([1]), return_entropy=True)
    _, after = ops.selected_logprobs(stepped, torch.tensor([1]), return_entropy=True)
    # First order: the squared length of dH/dz, times coefficient and learning rate.
    gain = 0.05 * 0.1 * sum((p * (math.log(p) + H)) ** 2 for p in P)
    assert after > before
    assert after.item() - before.item() == pytest.approx(gain, rel=1e-2, abs=2e-7)


def test_zero_coefficient_leaves_the_update_unchanged(dtype, exact, policy_loss):
    result = entropy_step(policy_loss, dtype, 0.0)
    assert result.loss.item() == 0.0
    assert not result.gradient.any()
    logits = torch.tensor([[[0.7, -0.1, 0.2]]], dtype=dtype)
    p = torch.tensor([0.7, -0.1, 0.2], dtype=torch.float64).softmax(-1)
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    old, advantage = p[1].log().to(dtype).reshape(1, 1), row([1.3], dtype)
    without = policy_loss(logits, torch.tensor([[1]]), old, advantage, entropy_coef=0.0)
    exact(without.gradient[0, 0], 1.3 * (p - one_hot))
    with_bonus = policy_loss(logits, torch.tensor([[1]]), old, advantage, entropy_coef=0.05)
    entropy = -(p * p.log()).sum()
    exact(with_bonus.gradient[0, 0], 1.3 * (p - one_hot) + 0.05 * p * (p.log() + entropy))
    exact(with_bonus.loss, -1.3 - 0.05 * entropy)


def test_entropy_gradient_is_zero_at_a_uniform_distribution(dtype, exact, policy_loss):
    logits = torch.full((1, 1, 4), 1.7, dtype=dtype)
    result = policy_loss(logits, torch.tensor([[2]]), row([-math.log(4.0)], dtype), row([0.0], dtype), entropy_coef=1.0)
    exact(result.loss, -math.log(4.0))
    exact(result.gradient, [[[0.0] * 4]])


def test_entropy_bonus_is_a_mean_over_valid_positions(dtype, exact, policy_loss):
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [5.0, 5.0]]], dtype=dtype)
    mask = torch.tensor([[True, True, False]])
    old = row([math.log(P[0]), math.log(P[0]), 0.0], dtype)
    result = policy_loss(
        logits, torch.tensor([[0, 1, 0]]), old, torch.zeros(1, 3, dtype=dtype), mask, entropy_coef=0.05
    )
    exact(result.loss, -0.05 * H)
    g = [0.05 * p * (math.log(p) + H) / 2 for p in P]
    exact(result.gradient, [[g, g[::-1], [0.0, 0.0]]])


def test_entropy_is_that_of_the_distribution_not_the_surprisal_of_the_token(dtype, exact):
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]], dtype=dtype)
    logprobs, entropy = ops.selected_logprobs(logits, torch.tensor([0, 1]), return_entropy=True)
    exact(entropy, [H, H])
    exact(-logprobs, [-math.log(P[0]), -math.log(P[1])])


@pytest.mark.parametrize("coefficient", [-0.05, NAN, float("inf")], ids=["negative", "nan", "inf"])
def test_negative_or_non_finite_entropy_coefficient_is_refused(coefficient):
    zeros, action = torch.zeros(1, 1), torch.tensor([[0]])
    with pytest.raises(ValueError, match="entropy_coef"):
        ops.ppo_loss(zeros, zeros, zeros, live(1), entropy=zeros, entropy_coef=coefficient)
    hidden, weight = torch.zeros(1, 1, 2), torch.eye(2)
    with pytest.raises(ValueError, match="entropy_coef"):
        ops.linear_ppo_loss(hidden, weight, action, zeros, zeros, live(1), entropy_coef=coefficient)


# Group-relative advantages


def test_group_advantages_of_0_0_1_1_are_minus_1_minus_1_1_1(dtype, exact):
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype)
    exact(ops.group_advantages(scores, 4, eps=0.0), [-1.0, -1.0, 1.0, 1.0])
    shrunk = 0.5 / (0.5 + 1e-4)
    exact(ops.group_advantages(scores, 4), [-shrunk, -shrunk, shrunk, shrunk])


def test_group_advantages_of_equal_scores_are_zero(dtype):
    scores = torch.tensor([0.1, 0.1, 0.1, 0.0, 0.0, 0.0], dtype=dtype)
    for eps in (0.0, 1e-4):
        assert torch.equal(ops.group_advantages(scores, 3, eps=eps), torch.zeros(6, dtype=dtype))


def test_each_group_has_its_own_mean_and_spread(dtype, exact):
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 10.0, 30.0, 30.0, 10.0], dtype=dtype)
    exact(ops.group_advantages(scores, 4, eps=0.0), [-1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0])


# The tabular two-action, two-step PPO: reward 1 for [1, 1] only, seed 19, 12 collections of 32, 3 epochs on each


def collect(logits):
    first = torch.distributions.Categorical(logits=logits[0]).sample((32,))
    second = torch.distributions.Categorical(logits=logits[1 + first]).sample()
    actions = torch.stack([first, second], dim=1)  # [32, 2]
    states = torch.stack([torch.zeros_like(first), 1 + first], dim=1)
    return actions, states, (actions == 1).all(dim=1).double()


def new_parameters(learning_rate):
    torch.manual_seed(19)
    logits = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    value = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    return logits, value, torch.optim.Adam([logits, value], lr=learning_rate)


def step(loss, logits, value, optimizer):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([logits, value], 1.0)
    optimizer.step()


def plain_run(learning_rate):
    """The algorithm in elementary operations: softmax by exp and sum, GAE written out for two steps."""
    logits, value, optimizer = new_parameters(learning_rate)
    metrics = []
    for _ in range(12):
        with torch.no_grad():
            actions, states, score = collect(logits)

        def logprobs(states=states, actions=actions):
            z = logits[states]
            return z.gather(-1, actions[..., None])[..., 0] - z.exp().sum(-1).log()

        old = logprobs().detach()
        kl = old - math.log(0.5)  # the reference is the uniform policy that zeros stand for
        v = value.detach()[states]
        r0, r1 = -0.1 * kl[:, 0], -0.1 * kl[:, 1] + score
        a1 = r1 - v[:, 1]
        a0 = (r0 + v[:, 1] - v[:, 0]) + 0.95 * a1
        raw = torch.stack([a0, a1], 1)
        targets = raw + v
        centred = raw - raw.sum() / raw.numel()
        advantages = centred / max((centred.square().sum() / raw.numel()).sqrt().item(), 1e-8)
        record = {"reward": score.mean().item(), "sampled_sequence_kl": kl.sum(1).mean().item(), "epochs": []}
        for _ in range(3):
            ratio = (logprobs() - old).exp()
            bounded = ratio.clamp(0.8, 1.2)
            actor = -torch.where(ratio * advantages < bounded * advantages, ratio, bounded).mul(advantages).mean()
            critic = 0.5 * (value[states] - targets).square().mean()
            beyond = torch.where(advantages > 0, ratio > 1.2, ratio < 0.8)
            record["epochs"].append((actor.item(), critic.item(), ratio.mean().item(), beyond.double().mean().item()))
            step(actor + 0.5 * critic, logits, value, optimizer)
        metrics.append(record)
    return metrics, logits.detach(), value.detach()


def ops_run(head, learning_rate):
    """The same, every formula replaced by a public op; `head` chooses how logits become the policy loss."""
    logits, value, optimizer = new_parameters(learning_rate)
    reference = logits.detach().clone()
    mask = torch.ones(32, 2, dtype=torch.bool)
    metrics = []
    for _ in range(12):
        actions, states, score = collect(logits.detach())
        one_hot = torch.nn.functional.one_hot(states, 3).double()  # hidden states whose head weight is logits.T

        def score_tokens(table, states=states, actions=actions, one_hot=one_hot):
            if head == "selected_logprobs":
                return ops.selected_logprobs(table[states], actions, return_entropy=True)[0]
            return ops.linear_selected_logprobs(one_hot, table.T, actions, return_entropy=True)[0]

        with torch.no_grad():
            old, ref = score_tokens(logits), score_tokens(reference)
            old_values = value[states]
            rewards = ops.shape_rewards(score, old, ref, mask, kl_coef=0.1)
            raw, targets = ops.gae(rewards, old_values, mask, gamma=1.0, lam=0.95)
            advantages = ops.whiten(raw, mask)
        record = {"reward": score.mean().item(), "sampled_sequence_kl": (old - ref).sum(1).mean().item(), "epochs": []}
        for epoch in range(3):
            if head == "linear_ppo_loss":
                actor, stats = ops.linear_ppo_loss(one_hot, logits.T, actions, old, advantages, mask)
            else:
                actor, stats = ops.ppo_loss(score_tokens(logits), old, advantages, mask)
            if epoch == 0:
                assert stats.ratio_mean.item() == 1.0
                assert stats.ratio_dev_sq.item() == 0.0
            critic, value_stats = ops.value_loss(value[states], old_values, targets, mask, clip_range=None)
            assert value_stats.clipped_fraction.item() == 0.0
            record["epochs"].append((actor.item(), critic.item(), stats.ratio_mean.item(), stats.flat_fraction.item()))
            step(actor + 0.5 * critic, logits, value, optimizer)
        metrics.append(record)
    assert torch.equal(reference, torch.zeros_like(reference))
    return metrics, logits.detach(), value.detach()


# 0.03 is the text's, at which no ratio leaves [0.8, 1.2]; at 0.1 the clip takes part.
@pytest.fixture(scope="module", params=[0.03, 0.1], ids=["text", "clipping"])
def plain(request):
    return request.param, plain_run(request.param)


@pytest.mark.parametrize("head", ["selected_logprobs", "linear_selected_logprobs", "linear_ppo_loss"])
def test_tabular_two_step_ppo(plain, head):
    learning_rate, (plain_metrics, plain_logits, plain_value) = plain
    metrics, logits, value = ops_run(head, learning_rate)

    assert len(metrics) == len(plain_metrics) == 12
    assert metrics[0]["sampled_sequence_kl"] == pytest.approx(0.0, abs=1e-15)
    for ours, theirs in zip(metrics, plain_metrics, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["sampled_sequence_kl"] == pytest.approx(theirs["sampled_sequence_kl"], rel=1e-9, abs=1e-9)
        for mine, reference in zip(ours["epochs"], theirs["epochs"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(value, plain_value, rtol=1e-9, atol=1e-9)

    flat = max(epoch[3] for record in metrics for epoch in record["epochs"])
    assert flat == 0.0 if learning_rate == 0.03 else flat > 0.1
    policy = logits.softmax(-1)
    both = policy[0, 1] * policy[2, 1]
    assert both > 0.5  # from 0.25, so [1, 1] is preferred to the other three together
    assert metrics[-1]["reward"] > metrics[0]["reward"]
