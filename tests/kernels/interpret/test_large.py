"""Every kernel where a grid passes 65,535 programs, a row 65,535 positions, or an offset 2^31 elements.

Tensors are allocated, not filled: only pages that a program touches become memory. A program takes the interpreter a
millisecond or more, so of a large grid it runs the first two and the last two; what the others would have written is
not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton.runtime.interpreter as interpreter

from ppo_fast.kernels import common, gae, kept, linear_head, linear_sample, ppo_loss, selected_logprobs, value_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first two programs may read anything

ROWS = 70_001
WIDE = 32_768  # ROWS * WIDE is 2^31 and 7% more
LARGE = 1024  # programs; the interpreter runs all of a smaller grid


@pytest.fixture(autouse=True)
def only_ends_of_large_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(*bounds: int) -> Iterable[int]:
        n = bounds[0]
        return (0, 1, n - 2, n - 1) if len(bounds) == 1 and n > LARGE else range(*bounds)

    monkeypatch.setattr(interpreter, "range", programs, raising=False)


ENDS = torch.tensor([0, 1, ROWS - 2, ROWS - 1])


def sparse(values: Tensor, rows: int = ROWS) -> Tensor:
    """[rows, ...] with ``values`` [4, ...] in the first two and the last two rows, and nothing in the others."""
    x = torch.empty(rows, *values.shape[1:], dtype=values.dtype)
    x[:2], x[-2:] = values[:2], values[2:]
    return x


def close(got: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def backwards(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, decay: float) -> Tensor:
    """Advantages of one row in float64, gamma 1."""
    result, advantage, following = torch.zeros(len(values), dtype=torch.float64), 0.0, float(bootstrap)
    for t in reversed(mask.nonzero()[:, 0].tolist()):
        advantage = float(rewards[t]) + following - float(values[t]) + decay * advantage
        following = float(values[t])
        result[t] = advantage
    return result


def test_gae_of_a_long_row() -> None:
    """Few positions are live, in every block but two; nothing decays, so that the carry crosses all of them."""
    torch.manual_seed(0)
    rewards, values, bootstrap = torch.randn(1, ROWS), torch.randn(1, ROWS), torch.randn(1)
    mask = torch.rand(1, ROWS) < 0.02
    mask[0, 30_000:33_000] = False
    mask[0, [0, -1]] = True
    advantages, returns, moments = gae.gae(rewards, values, mask, 1.0, 1.0, bootstrap)
    exact = backwards(rewards[0], values[0], mask[0], bootstrap[0], 1.0)
    close(advantages[0], exact, 2e-5)
    close(returns[0], torch.where(mask[0], exact + values[0].double(), 0.0), 2e-5)
    live = advantages[mask].double()
    close(moments, torch.stack([mask.sum().double(), live.sum(), (live - live.mean()).square().sum()]), 1e-9)


def test_gae_of_many_long_rows() -> None:
    torch.manual_seed(0)
    rewards, values, bootstrap = torch.randn(4, WIDE), torch.randn(4, WIDE), torch.randn(4)
    mask = torch.rand(4, WIDE) < 0.01
    advantages, _, _ = gae.gae(sparse(rewards), sparse(values), sparse(mask), 1.0, 0.99, sparse(bootstrap))
    for i, row in enumerate(ENDS):
        close(advantages[row], backwards(rewards[i], values[i], mask[i], bootstrap[i], 0.99), 2e-5)


def test_sums_of_many_programs_and_moments_of_many_rows() -> None:
    torch.manual_seed(0)
    table = torch.randn(ROWS, 5, dtype=torch.float64)
    loss, sums = torch.empty(()), torch.empty(4, dtype=torch.float64)
    common.combine(table, loss, sums)
    close(loss, table[:, 0].sum(), 1e-6)
    close(sums, table[:, 1:].sum(0), 1e-11)
    x = 1e3 + torch.randn(ROWS, 5, dtype=torch.float64)
    rows = torch.stack([torch.full((ROWS,), 5.0).double(), x.sum(1), (x - x.mean(1, keepdim=True)).square().sum(1)], 1)
    moments = torch.empty(3, dtype=torch.float64)
    gae._merge_moments_kernel[(1,)](rows, moments, ROWS, ROWS=gae._MERGE_ROWS)
    close(moments, torch.stack([torch.tensor(5.0 * ROWS).double(), x.sum(), (x - x.mean()).square().sum()]), 1e-11)


@pytest.mark.parametrize("shape", [(1, ROWS), (ROWS, 1), (ROWS, WIDE)], ids=str)
def test_losses_of_tokens(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Only the last 1000 tokens are live. What the programs leave is added up by `combine`, tested above."""
    torch.manual_seed(0)
    last: list[Tensor] = []
    for module in (ppo_loss, value_loss):
        monkeypatch.setattr(module, "combine", lambda table, loss, sums: last.append(table[-2:].sum(0)))
    n = shape[0] * shape[1]
    new, step, target, weights = torch.rand(4, 1000).unbind(0)
    mask = torch.empty(n, dtype=torch.bool)
    mask[-2048:] = False
    mask[-1000:] = True
    tensors = [torch.empty(n) for _ in range(3)]
    for x, live in zip(tensors, (new, new - 0.1 * step, target), strict=True):
        x[-1000:] = live
    tensors = [x.reshape(shape) for x in tensors]
    row_weights = torch.empty(shape[0])
    row_weights[-1000:] = weights[-min(shape[0], 1000) :]
    weight = row_weights[-1000:] if shape[1] == 1 else row_weights[-1]
    data = *tensors, mask.reshape(shape), row_weights

    _, d_logprobs, _, _ = ppo_loss.ppo_loss(*data, None, None, 9.0, 9.0, None, 0, 0.0, 0.0, 3)
    ratio = (new.double() - tensors[1].flatten()[-1000:].double()).exp()
    close(d_logprobs.flatten()[-1000:], -weight.double() * ratio * target.double())
    close(last[0][:2], torch.stack([(-weight.double() * ratio * target.double()).sum(), ratio.new_tensor(1000)]))

    _, d_values, _ = value_loss.value_loss(*data, None)
    error = new.double() - target.double()
    close(d_values.flatten()[-1000:], weight.double() * error)
    close(last[1][:2], torch.stack([(0.5 * weight.double() * error.square()).sum(), ratio.new_tensor(1000)]))


def test_rows_of_logits() -> None:
    torch.manual_seed(0)
    some, ids, row = 4 * torch.randn(4, WIDE), torch.randint(WIDE, (4,)), torch.rand(4, 3) + 0.5
    logits, t, c, e = sparse(some.bfloat16())[None], *(sparse(x)[None] for x in row.T)
    results = selected_logprobs.selected_logprobs(logits, sparse(ids)[None], t, None, True)
    rest = sparse(ids)[None], t, None, *results[1:]
    grad = selected_logprobs.selected_logprobs_backward(c, e, logits, *rest)
    table = (some.bfloat16().double() / row[:, :1].double()).requires_grad_()
    logp = table.log_softmax(-1)
    exact = logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    for got, want in zip(results[:2], exact, strict=True):
        close(got[0, ENDS], want.detach())
    (want,) = torch.autograd.grad(exact, table, [row[:, 1].double(), row[:, 2].double()])
    close(grad[0, ENDS], want / row[:, :1].double(), 4e-3)
    selected_logprobs.selected_logprobs_backward_(c, e, logits, *rest)
    assert torch.equal(logits[0, ENDS], grad[0, ENDS])


@pytest.mark.parametrize("way", ["fused", "vendor"])
def test_output_layer_on_many_tokens(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Scored by `head_scores`, whose programs have a block of tokens, and through memory, a program a token."""
    monkeypatch.setenv("PPO_FAST_SCORING", way)
    torch.manual_seed(0)
    hidden, weight, ids, c = torch.randn(ROWS, 3), torch.randn(5, 3), torch.randint(5, (ROWS,)), torch.randn(ROWS)
    head = hidden, weight, None, ids, None, None, 1.0
    table = (hidden[ENDS].double() @ weight.double().T).log_softmax(1)
    exact = table.gather(1, ids[ENDS][:, None])[:, 0], -(table.exp() * table).sum(1)
    logits = None if way == "fused" else torch.empty(ROWS, 5)
    results = linear_head.head_forward(*head, logits, True)
    for got, want in zip(results[:2], exact, strict=True):
        close(got[ENDS], want)
    if logits is None:
        return
    d_hidden = linear_head.head_backward(
        hidden, weight, ids, None, None, 1.0, logits, *results, c, None, True, None, None
    )
    hit = torch.zeros(4, 5).double().scatter_(1, ids[ENDS][:, None], 1.0)
    close(d_hidden[ENDS], (c[ENDS, None].double() * (hit - table.exp())) @ weight.double())


def test_draws_for_many_rows() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, 3), torch.randn(40, 3)
    keys = torch.stack([torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)], 1)
    ids, logprobs, entropy = linear_sample.draw(hidden, weight, None, None, keys, None, 1.0)
    alone = [
        linear_sample.draw(hidden[ends], weight, None, None, keys[ends], None, 1.0) for ends in (ENDS[:2], ENDS[2:])
    ]
    assert torch.equal(ids[ENDS], torch.cat([x[0] for x in alone]))
    table = (hidden[ENDS].double() @ weight.double().T).log_softmax(1)
    close(logprobs[ENDS], table.gather(1, ids[ENDS][:, None])[:, 0])
    close(entropy[ENDS], -(table.exp() * table).sum(1))


def test_draws_from_a_weight_past_two_to_the_31_elements() -> None:
    """Rows of hidden states and weight 2^30 elements apart."""
    torch.manual_seed(0)
    hidden, weight, keys = torch.randn(3, 33).bfloat16(), torch.randn(4, 33).bfloat16(), torch.arange(6).reshape(3, 2)
    far = []
    for x in (hidden, weight):
        far.append(torch.empty((len(x) - 1) * 2**30 + 33, dtype=x.dtype).as_strided(x.shape, (2**30, 1)).copy_(x))
    rest = None, None, keys, None, 1.0
    for got, want in zip(linear_sample.draw(*far, *rest), linear_sample.draw(hidden, weight, *rest), strict=True):
        assert torch.equal(got, want)


def test_kept_sets_of_many_wide_tokens() -> None:
    """Hidden states, weight and both gradients past 2^31 elements; ids of the programs that run are nobody else's."""
    torch.manual_seed(0)
    n, H, V, K = 1_000_001, 2_200, 1_000_001, 3
    ends = torch.tensor([0, 1, n - 2, n - 1])
    own = torch.tensor([[0, 1, 2], [3, 4, 5], [V - 6, V - 5, V - 4], [V - 3, V - 2, V - 1]])
    kept_ids = torch.full((n, K), 1000)
    kept_ids[ends] = own
    some, rows, c = torch.randn(4, H).bfloat16(), (torch.randn(12, H) / H**0.5).bfloat16(), torch.randn(4)
    hidden = sparse(some, n)
    weight = torch.empty(V, H, dtype=torch.bfloat16)
    weight[own.flatten()] = rows
    middle = kept_ids[:, 1].contiguous(), None, kept_ids, None, 1.0
    logits, logprobs, entropy = kept.kept_forward(hidden, weight, None, *middle, True)
    d_weight = torch.empty(V, H)
    d_weight[own.flatten()] = 0
    d_hidden = kept.kept_backward(sparse(c, n), None, logits, hidden, weight, *middle, True, d_weight, None)

    leaves = some.double().requires_grad_(), rows.double().requires_grad_()
    table = torch.einsum("nh,nkh->nk", leaves[0], leaves[1].reshape(4, K, H)).log_softmax(-1)
    close(logprobs[ends], table[:, 1].detach(), 2e-5)
    close(entropy[ends], -(table.exp() * table).sum(-1).detach(), 2e-5)
    exact = torch.autograd.grad((c.double() * table[:, 1]).sum(), leaves)
    close(d_hidden[ends], exact[0], 2e-5)
    first_and_last = torch.tensor([0, 1, V - 2, V - 1])
    close(d_weight[first_and_last], exact[1][[0, 1, -2, -1]], 2e-5)
