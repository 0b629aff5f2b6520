"""An output layer and its live rows, as the properties of the linear ops need them."""

from __future__ import annotations

import torch
from torch import Tensor

from .harness import stat_of
from .oracle import HeadRows, head_rows, judge
from .strategies import LinearCase, linear_inputs, temperatures


class Layer:
    """The tensors of a case with gradients where they are trainable, and its live rows for the oracle."""

    def __init__(self, case: LinearCase) -> None:
        self.case, self.x = case, linear_inputs(case)
        self.stat = stat_of(case.dtype)
        self.live = torch.ones(case.shape, dtype=torch.bool) if self.x.mask is None else self.x.mask

    def keywords(self) -> dict[str, object]:
        case, x = self.case, self.x
        return {
            "temperature": x.temperature, "softcap": case.softcap, "logit_scale": case.logit_scale,
            "kept_ids": x.kept_ids,
        }  # fmt: skip

    def leaves(self) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """hidden, weight, bias, and those of them that a gradient is asked for."""
        tensors = [None if t is None else t.detach() for t in self.x[:3]]
        asked = []
        for t, trainable in zip(tensors, self.case.trainable, strict=True):
            if t is not None and trainable:
                asked.append(t.requires_grad_())
        return tensors[0], tensors[1], tensors[2], asked

    def rows(self, dtype: torch.dtype, c: Tensor, e: Tensor) -> HeadRows:
        """The live rows in ``dtype``, from the values in the dtype of the weight."""
        x, live = self.x, self.live
        t = temperatures(x.temperature, self.stat, self.case.shape)[live]
        return head_rows(
            x.hidden[live].to(x.weight.dtype).to(dtype),
            x.weight.to(dtype),
            x.ids[live],
            c.to(dtype),
            e.to(dtype),
            bias=None if x.bias is None else x.bias.to(dtype),
            temperature=t.to(dtype),
            softcap=self.case.softcap,
            logit_scale=self.case.logit_scale,
            kept_ids=None if x.kept_ids is None else x.kept_ids[live],
        )

    def value_error(self, exact: HeadRows) -> Tensor:
        """[n] what roundings do to a log-prob or an entropy."""
        s = exact.softmax
        own = 1 + s.entropy + torch.nan_to_num(s.logprobs.abs(), posinf=0.0)
        return torch.finfo(self.stat).eps * (exact.logits_error + own)

    def judge_gradients(
        self, path: str, gradients: tuple[Tensor, ...], exact: HeadRows, near: HeadRows, drift: Tensor
    ) -> None:
        """``drift [n, V]``: what the gradient by the products may be off by for reasons of its own (an inexact c)."""
        x, live = self.x, self.live
        hidden, weight = x.hidden[live].to(x.weight.dtype).double(), x.weight.double()
        eps = torch.finfo(self.stat).eps
        drift = drift + eps * exact.raw_error + eps * exact.raw.abs()
        narrow = torch.finfo(x.weight.dtype).eps  # the gradient by the products is rounded to it once
        # And may vanish below its normal numbers.
        drift = drift + 2 * torch.finfo(self.stat).tiny * (1 + exact.reach)[:, None]
        if x.weight.dtype == torch.float16:  # after scaling by a power of two, but small elements still vanish
            drift = drift + 2.0**-38 * exact.raw.abs().amax() if exact.raw.numel() else drift
        # Dot products of AVX512-BF16 take operands below the normal numbers for zero.
        lost = torch.finfo(self.stat).tiny * exact.raw.abs()
        found = list(gradients)
        names = ("hidden", "weight", "bias")
        for name, tensor, trainable in zip(names, self.x[:3], self.case.trainable, strict=True):
            if tensor is None or not trainable:
                continue
            got = found.pop(0)
            assert got.dtype == tensor.dtype
            own = torch.finfo(got.dtype).eps
            if name == "hidden":
                assert not got[~live].any(), f"{path}: d_hidden at masked positions"
                got, wanted, yardstick = got[live], exact.d_hidden, near.d_hidden
                rounded = (exact.raw.square() @ weight.square()).sqrt()
                unavoidable = narrow * rounded + drift @ weight.abs() + lost.sum(1, keepdim=True)
            elif name == "weight":
                wanted, yardstick = exact.d_weight, near.d_weight
                rounded = (exact.raw.square().T @ hidden.square()).sqrt()
                unavoidable = narrow * rounded + drift.T @ hidden.abs() + lost.sum(0)[:, None]
            else:
                wanted, yardstick = exact.d_bias, near.d_bias
                unavoidable = drift.sum(0) + eps * exact.raw.abs().sum(0)
            # The product itself is rounded on the way, and its result once more.
            unavoidable = unavoidable + max(own, torch.finfo(x.weight.dtype).eps) * wanted.abs()
            judge(f"{path}: d_{name}", got, wanted, yardstick.to(x.weight.dtype).to(got.dtype), unavoidable)
        assert not found
