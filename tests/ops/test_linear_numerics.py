"""How far the linear ops may be from float64, on every CPU path.

Three yardsticks, each PyTorch on the same inputs: for float32 inputs at most twice the error of float32 PyTorch in all
results; for 16-bit inputs log-probs and entropies as exact as a float32 head makes them, at most twice its error, and
gradients at most as far off as those of 16-bit PyTorch (16-bit logits and products, softmax in float32). And what no
error bound says: log-probs are never positive, entropies never negative, the gradient of a row of logits sums to zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ppo_fast.ops import linear_ppo_loss, linear_selected_logprobs, linear_token_loss

V_REAL = 151_936
EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.usefixtures("cpu_backend")


def surrogate(logprobs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    return -weights * ((logprobs - old).exp() * advantages + 0.02 * entropy)


def by_logprobs(hidden, weight, bias, ids, rows) -> tuple[Tensor, ...]:
    return linear_selected_logprobs(hidden, weight, ids, bias=bias, return_entropy=True)


def by_logprobs_alone(hidden, weight, bias, ids, rows) -> tuple[Tensor, ...]:
    return (linear_selected_logprobs(hidden, weight, ids, bias=bias),)


def by_ppo_loss(hidden, weight, bias, ids, rows) -> tuple[Tensor, ...]:
    old, advantages, _ = (row[None] for row in rows)
    settings = {"clip_low": 1.0, "clip_high": math.inf, "entropy_coef": 0.02, "normalizer": 1 / float(rows[2][0])}
    mask = torch.ones_like(old, dtype=torch.bool)
    return (linear_ppo_loss(hidden[None], weight, ids[None], old, advantages, mask, bias=bias, **settings)[0],)


def by_token_loss(hidden, weight, bias, ids, rows) -> tuple[Tensor, ...]:
    loss = linear_token_loss(hidden, weight, ids, surrogate, rows, bias=bias)
    assert isinstance(loss, Tensor)
    return (loss,)


def in_pytorch(hidden, weight, bias, ids, rows, entropy_too: bool, is_loss: bool) -> tuple[Tensor, ...]:
    """The same from the logits, in the dtype of the inputs; the softmax of 16-bit logits in float32."""
    z = hidden @ weight.T
    z = z if bias is None else z + bias.to(z.dtype)
    logp = torch.log_softmax(z if z.dtype == torch.float64 else z.float(), -1)
    picked, entropy = logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    if is_loss:
        return (surrogate(picked, entropy, *(row.to(logp.dtype) for row in rows)).sum(),)
    return (picked, entropy) if entropy_too else (picked,)


OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "logprobs": by_logprobs,
    "logprobs, frozen": by_logprobs_alone,
    "ppo": by_ppo_loss,
    "token loss": by_token_loss,
}
SHAPES = {"square": (48, 192, 2999), "vocabulary": (6, 24, V_REAL), "deep": (24, 4096, 301)}


def inputs_of(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """hidden, weight, ids: logits of a few units, and every third row peaked: one logit 20 to 40 above the others."""
    N, H, V = shape
    hidden, weight = torch.randn(N, H), torch.randn(V, H) * (2.0 / math.sqrt(H))
    ids = torch.randint(V, (N,))
    peaked = torch.arange(0, N, 3)
    unit = hidden[peaked] / hidden[peaked].square().sum(1, keepdim=True)
    weight[ids[peaked]] += torch.linspace(20, 40, len(peaked))[:, None] * unit
    ids[peaked[1::2]] = (ids[peaked[1::2]] + 1) % V  # half of them ask for another token than the certain one
    return hidden.to(dtype), weight.to(dtype), ids


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cases() -> Iterator[object]:
    """Everything, of which `make test` leaves out what takes long and differs in little from its neighbours."""
    for op, shape, dtype in itertools.product(OPS, SHAPES, DTYPES):
        repeated = shape != "square" and (op == "token loss" or dtype == torch.float16)
        yield pytest.param(op, shape, dtype, id=f"{op}-{shape}-{dtype}", marks=[pytest.mark.long] if repeated else [])


@pytest.mark.parametrize(("op", "shape", "dtype"), list(_cases()))
def test_error_against_float64(as_exact_as, op, shape, dtype):
    hidden, weight, ids = inputs_of(SHAPES[shape], dtype)
    N, V = len(ids), len(weight)
    bias = None if shape == "vocabulary" else torch.randn(V)
    is_loss, entropy_too, frozen = op in ("ppo", "token loss"), op == "logprobs", op == "logprobs, frozen"
    with torch.no_grad():
        exact_logprobs = in_pytorch(*(x.double() for x in (hidden, weight)), bias, ids, (), False, False)[0]
    rows = (exact_logprobs.float() + 0.3 * torch.randn(N), torch.randn(N), torch.full((N,), 1 / N))

    def computed(function: Callable[..., tuple[Tensor, ...]], at: torch.dtype, *more: bool):
        leaves = [x.detach().to(at).requires_grad_() for x in (hidden, weight)]
        shift = None if bias is None else bias.to(torch.promote_types(at, torch.float32)).requires_grad_(not frozen)
        leaves[1].requires_grad_(not frozen)
        outputs = function(*leaves, shift, ids, rows, *more)
        torch.manual_seed(1)
        upstream = [torch.randn(x.shape).to(x.dtype) for x in outputs]
        wanted = [x for x in (*leaves, shift) if x is not None and x.requires_grad]
        return [x.detach() for x in outputs], torch.autograd.grad(outputs, wanted, upstream)

    more = (entropy_too, is_loss)
    got, got_gradients = computed(OPS[op], dtype)
    exact, exact_gradients = computed(in_pytorch, torch.float64, *more)
    near, near_gradients = computed(in_pytorch, torch.float32, *more)
    # A loss is one number, right by luck as often as not: it is asked for one rounding of each row's largest logit.
    peaks = (hidden.double() @ weight.double().T).amax(1)
    scale = float((rows[2] * rows[1] * peaks).norm()) if is_loss else None
    for a, b, c in zip(got, near, exact, strict=True):
        as_exact_as(a, b, c, times=2.0, scale=scale)
    if dtype == torch.float32:
        for a, b, c in zip(got_gradients, near_gradients, exact_gradients, strict=True):
            as_exact_as(a, b, c, times=2.0)
        return
    _, same_dtype_gradients = computed(in_pytorch, dtype, *more)
    for a, b, c in zip(got_gradients, same_dtype_gradients, exact_gradients, strict=True):
        as_exact_as(a, b, c, times=1.0)


# ---------------------------------------------------------------------------------- rows whose logits are known exactly


def exact_layer(V: int, dtype: torch.dtype, gaps: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, logits float64): row i has the logit ``gaps[i]`` at ``column[i]`` and small ones elsewhere.

    All products and partial sums are multiples of 1/8 below 2^8, exact in every dtype and order of summation.
    """
    N = len(gaps)
    low = torch.randint(-8, 9, (V,)) / 8.0
    hidden, weight = torch.zeros(N, N + 1), torch.zeros(V, N + 1)
    hidden[:, N], weight[:, N] = 1.0, low
    hidden[torch.arange(N), torch.arange(N)] = 1.0
    weight[column, torch.arange(N)] = gaps
    logits = hidden.double() @ weight.double().T
    return hidden.to(dtype), weight.to(dtype), logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [33, 4099, V_REAL])
def test_certain_tokens_and_point_masses(as_exact_as, dtype, V):
    """The gap to the rest grows to 120: probabilities up to 1 exactly, wherever in the vocabulary the token stands."""
    gaps = torch.arange(0.0, 121, 8).repeat_interleave(2)
    N = len(gaps)
    column = torch.linspace(0, V - 1, N).round().long() if V > N else torch.arange(N)
    hidden, weight, logits = exact_layer(V, dtype, gaps, column)
    logp = logits.log_softmax(-1)
    certain = logp.gather(1, column[:, None])[:, 0]
    exact_entropy = -(logp.exp() * logp).sum(-1)
    near = logits.float().log_softmax(-1)
    near, near_entropy = near.gather(1, column[:, None])[:, 0], -(near.exp() * near).sum(-1)
    for w in (weight, weight.clone().requires_grad_()):  # with a gradient the logits take another path
        got, entropy = linear_selected_logprobs(hidden, w, column, return_entropy=True)
        assert (got <= 0).all()
        assert (entropy >= 0).all()
        # Exactly zero, or right to the rounding of a sum near 1.
        sure = certain > -EPS / 2
        assert sure.sum() > N / 2
        assert (got.double() - certain)[sure].abs().max() <= EPS
        as_exact_as(got.detach(), near, certain, times=2.0)
        as_exact_as(entropy.detach(), near_entropy, exact_entropy, times=2.0)
    other = (column + 1) % V
    exact, near = (at.log_softmax(-1).gather(1, other[:, None])[:, 0] for at in (logits, logits.float()))
    as_exact_as(linear_selected_logprobs(hidden, weight, other), near, exact, times=2.0)


def test_a_vocabulary_of_one_token_is_certain():
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    logprobs, entropy = linear_selected_logprobs(hidden, weight, torch.zeros(5, dtype=torch.long), return_entropy=True)
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert not any(x.any() for x in (logprobs, entropy, *gradients))


@pytest.mark.parametrize("level", [-1e4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_far_from_zero(as_exact_as, dtype, level):
    """A bias of -1e4 on every logit changes nothing but their last bits, which are chosen to be zero here."""
    V = 4099
    hidden, weight, _ = exact_layer(V, dtype, torch.linspace(0, 32, 9).round(), torch.arange(9) * 450)
    hidden.requires_grad_()
    bias = torch.full((V,), level)
    ids = torch.tensor([0, 450, 901, 7, 1800, 4098, 2700, 3, 3600])
    got = linear_selected_logprobs(hidden, weight, ids, bias=bias, return_entropy=True)
    (gradient,) = torch.autograd.grad(got[0].sum() + got[1].sum(), hidden)
    yardsticks = []
    for at in (torch.float32, torch.float64):
        leaf = hidden.detach().to(at).requires_grad_()
        outputs = in_pytorch(leaf, weight.to(at), bias.to(at), ids, (), True, False)
        yardsticks.append([x.detach() for x in (*outputs, *torch.autograd.grad(sum(outputs).sum(), leaf))])
    near, exact = yardsticks
    assert (got[1] >= 0).all()
    for a, b, c in zip(got, near[:2], exact[:2], strict=True):
        as_exact_as(a.detach(), b, c, times=2.0)
    # 16-bit PyTorch is no yardstick here, for bfloat16 has steps of 64 at 1e4: a float32 head, rounded once.
    as_exact_as(gradient, near[2].to(dtype), exact[2], times=2.0 if dtype == torch.float32 else 4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64, 2999), (2, 16, V_REAL)], ids=str)
@pytest.mark.parametrize("op", ["logprobs", "ppo", "token loss"])
def test_gradient_rows_sum_to_zero(op, shape, dtype):
    """Seen through the bias, one row at a time, for upstream gradients of about 1. What is left is the rounding of the
    row's elements and, where 1 - p is small, of that difference."""
    hidden, weight, ids = inputs_of(shape, dtype)
    for i in range(shape[0]):
        bias = torch.zeros(shape[2], requires_grad=True)
        row, token = hidden[i : i + 1], ids[i : i + 1]
        with torch.no_grad():
            old = linear_selected_logprobs(row, weight, token) - 0.1
        outputs = OPS[op](row, weight, bias, token, (old, torch.tensor([-1.7]), torch.tensor([0.5])))
        (gradient,) = torch.autograd.grad(outputs, bias, [torch.full_like(x, 0.8) for x in outputs])
        assert gradient.any()
        assert abs(float(gradient.double().sum())) <= 8 * EPS
        assert float(gradient.double().abs().sum()) < 10
