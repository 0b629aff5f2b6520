from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from ppo_fast.ops import linear_selected_logprobs, selected_logprobs
from ppo_fast.ops._linear import check_layer

V_REAL = 151_936
OPS = torch.ops.ppo_fast


def logits_of(hidden, weight, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, kept_ids=None) -> Tensor:
    """[n, V] as the docstring defines them, in plain autograd; -inf outside of the kept sets."""
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if kept_ids is not None:
        chosen = torch.zeros(z.shape[0], z.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(kept_ids < 0, z.shape[1], kept_ids), True)
        z = z.masked_fill(~chosen[:, :-1], -torch.inf)
    return z


def reference(hidden, weight, ids, **settings) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits_of(hidden, weight, **settings), -1)
    entropy = -(logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1)
    return logp.gather(-1, ids[:, None])[:, 0], entropy


def kept_sets(ids: Tensor, V: int, K: int) -> Tensor:
    """[n, K] distinct ids with the token's own among them, every second row shorter and padded in the middle too."""
    sets = torch.stack([torch.randperm(V)[:K] for _ in ids])
    own = torch.arange(len(ids)) % K
    clash = sets == ids[:, None]
    sets[clash] = sets[torch.arange(len(ids)), own][clash.any(1)]
    sets[torch.arange(len(ids)), own] = ids
    blank = (torch.arange(K) % 3 == 1) & (torch.arange(len(ids)) % 2 == 1)[:, None]
    blank[torch.arange(len(ids)), own] = False
    return torch.where(blank, -1, sets)


def to(x, dtype):
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


FEATURES = {
    "plain": {},
    "all": {"bias": True, "temperature": "each", "softcap": 4.0, "logit_scale": 0.7},
    "kept": {"kept_ids": 5},
    "kept_all": {"kept_ids": 5, "bias": True, "temperature": "each", "softcap": 4.0, "logit_scale": 0.7},
}


def case(name: str, n: int, H: int, V: int, dtype=torch.float64):
    """hidden [n, H], weight [V, H], ids [n] and the settings of one of FEATURES, differentiable where possible."""
    hidden = torch.randn(n, H).to(dtype).requires_grad_()
    weight = torch.randn(V, H).to(dtype).requires_grad_()
    ids = torch.randint(V, (n,))
    settings = dict(FEATURES[name])
    if "bias" in settings:
        settings["bias"] = torch.randn(V).to(dtype).requires_grad_()
    if "temperature" in settings:
        settings["temperature"] = 0.5 + torch.rand(n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if "kept_ids" in settings:
        settings["kept_ids"] = kept_sets(ids, V, settings["kept_ids"])
    return hidden, weight, ids, settings


def derive(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, upstream[: len(outputs)])


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEATURES)
def test_values_and_gradients(cpu_backend, as_exact_as, name, dtype, trainable):
    n, H, V = 7, 24, 4999  # more than one tile of the vocabulary, and odd
    hidden, weight, ids, settings = case(name, n, H, V, dtype)
    if not trainable:
        weight.requires_grad_(False)
        settings = {k: v.detach() if isinstance(v, Tensor) else v for k, v in settings.items()}
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = [torch.randn(n, dtype=stat), torch.randn(n, dtype=stat)]

    def computed(function, at, **extra):
        def leaf(x):
            return x.detach().to(at).requires_grad_(x.requires_grad) if isinstance(x, Tensor) and at else x

        h, w = leaf(hidden), leaf(weight)
        changed = {k: leaf(v) if k != "kept_ids" else v for k, v in settings.items()}
        inputs = [x for x in (h, w, changed.get("bias")) if x is not None and x.requires_grad]
        outputs = function(h, w, ids, **changed, **extra)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, derive(outputs, inputs, [g.to(outputs[0].dtype) for g in upstream])

    for with_entropy in (False, True):

        def formula(*a, outputs=2 if with_entropy else 1, **k):
            return reference(*a, **k)[:outputs]

        got, got_gradients = computed(linear_selected_logprobs, None, return_entropy=with_entropy)
        # The yardstick is a float32 head on the same 16-bit values, its gradients rounded once.
        near, near_gradients = computed(formula, stat)
        exact, exact_gradients = computed(formula, torch.float64)
        if dtype == torch.float64:
            torch.testing.assert_close((got, got_gradients), (exact, exact_gradients), rtol=1e-12, atol=1e-12)
            continue
        for a, b, c in zip(got, near, exact, strict=True):
            as_exact_as(a.detach(), b.detach(), c.detach())
        for a, b, c in zip(got_gradients, near_gradients, exact_gradients, strict=True):
            as_exact_as(a, b.to(dtype), c)
            assert c.any()


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck(cpu_backend, name, return_entropy):
    hidden, weight, ids, settings = case(name, 6, 3, 11)
    mask = torch.tensor([True, False, True, True, False, True])
    bias = settings.pop("bias", None)

    def function(h, w, b=None):
        return linear_selected_logprobs(h, w, ids, bias=b, mask=mask, return_entropy=return_entropy, **settings)

    assert torch.autograd.gradcheck(function, (hidden, weight) if bias is None else (hidden, weight, bias))
    frozen = [None if x is None else x.detach() for x in (weight, bias)]
    assert torch.autograd.gradcheck(lambda h: function(h, *frozen), (hidden,))


def test_real_vocabulary(as_exact_as):
    hidden, weight, ids, _ = case("plain", 3, 8, V_REAL, torch.float32)
    ids[0], ids[1] = 0, V_REAL - 1
    with torch.no_grad():
        weight[77] += 10 * hidden[2] / hidden[2].norm()  # a peaked row
        ids[2] = 77
    got = linear_selected_logprobs(hidden, weight, ids, return_entropy=True)
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact, near = reference(*exact_inputs, ids), reference(hidden, weight, ids)
    upstream = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.3, 0.0, -1.0])]
    for a, b, c in zip(got, near, exact, strict=True):
        as_exact_as(a.detach(), b.detach(), c.detach())
    gradients = derive(got, (hidden, weight), upstream)
    for a, b, c in zip(
        gradients,
        derive(near, (hidden, weight), upstream),
        derive(exact, exact_inputs, [u.double() for u in upstream]),
        strict=True,
    ):
        as_exact_as(a, b, c)


def test_agrees_with_selected_logprobs_on_the_logits():
    hidden, weight, ids, settings = case("all", 6, 5, 40)
    mask = torch.rand(6) > 0.3
    temperature = settings.pop("temperature")
    got = linear_selected_logprobs(
        hidden, weight, ids, mask=mask, temperature=temperature, return_entropy=True, **settings
    )
    logits = logits_of(hidden, weight, **settings)
    expected = selected_logprobs(logits, ids, mask=mask, temperature=temperature, return_entropy=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_kept_sets_equal_the_vocabulary_cut_down_to_them(cpu_backend):
    hidden, weight, ids, settings = case("kept_all", 9, 5, 31)
    everything = {**settings, "kept_ids": torch.arange(31).expand(9, 31)}
    torch.testing.assert_close(
        linear_selected_logprobs(hidden, weight, ids, **everything, return_entropy=True),
        linear_selected_logprobs(hidden, weight, ids, **{**settings, "kept_ids": None}, return_entropy=True),
        rtol=1e-12,
        atol=1e-12,
    )
    alone = {**settings, "kept_ids": torch.stack([torch.full_like(ids, -1), ids], 1)}
    logprobs, entropy = linear_selected_logprobs(hidden, weight, ids, **alone, return_entropy=True)
    assert not logprobs.any()
    assert not entropy.any()


def test_kept_sets_larger_than_a_chunk(cpu_backend, monkeypatch, as_exact_as):
    monkeypatch.setattr("ppo_fast.ops._kept._CHUNK_BYTES", 3 * (5 + 24) * 8)  # three tokens' logits and d_hidden
    monkeypatch.setattr("ppo_fast.ops._kept._CPU_GATHER_BYTES", 2 * 5 * 24 * 8)  # two tokens' rows
    test_values_and_gradients(cpu_backend, as_exact_as, "kept_all", torch.float64, True)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_masked_positions_are_never_read(cpu_backend, trainable, kept, return_entropy):
    hidden, weight, ids, settings = case("kept" if kept else "plain", 8, 6, 50)
    weight.requires_grad_(trainable)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    upstream = [torch.randn(8, dtype=torch.float64)] * (2 if return_entropy else 1)
    inputs = (hidden, weight) if trainable else (hidden,)

    def run(h, ids, upstream, kept_ids, m):
        inputs = (h, weight) if trainable else (h,)
        out = linear_selected_logprobs(h, weight, ids, mask=m, kept_ids=kept_ids, return_entropy=return_entropy)
        out = out if isinstance(out, tuple) else (out,)
        return out, derive(out, inputs, upstream)

    kept_ids = settings.get("kept_ids")
    clean, clean_gradients = run(hidden, ids, upstream, kept_ids, mask)
    poisoned = hidden.detach().masked_fill(~mask[:, None], torch.nan).requires_grad_()
    bad_ids = torch.where(mask, ids, -100)
    bad_kept = None if kept_ids is None else kept_ids.masked_fill(~mask[:, None], 10**6)
    bad_upstream = [u.masked_fill(~mask, torch.nan) for u in upstream]
    dirty, dirty_gradients = run(poisoned, bad_ids, bad_upstream, bad_kept, mask)
    for a, b in zip((*clean, *clean_gradients), (*dirty, *dirty_gradients), strict=True):
        assert torch.equal(a, b)
    assert not dirty[0][~mask].any()
    assert not dirty_gradients[0][~mask].any()
    packed_kept = None if kept_ids is None else kept_ids[mask]
    packed, packed_gradients = run(hidden[mask], ids[mask], [u[mask] for u in upstream], packed_kept, None)
    torch.testing.assert_close(packed[0], clean[0][mask], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed_gradients[0], clean_gradients[0][mask], rtol=1e-12, atol=1e-12)
    assert len(inputs) == len(clean_gradients)


def test_no_token_and_none_live():
    weight = torch.randn(11, 3, requires_grad=True)
    for shape, mask in (((0,), None), ((2, 0), None), ((3,), torch.zeros(3, dtype=torch.bool))):
        hidden = torch.randn(*shape, 3, requires_grad=True)
        ids = torch.zeros(shape, dtype=torch.long)
        for w in (weight, weight.detach()):
            logprobs, entropy = linear_selected_logprobs(hidden, w, ids, mask=mask, return_entropy=True)
            alone = linear_selected_logprobs(hidden, w, ids, mask=mask)
            assert logprobs.shape == entropy.shape == alone.shape == shape
            assert not alone.any()
            (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum() + alone.sum(), hidden)
            assert gradient.shape == hidden.shape
            assert not gradient.any()


def test_one_token_of_any_rank():
    hidden, weight, ids, _ = case("plain", 1, 4, 9)
    (expected,) = linear_selected_logprobs(hidden, weight, ids)
    assert linear_selected_logprobs(hidden[0], weight, ids[0]).shape == ()
    for shape in ((), (1,), (1, 1, 1)):
        got = linear_selected_logprobs(hidden.reshape(*shape, 4), weight, ids.reshape(shape).to(torch.int32))
        assert got.shape == shape
        torch.testing.assert_close(got.reshape(()), expected, rtol=0, atol=0)


def test_strided_inputs_and_broadcast_temperature():
    B, T, H, V = 2, 5, 6, 17
    big = torch.randn(T, B, 2 * H, dtype=torch.float64, requires_grad=True)
    table = torch.randn(H, 2 * V, dtype=torch.float64, requires_grad=True)
    hidden, weight = big.transpose(0, 1)[:, :, ::2], table.T[::2]
    ids = torch.randint(V, (T, B)).T
    mask = (torch.rand(T, B) > 0.3).T
    temperature = torch.tensor([[0.5], [2.0]])
    got = linear_selected_logprobs(hidden, weight, ids, mask=mask, temperature=temperature)
    flat = temperature.expand(B, T).reshape(-1).double()
    expected = reference(hidden.reshape(-1, H), weight, ids.reshape(-1), temperature=flat)[0].reshape(B, T) * mask
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(B, T, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got, (big, table), upstream),
        torch.autograd.grad(expected, (big, table), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_logits_far_from_zero_and_infinite(as_exact_as):
    hidden, weight, ids, _ = case("plain", 4, 6, 30, torch.float32)
    far = torch.full((30,), -1e4)
    got = linear_selected_logprobs(hidden, weight, ids, bias=far, return_entropy=True)
    # What float32 can know is the rounded logits; from these on, nothing may be lost.
    rounded = (hidden @ weight.T + far).double()
    exact = torch.log_softmax(rounded, -1)
    as_exact_as(
        got[0].detach(),
        exact.gather(1, ids[:, None])[:, 0].float().detach(),
        exact.gather(1, ids[:, None])[:, 0].detach(),
    )

    banned = torch.zeros(30)
    banned[::2] = -torch.inf
    odd = ids | 1
    got = linear_selected_logprobs(hidden, weight, odd.clamp(max=29), bias=banned, return_entropy=True)
    expected = reference(hidden[:], weight[1::2], odd.clamp(max=29) // 2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(sum(x.sum() for x in got), (hidden, weight)),
        torch.autograd.grad(sum(x.sum() for x in expected), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert linear_selected_logprobs(hidden, weight, ids & ~1, bias=banned).eq(-torch.inf).all()

    nothing = torch.full((30,), -torch.inf)
    for w in (weight, weight.detach()):
        logprobs, entropy = linear_selected_logprobs(hidden, w, ids, bias=nothing, return_entropy=True)
        assert logprobs.eq(-torch.inf).all()
        assert not entropy.any()
        assert not torch.autograd.grad([logprobs, entropy], hidden, [torch.ones(4)] * 2)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_whose_exponential_overflows(cpu_backend, dtype):
    """Lanes of a vector that hold no token read such logits, too: 0 * inf must not reach d_weight or d_bias."""
    hidden, weight = torch.tensor([[300.0], [-200.0], [1.0]], dtype=dtype), torch.tensor([[1.0], [2.0]], dtype=dtype)
    bias = torch.tensor([100.0, 90.0], dtype=dtype)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    got = torch.autograd.grad(linear_selected_logprobs(*leaves[:2], torch.tensor([0, 0, 1]), bias=bias).sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(reference(*exact[:2], torch.tensor([0, 0, 1]), bias=exact[2])[0].sum(), exact)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_nan_stays_in_its_row():
    hidden, weight, ids, _ = case("plain", 5, 4, 12)
    with torch.no_grad():
        hidden[2, 1] = torch.nan
    rows = torch.tensor([0, 1, 3, 4])
    for w in (weight, weight.detach()):
        logprobs, entropy = linear_selected_logprobs(hidden, w, ids, return_entropy=True)
        ahead = linear_selected_logprobs(hidden, w, ids)
        assert logprobs.isnan().tolist() == entropy.isnan().tolist() == ahead.isnan().tolist() == [0, 0, 1, 0, 0]
        (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum() + ahead.sum(), hidden)
        assert gradient[2].isnan().all()
        assert gradient[rows].isfinite().all()


def test_matrix_products_and_dropped_rows(gemm_flops):
    """1 G to score; 2 G with a frozen head, none of it in the backward pass; 3 G and 4 G by recomputing."""
    n, H, V = 40, 8, 5000
    hidden, weight, ids, _ = case("plain", n, H, V, torch.float32)
    frozen = weight.detach()
    G = 2 * n * V * H
    mask = torch.arange(n) % 4 != 0
    state: dict[str, Tensor] = {}

    def forward(w, **settings):
        def run():
            out = linear_selected_logprobs(hidden, w, ids, **settings)
            state["out"] = out if isinstance(out, Tensor) else out[0] + out[1]

        return run

    def backward(upstream):
        return lambda: state["out"].backward(upstream)

    ones, half = torch.ones(n), (torch.arange(n) < n // 2).float()
    with torch.no_grad():
        assert gemm_flops(forward(weight, return_entropy=True)) == G
    assert gemm_flops(forward(frozen)) == 2 * G
    assert gemm_flops(backward(ones)) == 0
    assert gemm_flops(forward(frozen, mask=mask)) == 2 * G * 3 / 4
    assert gemm_flops(forward(frozen, return_entropy=True)) == G
    assert gemm_flops(backward(ones)) == 2 * G
    assert gemm_flops(forward(frozen, return_entropy=True, entropy_grad=False)) == 2 * G
    assert gemm_flops(backward(ones)) == 0
    assert gemm_flops(forward(weight)) == G
    assert gemm_flops(backward(ones)) == 3 * G
    assert gemm_flops(forward(weight)) == G
    assert gemm_flops(backward(half)) == 3 * G / 2
    hidden.requires_grad_(False)
    assert gemm_flops(forward(weight)) == G
    assert gemm_flops(backward(ones)) == 2 * G
    hidden.requires_grad_(True)
    kept = kept_sets(ids, V, 20)
    assert gemm_flops(forward(frozen, kept_ids=kept)) == 2 * (2 * n * 20 * H)


def test_scoring_never_holds_the_logits():
    n, H, V = 600, 4, 20_000
    hidden, weight, ids, _ = case("plain", n, H, V, torch.float32)
    with (
        torch.no_grad(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record,
    ):
        linear_selected_logprobs(hidden, weight, ids, return_entropy=True)
    largest = max(event.self_cpu_memory_usage for event in record.events())
    assert 0 < largest <= n * 4096 * 4 < n * V * 4


def test_second_backward_with_retained_graph():
    hidden, weight, ids, _ = case("plain", 6, 4, 12)
    upstream = torch.randn(6, dtype=torch.float64)
    for w in (weight, weight.detach()):
        hidden.grad = weight.grad = None
        out = linear_selected_logprobs(hidden.reshape(2, 3, 4), w, ids.reshape(2, 3)).reshape(-1)
        for times in (1, 2, 3):
            out.backward(upstream, retain_graph=True)
            if times == 1:
                once = hidden.grad.clone()
            torch.testing.assert_close(hidden.grad, times * once, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["all", "kept"])
@pytest.mark.parametrize("trainable", [False, True])
def test_entropy_as_a_constant(cpu_backend, trainable, name):
    hidden, weight, ids, settings = case(name, 7, 5, 30)
    mask = torch.arange(7) % 3 != 0
    leaves = [hidden, weight, *([settings["bias"]] if "bias" in settings else [])]
    for leaf in leaves[1:]:
        leaf.requires_grad_(trainable)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    upstream = torch.randn(7, dtype=torch.float64)
    reference = linear_selected_logprobs(hidden, weight, ids, mask=mask, return_entropy=True, **settings)
    expected = torch.autograd.grad(reference[0], wanted, upstream)
    logprobs, entropy = linear_selected_logprobs(
        hidden, weight, ids, mask=mask, return_entropy=True, entropy_grad=False, **settings
    )
    assert not entropy.requires_grad
    assert torch.equal(logprobs, reference[0])
    assert torch.equal(entropy, reference[1])
    got = torch.autograd.grad(logprobs + entropy, wanted, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_double_backward_is_an_error(trainable, return_entropy):
    hidden, weight, ids, _ = case("plain", 4, 3, 7)
    weight.requires_grad_(trainable)
    out = linear_selected_logprobs(hidden, weight, ids, return_entropy=return_entropy)
    out = out[0] if return_entropy else out
    (gradient,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward through ppo_fast::linear_selected_logprobs"):
        gradient.sum().backward()


def test_modes_without_gradients():
    hidden, weight, ids, _ = case("plain", 4, 3, 7)
    expected = linear_selected_logprobs(hidden, weight, ids).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, entropy = linear_selected_logprobs(hidden, weight, ids, return_entropy=True)
        assert not got.requires_grad
        assert not entropy.requires_grad
        assert torch.equal(got, expected)
    assert not linear_selected_logprobs(hidden.detach(), weight.detach(), ids).requires_grad


def test_tied_embedding():
    table = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(13, (6,))

    def loss(function):
        hidden = torch.nn.functional.embedding(ids, table).tanh()
        return function(hidden, table, ids.roll(1)).sum()

    (got,) = torch.autograd.grad(loss(linear_selected_logprobs), table)
    (expected,) = torch.autograd.grad(loss(lambda *a: reference(*a)[0]), table)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_dtypes_that_differ_and_autocast():
    hidden, weight, ids, _ = case("plain", 5, 16, 300, torch.float32)
    narrow = weight.detach().bfloat16()
    got = linear_selected_logprobs(hidden, narrow, ids)
    expected = linear_selected_logprobs(hidden.detach().bfloat16(), narrow, ids)
    assert torch.equal(got, expected)
    (gradient,) = torch.autograd.grad(got.sum(), hidden)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, gradient.bfloat16().float())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_selected_logprobs(hidden, weight, ids)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    gradients = torch.autograd.grad(got.sum(), (hidden, weight))
    assert [g.dtype for g in gradients] == [torch.float32] * 2
    double = hidden.detach().double(), weight.detach().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_selected_logprobs(*double, ids).dtype == torch.float64


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt2", "phi"])
def test_the_heads_of_real_model_families(tiny_model, family):
    """Order and meaning of bias, logit_scale and softcap, against transformers' own forward pass."""
    model = tiny_model(family)
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        logits = model(ids).logits
        hidden = model.base_model(ids).last_hidden_state
    config = model.config
    head = model.get_output_embeddings()
    got = linear_selected_logprobs(
        hidden[:, :-1],
        head.weight.detach(),
        ids[:, 1:],
        bias=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0),
        temperature=0.8,
    )
    expected = selected_logprobs(logits[:, :-1], ids[:, 1:], temperature=0.8)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden": [1.0]}, TypeError, "hidden must be a tensor"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "hidden must be float32"),
        ({"hidden": torch.zeros(2, 4)}, ValueError, r"hidden must have the shape \[\.\.\., H\] with H = 3"),
        ({"hidden": torch.zeros(2, 3, device="meta")}, ValueError, "weight must be on the device of hidden"),
        ({"weight": torch.zeros(3)}, ValueError, r"weight must have the shape \[V, H\]"),
        ({"weight": torch.zeros(0, 3)}, ValueError, r"weight must have the shape \[V, H\] with V, H >= 1"),
        ({"weight": torch.zeros(5, 0)}, ValueError, r"weight must have the shape \[V, H\] with V, H >= 1"),
        ({"weight": torch.zeros(5, 3).to_sparse()}, TypeError, "weight must be a plain dense"),
        ({"bias": torch.zeros(4)}, ValueError, "bias must have the shape"),
        ({"bias": torch.zeros(5, dtype=torch.int)}, TypeError, "bias must be float32"),
        ({"token_ids": torch.zeros(2)}, TypeError, "token_ids must be an integer"),
        ({"token_ids": torch.zeros(3, dtype=torch.long)}, ValueError, "token_ids must have the shape"),
        ({"token_ids": torch.tensor([0, 5])}, IndexError, r"token_ids must lie in \[0, 5\).*got 5 at \[1\]"),
        ({"token_ids": torch.tensor([-1, 0])}, IndexError, r"token_ids must lie in \[0, 5\)"),
        ({"mask": torch.ones(2)}, TypeError, "mask must be torch.bool"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask must have the shape"),
        ({"temperature": 0.0}, ValueError, "temperature must be finite and > 0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite and > 0"),
        ({"temperature": torch.tensor([1.0, torch.inf])}, ValueError, "temperature must be finite and > 0"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature must broadcast"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and > 0"),
        ({"softcap": -3.0}, ValueError, "softcap must be finite and > 0"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite and > 0"),
        ({"kept_ids": torch.tensor([[0.0], [1.0]])}, TypeError, "kept_ids must be int64"),
        ({"kept_ids": torch.tensor([0, 1])}, ValueError, "kept_ids must have the shape of token_ids and one more"),
        ({"kept_ids": torch.zeros(2, 0, dtype=torch.long)}, ValueError, "K >= 1"),
        ({"kept_ids": torch.tensor([[0], [1], [2]])}, ValueError, "kept_ids must have the shape"),
        ({"kept_ids": torch.tensor([[0, 1], [2, -1]])}, IndexError, "kept_ids lacks token 1"),
        ({"kept_ids": torch.tensor([[0, 5], [1, -1]])}, IndexError, r"kept_ids must lie in \[0, 5\)"),
        ({"kept_ids": torch.tensor([[0, -2], [1, -1]])}, IndexError, r"kept_ids must lie in \[0, 5\)"),
        ({"kept_ids": torch.tensor([[0, 0], [1, -1]])}, ValueError, "must not name a token twice"),
    ],
)
def test_bad_input(cpu_backend, change, error, match):
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "token_ids": torch.tensor([0, 1]), **change}
    with pytest.raises(error, match=match):
        linear_selected_logprobs(**arguments)


def test_a_weight_that_only_pretends_to_be_a_tensor_is_refused():
    class Quantised(torch.Tensor):
        pass

    weight = torch.zeros(5, 3).as_subclass(Quantised)
    with pytest.raises(TypeError, match=r"weight must be a plain dense torch\.Tensor or Parameter, got Quantised"):
        linear_selected_logprobs(torch.zeros(2, 3), weight, torch.tensor([0, 1]))


@pytest.mark.parametrize("name", ["all", "kept"])
def test_opcheck(name):
    hidden, weight, ids, settings = case(name, 5, 3, 9)
    bias, mask = settings.get("bias"), torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
    rest = (ids, settings.get("temperature"), mask, settings.get("kept_ids"), settings.get("softcap"), 0.7)
    torch.library.opcheck(OPS.linear_selected_logprobs.default, (hidden, weight, bias, *rest, True, False))
    torch.library.opcheck(
        OPS.linear_selected_logprobs.default,
        (hidden, weight.detach(), None if bias is None else bias.detach(), *rest, False, True),
    )
    torch.library.opcheck(
        OPS.linear_selected_logprobs.default,
        (hidden, weight.detach(), None if bias is None else bias.detach(), *rest, True, True),
    )
    constants = [None if x is None else x.detach() for x in (hidden, weight, bias)]
    needs = (True, True, bias is not None)
    grads = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    torch.library.opcheck(OPS.linear_selected_logprobs_backward.default, (*grads, *constants, *rest, *needs))
    torch.library.opcheck(
        OPS.linear_selected_logprobs_backward_ahead.default, (grads[0], constants[0], mask, torch.float32)
    )


def compiled_target(hidden, weight, ids, mask):
    logprobs, entropy = linear_selected_logprobs(hidden * 2, weight, ids, mask=mask, return_entropy=True)
    ahead = linear_selected_logprobs(hidden * 2, weight.detach(), ids, mask=mask, temperature=0.5)
    constant = linear_selected_logprobs(
        hidden * 2, weight.detach(), ids, mask=mask, return_entropy=True, entropy_grad=False
    )
    return (logprobs + entropy * ahead + constant[0] * constant[1]).sum()


def test_compiles_to_one_graph_for_any_number_of_tokens():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compiled_target, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for n in (5, 9, 2):
        hidden, weight, ids, _ = case("plain", n, 4, 11)
        mask = torch.arange(n) != 1
        got, expected = compiled(hidden, weight, ids, mask), compiled_target(hidden, weight, ids, mask)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        for a, b in zip(
            torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
    with pytest.raises(IndexError, match=r"token_ids must lie in \[0, 11\)"):
        compiled(hidden, weight, ids + 11, mask)


def test_the_head_is_cast_in_one_place():
    layer = check_layer(
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.zeros(7, 4, dtype=torch.float16),
        torch.zeros(2, 3, dtype=torch.uint8),
        bias=None,
        temperature=1.0,
        softcap=None,
        logit_scale=1,
        mask=None,
        kept_ids=None,
    )
    assert (layer.hidden.dtype, layer.hidden.shape) == (torch.float16, (6, 4))
    assert (layer.token_ids.dtype, layer.temperature) == (torch.int64, None)
