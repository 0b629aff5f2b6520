"""selected_logprobs, and its backward pass in place: as near to float64 as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from torch import Tensor

from ppo_fast.ops import selected_logprobs

from .harness import examples, on_every_path, stat_of
from .oracle import judge, softmax_rows
from .strategies import ROW_LAYOUTS, LogitsCase, LogitsInputs, logits_cases, logits_inputs, temperatures


def _check_logits(
    case: LogitsCase, x: LogitsInputs, run: Callable[[], tuple[Tensor, ...]], op: str = "selected_logprobs"
) -> None:
    """``run`` gives log-probs, entropy and gradient."""
    logits = x.logits.tensor
    stat = stat_of(case.dtype)
    eps, out_eps = torch.finfo(stat).eps, torch.finfo(logits.dtype).eps
    live = torch.ones(case.shape, dtype=torch.bool) if x.mask is None else x.mask
    rows, ids = logits[live], x.ids[live]
    c = x.c[live] if case.upstream != "entropy" else torch.zeros_like(x.c[live])
    e = x.e[live] if case.upstream != "logprobs" else torch.zeros_like(x.e[live])
    t = temperatures(x.temperature, stat, case.shape)[live]
    exact = softmax_rows(rows.double() / t.double()[:, None], ids, c.double(), e.double())
    near = softmax_rows(rows.to(stat) / t[:, None], ids, c, e)

    z = rows.double() / t.double()[:, None]
    largest = torch.where(z.isfinite(), z, 0.0).abs().amax(1).clamp(min=1.0) if z.numel() else z.new_zeros(len(z))
    # z is rounded where the temperature isn't 1; its maximum and the log-sum-exp are, in any case, at their own size.
    spread = torch.where((t == 1) & z.isfinite().any(1), exact.entropy.abs() + 1, largest)
    unavoidable = eps * torch.maximum(spread, torch.nan_to_num(exact.logprobs.abs(), posinf=0.0))
    size = torch.maximum(largest, torch.nan_to_num(exact.lse.abs(), posinf=0.0))
    of_gradient = (
        exact.size / t.double()[:, None] * eps * (4 + size[:, None]) + out_eps * exact.gradient.abs() / t[:, None]
    )
    # A probability below the normal numbers is cut off.
    of_gradient = of_gradient + 8 * torch.finfo(stat).tiny * (c.abs() + e.abs() * 100)[:, None] / t[:, None]

    broken = z.isnan().any(1)
    for path, (logprobs, entropy, gradient) in on_every_path(op, run):
        for name, y in (("log-probs", logprobs), ("entropy", entropy)):
            assert not y[~live].any(), f"{path}: {name} at masked positions"
        assert not gradient[~live].any(), f"{path}: gradient at masked positions"
        logprobs, entropy, gradient = logprobs[live], entropy[live], gradient[live]
        assert not (logprobs > 0).any(), f"{path}: a log-prob above 0"
        assert not (entropy < 0).any(), f"{path}: an entropy below 0"
        judge(f"{path}: log-probs", logprobs, exact.logprobs, near.logprobs, unavoidable)
        judge(f"{path}: entropy", entropy, exact.entropy, near.entropy, unavoidable)
        assert gradient[broken].isnan().any(1).all(), f"{path}: NaN of the logits is lost in the gradient"
        fine = ~broken
        judge(
            f"{path}: gradient",
            gradient[fine],
            (exact.gradient / t.double()[:, None])[fine],
            (near.gradient / t[:, None]).to(gradient.dtype)[fine],
            of_gradient[fine],
        )


def _logits_gradient(case: LogitsCase, x: LogitsInputs, logits: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """The gradient of the logits for what arrives at the log-probs, the entropy, or both."""
    pairs = {
        "both": ((logprobs, x.c), (entropy, x.e)),
        "logprobs": ((logprobs, x.c),),
        "entropy": ((entropy, x.e),),
    }
    outputs, upstream = zip(*pairs[case.upstream], strict=True)
    (gradient,) = torch.autograd.grad(outputs, logits, upstream)
    return gradient


@examples
@given(case=logits_cases())
def test_selected_logprobs(case: LogitsCase) -> None:
    x = logits_inputs(case)

    def run() -> tuple[Tensor, ...]:
        logits = x.logits.tensor.detach().requires_grad_()
        logprobs, entropy = selected_logprobs(
            logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True
        )
        gradient = _logits_gradient(case, x, logits, logprobs, entropy)
        return logprobs.detach(), entropy.detach(), gradient

    _check_logits(case, x, run)


@examples
@given(case=logits_cases(ROW_LAYOUTS))
def test_inplace_backward(case: LogitsCase) -> None:
    """The gradient lands in the storage of the logits, and nothing around them is touched."""
    x = logits_inputs(case)
    outside = torch.ones_like(x.logits.storage, dtype=torch.bool)
    x.logits.view(outside).fill_(False)

    def run() -> tuple[Tensor, ...]:
        storage = x.logits.storage.clone().requires_grad_() * 1.0
        logits = x.logits.view(storage)
        # A view of one dimension less than three is unsqueezed by the op; all of ROW_LAYOUTS can be overwritten, unless
        # merging the leading dimensions takes a copy.
        try:
            logprobs, entropy = selected_logprobs(
                logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True, inplace_backward=True
            )
        except ValueError as error:
            assert "inplace_backward needs logits" in str(error)  # noqa: PT017
            assert len(case.shape) > 2
            logprobs, entropy = selected_logprobs(
                logits, x.ids, temperature=x.temperature, mask=x.mask, return_entropy=True
            )
        gradient = _logits_gradient(case, x, logits, logprobs, entropy)
        if gradient.data_ptr() == logits.data_ptr() and logits.numel():
            assert storage.detach()[outside].isnan().all()
        return logprobs.detach(), entropy.detach(), gradient

    _check_logits(case, x, run)
