from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ppo_fast.ops import linear_ppo_loss, linear_selected_logprobs, linear_token_loss
from ppo_fast.ops import linear_token_loss as function_under_test
from ppo_fast.ops._eager import ppo_token_terms
from ppo_fast.ops.linear_token_loss import _aux_names, _functions

OPS = torch.ops.ppo_fast


def squares(logprobs: Tensor, entropy: Tensor, target: Tensor, weight: Tensor):
    """Nothing of policy gradients in it: smooth, and nonlinear in both."""
    error = logprobs - target
    return weight * (error.square() + logprobs * entropy), {"error": error, "above": error > 0}


def reinforce(logprobs: Tensor, entropy: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return -weight * target * logprobs


def case(shape=(3, 4), H=5, V=23, dtype=torch.float64):
    hidden = torch.randn(*shape, H).to(dtype).requires_grad_()
    weight = torch.randn(V, H).to(dtype).requires_grad_()
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    rows = (torch.randn(*shape, dtype=stat), torch.rand(*shape, dtype=stat))
    return hidden, weight, torch.randint(V, shape), rows, torch.rand(*shape) > 0.3


def by_hand(hidden, weight, ids, token_loss, rows, mask=None, entropy_grad=True, **head) -> Tensor:
    """The same sum, from the log-probs of all live tokens at once."""
    logprobs, entropy = linear_selected_logprobs(hidden, weight, ids, mask=mask, return_entropy=True, **head)
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    returned = token_loss(
        logprobs[live], entropy[live] if entropy_grad else entropy[live].detach(), *(row[live] for row in rows)
    )
    return (returned[0] if isinstance(returned, tuple) else returned).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("kept", [False, True])
def test_values_and_gradients(cpu_backend, kept, entropy_grad, chunk_tokens):
    hidden, weight, ids, rows, mask = case()
    bias = torch.randn(23, dtype=torch.float64, requires_grad=True)
    head = {"bias": bias, "temperature": 0.7, "softcap": 4.0, "logit_scale": 0.8}
    if kept:
        head["kept_ids"] = torch.stack([ids, (ids + 3) % 23, torch.where(ids > 9, -1, (ids + 7) % 23)], -1)
    settings = {"mask": mask, "entropy_grad": entropy_grad, **head}
    loss, aux = linear_token_loss(hidden, weight, ids, squares, rows, chunk_tokens=chunk_tokens, **settings)
    expected = by_hand(hidden, weight, ids, squares, rows, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    inputs = (hidden, weight, bias)
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        assert b.any()
    error = torch.where(mask, linear_selected_logprobs(hidden, weight, ids, **head).detach() - rows[0], 0.0)
    torch.testing.assert_close(aux["error"], error, rtol=1e-12, atol=1e-12)
    assert torch.equal(aux["above"], error > 0)
    assert list(aux) == ["error", "above"]
    assert not aux["error"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(as_exact_as, dtype):
    hidden, weight, ids, rows, mask = case(H=32, V=4999, dtype=dtype)
    got, _ = linear_token_loss(hidden, weight, ids, squares, rows, mask=mask)
    results = []
    for at in (torch.float32, torch.float64):
        leaves = [x.detach().to(at).requires_grad_() for x in (hidden, weight)]
        logp = torch.log_softmax(leaves[0][mask] @ leaves[1].T, -1)
        picked, entropy = logp.gather(-1, ids[mask][:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        loss = squares(picked, entropy, *(row[mask].to(at) for row in rows))[0].sum()
        results.append((loss.detach(), torch.autograd.grad(loss, leaves)))
    as_exact_as(got.detach(), results[0][0], results[1][0])
    for a, b, c in zip(torch.autograd.grad(got, (hidden, weight)), results[0][1], results[1][1], strict=True):
        assert a.dtype == dtype
        as_exact_as(a, b.to(dtype), c)


def test_gradcheck():
    hidden, weight, ids, rows, mask = case((4,), 3, 7)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def function(h, w, b):
        return linear_token_loss(h, w, ids, squares, rows, mask=mask, bias=b, softcap=5.0, chunk_tokens=2)[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h: function(h, weight.detach(), bias.detach()), (hidden,))


def test_ppo_as_a_token_loss_is_linear_ppo_loss():
    hidden, weight, ids, (old, advantages), mask = case()
    old, advantages = old - 3, advantages - 0.5

    def clipped(logprobs, entropy, old, advantages):
        loss, _, flat, _, ratio = ppo_token_terms(
            logprobs,
            old,
            advantages,
            clip_low=0.2,
            clip_high=0.3,
            dual_clip=None,
            objective=0,
            entropy=entropy,
            entropy_coef=0.05,
        )
        return loss / 8, {"flat": flat, "ratio": ratio}

    loss, aux = linear_token_loss(hidden, weight, ids, clipped, (old, advantages), mask=mask, verify=True)
    expected, stats = linear_ppo_loss(
        hidden, weight, ids, old, advantages, mask, clip_high=0.3, entropy_coef=0.05, normalizer=8
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    assert aux["flat"].sum() == stats.flat > 0
    torch.testing.assert_close(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), rtol=1e-11, atol=0
    )


def test_rows_of_any_rank_and_dtype_are_cut_alike():
    hidden, weight, ids, rows, mask = case()
    label, table = torch.randint(5, (3, 4)), torch.randn(3, 4, 5, dtype=torch.float64)
    seen = []

    def looked_up(logprobs, entropy, label, table, keep):
        assert keep.dtype == torch.bool
        seen.append(logprobs.shape[0])
        return torch.where(keep, logprobs, 0.0) * table.gather(1, label[:, None])[:, 0]

    loss = linear_token_loss(
        hidden, weight, ids, looked_up, (label, table, rows[0] > 0), mask=mask, chunk_tokens=4, verify=False
    )
    picked = table.gather(-1, label[..., None])[..., 0]
    logprobs = linear_selected_logprobs(hidden, weight, ids)
    expected = (logprobs * picked * (rows[0] > 0) * mask).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    live = int(mask.sum())
    assert seen == [4] * (live // 4) + ([live % 4] if live % 4 else [])


def test_masked_positions_are_never_read():
    hidden, weight, ids, rows, mask = case()
    clean = linear_token_loss(hidden, weight, ids, squares, rows, mask=mask)
    gradients = torch.autograd.grad(clean[0], (hidden, weight))
    bad = hidden.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    bad_rows = [row.masked_fill(~mask, torch.nan) for row in rows]
    dirty = linear_token_loss(bad, weight, ids.masked_fill(~mask, -1), squares, bad_rows, mask=mask)
    dirty_gradients = torch.autograd.grad(dirty[0], (bad, weight))
    for a, b in zip(
        (clean[0], *clean[1].values(), *gradients), (dirty[0], *dirty[1].values(), *dirty_gradients), strict=True
    ):
        assert torch.equal(a, b)
    assert not dirty_gradients[0][~mask].any()


def test_no_token_and_none_live():
    _, weight, _, _, _ = case()
    for shape, mask in (((0,), None), ((2, 0), None), ((3,), torch.zeros(3, dtype=torch.bool))):
        hidden = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
        ids, row = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        loss, aux = linear_token_loss(hidden, weight, ids, squares, (row, row), mask=mask, verify=True)
        assert loss == 0
        assert {name: x.shape for name, x in aux.items()} == {"error": shape, "above": shape}
        assert not any(x.any() for x in (*aux.values(), *torch.autograd.grad(loss, (hidden, weight))))


def test_matrix_products_and_dropped_rows(gemm_flops):
    n, H, V = 40, 8, 5000
    hidden, weight, ids, _, _ = case((n,), H, V, torch.float32)
    half = (torch.arange(n) < n // 2).float()
    G = 2 * n * V * H

    def forward(w, target, **settings):
        return lambda: linear_token_loss(
            hidden, w, ids, reinforce, (target, torch.ones(n)), chunk_tokens=16, **settings
        )

    frozen = weight.detach()
    with torch.no_grad():
        assert gemm_flops(forward(weight, half)) == G
    assert gemm_flops(forward(frozen, half + 1)) == 2 * G
    assert gemm_flops(forward(weight, half + 1)) == 3 * G
    assert gemm_flops(forward(weight, half)) == G + 2 * G / 2
    assert gemm_flops(forward(weight, half + 1, mask=half > 0)) == 3 * G / 2
    assert gemm_flops(forward(weight, half, verify=True)) == 2 * G + 2 * G / 2
    assert gemm_flops(forward(weight, half)().backward) == 0
    # A loss that does not depend on the policy has no gradient anywhere, and costs no more than its value.
    assert gemm_flops(lambda: linear_token_loss(hidden, weight, ids, lambda p, e, x: x * 2, (half,))) == G


def test_retained_graph_and_factor():
    hidden, weight, ids, rows, mask = case()
    loss, _ = linear_token_loss(hidden, weight, ids, squares, rows, mask=mask)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        torch.testing.assert_close([hidden.grad, weight.grad], [times * g for g in once], rtol=1e-13, atol=0)
    for a, b in zip(torch.autograd.grad(loss * -7, (hidden, weight)), once, strict=True):
        assert torch.equal(a, -7 * b)


def test_double_backward_is_an_error():
    hidden, weight, ids, rows, _ = case()
    loss, _ = linear_token_loss(hidden, weight, ids, squares, rows)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward through ppo_fast::linear_token_loss"):
        gradient.sum().backward()


def test_modes_without_gradients():
    hidden, weight, ids, rows, mask = case()
    expected, expected_aux = linear_token_loss(hidden, weight, ids, squares, rows, mask=mask)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for verify in (False, True):
                loss, aux = linear_token_loss(hidden, weight, ids, squares, rows, mask=mask, verify=verify)
                assert torch.equal(loss, expected)
                assert not loss.requires_grad
                assert torch.equal(aux["error"], expected_aux["error"])
        with mode():  # inference tensors inside, a gradient outside of the mode
            inside = [row.clone() for row in rows]
        loss, _ = linear_token_loss(hidden, weight, ids, squares, inside, mask=mask)
        assert torch.autograd.grad(loss, hidden)[0].any()


def test_autocast_does_not_reach_the_token_loss():
    hidden, weight, ids, rows, _ = case(dtype=torch.float32)

    def product(logprobs, entropy, target, scale):
        return (logprobs[:, None, None] @ target[:, None, None])[:, 0, 0] * scale

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_token_loss(hidden, weight, ids, product, rows)
    narrow = [x.detach().bfloat16() for x in (hidden, weight)]
    torch.testing.assert_close(got, by_hand(*narrow, ids, product, rows), rtol=1e-6, atol=0)


# ----------------------------------------------------------------------------------------------- what isn't token-local


def test_verify_accepts_losses_that_are_local():
    hidden, weight, ids, rows, mask = case(dtype=torch.float32)
    for token_loss in (squares, reinforce):
        linear_token_loss(hidden, weight, ids, token_loss, rows, mask=mask, verify=True)
    linear_token_loss(hidden[:1, 0], weight, ids[:1, 0], squares, [row[:1, 0] for row in rows], verify=True)


NOT_LOCAL = {
    "mean": lambda p, e, t, w: p * t / p.numel(),
    "normaliser": lambda p, e, t, w: p * w / w.sum(),
    "cumsum": lambda p, e, t, w: p.cumsum(0),
    "position": lambda p, e, t, w: p * torch.arange(p.shape[0]),
    "entropy mean": lambda p, e, t, w: p.detach() + e / e.shape[0],
    # A single token is its own mean, to which these are local.
    "centred": lambda p, e, t, w: (p - p.mean()) * t,
    "baseline": lambda p, e, t, w: (p - p.detach().mean()).square(),
    "sequence ratio": lambda p, e, t, w: (p - p.detach() + p.detach().mean()).exp() * t,
    "gspo": lambda p, e, t, w: (p - t).mean().exp().expand_as(p) * w,
    "batch norm": lambda p, e, t, w: (p - p.mean()) / (p.std(correction=0) + 1e-5) * w,
    "batch norm, detached": lambda p, e, t, w: (p - p.detach().mean()) / (p.detach().std(correction=0) + 1e-5) * w,
    "largest weight": lambda p, e, t, w: p * w / w.amax(),
    "best half": lambda p, e, t, w: p * (p >= p.detach().median()),
    "neighbour": lambda p, e, t, w: p * w.roll(1),
    "sorted": lambda p, e, t, w: p.sort().values * w,
    "dropout": lambda p, e, t, w: p * (torch.rand_like(p) < 0.5),
    "noise": lambda p, e, t, w: p * w + 1e-3 * torch.randn_like(p),
    # The same for all, for reversed, halved and doubled tokens, if the sums happen to have one sign.
    "sign of the sum": lambda p, e, t, w: p * t.abs() * (t.abs() - 0.1).sum().sign() if len(p) > 1 else p,
    "auxiliary": lambda p, e, t, w: (p * w, {"centred": p - p.mean()}),
    "auxiliary names": lambda p, e, t, w: (p * w, {f"of {p.numel()}": p}),
}


@pytest.mark.parametrize(("name", "n"), [(name, 9) for name in NOT_LOCAL] + [(name, 1) for name in list(NOT_LOCAL)[:5]])
def test_verify_refuses_losses_that_are_not(name, n):
    hidden, weight, ids, rows, _ = case((n,), dtype=torch.float32)
    token_loss = NOT_LOCAL[name]
    with pytest.raises(ValueError, match=r"token_loss must (be local to the token|always give the same values)"):
        linear_token_loss(hidden, weight, ids, token_loss, rows, verify=True)


def test_verify_finds_one_token_among_many():
    hidden, weight, ids, rows, _ = case((300,), dtype=torch.float32)
    odd = torch.zeros(300, dtype=torch.bool)
    odd[211] = True

    def almost(logprobs, entropy, target, weight, odd):
        return torch.where(odd, logprobs - target.mean(), logprobs - target) * weight

    with pytest.raises(ValueError, match="the loss of live token 211 is"):
        linear_token_loss(hidden, weight, ids, almost, (*rows, odd), verify=True)


@pytest.mark.parametrize("verify", [False, True])
def test_nan_comes_through_as_it_does_unchunked(verify):
    """0 / 0 in some tokens is local, and so is a NaN that only the gradient has."""
    hidden, weight, ids, rows, _ = case((6,))
    good = torch.tensor([True, True, False, True, False, True])
    for token_loss in (
        lambda p, e, t, w, good: p * torch.where(good, w, 0.0) / good,
        lambda p, e, t, w, good: torch.where(good, p, (p * good).sqrt()),
    ):
        loss = linear_token_loss(hidden, weight, ids, token_loss, (*rows, good), chunk_tokens=2, verify=verify)
        expected = by_hand(hidden, weight, ids, token_loss, (*rows, good))
        torch.testing.assert_close(loss, expected, equal_nan=True)
        (got,), (gradient,) = torch.autograd.grad(loss, hidden), torch.autograd.grad(expected, hidden)
        assert gradient.isnan().any()
        torch.testing.assert_close(got, gradient, equal_nan=True, rtol=1e-11, atol=1e-12)


IN_PLACE = {
    "row": lambda p, e, t, w: p * t.mul_(2),
    "log-prob": lambda p, e, t, w: p.detach().sub_(1) * t + p,
    "entropy": lambda p, e, t, w: p + e.detach().zero_(),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_loss_that_changes_its_inputs_is_refused(name, mode):
    """Its gradient would be wrong, and the caller's rows with it."""
    hidden, weight, ids, rows, _ = case((7,), dtype=torch.float32)
    for verify in (False, True):
        with mode(), pytest.raises(ValueError, match="token_loss must not change its inputs in place"):
            linear_token_loss(hidden, weight, ids, IN_PLACE[name], rows, verify=verify)
    with pytest.raises(ValueError, match="token_loss must not change its inputs in place"):
        linear_token_loss(hidden, weight, ids, lambda p, e, t, w: p * t.data.mul_(2), rows, verify=True)


def test_a_loss_that_needs_a_gradient_for_something_else_is_refused():
    """A learned baseline, say: its gradient would be lost without a word."""
    hidden, weight, ids, rows, _ = case((7,))
    baseline = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for used in (baseline[0], (baseline * 2).tanh().sum()):

        def centred(logprobs, entropy, target, weight, used=used):
            return (logprobs - used) * target

        with pytest.raises(ValueError, match=r"uses a tensor of shape \[3\] that requires grad"):
            linear_token_loss(hidden, weight, ids, centred, rows)
        with torch.no_grad():
            linear_token_loss(hidden, weight, ids, centred, rows)
        detached = used.detach()
        linear_token_loss(hidden, weight, ids, lambda p, e, t, w, used=detached: (p - used) * t, rows, verify=True)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("token_loss", "error", "match"),
    [
        (lambda p, e: p.sum(), ValueError, r"token_loss must return one floating-point loss a token, shape \[3\], got"),
        (lambda p, e: p[:, None], ValueError, r"got shape \[3, 1\]"),
        (lambda p, e: p > 0, ValueError, "got shape .* of torch.bool"),
        (lambda p, e: None, TypeError, "token_loss must return a tensor"),
        (lambda p, e: (p, p), TypeError, "got Tensor, Tensor"),
        (lambda p, e: (p, {"x": p.sum()}), ValueError, "token_loss must return one value a token for 'x'"),
        (lambda p, e: (p, {"x": 1.0}), TypeError, "'x': float"),
        ("ppo", TypeError, "token_loss must be callable"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_token_loss(token_loss, error, match, grad):
    hidden, weight = torch.zeros(3, 2, requires_grad=grad), torch.zeros(5, 2)
    with pytest.raises(error, match=match):
        linear_token_loss(hidden, weight, torch.zeros(3, dtype=torch.long), token_loss)
    assert not any(key.startswith("call") for key in (*_functions, *_aux_names))


def test_an_error_inside_the_token_loss_comes_through():
    def broken(logprobs, entropy):
        raise KeyError("mine")

    hidden = torch.zeros(3, 2, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        linear_token_loss(hidden, torch.zeros(5, 2), torch.zeros(3, dtype=torch.long), broken)
    assert not any(key.startswith("call") for key in (*_functions, *_aux_names))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rows": (1.0, torch.zeros(3))}, TypeError, r"rows\[0\] must be a tensor"),
        ({"rows": (torch.zeros(3), torch.zeros(2))}, ValueError, r"rows\[1\] must have the shape of token_ids"),
        ({"rows": (torch.zeros(3, requires_grad=True),) * 2}, ValueError, r"rows\[0\] must not require grad"),
        ({"rows": (torch.zeros(3, device="meta"),) * 2}, ValueError, r"rows\[0\] must be on the device"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be >= 1"),
        ({"chunk_tokens": "all"}, TypeError, "chunk_tokens must be an int"),
        ({"token_ids": torch.tensor([0, 1, 5])}, IndexError, "token_ids must lie in"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must be finite and > 0"),
    ],
)
def test_bad_input(change, error, match):
    arguments = {
        "hidden": torch.zeros(3, 2),
        "weight": torch.zeros(5, 2),
        "token_ids": torch.zeros(3, dtype=torch.long),
        "token_loss": reinforce,
        "rows": (torch.zeros(3), torch.zeros(3)),
        **change,
    }
    with pytest.raises(error, match=match):
        linear_token_loss(**arguments)


# ----------------------------------------------------------------------------------------------- registration, compile


@pytest.mark.parametrize("frozen", [False, True])
def test_opcheck(monkeypatch, frozen):
    monkeypatch.setitem(_functions, "squares", squares)
    monkeypatch.setitem(_aux_names, "squares", None)
    hidden, weight, ids, rows, mask = case((5,), 3, 9)
    weight = weight.detach() if frozen else weight
    layer = (hidden, weight, None, ids, None, mask, None, None, 1.0)
    torch.library.opcheck(
        OPS.linear_token_loss.default, (*layer, list(rows), "squares", True, True, not frozen, False, 2)
    )


def compiled_target(hidden, weight, ids, rows, mask, token_loss):
    returned = function_under_test(hidden * 2, weight, ids, token_loss, rows, mask=mask)
    loss, aux = returned if isinstance(returned, tuple) else (returned, {})
    return 2 * loss, aux


def test_compiles_to_one_graph_for_any_shape():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compiled_target, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for shape in ((2, 3), (3, 5), (2, 7)):
        hidden, weight, ids, rows, mask = case(shape)
        got = compiled(hidden, weight, ids, rows, mask, squares)
        expected = compiled_target(hidden, weight, ids, rows, mask, squares)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(got[0], (hidden, weight))
        torch.testing.assert_close(
            gradients, torch.autograd.grad(expected[0], (hidden, weight)), rtol=1e-12, atol=1e-12
        )
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
    # Another function is another graph, not the first one's loss.
    got = compiled(hidden, weight, ids, rows, mask, reinforce)
    torch.testing.assert_close(got, compiled_target(hidden, weight, ids, rows, mask, reinforce), rtol=1e-12, atol=0)
    assert counter.frame_count > graphs[-1]


def test_inductor(calls):
    torch._dynamo.reset()
    hidden, weight, ids, rows, mask = case()
    compiled = torch.compile(function_under_test, fullgraph=True)
    got, aux = compiled(hidden, weight, ids, squares, rows, mask=mask)
    expected, expected_aux = function_under_test(hidden, weight, ids, squares, rows, mask=mask)
    torch.testing.assert_close((got, aux), (expected, expected_aux), rtol=1e-12, atol=1e-12)
    assert calls(got.backward, "ppo_fast::linear_token_loss") == 0  # what the forward pass made is kept
    gradients = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), gradients, rtol=1e-12, atol=1e-12)


def test_compiled_code_refuses_what_it_could_not_find_again():
    torch._dynamo.reset()
    hidden, weight, ids, rows, mask = case()
    compiled = torch.compile(compiled_target, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="token_loss must be a function at the top level of a module"):
        compiled(hidden, weight, ids, rows, mask, lambda p, e, t, w: p)
    with pytest.raises(Exception, match=r"verify=True must be False under torch\.compile"):
        torch.compile(
            lambda: function_under_test(hidden, weight, ids, squares, rows, verify=True),
            backend="eager",
            fullgraph=True,
        )()
