from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from ppo_fast.ops import backends, linear_ppo_loss, ppo_loss, selected_logprobs

OPS = torch.ops.ppo_fast
HEAD = ("bias", "temperature", "softcap", "logit_scale", "kept_ids")


def case(B=3, T=5, H=6, V=29, dtype=torch.float64, scale=1.0):
    """(hidden, weight) and the other positional arguments: old log-probs near the current ones, holes in the mask."""
    hidden = (scale * torch.randn(B, T, H)).to(dtype).requires_grad_()
    weight = (scale * torch.randn(V, H)).to(dtype).requires_grad_()
    ids = torch.randint(V, (B, T))
    with torch.no_grad():
        old = selected_logprobs(hidden.double() @ weight.double().T, ids) + 0.4 * torch.randn(B, T).double()
    mask = torch.rand(B, T) > 0.3
    mask[0] = B == 1  # a row without live tokens, where there are others
    mask[-1, :2] = True
    return (hidden, weight), (ids, old, torch.randn(B, T).double(), mask)


def composed(hidden, weight, ids, old, advantages, mask, **settings):
    """The same loss by way of the logits."""
    head = {k: settings.pop(k) for k in HEAD if k in settings}
    z = hidden @ weight.T
    if "bias" in head:
        z = z + head["bias"]
    z = z * head.get("logit_scale", 1.0)
    if "softcap" in head:
        z = head["softcap"] * torch.tanh(z / head["softcap"])
    if "kept_ids" in head:
        kept = head["kept_ids"]
        chosen = torch.zeros(*z.shape[:-1], z.shape[-1] + 1, dtype=torch.bool)
        chosen.scatter_(-1, torch.where(kept < 0, z.shape[-1], kept), True)
        z = z.masked_fill(~chosen[..., :-1], -torch.inf)
    temperature = head.get("temperature", 1.0)
    logprobs, entropy = selected_logprobs(z, ids, temperature=temperature, mask=mask, return_entropy=True)
    like = {"dtype": logprobs.dtype}
    if "ref_logprobs" in settings:
        settings["ref_logprobs"] = settings["ref_logprobs"].to(**like)
    old = old.to(**like)
    loss, stats = ppo_loss(logprobs, old, advantages.to(**like), mask, entropy=entropy, **settings)
    return loss, stats._replace(log_ratios=torch.where(mask, logprobs.detach() - old, 0.0))


def assert_equal_to_composed(inputs, rest, **settings) -> None:
    tensors = [*inputs, *([settings["bias"]] if "bias" in settings else [])]
    got, stats = linear_ppo_loss(*inputs, *rest, **settings)
    settings.pop("chunk_tokens", None)
    expected, expected_stats = composed(*inputs, *rest, **settings)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    for name, a, b in zip(stats._fields, stats, expected_stats, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        assert not a.requires_grad
    for a, b in zip(torch.autograd.grad(got, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
        assert b.any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
        {"objective": "cispo", "clip_high": 0.25},
        {"entropy_coef": 0.05},
        {"entropy_coef": 0.05, "kl": 0.2, "kl_estimator": "k1"},
        {"kl": 0.2, "kl_estimator": "k2", "aggregation": "sequence_mean"},
        {"kl": 0.2, "kl_estimator": "k3", "aggregation": "sequence_sum_constant", "objective": "cispo"},
        {"normalizer": 117, "aggregation": "sequence_mean", "entropy_coef": 0.3},
        {"normalizer": torch.tensor(40.0)},
    ],
    ids=str,
)
def test_equals_ppo_loss_of_selected_logprobs(settings):
    inputs, rest = case()
    settings = dict(settings)
    if "kl" in settings:
        settings |= {"kl_coef": settings.pop("kl"), "ref_logprobs": rest[1] + 0.3 * torch.randn(3, 5)}
    assert_equal_to_composed(inputs, rest, **settings)
    assert_equal_to_composed(inputs, rest, **settings, chunk_tokens=2)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("kept", [False, True])
def test_every_setting_of_the_head(cpu_backend, kept, entropy_coef):
    inputs, rest = case()
    ids = rest[0]
    settings = {
        "bias": torch.randn(29, dtype=torch.float64, requires_grad=True),
        "temperature": 0.5 + torch.rand(3, 1).double(),
        "softcap": 3.0,
        "logit_scale": 0.6,
        "entropy_coef": entropy_coef,
    }
    if kept:
        others = (ids[..., None] + 1 + torch.arange(4)) % 29
        settings["kept_ids"] = torch.cat([others[..., :2], ids[..., None], others[..., 2:]], -1)
        settings["kept_ids"][1, :, 4] = -1
    assert_equal_to_composed(inputs, rest, chunk_tokens=4, **settings)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradcheck(frozen):
    (hidden, weight), rest = case(B=2, T=3, H=3, V=7)
    rest[3][:] = True
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([[0.7], [1.3]], dtype=torch.float64)

    def function(h, w, b):
        return linear_ppo_loss(
            h, w, *rest, bias=b, entropy_coef=0.1, temperature=temperature, softcap=4.0, logit_scale=0.8, chunk_tokens=2
        )[0]

    if frozen:
        assert torch.autograd.gradcheck(lambda h: function(h, weight.detach(), bias.detach()), (hidden,))
    else:
        assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(as_exact_as, dtype):
    inputs, rest = case(B=4, T=6, H=32, V=4999, dtype=dtype, scale=0.5)
    settings = {"entropy_coef": 0.01, "normalizer": 2048, "chunk_tokens": 5}
    got, stats = linear_ppo_loss(*inputs, *rest, **settings)
    settings.pop("chunk_tokens")
    results = []
    for at in (torch.float32, torch.float64):
        leaves = [x.detach().to(at).requires_grad_() for x in inputs]
        loss, reference_stats = composed(*leaves, *rest, **settings)
        results.append((loss, reference_stats, torch.autograd.grad(loss, leaves)))
    (near, near_stats, near_gradients), (exact, exact_stats, exact_gradients) = results
    # A float32 head on the same values; the terms of the loss cancel, so that its error is on the scale of one term.
    scale = float((rest[2][rest[3]].abs().mean()) * rest[3].sum() / 2048)
    as_exact_as(got.detach(), near.detach(), exact.detach(), scale=scale)
    as_exact_as(stats.log_ratios, near_stats.log_ratios, exact_stats.log_ratios, scale=float(rest[1].abs().max()))
    for a, b, c in zip(torch.autograd.grad(got, inputs), near_gradients, exact_gradients, strict=True):
        assert a.dtype == dtype
        as_exact_as(a, b.to(dtype), c)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The path that CUDA takes: 16-bit products with float32 output, which CPUs lack, and no count of dropped rows."""

    seen = []

    def wide_product(a, b, out_dtype):
        seen.append(a.dtype)
        assert a.dtype == b.dtype != out_dtype
        return a.to(out_dtype) @ b.to(out_dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", wide_product, "CPU")
    library.impl("mm.dtype_out", lambda a, b, out_dtype, *, out: out.copy_(wide_product(a, b, out_dtype)), "CPU")
    monkeypatch.setattr("ppo_fast.ops._head._has_wide_product", lambda device: True)
    monkeypatch.setattr("ppo_fast.ops._head._alive_rows", lambda c, e: None)
    with backends.force("eager"):
        yield seen
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_float32_output(as_on_cuda, as_exact_as, dtype):
    test_precision(as_exact_as, dtype)
    assert set(as_on_cuda) == {dtype}
    inputs, rest = case(H=16, dtype=dtype)
    rest[2][rest[2] < 0] = 0.0  # rows without a gradient, multiplied as zeros here
    loss, _ = linear_ppo_loss(*inputs, *rest)
    gradients = torch.autograd.grad(loss, inputs)
    assert not gradients[0][rest[2] == 0].any()
    assert gradients[0][rest[3] & (rest[2] > 0)].any()


def test_a_loss_scaler_saves_small_float16_gradients():
    """With a large normalizer float16 gradients underflow, unless the factor meets them before they are rounded."""
    inputs, rest = case(H=16, dtype=torch.float16, scale=0.5)
    loss, _ = linear_ppo_loss(*inputs, *rest, normalizer=1e7)
    got = torch.autograd.grad(loss * 2.0**22, inputs)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(composed(*leaves, *rest, normalizer=1e7)[0] * 2.0**22, leaves)
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-3 * float(b.abs().max()))


def test_result_does_not_depend_on_the_chunks():
    inputs, rest = case(B=4, T=7)
    reference = None
    for chunk_tokens in (1, 3, 16, 1000, None):
        loss, stats = linear_ppo_loss(*inputs, *rest, entropy_coef=0.1, chunk_tokens=chunk_tokens)
        result = [loss, *stats, *torch.autograd.grad(loss, inputs)]
        reference = reference or result
        for a, b in zip(result, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_matrix_products_masked_and_dropped_rows(gemm_flops):
    n, H, V = 48, 8, 5000
    hidden, weight = torch.randn(2, n // 2, H), torch.randn(V, H)
    ids = torch.randint(V, (2, n // 2))
    with torch.no_grad():
        old = selected_logprobs(hidden @ weight.T, ids)
    mask, advantages = torch.ones(2, n // 2, dtype=torch.bool), torch.ones(2, n // 2)
    G = 2 * n * V * H

    def forward(h, w, **change):
        arguments = {"old_logprobs": old, "advantages": advantages, "mask": mask, **change}
        return lambda: linear_ppo_loss(h, w, ids, chunk_tokens=20, **arguments)

    h, w = (x.clone().requires_grad_() for x in (hidden, weight))
    with torch.no_grad():
        assert gemm_flops(forward(h, w)) == G
    assert gemm_flops(forward(hidden, weight)) == G
    assert gemm_flops(forward(h, weight)) == 2 * G
    assert gemm_flops(forward(hidden, w)) == 2 * G
    assert gemm_flops(forward(h, w)) == 3 * G
    loss, _ = forward(h, w)()
    assert gemm_flops(loss.backward) == 0

    half = mask.clone()
    half[0] = False
    assert gemm_flops(forward(h, w, mask=half)) == 3 * G / 2
    no_signal = advantages * half
    assert gemm_flops(forward(h, w, advantages=no_signal)) == G + 2 * G / 2
    # Clipped: the ratio is e^0.5 and the advantage positive; with an entropy bonus these rows do have a gradient.
    clipped = old - 0.5 * ~half
    assert gemm_flops(forward(h, w, old_logprobs=clipped)) == G + 2 * G / 2
    assert gemm_flops(lambda: linear_ppo_loss(h, w, ids, clipped, advantages, mask, entropy_coef=0.1)) == 3 * G
    kept = torch.cat([ids[..., None], (ids[..., None] + 1 + torch.arange(9)) % V], -1)
    unclipped = {"kept_ids": kept, "old_logprobs": torch.zeros_like(old)}  # every ratio below 1
    assert gemm_flops(forward(h, weight, **unclipped)) == 2 * (2 * n * 10 * H)
    assert gemm_flops(forward(h, weight, **unclipped, advantages=no_signal)) == 1.5 * (2 * n * 10 * H)


def test_only_chunks_of_logits_exist():
    hidden, weight = torch.randn(1, 256, 4, requires_grad=True), torch.randn(20_000, 4)
    ids = torch.zeros(1, 256, dtype=torch.long)
    flat = torch.randn(1, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        linear_ppo_loss(hidden, weight, ids, flat, flat, flat > -9, chunk_tokens=32)
    largest = max(event.self_cpu_memory_usage for event in record.events())
    assert largest == 32 * 20_000 * 4


@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)))
def test_any_subset_of_inputs_may_require_a_gradient(which):
    (hidden, weight), rest = case()
    bias = torch.randn(29, dtype=torch.float64)
    inputs = [x.detach().clone().requires_grad_(on) for x, on in zip((hidden, weight, bias), which, strict=True)]
    loss, _ = linear_ppo_loss(*inputs[:2], *rest, bias=inputs[2])
    assert loss.requires_grad == any(which)
    if not any(which):
        return
    loss.backward()
    full = [x.detach().clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(linear_ppo_loss(*full[:2], *rest, bias=full[2])[0], full)
    for x, on, gradient in zip(inputs, which, expected, strict=True):
        if on:
            torch.testing.assert_close(x.grad, gradient, rtol=1e-13, atol=1e-15)
        else:
            assert x.grad is None


def test_backward_multiplies_out_of_place_and_only_where_it_must(calls):
    """Under a kept graph, leaves accumulate into what they were given: that must not be the saved gradient itself."""
    (hidden, weight), rest = case()
    name = "ppo_fast::linear_loss_backward"
    once = torch.autograd.grad(linear_ppo_loss(hidden, weight, *rest)[0], (hidden, weight))
    loss, _ = linear_ppo_loss(hidden, weight, *rest)
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        torch.testing.assert_close([hidden.grad, weight.grad], [times * g for g in once], rtol=1e-13, atol=0)
    hidden.grad = weight.grad = None
    assert calls(loss.backward, name) == 0
    torch.testing.assert_close([hidden.grad, weight.grad], list(once), rtol=0, atol=0)
    hidden.grad = weight.grad = None
    loss, _ = linear_ppo_loss(hidden, weight, *rest)
    assert calls((-0.3 * loss).backward, name) == 2
    torch.testing.assert_close([hidden.grad, weight.grad], [-0.3 * g for g in once], rtol=1e-13, atol=0)


def test_a_16_bit_gradient_is_scaled_by_an_unrounded_factor():
    inputs, rest = case(H=16, dtype=torch.bfloat16)
    loss, _ = linear_ppo_loss(*inputs, *rest)
    once = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(torch.autograd.grad(loss / 3, inputs), once, strict=True):
        assert torch.equal(a, (b.float() * (1 / 3)).bfloat16())


def test_double_backward_is_an_error():
    inputs, rest = case()
    for which in inputs:
        loss, _ = linear_ppo_loss(*inputs, *rest)
        (gradient,) = torch.autograd.grad(loss, which, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward through ppo_fast::linear_token_loss or linear_ppo"):
            gradient.sum().backward()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_masked_positions_are_never_read(entropy_coef):
    (hidden, weight), (ids, old, advantages, mask) = case()
    settings = {"entropy_coef": entropy_coef, "kl_coef": 0.1}
    clean = linear_ppo_loss(hidden, weight, ids, old, advantages, mask, ref_logprobs=old - 0.1, **settings)
    gradients = torch.autograd.grad(clean[0], (hidden, weight))

    def poison(x: Tensor) -> Tensor:
        return x.detach().masked_fill(~(mask if x.dim() == 2 else mask[..., None]), torch.nan)

    bad = poison(hidden).requires_grad_()
    bad_ids = ids.masked_fill(~mask, 10**9)
    dirty = linear_ppo_loss(
        bad, weight, bad_ids, poison(old), poison(advantages), mask, ref_logprobs=poison(old - 0.1), **settings
    )
    dirty_gradients = torch.autograd.grad(dirty[0], (bad, weight))
    for a, b in zip((clean[0], *clean[1], *gradients), (dirty[0], *dirty[1], *dirty_gradients), strict=True):
        assert torch.equal(a, b)
    assert not dirty_gradients[0][~mask].any()
    assert not dirty[1].log_ratios[~mask].any()
    assert clean[1].count == mask.sum()


def test_nan_at_a_live_position_propagates():
    (hidden, weight), (ids, old, advantages, mask) = case()
    mask[:] = True
    old[1, 1] = torch.nan
    loss, stats = linear_ppo_loss(hidden, weight, ids, old, advantages, mask)
    assert loss.isnan()
    assert stats.log_ratios.isnan().sum() == 1
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient[1, 1].isnan().all()
    assert gradient.isnan().sum() == hidden.shape[-1]


def test_no_live_token():
    (hidden, weight), (ids, old, advantages, mask) = case()
    with pytest.raises(ValueError, match="mask must have a live token"):
        linear_ppo_loss(hidden, weight, ids, old, advantages, mask & False)
    for B, T in ((3, 5), (0, 5), (3, 0)):
        arguments = [x[:B, :T] for x in (ids, old, advantages, mask & False)]
        loss, stats = linear_ppo_loss(hidden[:B, :T], weight, *arguments, normalizer=7)
        assert loss == 0
        assert stats.count == 0
        assert stats.log_ratios.shape == (B, T)
        for gradient in torch.autograd.grad(loss, (hidden, weight)):
            assert not gradient.any()


def test_one_token():
    inputs, rest = case(B=1, T=1)
    rest[3][:] = True
    assert_equal_to_composed(inputs, rest)


def test_micro_batches_add_up():
    (hidden, weight), rest = case(B=4)
    live = int(rest[3].sum())
    whole, stats = linear_ppo_loss(hidden, weight, *rest)
    halves = [
        linear_ppo_loss(hidden[part], weight, *(x[part] for x in rest), normalizer=live)
        for part in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole, rtol=1e-12, atol=0)
    merged = halves[0][1].merge(halves[1][1])
    torch.testing.assert_close(merged[:-1], stats[:-1], rtol=1e-12, atol=1e-13)
    assert torch.equal(merged.log_ratios, stats.log_ratios.flatten())


def test_autocast_leaves_old_logprobs_alone():
    inputs, rest = case(H=16, V=300, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected, expected_stats = linear_ppo_loss(*narrow, *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, stats = linear_ppo_loss(*inputs, *rest)
        gradients = torch.autograd.grad(loss, inputs)
    assert torch.equal(loss, expected)
    assert torch.equal(stats.log_ratios, expected_stats.log_ratios)
    assert not torch.equal(stats.log_ratios, stats.log_ratios.bfloat16().float())
    for a, b in zip(gradients, torch.autograd.grad(expected, narrow), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_modes_without_gradients(cpu_backend):
    inputs, rest = case()
    expected = linear_ppo_loss(*inputs, *rest, entropy_coef=0.1)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss, stats = linear_ppo_loss(*inputs, *rest, entropy_coef=0.1)
        assert not loss.requires_grad
        torch.testing.assert_close((loss, stats), (expected[0].detach(), expected[1]), rtol=1e-13, atol=0)


def test_tied_embedding():
    table = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(13, (2, 3))
    rest = (ids, torch.randn(2, 3).double() - 2, torch.randn(2, 3).double(), torch.ones(2, 3, dtype=torch.bool))
    hidden = torch.nn.functional.embedding(ids.roll(1), table).tanh()
    (got,) = torch.autograd.grad(linear_ppo_loss(hidden, table, *rest)[0], table, retain_graph=True)
    (expected,) = torch.autograd.grad(composed(hidden, table, *rest)[0], table)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"hidden": torch.zeros(6, 3), "token_ids": torch.zeros(6, dtype=torch.long), "mask": None},
            ValueError,
            "B, T",
        ),
        ({"old_logprobs": torch.zeros(2, 2)}, ValueError, "old_logprobs must have the shape of token_ids"),
        ({"advantages": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "advantages must be float32"),
        ({"ref_logprobs": torch.zeros(3, 2)}, ValueError, "ref_logprobs must have the shape of token_ids"),
        ({"mask": torch.zeros(2, 3)}, TypeError, r"mask must be torch\.bool"),
        ({"mask": None}, TypeError, "mask must be a tensor"),
        ({"kl_coef": 0.1}, ValueError, "ref_logprobs must be given"),
        ({"clip_low": -0.1}, ValueError, "clip_low"),
        ({"entropy_coef": -0.1}, ValueError, "entropy_coef must be finite and >= 0"),
        ({"objective": "grpo"}, ValueError, "objective must be one of"),
        ({"aggregation": "mean"}, ValueError, "aggregation must be one of"),
        ({"normalizer": 0}, ValueError, "normalizer must be finite and > 0"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be >= 1"),
        ({"chunk_tokens": 2.0}, TypeError, "chunk_tokens must be an int"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and > 0"),
        ({"token_ids": torch.full((2, 3), 5)}, IndexError, r"token_ids must lie in \[0, 5\)"),
        ({"kept_ids": torch.ones(2, 3, 1, dtype=torch.long)}, IndexError, "kept_ids lacks token 0"),
    ],
)
def test_bad_input(change, error, match):
    arguments = {
        "hidden": torch.zeros(2, 3, 3),
        "weight": torch.zeros(5, 3),
        "token_ids": torch.zeros(2, 3, dtype=torch.long),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        **change,
    }
    with pytest.raises(error, match=match):
        linear_ppo_loss(**arguments)


def op_arguments(needs=(True, True, True)):
    (hidden, weight), (ids, old, advantages, mask) = case(B=1, T=5, H=3, V=9)
    mask[0] = torch.tensor([True, False, True, True, True])
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    inputs = [x.detach().requires_grad_(on) for x, on in zip((hidden[0], weight, bias), needs, strict=True)]
    layer = (*inputs, ids[0], torch.full((5,), 0.7).double(), mask[0], None, 3.0, 0.5)
    loss = (old[0], advantages[0], torch.full((5,), 0.2).double(), None, 0.2, 0.2, None, 0, 0.1, 0.0, 3)
    return (*layer, *loss, *needs, 2)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)])
def test_opcheck(needs):
    torch.library.opcheck(OPS.linear_ppo_loss.default, op_arguments(needs))
    torch.library.opcheck(
        OPS.linear_loss_backward.default, (torch.tensor(0.5), torch.randn(3, 4).bfloat16(), torch.bfloat16)
    )


def compiled_target(hidden, weight, ids, old, advantages, mask):
    loss, stats = linear_ppo_loss(hidden * 2, weight, ids, old, advantages, mask, entropy_coef=0.1, temperature=0.7)
    return 2 * loss, stats


def test_compiles_to_one_graph_for_any_shape():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compiled_target, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for B, T in ((2, 3), (3, 5), (2, 8)):
        inputs, rest = case(B, T)
        got, expected = compiled(*inputs, *rest), compiled_target(*inputs, *rest)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        gradients = torch.autograd.grad(got[0], inputs)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected[0], inputs), rtol=1e-12, atol=1e-13)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
    (graph,) = (g for g in counter.graphs if any("linear_ppo_loss" in str(n.target) for n in g.graph.nodes))
    assert sum("ppo_fast" in str(node.target) for node in graph.graph.nodes) == 1
