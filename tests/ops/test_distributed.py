"""Two processes with half of the batch each against one with all of it: DDP, FSDP2 and tensors gathered by hand.

This file is also the program of each process: ``python test_distributed.py RANK FOLDER``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ppo_fast.ops import linear_ppo_loss, linear_selected_logprobs, linear_token_loss, ppo_loss

B, T, V, H, RANKS = 4, 5, 23, 8, 2
FORMS = ("linear_ppo_loss", "linear_token_loss", "linear_selected_logprobs")


def reinforce(logprobs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logprobs - 0.1 * entropy


class Tied(nn.Module):
    """The head is the embedding, and the loss is made where the hooks of the wrapper see its weight: inside forward."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=False) if separate else self.embedding

    def forward(self, form: str, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, live: float) -> Tensor:
        hidden = self.mix(self.embedding(ids.roll(1, -1))).tanh()
        head = (hidden, self.head.weight, ids)
        if form == "linear_ppo_loss":
            return linear_ppo_loss(*head, old, advantages, mask, normalizer=live, entropy_coef=0.1)[0]
        if form == "linear_token_loss":
            return linear_token_loss(*head, reinforce, (advantages,), mask=mask) / live
        logprobs, entropy = linear_selected_logprobs(*head, mask=mask, return_entropy=True)
        return ppo_loss(logprobs, old, advantages, mask, entropy=entropy, entropy_coef=0.1, normalizer=live)[0]


def model_and_batch(separate: bool = False) -> tuple[Tied, list[Tensor]]:
    """The same in every process. The halves of the batch have different numbers of live tokens."""
    torch.manual_seed(0)
    model = Tied(separate).double()
    mask = torch.rand(B, T) < torch.tensor([[0.9], [0.9], [0.4], [0.5]])
    return model, [
        torch.randint(V, (B, T)),
        torch.randn(B, T).double() * 0.3 - 3,
        torch.randn(B, T).double(),
        mask.logical_or(torch.arange(T) == 0),
    ]


def gradients(model: nn.Module, wrapped: nn.Module, form: str, batch: list[Tensor], live: float) -> dict[str, Tensor]:
    model.zero_grad()
    # Both wrappers average over ranks what is to be summed.
    (wrapped(form, *batch, live) * (dist.get_world_size() if dist.is_initialized() else 1)).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}


def program(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    _, whole = model_and_batch()
    live, mine = float(whole[-1].sum()), [x.chunk(RANKS)[rank] for x in whole]
    found: dict[str, object] = {}

    model, _ = model_and_batch()
    ddp = DistributedDataParallel(model)
    for form in FORMS:
        found[f"ddp {form}"] = gradients(model, ddp, form, mine, live)

    model, _ = model_and_batch()
    fully_shard(model, mesh=mesh)
    for form in FORMS:
        found[f"fsdp {form}"] = gradients(model, model, form, mine, live)

    model, _ = model_and_batch(separate=True)
    fully_shard(model.head, mesh=mesh)  # its weight is whole inside its own forward alone
    fully_shard(model, mesh=mesh)
    try:
        model(FORMS[0], *mine, live)
    except TypeError as error:
        found["head sharded apart"] = str(error)

    model, _ = model_and_batch()
    hidden = model.mix(model.embedding(mine[0].roll(1, -1))).tanh().detach()
    shards = distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    gathered = shards.full_tensor(grad_placements=[Partial()])
    linear_ppo_loss(hidden, gathered, *mine, normalizer=live, entropy_coef=0.1)[0].backward()
    found["gathered"] = shards.grad.full_tensor()

    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each process got."""
    folder = tmp_path_factory.mktemp("ranks")
    running = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("form", FORMS)
def test_two_processes_have_the_gradients_of_one(found, form, wrapper):
    model, batch = model_and_batch()
    expected = gradients(model, model, form, batch, float(batch[-1].sum()))
    for of_rank in found:
        for name, gradient in expected.items():
            assert gradient.any()
            torch.testing.assert_close(of_rank[f"{wrapper} {form}"][name], gradient, rtol=1e-10, atol=1e-13)


def test_a_sharded_weight_is_refused_with_what_to_do(found):
    """Gathering it in here would be wrong: only the caller knows whether ranks hold the same tokens or others."""
    for of_rank in found:
        message = of_rank["head sharded apart"]
        assert message.startswith("weight must be a plain dense torch.Tensor or Parameter, got DTensor")
        assert "full_tensor(grad_placements=[Partial()])" in message


def test_a_weight_gathered_as_the_message_says_has_the_gradient_of_the_whole_batch(found):
    model, batch = model_and_batch()
    hidden = model.mix(model.embedding(batch[0].roll(1, -1))).tanh().detach()
    weight = model.head.weight.detach().requires_grad_()
    linear_ppo_loss(hidden, weight, *batch, entropy_coef=0.1)[0].backward()
    for of_rank in found:
        torch.testing.assert_close(of_rank["gathered"], weight.grad, rtol=1e-10, atol=1e-13)


if __name__ == "__main__":
    program(int(sys.argv[1]), Path(sys.argv[2]))
