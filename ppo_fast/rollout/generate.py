"""The decode loop: prefill the prompts once, then one token a step, with the log-prob of each token as it is drawn.

Sampling inverts the cumulative distribution at one uniform number per reply and step, drawn before the loop. So a
reply depends on its own row of numbers alone: batches can be split, and two policies can be compared on the same
numbers. The cumulative sum runs in float64; over 151,936 tokens a float32 one would be off by more than many tokens'
whole probability.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from ppo_fast import ops
from ppo_fast.models.roles import Actor
from ppo_fast.models.tokens import pad_prompts
from ppo_fast.profiling import annotate
from ppo_fast.rollout.batch import Rollout


@torch.no_grad()
def generate(
    actor: Actor,
    prompt_ids: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    eos_ids: tuple[int, ...],
    pad_id: int,
    uniforms: Tensor,  # float64 [B, max_new_tokens] in [0, 1)
    on_tokens: Callable[[int], None] | None = None,
) -> Rollout:
    """One reply to each prompt, sampled from ``softmax(logits / temperature)``; temperature 0 is greedy.

    Args:
        actor: whose distribution is sampled.
        prompt_ids: ``B`` token lists, none of them empty.
        uniforms: the numbers that decide every draw.
        on_tokens: called after each step with the number of tokens that step added.

    Returns:
        The rollout, on the actor's device, log-probs in float32 (of the greedy choice at temperature 1 when
        ``temperature`` is 0).

    Raises:
        ValueError: no prompt or an empty one, a temperature that is negative or not finite, no token to sample, or
            ``uniforms`` of another shape.
    """
    batch = len(prompt_ids)
    if min((len(ids) for ids in prompt_ids), default=0) == 0:
        raise ValueError(f"prompt_ids must hold prompts of at least one token, got {prompt_ids}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be >= 0 and finite, got {temperature}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if uniforms.shape != (batch, max_new_tokens):
        raise ValueError(f"uniforms has shape {tuple(uniforms.shape)}, expected ({batch}, {max_new_tokens})")

    device = actor.device
    prompts, prompt_mask = (tensor.to(device) for tensor in pad_prompts(prompt_ids, pad_id))
    uniforms, stops = uniforms.to(device), torch.tensor(eos_ids, device=device)
    chosen = torch.full((batch, max_new_tokens), pad_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros(batch, max_new_tokens, dtype=torch.float32, device=device)
    live = torch.zeros(batch, max_new_tokens, dtype=torch.bool, device=device)
    running = torch.ones(batch, dtype=torch.bool, device=device)

    with actor.activated(), annotate("ppo_fast/decode"):
        body, head = actor.model.base_model, actor.head
        # transformers renames its argument past_key_values to cache within 5.x, and drops the old name in 5.40.
        cache_keyword = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
        cache = DynamicCache(config=actor.model.config)
        attention = prompt_mask.long()
        positions = (attention.cumsum(1) - 1).clamp_min(0)
        step_ids = prompts
        for step in range(max_new_tokens):
            hidden = body(
                input_ids=step_ids,
                attention_mask=attention,
                position_ids=positions,
                use_cache=True,
                **{cache_keyword: cache},
            ).last_hidden_state[:, -1]
            logits = head.logits(hidden)
            ids = _draw(logits, temperature, uniforms[:, step])
            drawn = ops.selected_logprobs(logits, ids, temperature=temperature or 1.0)
            chosen[:, step] = ids.where(running, pad_id)
            logprobs[:, step] = drawn.where(running, 0.0)
            live[:, step] = running
            if on_tokens is not None:
                on_tokens(int(running.sum()))
            running = running & ~torch.isin(ids, stops)
            if not running.any():
                break
            step_ids = chosen[:, step : step + 1]
            # A row that has ended goes on as padding: its new column is masked, its results are dropped.
            attention = torch.cat([attention, live[:, step : step + 1].long()], dim=1)
            positions = (attention.sum(1, keepdim=True) - 1).clamp_min(0)

    width = step + 1
    return Rollout(
        token_ids=torch.cat([prompts, chosen[:, :width]], dim=1),
        prompt_mask=prompt_mask,
        response_mask=live[:, :width],
        logprobs=logprobs[:, :width],
        finished=~running,
    )


def _draw(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Token ids int64 [B].  ``logits``: float32 [B, V]; ``uniform``: float64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative sum exceeds u * total: right=True steps over tokens of probability zero. Some sum
    # does, for u <= 1 - 2^-53 stays below the total when multiplied; the clamp is for NaN.
    target = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
