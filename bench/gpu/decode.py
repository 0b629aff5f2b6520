"""Rollouts: decode steps as CUDA graphs, plain, and transformers' own ``generate``."""

from __future__ import annotations

import torch

from gpu.machine import Machine, Numbers, measure
from ppo_fast.models.roles import Actor
from ppo_fast.rollout import generate
from ppo_fast.rollout.slots import Pass, SlotCache
from ppo_fast.rollout.step import DecodeStep, Row, Sampler, has_graphs
from shapes import QWEN, TINY, random_model


def bench_decode(machine: Machine) -> Numbers:
    """Whole rollouts of 64 prompts of 64 tokens by 64 new ones, Qwen2.5-0.5B's shape with random weights.

    Greedy ids of graphs and plain steps are compared first.
    """
    B, L, T = (2, 4, 3) if machine.dry else (64, 64, 64)
    config = TINY if machine.dry else QWEN
    with torch.device(machine.device):
        model = random_model(config, machine.dtype).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    actor = Actor(model)
    device = actor.device
    prompts = torch.randint(10, config.vocab_size - 1, (B, L))

    def ours() -> object:
        return generate(
            actor, prompts.tolist(), max_new_tokens=T, temperature=1.0, eos_ids=(), pad_id=0, seeds=range(B)
        )

    @torch.no_grad()
    def steps(captured: bool, temperature: float = 1.0) -> list[list[int]]:
        """Ids of each step, without what ``generate`` does between them."""
        cache = SlotCache(B, L + T)
        sampler = Sampler(actor.head, B, temperature=temperature, top_k=None, top_p=None, banned_early=())
        step = DecodeStep(model.base_model, cache, sampler, device, captured=captured)
        ids = [prompts[:, -1].tolist()]
        slots = torch.arange(B, device=device)
        with cache.attached(model):
            now = Pass(slots, torch.zeros_like(slots), L - 1, L - 1, running=False)
            cache.forward(model.base_model, prompts[:, :-1].to(device), now)
            for t in range(T):
                ids.append(step([Row(token, L - 1 + t, row, t, False) for row, token in enumerate(ids[-1])]).ids)
        return ids[1:]

    def stock() -> torch.Tensor:
        with torch.no_grad():
            ids = prompts.to(machine.device)
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=T, pad_token_id=0,
            )  # fmt: skip

    # Shapes are rounded up for graphs, so that near ties may fall otherwise and a reply go on from there.
    graphs = has_graphs(device)
    same = torch.tensor(steps(graphs, 0.0)).eq(torch.tensor(steps(False, 0.0))).float().mean()
    variants = {"ours": ours, "graphs": lambda: steps(graphs), "plain": lambda: steps(False), "generate": stock}
    found = measure(machine, variants)
    rates = {name: round(1e3 * B * T / row["ms"], 1) for name, row in found.items() if row.get("ms")}
    return {**found, "tokens_per_second": rates, "equal_greedy_ids": round(float(same), 4)}
