"""Rewards, truncation rules and advantages of a small batch against formulas written out here in float64."""

import pytest
import torch

from ppo_fast.rollout import Rollout
from ppo_fast.training import PPOConfig
from ppo_fast.training.experience import Forwards, eos_rule, shape

GAMMA, LAM, BETA = 1.0, 0.95, 0.1


def config(**settings):
    return PPOConfig(output_dir="run", gamma=GAMMA, lam=LAM, kl_coef=BETA, **settings)


@pytest.fixture
def batch():
    """Three replies of 3, 1 and 4 tokens; the last was cut at the limit."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 4])
    mask = torch.arange(4)[None] < lengths[:, None]
    noise = lambda: torch.randn(3, 4, generator=generator)  # noqa: E731
    rollout = Rollout(
        token_ids=torch.zeros(3, 6, dtype=torch.int64),
        prompt_mask=torch.ones(3, 2, dtype=torch.bool),
        response_mask=mask,
        logprobs=(-noise().abs()).masked_fill(~mask, 0.0),
        finished=torch.tensor([True, True, False]),
    )
    forwards = Forwards(
        rescored_logprobs=None,
        ref_logprobs=(-noise().abs()).masked_fill(~mask, 0.0),
        values=noise().masked_fill(~mask, 0.0),
        bootstrap_values=torch.tensor([9.0, 9.0, 0.7]),
    )
    return rollout, forwards


def expected_advantages(rollout, forwards, last_rewards, bootstrap, rows):
    """The recursion of seeds/000, Eq. 3.3, one row and one token at a time."""
    result = torch.zeros(3, 4, dtype=torch.float64)
    for row in rows:
        length = int(rollout.response_mask[row].sum())
        following, next_value = 0.0, bootstrap[row]
        for t in reversed(range(length)):
            kl = float(rollout.logprobs[row, t] - forwards.ref_logprobs[row, t])
            reward = -BETA * kl + (last_rewards[row] if t == length - 1 else 0.0)
            value = float(forwards.values[row, t])
            following = reward + GAMMA * next_value - value + GAMMA * LAM * following
            result[row, t], next_value = following, value
    return result


def check(experience, rollout, expected, live):
    torch.testing.assert_close(experience.raw_advantages.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        experience.returns.double(), (expected + experience.values.double()) * live, rtol=1e-5, atol=1e-5
    )
    flat = expected[live]
    whitened = torch.zeros_like(expected)
    whitened[live] = (flat - flat.mean()) / flat.std(correction=0)
    torch.testing.assert_close(experience.advantages.double(), whitened, rtol=1e-4, atol=1e-5)
    assert torch.equal(experience.mask, live)


def test_terminal_scores_every_reply_at_its_last_token(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [1.0, -0.5, 0.25], BETA, config(missing_eos_penalty=0.5))
    expected = expected_advantages(rollout, forwards, [1.0, -0.5, -0.25], [0, 0, 0], rows=[0, 1, 2])
    check(experience, rollout, expected, rollout.response_mask)
    assert experience.scores.tolist() == [1.0, -0.5, -0.25]


def test_bootstrap_gives_a_cut_reply_the_critics_value_and_no_score(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [1.0, -0.5, 0.25], BETA, config(truncation="bootstrap"))
    expected = expected_advantages(rollout, forwards, [1.0, -0.5, 0.0], [0, 0, 0.7], rows=[0, 1, 2])
    check(experience, rollout, expected, rollout.response_mask)


def test_mask_leaves_a_cut_reply_out_of_the_update(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [1.0, -0.5, 0.25], BETA, config(truncation="mask"))
    expected = expected_advantages(rollout, forwards, [1.0, -0.5, 0.0], [0, 0, 0], rows=[0, 1])
    live = rollout.response_mask.clone()
    live[2] = False
    check(experience, rollout, expected, live)


def test_unscored_reply_leaves_the_update_and_the_whitening(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [None, -0.5, 0.25], BETA, config())
    expected = expected_advantages(rollout, forwards, [0.0, -0.5, 0.25], [0, 0, 0], rows=[1, 2])
    live = rollout.response_mask.clone()
    live[0] = False
    check(experience, rollout, expected, live)


def test_kl_in_the_loss_leaves_the_rewards_alone(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [1.0, -0.5, 0.25], BETA, config(kl_in="loss", kl_estimator="k3"))
    assert torch.equal(experience.kl_rewards, torch.zeros(3, 4))
    assert experience.rewards.sum(1).tolist() == [1.0, -0.5, 0.25]


def test_rescored_log_probs_replace_the_samplers(batch):
    rollout, forwards = batch
    rescored = Forwards(rollout.logprobs - 0.25, forwards.ref_logprobs, forwards.values, forwards.bootstrap_values)
    experience = shape(rollout, rescored, [1.0, -0.5, 0.25], BETA, config(old_logprobs="rescored"))
    assert torch.equal(experience.old_logprobs, rescored.rescored_logprobs)


def test_eos_rules():
    scores, finished = torch.tensor([0.5, 0.5]), torch.tensor([True, False])
    assert eos_rule(scores, finished, config()).tolist() == [0.5, 0.5]
    assert eos_rule(scores, finished, config(missing_eos_penalty=2.0)).tolist() == [0.5, -1.5]
    assert eos_rule(scores, finished, config(missing_eos_score=-1.0)).tolist() == [0.5, -1.0]


def test_rows_are_cut_to_the_longest_reply_among_them(batch):
    rollout, forwards = batch
    experience = shape(rollout, forwards, [1.0, -0.5, 0.25], BETA, config())
    cut = experience.rows(torch.tensor([1, 0]))
    assert cut.mask.shape == (2, 3)
    assert torch.equal(cut.advantages, experience.advantages[[1, 0], :3])
    assert torch.equal(cut.scores, experience.scores[[1, 0]])
    assert cut.rollout.token_ids.shape == (2, 5)
