from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_fast.ops import backends, selected_logprobs
from ppo_fast.ops.selected_logprobs import _as_matrix_of_rows

V_REAL = 151_936
OPS = torch.ops.ppo_fast


def formula(logits: Tensor, ids: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """log_softmax, gathered, and the entropy of the same distribution, from their definitions."""
    scale = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    return of_logprobs(torch.log_softmax(logits / scale, -1), ids)


def formula_from_lse(logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The same through a log-sum-exp, rounded once, which is all that the op's backward pass is given."""
    z = logits / temperature[..., None]
    return of_logprobs(z - z.logsumexp(-1, keepdim=True), ids)


def of_logprobs(logp: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    p = logp.exp()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, logp, 0.0), 0.0).sum(-1)
    return logp.gather(-1, ids[..., None])[..., 0], entropy


def run(function, logits: Tensor, c: Tensor | None, e: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, gradient of the logits) of ``function`` under the upstream gradients c and e."""
    logits = logits.clone().requires_grad_()  # clone keeps the strides of dense tensors
    logprobs, entropy = function(logits)
    total = 0.0
    if c is not None:
        total = total + (logprobs * c.to(logprobs.dtype)).sum()
    if e is not None:
        total = total + (entropy * e.to(entropy.dtype)).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return logprobs.detach(), entropy.detach(), gradient


def compare(as_exact_as, logits, ids, c, e, temperature=1.0, mask=None) -> None:
    """The op against the formula in float64, with the formula in the statistics' dtype as the yardstick."""
    live = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask
    scale = temperature if isinstance(temperature, Tensor) else torch.full(ids.shape, temperature, dtype=torch.float64)
    scale = scale.expand(ids.shape)[live]
    cc, ee = (None if g is None else g[live] for g in (c, e))
    got = run(
        lambda x: selected_logprobs(x, ids, temperature=temperature, mask=mask, return_entropy=True), logits, c, e
    )
    assert got[0].dtype == got[1].dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert got[2].dtype == logits.dtype
    rows = logits[live]
    exact = run(lambda x: formula(x, ids[live], scale.double()), rows.double(), cc, ee)
    wide = rows if rows.dtype == torch.float64 else rows.float()
    baseline = run(lambda x: formula(x, ids[live], scale.to(wide.dtype)), wide, cc, ee)
    gradient_baseline = run(lambda x: formula_from_lse(x, ids[live], scale.to(wide.dtype)), wide, cc, ee)[2]
    for i in (0, 1):
        as_exact_as(got[i][live], baseline[i], exact[i])
        assert not got[i][~live].any()
    if logits.dtype in (torch.bfloat16, torch.float16):
        # Formed in float32, rounded once: at most half a unit in the last place off, or half a subnormal.
        half_ulp = torch.finfo(logits.dtype).eps / 2
        floor = torch.finfo(logits.dtype).tiny * half_ulp + 1e-7 * exact[2].abs().max()
        assert ((got[2][live].double() - exact[2]).abs() <= half_ulp * 1.01 * exact[2].abs() + floor).all()
    else:
        # The relative error of p is the absolute error of log p = z - lse, two numbers that were rounded at their size.
        size = (rows.double() / scale[:, None]).logsumexp(1).abs().max().clamp(min=1.0)
        as_exact_as(got[2][live], gradient_baseline, exact[2], scale=float(size * exact[2].abs().max()) / 4)
    assert torch.equal(got[2][~live], torch.zeros_like(got[2][~live]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("V", [1000, 997])
def test_values_and_gradients(cpu_backend, as_exact_as, dtype, V):
    logits = (3 * torch.randn(3, 5, V)).to(dtype)
    ids = torch.randint(V, (3, 5))
    compare(as_exact_as, logits, ids, torch.randn(3, 5), torch.randn(3, 5))


def test_only_one_of_the_outputs_is_differentiated(cpu_backend, as_exact_as):
    logits, ids = 2 * torch.randn(4, 33), torch.randint(33, (4,))
    compare(as_exact_as, logits, ids, torch.randn(4), None)
    compare(as_exact_as, logits, ids, None, torch.randn(4))


@pytest.mark.parametrize(
    "temperature",
    [
        0.7,
        2,
        torch.tensor(0.7),
        torch.tensor([[0.5], [1.3]]),
        torch.linspace(0.5, 1.5, 12).view(2, 6),
        torch.tensor([[1], [3]]),
    ],
    ids=["float", "int", "0-d", "per sequence", "per token", "integers"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature(cpu_backend, as_exact_as, temperature, dtype):
    logits, ids = 3 * torch.randn(2, 6, 101, dtype=dtype), torch.randint(101, (2, 6))
    compare(as_exact_as, logits, ids, torch.randn(2, 6), torch.randn(2, 6), temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabulary(cpu_backend, as_exact_as, dtype):
    logits = (3 * torch.randn(3, V_REAL)).to(dtype)
    ids = torch.tensor([0, V_REAL - 1, 70_001])
    compare(as_exact_as, logits, ids, torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.3, 1.0, -1.0]), 0.8)


def test_peaked_rows(cpu_backend, as_exact_as):
    logits = torch.randn(4, V_REAL)
    peak = torch.tensor([5, 4096, V_REAL - 1, 0])
    logits[torch.arange(4), peak] = 40.0
    ids = torch.tensor([5, 4097, V_REAL - 1, 9])  # twice the peak itself, twice another token
    compare(as_exact_as, logits, ids, torch.randn(4), torch.randn(4))


def test_a_late_maximum_overtakes_the_first_block(cpu_backend, as_exact_as):
    """Rising logits: a running maximum taken from the first block would overflow exp in the last."""
    logits = torch.linspace(-300.0, 300.0, 20_011).expand(2, -1).contiguous()
    compare(as_exact_as, logits, torch.tensor([20_010, 0]), torch.randn(2), torch.randn(2))


@pytest.mark.parametrize("V", [300, 1000, 2047, 5000])
@pytest.mark.parametrize("top", [90.0, 300.0, 2000.0, 1e30, 3e38])
@pytest.mark.parametrize("steep", [1, 30])
def test_later_elements_any_distance_above_the_first(cpu_backend, V, top, steep):
    """exp(x - reference) against an early reference overflows float32, its exponent field, and then x - reference."""
    logits = top * torch.linspace(-1.0, 1.0, V, dtype=torch.float64).abs().pow(steep) * torch.linspace(-1.0, 1.0, V)
    logits = torch.stack([logits, logits.flip(0), logits[torch.randperm(V)]]).float()
    ids = logits.argmax(-1)
    exact = logits.double().log_softmax(-1)
    logprobs, entropy = selected_logprobs(logits, ids, return_entropy=True)
    torch.testing.assert_close(logprobs.double(), exact.amax(-1), rtol=1e-5, atol=1e-6)
    expected = torch.where(exact.exp() > 0, -exact * exact.exp(), 0.0).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("V", [7, V_REAL])
def test_all_logits_at_minus_ten_thousand(cpu_backend, as_exact_as, V):
    logits = torch.full((2, V), -1e4)
    compare(as_exact_as, logits, torch.tensor([0, V - 1]), torch.ones(2), torch.ones(2))
    logprobs, entropy = selected_logprobs(logits, torch.tensor([0, V - 1]), return_entropy=True)
    expected = torch.full((2,), float(torch.tensor(V, dtype=torch.float64).log()))
    assert torch.allclose(entropy, expected, rtol=1e-6)
    assert torch.allclose(logprobs, -expected, rtol=2e-4)  # -1e4 - lse, of which float32 keeps 1e-3


def test_minus_infinity_has_probability_zero(cpu_backend, as_exact_as):
    logits = torch.randn(3, 50)
    logits[:, ::3] = -torch.inf
    logits[2, 1:] = -torch.inf  # all of the mass on one token
    logits[2, 0] = 1.5
    ids = torch.tensor([1, 3, 0])  # the second is impossible
    logprobs, entropy, gradient = run(
        lambda x: selected_logprobs(x, ids, return_entropy=True), logits, torch.tensor([1.0, 0.0, 1.0]), torch.ones(3)
    )
    exact, exact_entropy = formula(logits.double(), ids)
    as_exact_as(logprobs, formula(logits, ids)[0], exact)
    as_exact_as(entropy, formula(logits, ids)[1], exact_entropy)
    assert logprobs[1] == -torch.inf
    assert logprobs[2] == 0 == entropy[2]
    assert not gradient.isnan().any()
    assert not gradient[logits == -torch.inf].any()
    assert not gradient[2].any()


def test_the_gradient_of_an_impossible_token(cpu_backend):
    """p_y = 0: the row of 1[j = y] - p_j as it stands."""
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    _, _, gradient = run(
        lambda x: selected_logprobs(x, torch.tensor([1]), return_entropy=True), logits, torch.tensor([2.0]), None
    )
    assert torch.allclose(gradient, torch.tensor([[-1.0, 2.0, -1.0]]))


def test_a_row_of_minus_infinity(cpu_backend):
    logits = torch.stack([torch.full((40,), -torch.inf), torch.zeros(40)])
    logprobs, entropy, gradient = run(
        lambda x: selected_logprobs(x, torch.tensor([3, 3]), return_entropy=True), logits, torch.ones(2), torch.ones(2)
    )
    assert logprobs[0] == -torch.inf
    assert entropy[0] == 0
    assert not gradient[0].any()
    assert torch.allclose(entropy[1], torch.tensor(40.0).log())
    _, _, lse = OPS.selected_logprobs(logits[None], torch.tensor([[3, 3]]), torch.ones(1, 2), None, False)
    assert lse[0, 0] == -torch.inf
    assert torch.allclose(lse[0, 1], torch.tensor(40.0).log())


def test_nan_stays_in_its_row(cpu_backend, as_exact_as):
    logits = torch.randn(3, 64)
    logits[1, 17] = torch.nan
    ids = torch.tensor([0, 1, 2])
    logprobs, entropy, gradient = run(
        lambda x: selected_logprobs(x, ids, return_entropy=True), logits, torch.ones(3), torch.ones(3)
    )
    assert logprobs[1].isnan()
    assert entropy[1].isnan()
    assert gradient[1].isnan().any()
    others = [0, 2]
    compare(as_exact_as, logits[others], ids[others], torch.ones(2), torch.ones(2))
    assert logprobs[others].isfinite().all()
    assert gradient[others].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_rows_are_never_read(cpu_backend, as_exact_as, poison):
    logits, ids = torch.randn(3, 5, 71), torch.randint(71, (3, 5))
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    logits[~mask] = poison
    ids[~mask] = -100
    temperature = torch.where(mask, 0.9, 1.0)
    compare(as_exact_as, logits, ids, torch.randn(3, 5), torch.randn(3, 5), temperature, mask)


def test_nan_upstream_at_masked_rows(cpu_backend):
    logits, ids = torch.randn(2, 9), torch.tensor([1, 2])
    mask = torch.tensor([True, False])
    c = torch.tensor([1.0, torch.nan])
    _, _, gradient = run(lambda x: selected_logprobs(x, ids, mask=mask, return_entropy=True), logits, c, c)
    assert gradient[0].isfinite().all()
    assert not gradient[1].any()


def test_all_rows_masked(cpu_backend):
    logits, mask = torch.full((2, 3, 11), torch.nan), torch.zeros(2, 3, dtype=torch.bool)
    logprobs, entropy, gradient = run(
        lambda x: selected_logprobs(x, torch.zeros(2, 3, dtype=torch.long), mask=mask, return_entropy=True),
        logits,
        torch.ones(2, 3),
        torch.ones(2, 3),
    )
    assert not logprobs.any()
    assert not entropy.any()
    assert not gradient.any()


class TestLayouts:
    def check(self, as_exact_as, logits: Tensor, view) -> None:
        """``view(logits)`` is what the op sees; the gradient of the whole is compared."""
        seen = view(logits)
        ids = torch.randint(seen.shape[-1], seen.shape[:-1])
        c, e = torch.randn(ids.shape), torch.randn(ids.shape)
        got = run(lambda x: selected_logprobs(view(x), ids, return_entropy=True), logits, c, e)
        exact = run(lambda x: formula(view(x), ids), logits.double(), c, e)
        baseline = run(lambda x: formula(view(x), ids), logits, c, e)
        for a, b, z in zip(got, baseline, exact, strict=True):
            as_exact_as(a, b, z)

    def test_shifted_slice(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(2, 6, 45), lambda x: x[:, :-1])

    def test_slice_of_the_vocabulary(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(2, 6, 45), lambda x: x[..., 3:40])

    def test_transposed_rows(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(6, 2, 45), lambda x: x.transpose(0, 1))

    def test_transposed_vocabulary(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(2, 45, 6), lambda x: x.transpose(1, 2))

    def test_every_other_logit(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(3, 90), lambda x: x[:, ::2])

    def test_four_dimensions(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(2, 3, 4, 21), lambda x: x)
        self.check(as_exact_as, torch.randn(3, 2, 4, 21), lambda x: x.transpose(0, 1)[:, :, 1:])

    def test_one_row(self, cpu_backend, as_exact_as):
        self.check(as_exact_as, torch.randn(45), lambda x: x)
        self.check(as_exact_as, torch.randn(1, 45), lambda x: x)
        self.check(as_exact_as, torch.randn(1, 1, 45), lambda x: x)

    def test_one_token_in_the_vocabulary(self, cpu_backend):
        logits = torch.randn(3, 4, 1)
        for x in (logits, logits.transpose(0, 1), torch.randn(3, 4, 5)[..., 2:3]):
            logprobs, entropy, gradient = run(
                lambda y: selected_logprobs(y, torch.zeros(y.shape[:-1], dtype=torch.long), return_entropy=True),
                x,
                torch.ones(x.shape[:-1]),
                torch.ones(x.shape[:-1]),
            )
            assert not logprobs.any()
            assert not entropy.any()
            assert not gradient.any()

    @pytest.mark.parametrize(
        "logits",
        [
            torch.randn(4, 1, 3).transpose(1, 2),  # V == 1, which is_contiguous finds contiguous at any stride
            torch.randn(4, 5)[:, 2:3],
            torch.randn(2, 3, 4).transpose(1, 2),
            torch.randn(2, 3, 4)[..., ::2],
        ],
    )
    def test_kernels_always_see_stride_one(self, logits):
        rows = _as_matrix_of_rows(logits)
        assert rows.dim() == 3
        assert rows.stride(2) == 1
        assert torch.equal(rows.reshape(logits.shape), logits)

    @pytest.mark.parametrize("logits", [torch.randn(2, 6, 9)[:, :-1], torch.randn(6, 2, 9).transpose(0, 1)[..., 1:]])
    def test_rows_that_are_contiguous_are_not_copied(self, logits):
        assert _as_matrix_of_rows(logits).data_ptr() == logits.data_ptr()

    @pytest.mark.parametrize("shape", [(0, 7), (0, 3, 7), (3, 0, 7)])
    def test_no_rows(self, cpu_backend, shape):
        ids = torch.zeros(shape[:-1], dtype=torch.long)
        logprobs, entropy, gradient = run(
            lambda x: selected_logprobs(x, ids, return_entropy=True),
            torch.randn(shape),
            torch.ones(ids.shape),
            torch.ones(ids.shape),
        )
        assert logprobs.shape == entropy.shape == ids.shape
        assert gradient.shape == shape

    def test_more_elements_than_32_bits_count(self, cpu_backend):
        """Stride 0 makes 20,000 rows of V out of 20; the mask leaves the last ones to be computed."""
        B, T = 1000, 20
        base = torch.randn(T, V_REAL)
        logits = base.expand(B, T, V_REAL)
        assert logits.numel() > 2**31
        ids = torch.randint(V_REAL, (B, T))
        mask = torch.zeros(B, T, dtype=torch.bool)
        mask[0, 0] = mask[-1, -2] = mask[-1, -1] = True
        logprobs = selected_logprobs(logits, ids, mask=mask)
        exact, _ = formula(base.double()[[0, -2, -1]], ids[mask])
        assert torch.allclose(logprobs[mask].double(), exact, rtol=0, atol=1e-5)
        assert logprobs.count_nonzero() == 3


class TestTokenIds:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
    def test_any_integer_dtype(self, cpu_backend, dtype):
        logits, ids = torch.randn(2, 5, 60), torch.randint(60, (2, 5))
        assert torch.equal(selected_logprobs(logits, ids.to(dtype)), selected_logprobs(logits, ids))

    def test_non_contiguous(self, cpu_backend):
        logits, ids = torch.randn(2, 5, 60), torch.randint(60, (5, 2)).T
        assert torch.equal(selected_logprobs(logits, ids), selected_logprobs(logits, ids.contiguous()))

    @pytest.mark.parametrize("bad", [-1, 60, 2**40])
    def test_out_of_range(self, cpu_backend, bad):
        ids = torch.zeros(2, 3, dtype=torch.long)
        ids[1, 2] = bad
        with pytest.raises(IndexError, match=rf"token_ids.*\[0, 60\).*{bad} at \[1, 2\]"):
            selected_logprobs(torch.randn(2, 3, 60), ids)

    def test_the_registered_op_checks_too(self, cpu_backend):
        with pytest.raises((IndexError, RuntimeError), match="token_ids"):
            OPS.selected_logprobs(torch.randn(1, 1, 5), torch.tensor([[5]]), torch.ones(1, 1), None, False)

    @pytest.mark.parametrize("ids", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), [[0, 0, 0]] * 2])
    def test_wrong_type(self, ids):
        with pytest.raises(TypeError, match="token_ids must be"):
            selected_logprobs(torch.randn(2, 3, 60), ids)

    def test_wrong_shape(self):
        with pytest.raises(ValueError, match=r"token_ids must have the shape.*\[2, 3\], got \[2, 4\]"):
            selected_logprobs(torch.randn(2, 3, 60), torch.zeros(2, 4, dtype=torch.long))


class TestArguments:
    ids = torch.zeros(2, 3, dtype=torch.long)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
    def test_temperature(self, temperature):
        with pytest.raises(ValueError, match="temperature must be finite and > 0"):
            selected_logprobs(torch.randn(2, 3, 7), self.ids, temperature=temperature)
        per_sequence = torch.tensor([[1.0], [temperature]])
        with pytest.raises(ValueError, match="temperature must be finite and > 0"):
            selected_logprobs(torch.randn(2, 3, 7), self.ids, temperature=per_sequence)

    def test_temperature_that_does_not_broadcast(self):
        with pytest.raises(ValueError, match=r"temperature must broadcast.*\[2, 3\], got \[2\]"):
            selected_logprobs(torch.randn(2, 3, 7), self.ids, temperature=torch.ones(2))

    def test_logits(self):
        with pytest.raises(TypeError, match="logits must be float32"):
            selected_logprobs(torch.zeros(2, 3, 7, dtype=torch.long), self.ids)
        with pytest.raises(ValueError, match="V >= 1"):
            selected_logprobs(torch.randn(2, 3, 0), self.ids)
        with pytest.raises(ValueError, match="V >= 1"):
            selected_logprobs(torch.tensor(1.0), torch.tensor(0))

    def test_mask(self):
        with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
            selected_logprobs(torch.randn(2, 3, 7), self.ids, mask=torch.ones(2, 3))
        with pytest.raises(ValueError, match="mask must have the shape"):
            selected_logprobs(torch.randn(2, 3, 7), self.ids, mask=torch.ones(2, dtype=torch.bool))

    def test_without_entropy_a_tensor_with_entropy_a_pair(self, cpu_backend):
        logits = torch.randn(2, 3, 7)
        alone = selected_logprobs(logits, self.ids)
        logprobs, _ = selected_logprobs(logits, self.ids, return_entropy=True)
        assert torch.equal(alone, logprobs)

    def test_no_gradient_for_the_temperature(self, cpu_backend):
        temperature = torch.ones(2, 1, requires_grad=True)
        assert not selected_logprobs(torch.randn(2, 3, 7), self.ids, temperature=temperature).requires_grad


class TestInplaceBackward:
    def graph(self, shape=(2, 5, 31), dtype=torch.float32) -> tuple[Tensor, Tensor]:
        """A leaf, and logits computed from it."""
        leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
        return leaf, leaf * 1.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_same_gradient_in_the_same_storage(self, cpu_backend, dtype):
        leaf, logits = self.graph(dtype=dtype)
        ids, mask = torch.randint(31, (2, 5)), torch.rand(2, 5) > 0.3
        c, e = torch.randn(2, 5), torch.randn(2, 5)

        def total(x, inplace):
            logprobs, entropy = selected_logprobs(
                x, ids, mask=mask, temperature=0.7, return_entropy=True, inplace_backward=inplace
            )
            return (logprobs * c + entropy * e).sum()

        (expected,) = torch.autograd.grad(total(leaf * 1.0, False), leaf)
        seen = []
        logits.register_hook(lambda g: seen.append(g.data_ptr()))
        total(logits, True).backward()
        assert torch.equal(leaf.grad, expected)
        assert seen == [logits.data_ptr()]
        assert torch.equal(logits.detach(), expected)

    def test_masked_nan_rows_become_zero(self, cpu_backend):
        leaf = torch.randn(3, 7)
        leaf[1] = torch.nan
        leaf.requires_grad_()
        logits = leaf * 1.0
        mask = torch.tensor([True, False, True])
        ids = torch.zeros(3, dtype=torch.long)
        selected_logprobs(logits, ids, mask=mask, inplace_backward=True).sum().backward()
        assert not logits.detach()[1].any()
        assert not logits.detach().isnan().any()

    def test_slice_of_the_sequence(self, cpu_backend):
        leaf, logits = self.graph()
        ids = torch.randint(31, (2, 4))
        (expected,) = torch.autograd.grad(selected_logprobs((leaf * 1.0)[:, :-1], ids).sum(), leaf)
        selected_logprobs(logits[:, :-1], ids, inplace_backward=True).sum().backward()
        assert torch.equal(leaf.grad, expected)

    def test_no_rows(self, cpu_backend):
        """A tensor without elements may have any strides."""
        for shape in ((0, 1), (0, 7), (2, 0, 7)):
            leaf, logits = self.graph(shape)
            ids = torch.zeros(shape[:-1], dtype=torch.long)
            selected_logprobs(logits, ids, inplace_backward=True).sum().backward()
            assert leaf.grad.shape == shape

    def test_a_second_backward_raises(self, cpu_backend):
        _, logits = self.graph()
        loss = selected_logprobs(logits, torch.zeros(2, 5, dtype=torch.long), inplace_backward=True).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_another_consumer_that_comes_too_late_raises(self, cpu_backend):
        _, logits = self.graph()
        ids = torch.zeros(2, 5, dtype=torch.long)
        other = logits.square().sum()  # saved the logits
        loss = selected_logprobs(logits, ids, inplace_backward=True).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()

    def test_two_ops_on_the_same_logits_raise(self, cpu_backend):
        _, logits = self.graph()
        ids = torch.zeros(2, 5, dtype=torch.long)
        a = selected_logprobs(logits, ids, inplace_backward=True)
        b = selected_logprobs(logits, ids, inplace_backward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (a.sum() + b.sum()).backward()

    def test_a_leaf_is_refused(self, cpu_backend):
        leaf, _ = self.graph()
        with pytest.raises(ValueError, match="got a leaf"):
            selected_logprobs(leaf, torch.zeros(2, 5, dtype=torch.long), inplace_backward=True)

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.transpose(1, 2),
            lambda x: x[:, :1].expand(2, 5, 31),
            lambda x: x.as_strided((2, 5, 20), (155, 10, 1)),
            lambda x: x.as_strided((2, 2, 3, 7), (70, 7, 21, 1)),
        ],
        ids=["V not contiguous", "expanded", "overlapping", "unevenly spaced"],
    )
    def test_other_layouts_are_refused(self, view):
        logits = view(self.graph()[1])
        with pytest.raises(ValueError, match="inplace_backward needs logits whose rows"):
            selected_logprobs(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), inplace_backward=True)

    def test_nothing_is_overwritten_without_a_gradient(self, cpu_backend):
        leaf, logits = self.graph()
        before = logits.detach().clone()
        ids = torch.zeros(2, 5, dtype=torch.long)
        with torch.no_grad():
            selected_logprobs(logits, ids, inplace_backward=True)
            selected_logprobs(leaf, ids, inplace_backward=True)
        selected_logprobs(before, ids, inplace_backward=True)
        assert torch.equal(logits.detach(), before)
        assert logits._version == 0

    def test_double_backward_raises(self, cpu_backend):
        _, logits = self.graph(dtype=torch.float64)
        loss = selected_logprobs(logits, torch.zeros(2, 5, dtype=torch.long), inplace_backward=True).sum()
        with pytest.raises(RuntimeError, match="double backward through ppo_fast::selected_logprobs"):
            torch.autograd.grad(loss, logits, create_graph=True)


class TestAutograd:
    def test_gradcheck(self, cpu_backend):
        logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
        ids, mask = torch.randint(7, (2, 3)), torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.bool)
        temperature = torch.rand(2, 3, dtype=torch.float64) + 0.5
        assert torch.autograd.gradcheck(
            lambda x: selected_logprobs(x, ids, temperature=temperature, mask=mask, return_entropy=True), logits
        )

    def test_second_backward_is_right(self, cpu_backend):
        logits = torch.randn(2, 7, requires_grad=True)
        loss = selected_logprobs(logits, torch.tensor([1, 2])).square().sum()
        (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (second,) = torch.autograd.grad(loss, logits)
        assert torch.equal(first, second)

    def test_double_backward_raises(self, cpu_backend):
        logits = torch.randn(2, 7, requires_grad=True)
        loss = selected_logprobs(logits, torch.tensor([1, 2])).sum()
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward through ppo_fast::selected_logprobs"):
            gradient.sum().backward()

    def test_no_grad_and_inference_mode(self, cpu_backend):
        logits = torch.randn(2, 7, requires_grad=True)
        expected = selected_logprobs(logits, torch.tensor([1, 2]))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = selected_logprobs(logits, torch.tensor([1, 2]))
            assert not got.requires_grad
            assert torch.equal(got, expected)

    def test_autocast_keeps_float32_statistics(self, cpu_backend):
        logits = torch.randn(2, 7, requires_grad=True)
        expected = run(lambda x: selected_logprobs(x, torch.tensor([1, 2]), return_entropy=True), logits.detach(),
                       torch.ones(2), torch.ones(2))  # fmt: skip
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = run(lambda x: selected_logprobs(x, torch.tensor([1, 2]), return_entropy=True), logits.detach(),
                      torch.ones(2), torch.ones(2))  # fmt: skip
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("inplace", [False, True])
    def test_compiles_to_one_graph(self, inplace):
        weight = torch.randn(5, 33, requires_grad=True)
        hidden, ids = torch.randn(2, 4, 5), torch.randint(33, (2, 4))
        mask = torch.rand(2, 4) > 0.3

        def total(weight, hidden):
            logprobs, entropy = selected_logprobs(
                hidden @ weight, ids, temperature=0.9, mask=mask, return_entropy=True, inplace_backward=inplace
            )
            return (logprobs.square() + entropy).sum()

        compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
        expected = torch.autograd.grad(total(weight, hidden), weight)[0]
        got = torch.autograd.grad(compiled(weight, hidden), weight)[0]
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(compiled(weight, hidden), total(weight, hidden))

    def test_compiled_for_any_number_of_rows(self):
        compiled = torch.compile(
            lambda x, ids: selected_logprobs(x, ids), fullgraph=True, backend="aot_eager", dynamic=True
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in (4, 5, 9):
                x, ids = torch.randn(n, 13), torch.randint(13, (n,))
                assert torch.allclose(compiled(x, ids), formula(x, ids)[0], atol=1e-6)

    def test_overwriting_is_compiled_for_any_number_of_rows(self):
        """The layout check must not need to know symbolic sizes."""

        def total(x, ids):
            return selected_logprobs(3 * x, ids, inplace_backward=True).square().sum()

        compiled = torch.compile(total, fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (4, 5, 9):
            x, ids = torch.randn(2, n, 13, requires_grad=True), torch.randint(13, (2, n))
            got, expected = (torch.autograd.grad(f(x, ids), x)[0] for f in (compiled, total))
            assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)

    def test_opcheck(self, opcheck):
        for return_entropy in (False, True):
            logits = torch.randn(2, 3, 8).bfloat16()
            ids, ones = torch.randint(8, (2, 3)), torch.ones(2, 3)
            mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
            _, entropy, lse = OPS.selected_logprobs(logits, ids, ones, mask, return_entropy)
            e = torch.randn(2, 3) if return_entropy else None
            forward = (logits.clone().requires_grad_(), ids, ones, mask, return_entropy)
            assert [x.requires_grad for x in OPS.selected_logprobs(*forward)] == [True, return_entropy, False]
            opcheck(OPS.selected_logprobs, forward)
            backward = (torch.randn(2, 3), e, logits, ids, ones, mask, entropy, lse)
            opcheck(OPS.selected_logprobs_backward, backward)
            opcheck(OPS.selected_logprobs_backward_, backward)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    """Random shapes, layouts, scales and masks, on every CPU path, against the formula in float64."""
    V = data.draw(st.integers(1, 70), label="V")
    B, T = data.draw(st.integers(1, 3), label="B"), data.draw(st.integers(1, 5), label="T")
    scale = data.draw(st.sampled_from([0.01, 1.0, 30.0]), label="scale")
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    logits = scale * torch.randn(B, T + 1, V + 3, dtype=torch.float64)
    logits = data.draw(
        st.sampled_from([lambda x: x[:, 1:, 3:], lambda x: x[:, :-1, :-3].contiguous(), lambda x: x[:, 1:, :V]])
    )(logits)
    ids, mask = torch.randint(V, (B, T)), torch.rand(B, T) > 0.3
    temperature = torch.rand(B, 1, dtype=torch.float64) + 0.5
    c, e = torch.randn(B, T, dtype=torch.float64), torch.randn(B, T, dtype=torch.float64)
    expected = run(lambda x: formula(x, ids, temperature.expand(B, T)), logits, c * mask, e * mask)
    for name in [name for name in backends.available() if name != "triton"]:
        with backends.force(name):
            got = run(
                lambda x: selected_logprobs(x, ids, temperature=temperature, mask=mask, return_entropy=True),
                logits, c, e,
            )  # fmt: skip
        assert torch.allclose(got[0], expected[0] * mask, rtol=1e-12, atol=1e-12)
        assert torch.allclose(got[1], expected[1] * mask, rtol=1e-12, atol=1e-12)
        assert torch.allclose(got[2], expected[2], rtol=1e-12, atol=1e-11)


def test_check_variable_sees_only_what_is_cheap(monkeypatch):
    """On the meta device nothing can be looked at; on CPU it always is."""
    ids = torch.full((2,), 99)
    logits = torch.randn(2, 7)
    assert selected_logprobs(logits.to("meta"), ids.to("meta")).shape == (2,)
    monkeypatch.setenv("PPO_FAST_CHECK", "0")
    with pytest.raises(IndexError):
        selected_logprobs(logits, ids)
