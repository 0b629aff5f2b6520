"""Cutting rows out of a rollout, and what its masks say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ppo_fast.models.tokens import TokenBatch, pad_prompts
from ppo_fast.rollout import Rollout

# Prompts of 3, 1, 2 and 5 tokens, replies of 2, 4, 1 and 3. 0 is the pad id; it is also a prompt's and a reply's token.
PROMPTS = [[11, 12, 13], [21], [0, 32], [41, 42, 43, 44, 45]]
REPLIES = [[14, 1], [22, 0, 24, 25], [1], [46, 47, 48]]
FINISHED = [True, False, True, False]


def equal(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture
def rollout() -> Rollout:
    ids, prompt_mask = pad_prompts(PROMPTS, 0)
    replies = torch.tensor([reply + [0] * (4 - len(reply)) for reply in REPLIES])
    mask = torch.tensor([[t < len(reply) for t in range(4)] for reply in REPLIES])
    logprobs = torch.where(mask, -torch.arange(1.0, 17.0).view(4, 4), 0.0)
    # Sets of one to three tokens, the reply's own first.
    kept = torch.tensor([[[replies[b, t], 50, 51] for t in range(4)] for b in range(4)])
    sizes = torch.tensor([[1, 3, 1, 1], [2, 1, 1, 2], [1, 1, 1, 1], [2, 2, 2, 1]])
    kept = kept.where(mask[..., None] & (torch.arange(3) < sizes[..., None]), -1)
    return Rollout(torch.cat([ids, replies], 1), prompt_mask, mask, logprobs, torch.tensor(FINISHED), kept, 2, (1, 9))


def test_pad_prompts():
    ids, mask = pad_prompts(PROMPTS, 7)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[7, 7, 11, 12, 13], [7, 7, 7, 7, 21], [7, 7, 7, 0, 32], [41, 42, 43, 44, 45]]
    assert mask.tolist() == [[False] * (5 - n) + [True] * n for n in (3, 1, 2, 5)]


def test_views(rollout):
    assert rollout.prompt_length == 5
    assert rollout.response_ids.tolist() == [[14, 1, 0, 0], [22, 0, 24, 25], [1, 0, 0, 0], [46, 47, 48, 0]]
    assert rollout.lengths.tolist() == [2, 4, 1, 3]
    assert rollout.completion_ids() == REPLIES
    assert torch.equal(rollout.attention_mask, torch.cat([rollout.prompt_mask, rollout.response_mask], 1))


def test_position_ids(rollout):
    """From each row's first real token; behind the reply's end they don't matter, and stay in range."""
    positions = rollout.position_ids
    for row, (prompt, reply) in enumerate(zip(PROMPTS, REPLIES, strict=True)):
        live = positions[row][rollout.attention_mask[row]]
        assert live.tolist() == list(range(len(prompt) + len(reply)))
    assert positions.min() == 0
    assert positions.max() == 7


@pytest.mark.parametrize(
    ("rows", "prompt", "reply"), [([0], 3, 2), ([1], 1, 4), ([2], 2, 1), ([2, 0], 3, 2), ([1, 2], 2, 4), ([3, 1], 5, 4)]
)
def test_rows_are_cut_to_the_widest_among_them(rows, prompt, reply, rollout):
    cut = rollout.rows(torch.tensor(rows))
    assert cut.prompt_mask.shape == (len(rows), prompt)
    assert cut.response_mask.shape == cut.logprobs.shape == (len(rows), reply)
    assert cut.token_ids.shape == (len(rows), prompt + reply)
    assert cut.completion_ids() == [REPLIES[row] for row in rows]
    assert cut.finished.tolist() == [FINISHED[row] for row in rows]
    for new, old in enumerate(rows):
        assert cut.token_ids[new, :prompt][cut.prompt_mask[new]].tolist() == PROMPTS[old]
        assert cut.logprobs[new].tolist() == rollout.logprobs[old, :reply].tolist()
        widest = cut.kept_ids.shape[2]
        assert cut.kept_ids[new].tolist() == rollout.kept_ids[old, :reply, :widest].tolist()
        assert (rollout.kept_ids[old, :, widest:] == -1).all()
    assert (cut.kept_ids >= 0).sum(2).max() == widest


def test_rows_of_a_rollout_without_kept_sets(rollout):
    assert dataclasses.replace(rollout, kept_ids=None).rows(torch.tensor([1])).kept_ids is None


def test_all_rows_in_order_are_the_rollout(rollout):
    same = rollout.rows(torch.arange(4))
    for field in dataclasses.fields(rollout):
        assert equal(getattr(same, field.name), getattr(rollout, field.name))


def test_rows_of_rows(rollout):
    once = rollout.rows(torch.tensor([3, 1, 0])).rows(torch.tensor([2, 1]))
    direct = rollout.rows(torch.tensor([0, 1]))
    for field in dataclasses.fields(rollout):
        assert equal(getattr(once, field.name), getattr(direct, field.name))


def test_rows_can_repeat(rollout):
    assert rollout.rows(torch.tensor([2, 2])).completion_ids() == [REPLIES[2]] * 2


def test_rows_without_a_live_token_keep_one_column(rollout):
    """A batch of no width would have no last position."""
    empty = dataclasses.replace(rollout, response_mask=torch.zeros_like(rollout.response_mask))
    cut = empty.rows(torch.tensor([0, 1]))
    assert cut.response_mask.shape == cut.logprobs.shape == (2, 1)
    assert cut.token_ids.shape == (2, 4)


def test_rows_share_nothing_with_the_rollout(rollout):
    cut = rollout.rows(torch.tensor([0, 1, 2, 3]))
    cut.token_ids.fill_(9)
    assert rollout.completion_ids() == REPLIES


def test_to_moves_every_tensor(rollout):
    moved = rollout.to(torch.device("meta"))
    assert isinstance(moved, Rollout)
    for field in dataclasses.fields(rollout):
        before, after = getattr(rollout, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert (after.device.type, after.dtype) == ("meta", before.dtype)
        else:
            assert after == before
    same = rollout.to(torch.device("cpu"))
    assert all(equal(getattr(same, f.name), getattr(rollout, f.name)) for f in dataclasses.fields(rollout))


def test_it_is_frozen(rollout):
    assert isinstance(rollout, TokenBatch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.finished = None
