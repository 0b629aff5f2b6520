"""Proofs that take minutes: `make test-long`."""

import pytest
import torch

from ppo_fast import ops

pytestmark = pytest.mark.long


def policy_step(logits, token_ids, old_logprobs, advantages, mask, values, returns, rewards):
    """Row-level ops of one update, forward, as somebody's compiled training step would hold them."""
    logprobs, entropy = ops.selected_logprobs(logits, token_ids, mask=mask, return_entropy=True)
    raw, _ = ops.gae(rewards, values.detach(), mask)
    policy, _ = ops.ppo_loss(logprobs, old_logprobs, advantages + raw, mask, entropy=entropy, entropy_coef=0.01)
    value, _ = ops.value_loss(values, values.detach() - 0.1, returns, mask)
    return policy + value


def fused_step(hidden, weight, token_ids, old_logprobs, advantages, mask):
    loss, _ = ops.linear_ppo_loss(hidden, weight, token_ids, old_logprobs, advantages, mask, entropy_coef=0.01)
    return loss + ops.linear_selected_logprobs(hidden, weight, token_ids, mask=mask).square().mean()


def gradients(function, inputs, differentiated):
    leaves = [x.clone().requires_grad_() if i in differentiated else x for i, x in enumerate(inputs)]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, [leaves[i] for i in differentiated])]


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_inductor_with_one_graph_gives_what_eager_gives(rows):
    generator = torch.Generator().manual_seed(rows)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    T, H, V = 5, 8, 331
    ids = torch.randint(0, V, (rows, T), generator=generator)
    mask = torch.rand(rows, T, generator=generator) < 0.8
    mask[0, 0] = True
    tokens = [ids, noise(rows, T) - 5, noise(rows, T), mask]
    cases = [
        (policy_step, [noise(rows, T, V), *tokens, *(noise(rows, T) for _ in range(3))], (0, 5)),
        (fused_step, [noise(rows, T, H), noise(V, H), *tokens], (0, 1)),
    ]
    for function, inputs, differentiated in cases:
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for got, expected in zip(
            gradients(compiled, inputs, differentiated), gradients(function, inputs, differentiated), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ops.backends.available())
def test_a_whole_vocabulary_of_rows_on_every_path(backend):
    """[3000, 151936] through strides: more than 2^31 logits, of which 64 MiB exist."""
    if backend == "triton":
        pytest.skip("Triton kernels run on CPU tensors in the interpreter only: make test covers them there")
    N, V = 3000, 151_936
    rows = 100
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(0))
    stacked = logits[None].expand(N // rows, rows, V)
    ids = (torch.arange(N).reshape(N // rows, rows) * 7919) % V
    with ops.backends.force(backend):
        logprobs, entropy = ops.selected_logprobs(stacked, ids, return_entropy=True)
    wide = logits.double().log_softmax(-1)
    expected = wide.gather(1, ids.T).T
    assert float((logprobs.double() - expected).abs().max()) < 2e-5
    expected_entropy = -(wide.exp() * wide).sum(-1)
    assert float((entropy.double() - expected_entropy).abs().max()) < 1e-4
    assert torch.equal(entropy, entropy[:1].expand_as(entropy))
