"""Any token-local loss straight from hidden states; its gradients are made in the forward pass.

The loss is a Python function of a chunk's log-probs and entropies. A registered op can't take a function, so it gets a
key under which the function is registered: for the time of one call, or, under torch.compile, the function's own
qualified name, for as long as compiled code may call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_dense
from ppo_fast.ops._chunks import chunk_loop
from ppo_fast.ops._library import autograd_inside_op, define, detached, differentiable, stat_dtype, sum_dtype
from ppo_fast.ops._linear import (
    LAYER_ARGUMENTS,
    LAYER_SCHEMA,
    NEEDS_SCHEMA,
    Layer,
    check_chunk_tokens,
    check_layer,
    fake_gradients,
    finished,
    gradient_dtype,
    save_gradients,
    scaled_gradients,
    split_layer,
)
from ppo_fast.ops._row_math import Gradients, Statistics
from ppo_fast.profiling import annotate

TokenLoss = Callable[..., "Tensor | tuple[Tensor, dict[str, Tensor]]"]

_functions: dict[str, TokenLoss] = {}
# Names of the auxiliary values, in order, as the function under the key last returned them; None for none.
_aux_names: dict[str, tuple[str, ...] | None] = {}
_calls = itertools.count()
_IN_PLACE = "token_loss must not change its inputs in place: rows may be the caller's own memory"
# Tokens that `verify` computes one by one.
_ALONE = 32


def linear_token_loss(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [...] any integer dtype
    token_loss: TokenLoss,
    rows: Sequence[Tensor] = (),  # [..., *] each
    *,
    mask: Tensor | None = None,  # [...] bool, True = live
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kept_ids: Tensor | None = None,  # [..., K] int64, padded with -1
    entropy_grad: bool = True,
    chunk_tokens: int | None = None,
    verify: bool = False,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """The SUM over live tokens of a token-local loss, in one pass that keeps neither logits nor anything to recompute.

    ``token_loss(logprobs [n], entropy [n], *rows) -> loss [n]``, or ``(loss [n], {name: [n]})``, is called with any
    number n >= 0 of live tokens at a time, in any grouping, and differentiated. It must be *local to the token*: the
    loss of one token depends on that token's values alone. Means, normalisers and sequence weights are fixed beforehand
    and come in through ``rows``. Use plain torch operations. Example, REINFORCE:

        def reinforce(logprobs, entropy, advantages, weights):
            return -weights * advantages * logprobs

        loss = linear_token_loss(hidden, head.weight, ids, reinforce, (advantages, weights), mask=mask)

    A loss that is not local to the token (a sequence-level ratio, say) goes through `linear_selected_logprobs`.

    Args:
        hidden, weight, token_ids, bias, temperature, softcap, logit_scale, mask, kept_ids: as in
            `linear_selected_logprobs`.
        rows: tensors of any dtype whose leading dimensions are those of ``token_ids``; the function gets them cut to
            its tokens, ``[n, ...]``. Constants: none may require grad.
        entropy_grad: False passes the entropy as a constant.
        chunk_tokens: tokens whose logits exist at one time. Default: as many as fit into 80 MiB on CPU and 896 MiB
            elsewhere, at least 32.
        verify: call the function on all tokens at once, reversed, in halves, doubled and one at a time, and compare
            losses, gradients and auxiliary values; one more product with the output layer. For trying out a new loss,
            not for training. What it can't see: a branch on a number of tokens that none of these calls has.

    Returns:
        the loss, 0-d float32 (float64 for a float64 weight), differentiable in ``hidden``, ``weight`` and ``bias``; or
        ``(loss, {name: [...]})`` with the auxiliary values in the shape of ``token_ids``, detached, 0 where masked.

    Raises:
        TypeError, ValueError: for arguments that don't fit, rows that require grad, a token_loss that returns anything
            but the above, changes its inputs in place or uses another tensor that requires grad (it would receive
            none), or, with ``verify``, one that is not local to the token; under torch.compile also a token_loss that
            is not a function at the top level of a module.
        IndexError: for an id out of range or outside its kept set, on CPU.

    Cost, with ``G = 2 N V H`` over the live tokens: G without gradients, 2 G with a frozen output layer, 3 G with a
    trainable one; on CPU tokens whose loss has no gradient are left out of the second and third product. The backward
    pass multiplies by the incoming scalar; where that is exactly 1 it does nothing. Keep it outside of activation
    checkpointing, which would run it twice. Double backward is an error. Numerics: as stated for
    `linear_selected_logprobs`.
    """
    layer = check_layer(
        hidden,
        weight,
        token_ids,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        kept_ids=kept_ids,
    )
    check_chunk_tokens(chunk_tokens)
    if not callable(token_loss):
        raise TypeError(f"token_loss must be callable, got {type(token_loss).__name__}")
    if isinstance(rows, Tensor) or not isinstance(rows, Sequence):
        raise TypeError(f"rows must be a sequence of tensors, got {type(rows).__name__}")
    shape = token_ids.shape
    flat = [_flat_row(i, row, token_ids) for i, row in enumerate(rows)]
    if verify:
        if torch.compiler.is_compiling():
            raise ValueError("verify=True must be False under torch.compile: it is a check for eager mode")
        _verify(layer, token_loss, flat, entropy_grad)

    settings = (bool(entropy_grad), *layer.needs(), chunk_tokens)
    with annotate("ppo_fast::linear_token_loss"):
        if torch.compiler.is_compiling():
            key = _register_for_compiled_code(token_loss)
            loss, _, _, _, aux = torch.ops.ppo_fast.linear_token_loss(*layer, flat, key, *settings)
            names = _names_for_compiled_code(key)
        else:
            key = f"call {next(_calls)}"
            _functions[key] = token_loss
            try:
                loss, _, _, _, aux = torch.ops.ppo_fast.linear_token_loss(*layer, flat, key, *settings)
                names = _aux_names[key]
            finally:
                _functions.pop(key)
                _aux_names.pop(key, None)
    if names is None:
        return loss
    return loss, {name: x.reshape(shape) for name, x in zip(names, aux, strict=True)}


def _flat_row(i: int, row: Any, token_ids: Tensor) -> Tensor:
    if not isinstance(row, Tensor):
        raise TypeError(f"rows[{i}] must be a tensor, got {type(row).__name__}")
    check_dense(f"rows[{i}]", row)
    dims = token_ids.dim()
    if row.shape[:dims] != token_ids.shape:
        raise ValueError(
            f"rows[{i}] must have the shape of token_ids as its leading dimensions, {list(token_ids.shape)}, "
            f"got {list(row.shape)}"
        )
    if row.device != token_ids.device:
        raise ValueError(f"rows[{i}] must be on the device of token_ids, {token_ids.device}, got {row.device}")
    if row.requires_grad:
        raise ValueError(f"rows[{i}] must not require grad: rows are constants, detach it")
    return row.reshape(token_ids.numel(), *row.shape[dims:])


# ------------------------------------------------------------------------------------------------- calling the function


def _call(
    token_loss: TokenLoss, logprobs: Tensor, entropy: Tensor, rows: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """What the function returns, checked: losses [n], and the auxiliary values [n] if there are any."""
    n = logprobs.shape[0]
    inputs = [x for x in (logprobs, entropy, *rows) if not x.is_inference()]
    versions = [x._version for x in inputs]
    returned = token_loss(logprobs, entropy, *rows)
    if [x._version for x in inputs] != versions:
        raise ValueError(_IN_PLACE)
    loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or not (aux is None or isinstance(aux, dict)):
        got = ", ".join(type(x).__name__ for x in returned) if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"token_loss must return a tensor [n], or (a tensor [n], a dict of tensors [n]), got {got}")
    if loss.shape != (n,) or not loss.is_floating_point():
        raise ValueError(
            f"token_loss must return one floating-point loss a token, shape [{n}], "
            f"got shape {list(loss.shape)} of {loss.dtype}"
        )
    for name, x in (aux or {}).items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise TypeError(f"token_loss must name tensors in its dict, got {name!r}: {type(x).__name__}")
        if x.shape != (n,):
            raise ValueError(f"token_loss must return one value a token for {name!r}, [{n}], got {list(x.shape)}")
    return loss, aux


def _differentiate(
    token_loss: TokenLoss, logprobs: Tensor, entropy: Tensor, rows: Sequence[Tensor], entropy_grad: bool
) -> tuple[Tensor, dict[str, Tensor] | None, Tensor, Tensor | None]:
    """(loss [n], aux, c = dloss/dlogprobs [n], e = dloss/dentropy [n] or None), for tensors of one chunk's size."""
    with autograd_inside_op():
        rows = [detached(row) for row in rows]
        logprobs = detached(logprobs).requires_grad_()
        entropy = detached(entropy).requires_grad_(entropy_grad)
        loss, aux = _call(token_loss, logprobs, entropy, rows)
        c = e = None
        if loss.requires_grad:
            _refuse_foreign_leaves(loss, (logprobs, entropy))
            inputs = (logprobs, entropy) if entropy_grad else (logprobs,)
            c, *more = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
            e = more[0] if more else None
    return loss.detach(), aux, torch.zeros_like(logprobs) if c is None else c, e


def _refuse_foreign_leaves(loss: Tensor, own: tuple[Tensor, Tensor]) -> None:
    """A tensor that the function closes over and that requires grad would be left without its gradient."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # type: ignore[attr-defined]
            if all(leaf is not x for x in own):
                raise ValueError(
                    "token_loss must be differentiable in log-probs and entropy alone, but it uses a tensor of shape "
                    f"{list(leaf.shape)} that requires grad and would receive none: detach it, or compute the loss "
                    "from linear_selected_logprobs"
                )
        waiting.extend(node for node, _ in node.next_functions)


def _verify(layer: Layer, token_loss: TokenLoss, rows: Sequence[Tensor], entropy_grad: bool) -> None:
    """Raise ValueError if anything the function gives for a token depends on the tokens that it is computed with."""
    with torch.no_grad():
        logprobs, entropy, _ = torch.ops.ppo_fast.linear_selected_logprobs(*layer, True, False)
    live = torch.ones_like(layer.token_ids, dtype=torch.bool) if layer.mask is None else layer.mask
    index = live.nonzero()[:, 0]
    sources = (logprobs, entropy, *rows)

    def computed(group: Tensor) -> dict[str, Tensor]:
        inputs = [x[group] for x in sources]
        loss, aux, c, e = _differentiate(token_loss, inputs[0], inputs[1], inputs[2:], entropy_grad)
        if not all(_same(x, source[group]).all() for x, source in zip(inputs, sources, strict=True)):
            raise ValueError(_IN_PLACE)
        derivatives = {"dloss/dlogprob": c, "dloss/dentropy": torch.zeros_like(c) if e is None else e}
        return {"the loss": loss, **derivatives, **{f"the value {name!r}": x for name, x in (aux or {}).items()}}

    def joined(groups: Sequence[Tensor]) -> dict[str, Tensor]:
        parts = [computed(group) for group in groups]
        common = [what for what in parts[0] if all(what in part for part in parts)]
        return {what: torch.cat([part[what] for part in parts]) for what in common}

    whole = computed(index)
    half = index.numel() // 2
    # All of them one by one would take as many calls: a few show what a mean or a threshold does to a single token.
    few = torch.linspace(0, max(index.numel() - 1, 0), min(index.numel(), _ALONE), device=index.device).long()
    twice = computed(index.repeat_interleave(2))
    for how, results, positions in (
        ("in reverse order", {what: x.flip(0) for what, x in computed(index.flip(0)).items()}, None),
        ("in two halves", joined([index[:half], index[half:]]), None),
        ("with each token twice", {what: x[::2] for what, x in twice.items()}, None),
        ("with each token twice", {what: x[1::2] for what, x in twice.items()}, None),
        ("one at a time", joined([index[i : i + 1] for i in few.tolist()] or [index]), few),
    ):
        if results.keys() != whole.keys():
            raise ValueError(f"token_loss must always give the same values, but computed {how} they have other names")
        for what, of_all in whole.items():
            a, b = of_all.detach(), results[what].detach()
            a = a if positions is None else a[positions]
            close = _same(a, b)
            if a.is_floating_point() and a.numel():
                size = torch.nan_to_num(of_all.detach().abs(), posinf=0.0).amax()
                close |= (a - b).abs() <= torch.finfo(a.dtype).eps * (100 * b.abs() + 10 * size)
            if not close.all():
                i = int((~close).nonzero()[0])
                token = i if positions is None else int(positions[i])
                raise ValueError(
                    f"token_loss must be local to the token, but {what} of live token {token} is {float(a[i]):.6g} "
                    f"among all {index.numel()} live tokens and {float(b[i]):.6g} when they are computed {how}: fix "
                    "normalisers beforehand and pass them in rows, or use linear_selected_logprobs"
                )


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


# -------------------------------------------------------------------------------------------------------- torch.compile


@torch.compiler.assume_constant_result
def _register_for_compiled_code(token_loss: TokenLoss) -> str:
    """A key that names the same function in every process, for it may end up in a cache of compiled graphs."""
    module, name = getattr(token_loss, "__module__", None), getattr(token_loss, "__qualname__", "")
    if module is None or not name.isidentifier():
        raise ValueError(
            f"token_loss must be a function at the top level of a module under torch.compile, got {token_loss!r}"
        )
    key = f"{module}.{name}"
    _functions[key] = token_loss
    return key


@torch.compiler.assume_constant_result
def _names_for_compiled_code(key: str) -> tuple[str, ...] | None:
    """The names that the shape rule has just met while tracing."""
    return _aux_names[key]


# -------------------------------------------------------------------------------------------------------- registered op


_SCHEMA = (
    f"linear_token_loss({LAYER_SCHEMA}, Tensor[] rows, str key, bool entropy_grad, {NEEDS_SCHEMA}, int? chunk_tokens) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
_NEEDS = slice(-4, -1)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """loss 0-d, d_hidden, d_weight, d_bias ([0] where not needed), auxiliary values [N] each."""
    token_rows, key, entropy_grad, need_hidden, need_weight, need_bias, chunk_tokens = arguments[LAYER_ARGUMENTS:]
    token_loss = _functions[key]
    head, rows, mask = split_layer(arguments)
    total = rows.hidden.new_zeros((), dtype=sum_dtype(rows.hidden.device))
    collected: dict[str, Tensor] = {}
    kept_in = gradient_dtype(head.weight.dtype) if need_hidden else None
    gradients = Gradients.zeros(head, rows, kept_in, need_weight, need_bias)

    def consume(statistics: Statistics, index: Tensor | slice) -> tuple[Tensor, Tensor | None] | None:
        chunk_rows = [row[index] for row in token_rows]
        c = e = None
        if gradients.wanted:
            loss, aux, c, e = _differentiate(
                token_loss, statistics.logprobs, statistics.entropy, chunk_rows, entropy_grad
            )
        else:
            loss, aux = _call(token_loss, statistics.logprobs, statistics.entropy, chunk_rows)
        total.add_(loss.sum(dtype=total.dtype))
        for name, x in (aux or {}).items():
            if name not in collected:
                collected[name] = x.new_zeros(rows.hidden.shape[0])
            collected[name][index] = x.detach()
        _aux_names[key] = None if aux is None else tuple(aux)
        return None if c is None else (c, e)

    chunk_loop(head, rows, mask, consume, gradients, want_entropy=True, chunk_tokens=chunk_tokens)
    return total.to(head.stat_dtype), *finished(gradients, head), list(collected.values())


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    hidden, weight = arguments[:2]
    token_rows, key = arguments[LAYER_ARGUMENTS : LAYER_ARGUMENTS + 2]
    loss = hidden.new_empty((), dtype=stat_dtype(weight.dtype))
    # Which auxiliary values there are, and their dtypes, only the function knows: ask it about two imaginary tokens.
    with torch.no_grad():
        _, aux = _call(
            _functions[key], loss.new_empty(2), loss.new_empty(2), [x.new_empty((2, *x.shape[1:])) for x in token_rows]
        )
    _aux_names[key] = None if aux is None else tuple(aux)
    return (
        loss,
        *fake_gradients(arguments, arguments[_NEEDS]),
        [x.new_empty(hidden.shape[0]) for x in (aux or {}).values()],
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, *gradients, aux = output
    ctx.mark_non_differentiable(*gradients, *aux)
    save_gradients(ctx, inputs, tuple(gradients), inputs[_NEEDS])
    ctx.rows = len(inputs[LAYER_ARGUMENTS])


def _autograd(ctx: Any, grad_loss: Tensor | None, *rest: Any) -> Any:
    return (
        *scaled_gradients(ctx, grad_loss),
        *[None] * (LAYER_ARGUMENTS - 3),
        [None] * ctx.rows,
        *[None] * 6,
    )


define(_SCHEMA, _forward, _fake)
differentiable("linear_token_loss", _autograd, _setup_context)
