"""Hidden states to drawn tokens and their log-probs; neither logits nor probabilities of whole rows are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ppo_fast.ops._checks import check_dense, check_like, check_number, temperature_like, visible
from ppo_fast.ops._head import Tiles
from ppo_fast.ops._library import define, stat_dtype, sum_dtype
from ppo_fast.ops._linear import cast_alike, check_head
from ppo_fast.ops._noise import gumbel
from ppo_fast.ops._row_math import Head, RowSums, shape_logits_
from ppo_fast.profiling import annotate


def linear_sample(
    hidden: Tensor,  # [B, H]
    weight: Tensor,  # [V, H]
    *,
    bias: Tensor | None = None,  # [V]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    keys: Tensor,  # [B, 2] int64: row seed, position
    return_entropy: bool = False,
    return_kept: bool = False,
    max_kept: int = 1024,
) -> tuple[Tensor, ...]:
    """One token for each row, drawn from the distribution of an output layer, and its log-prob in nats.

    Logits are as in `linear_selected_logprobs`. Then, in this order: the temperature divides them, top-k keeps the k
    largest, top-p of these the fewest that together hold a share p of *their* probability. Equal logits rank by id,
    the lower first: exactly k tokens are kept, and a token is kept by top-p if those ranked before it hold less than p.
    The token is drawn from, and log-prob and entropy are those of, what is left, renormalised.

    **A cut by top-p implies top_k = max_kept**, unless a smaller ``top_k`` is given: the set that is returned is then
    always the one that was sampled from. Where a nucleus of the whole vocabulary is wanted however wide, pass
    ``max_kept=V``.

    Args:
        hidden: ``[B, H]`` float32, bfloat16, float16 or float64, any strides; cast to the dtype of ``weight``.
        weight: ``[V, H]``, any strides, read in place; may be the (tied) embedding.
        bias: ``[V]``; -inf bans a token, unless a softcap makes a finite logit of it.
        softcap, logit_scale: positive numbers.
        temperature: a number >= 0, or a tensor that broadcasts to ``[B]``. A row of temperature 0 takes its most
            probable token, the lowest id among equals; log-prob, entropy and kept set are then those at temperature 1.
        top_k: from 1 to ``max_kept``; more than V means V. None keeps all.
        top_p: in (0, 1]; None and 1 keep all.
        keys: ``[B, 2]`` int64: the seed of the reply, and the position of the token in it. They alone decide the noise
            of a row, for each token of the vocabulary on its own (Gumbel-max over Philox4x32-10): the same pair on the
            same distribution draws the same token. Use no pair twice within a rollout.
        return_entropy: also return ``-sum_j p_j log p_j``.
        return_kept: also return the kept ids; needs ``top_k``, or ``top_p`` below 1.
        max_kept: the most tokens that a cut may leave.

    Returns:
        ``(ids, log-probs)``, then the entropy, then the kept ids, each if asked for. ids int64 ``[B]``; log-probs and
        entropy ``[B]`` float32 (float64 for a float64 weight). Kept ids int64 ``[B, min(top_k or max_kept, V)]``, most
        probable first, filled up with -1: what ``kept_ids`` of `linear_selected_logprobs` takes.

    Raises:
        TypeError, ValueError: for a dtype, a shape, a device or a number that doesn't fit; for a ``hidden``, ``weight``
            or ``bias`` that requires grad while gradients are recorded: there is no derivative. ValueError on CPU
            (or with PPO_FAST_CHECK=1) for a row whose logits hold NaN or +inf or are all -inf; elsewhere, and under
            torch.compile, such a row gets id 0 and the log-prob NaN.

    The C++ kernels give a row the same bits whatever the other rows are, how many there are, and for any number of
    threads. Beside the weight they need a few MB, and at most 32 MiB for the candidates of top-k and top-p.
    """
    check_head(hidden, weight, bias, softcap, logit_scale)
    if hidden.dim() != 2:
        raise ValueError(f"hidden must have the shape [B, H], got {list(hidden.shape)}")
    if torch.is_grad_enabled():
        for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, but linear_sample has no derivative: call it under torch.no_grad()"
                )
    _check_keys(keys, hidden)
    kept, share = _check_cut(top_k, top_p, max_kept, weight.shape[0])
    if return_kept and kept == 0:
        raise ValueError("return_kept needs top_k, or top_p below 1: without them the whole vocabulary is kept")
    hidden, weight = cast_alike(hidden, weight)
    dtype = stat_dtype(weight.dtype)
    temperatures = None
    if isinstance(temperature, Tensor) or temperature != 1:
        temperatures = temperature_like(temperature, hidden[:, 0], dtype, like="hidden's rows", zero=True)
    with annotate("ppo_fast::linear_sample"):
        ids, logprobs, entropy, kept_ids = torch.ops.ppo_fast.linear_sample(
            hidden,
            weight,
            None if bias is None else bias.to(dtype).contiguous(),
            temperatures,
            keys.contiguous(),
            None if softcap is None else float(softcap),
            float(logit_scale),
            kept,
            share,
            bool(return_entropy),
            bool(return_kept),
        )
    if visible(logprobs) and bool(logprobs.isnan().any()):
        row = int(logprobs.isnan().nonzero()[0])
        raise ValueError(
            "hidden and weight must give every row a distribution: the logits of row "
            f"{row} hold NaN or +inf, or are all -inf"
        )
    return (ids, logprobs, *([entropy] if return_entropy else []), *([kept_ids] if return_kept else []))


def _check_keys(keys: Any, hidden: Tensor) -> None:
    if not isinstance(keys, Tensor):
        raise TypeError(f"keys must be a tensor, got {type(keys).__name__}")
    if keys.dtype != torch.int64:
        raise TypeError(f"keys must be int64, got {keys.dtype}")
    check_dense("keys", keys)
    check_like("keys", keys, (hidden.shape[0], 2), hidden.device, "hidden's rows, a seed and a position each")


def _check_cut(top_k: int | None, top_p: float | None, max_kept: int, V: int) -> tuple[int, float]:
    """How many tokens are kept at most, 0 for no limit, and the share p."""
    _check_count("max_kept", max_kept)
    if top_k is not None:
        _check_count("top_k", top_k)
    share = 1.0
    if top_p is not None:
        check_number("top_p", top_p)
        share = float(top_p)
        if not 0 < share <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if top_k is None:
        return (min(max_kept, V) if share < 1 else 0), share
    if min(top_k, V) > max_kept:
        raise ValueError(f"top_k must be at most max_kept, {max_kept}, got {top_k}")
    return min(top_k, V), share


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not 1 <= value < 2**63:
        raise ValueError(f"{name} must be >= 1, got {value}")


# ------------------------------------------------------------------------------------------------------ registered op


def _eager(
    hidden: Tensor,  # [B, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V] stat dtype
    temperature: Tensor | None,  # [B] stat dtype; 0 for greedy
    keys: Tensor,  # [B, 2] int64
    softcap: float | None,
    logit_scale: float,
    top_k: int,  # 0 for the whole vocabulary
    top_p: float,
    return_entropy: bool,
    return_kept: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [B], log-probs [B], entropy [B] or [0], kept ids [B, top_k] or [B, 0]."""
    head = Head(weight, bias, softcap, logit_scale)
    if temperature is None:
        temperature = hidden.new_ones(hidden.shape[0], dtype=head.stat_dtype)
    greedy = (temperature == 0)[:, None]
    divisor = temperature.masked_fill(greedy[:, 0], 1.0)[:, None]
    if top_k:
        ids, logprobs, entropy, kept = _draw_kept(hidden, head, divisor, greedy, keys, top_k, top_p)
    else:
        draw = _draw if weight.dtype == torch.float64 else torch.ops.ppo_fast._draw  # its GPU kernel has no float64
        ids, logprobs, entropy = draw(hidden, weight, bias, temperature, keys, softcap, logit_scale)
        kept = keys
    usable = logprobs.isfinite()
    return (
        ids.masked_fill(~usable, 0),
        torch.where(usable, logprobs, torch.nan).to(head.stat_dtype),
        torch.where(usable, entropy, torch.nan).to(head.stat_dtype) if return_entropy else logprobs.new_empty(0),
        kept if return_kept else keys.new_empty(hidden.shape[0], 0),
    )


def _draw(
    hidden: Tensor,  # [B, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V] stat dtype
    temperature: Tensor,  # [B] stat dtype; 0 for greedy
    keys: Tensor,  # [B, 2] int64
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B], log-probs [B], entropy [B], drawn from the whole vocabulary; a row without a distribution has NaN."""
    head, B = Head(weight, bias, softcap, logit_scale), hidden.shape[0]
    greedy = (temperature == 0)[:, None]
    divisor = temperature.masked_fill(greedy[:, 0], 1.0)[:, None]
    wide = sum_dtype(hidden.device)
    sums = RowSums(B, divisor, True)
    nowhere = keys.new_full((B,), -1)
    ids, logits = keys.new_zeros(B), divisor.new_zeros(B)
    best = divisor.new_full((B,), -torch.inf, dtype=wide)
    for start, z in _logits(hidden, head):
        z = z / divisor
        width = z.shape[1]
        blocks = torch.arange(start // 4, (start + width + 3) // 4, device=z.device)[None]
        noise = gumbel(keys, blocks, wide).flatten(1)[:, :width]
        key, column = (z.to(wide) + noise.masked_fill_(greedy, 0.0)).max(1)
        better = key > best
        best, ids = torch.where(better, key, best), torch.where(better, start + column, ids)
        logits = torch.where(better, z.gather(1, column[:, None])[:, 0], logits)
        sums.fold(z, nowhere, z, torch.empty_like(z))
    statistics = sums.statistics()
    logprobs = (logits - statistics.peak) - statistics.total.log()
    empty = sums.peak == -torch.inf
    return ids, logprobs.masked_fill(empty, torch.nan), statistics.entropy


def _draw_kept(
    hidden: Tensor, head: Head, divisor: Tensor, greedy: Tensor, keys: Tensor, top_k: int, top_p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B = hidden.shape[0]
    wide = sum_dtype(hidden.device)
    logits, ids = divisor.new_empty(B, 0), keys.new_empty(B, 0)
    for start, z in _logits(hidden, head):
        columns = torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
        # Stable, and ids ascend among equals on both sides: the lower id stays first. NaN comes first of all.
        logits, order = torch.cat([logits, z], 1).sort(dim=1, descending=True, stable=True)
        logits, ids = logits[:, :top_k], torch.cat([ids, columns], 1).gather(1, order[:, :top_k])
    scaled = logits.to(wide) / divisor
    shifted = scaled - scaled[:, :1]
    cumulative = shifted.exp().cumsum(1)
    inside = logits > -torch.inf
    if top_p < 1:  # a token is kept if those before it hold less
        inside[:, 1:] &= cumulative[:, :-1] < top_p * cumulative[:, -1:]
    shifted = shifted.masked_fill(~inside, -torch.inf)
    noise = gumbel(keys, ids // 4, wide).gather(2, (ids % 4)[:, :, None])[:, :, 0]
    column = (shifted + noise.masked_fill_(greedy, 0.0)).max(1).indices[:, None]
    weights = shifted.exp()
    log_total = weights.sum(1).log()
    entropy = log_total - (weights * shifted.masked_fill(~inside, 0.0)).sum(1) / weights.sum(1)
    logprobs = shifted.gather(1, column)[:, 0] - log_total
    unusable = ~logits[:, 0].isfinite()
    return (
        ids.gather(1, column)[:, 0],
        logprobs.masked_fill(unusable, torch.nan),
        entropy,
        ids.masked_fill(~inside, -1),
    )


def _logits(hidden: Tensor, head: Head) -> Iterator[tuple[int, Tensor]]:
    """(first id, logits [B, columns] at temperature 1) tile by tile."""
    tiles = Tiles(head.weight, hidden.shape[0])
    rows = tiles.widened(hidden)
    for start, stop, operand in tiles:
        z = rows.new_empty(rows.shape[0], stop - start, dtype=head.stat_dtype)
        if operand.dtype == head.stat_dtype:
            torch.mm(rows, operand.T, out=z)  # which autocast leaves alone
        else:
            torch.mm(rows, operand.T, out_dtype=head.stat_dtype, out=z)
        shape_logits_(z, None if head.bias is None else head.bias[start:stop], head, None)
        yield start, z


def _fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top_k, _, return_entropy, return_kept = rest[-4:]
    B = hidden.shape[0]
    logprobs = hidden.new_empty(B, dtype=stat_dtype(weight.dtype))
    return (
        hidden.new_empty(B, dtype=torch.int64),
        logprobs,
        logprobs.new_empty(B if return_entropy else 0),
        hidden.new_empty(B, top_k if return_kept else 0, dtype=torch.int64),
    )


define(
    "linear_sample(Tensor hidden, Tensor weight, Tensor? bias, Tensor? temperature, Tensor keys, float? softcap, "
    "float logit_scale, int top_k, float top_p, bool return_entropy, bool return_kept) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _eager,
    _fake,
)
# A part of it that has a GPU kernel.
define(
    "_draw(Tensor hidden, Tensor weight, Tensor? bias, Tensor temperature, Tensor keys, float? softcap, "
    "float logit_scale) -> (Tensor, Tensor, Tensor)",
    _draw,
    lambda hidden, weight, *rest: (
        hidden.new_empty(hidden.shape[0], dtype=torch.int64),
        *(hidden.new_empty(hidden.shape[0], dtype=stat_dtype(weight.dtype)) for _ in range(2)),
    ),
)
