"""Activation checkpointing with two adapters on one base: backward recomputes with the adapter of the forward."""

from __future__ import annotations

import itertools

import pytest
import torch

from ppo_fast.models.roles import build_roles

# Forwards and backwards of policy and value, each forward before its backward.
ORDERS = [
    order
    for order in itertools.permutations(("policy forward", "value forward", "policy backward", "value backward"))
    if all(order.index(f"{role} forward") < order.index(f"{role} backward") for role in ("policy", "value"))
]


@pytest.fixture
def batch(ragged, batch_of):
    return batch_of(ragged)


@pytest.fixture
def build(tiny_model, lora, shake, with_adapter):
    """``build(kind, family="llama", **settings)``: roles in which every adapter and head has an effect."""

    def make(kind, family="llama", arrives_on=False, **settings):
        torch.manual_seed(0)  # of the adapters' own start
        if kind == "trained adapter":
            model, peft = with_adapter(family), None
        else:
            model, peft = tiny_model(family), lora() if kind == "lora" else None
        if arrives_on:
            model.gradient_checkpointing_enable()
        roles = build_roles(model, peft_config=peft, **settings)
        shake(roles.policy_parameters.values(), seed=1)
        shake(roles.value_parameters.values(), seed=2)
        return roles

    return make


def _policy_loss(roles, batch):
    logprobs = roles.policy.head.logits(roles.policy.hidden(batch)).log_softmax(-1)
    return -(logprobs.gather(-1, batch.response_ids[..., None])[..., 0] * batch.response_mask).sum()


def _value_loss(roles, batch):
    values, bootstrap = roles.critic.values(batch)
    return ((values - 1).square() * batch.response_mask).sum() + bootstrap.sum()


def _gradients(roles) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in (roles.policy_parameters | roles.value_parameters).items()
    }


def _run(roles, batch, order, between=lambda: None) -> dict[str, torch.Tensor | None]:
    losses = {}
    for event in order:
        role, direction = event.split()
        if direction == "forward":
            losses[role] = {"policy": _policy_loss, "value": _value_loss}[role](roles, batch)
        else:
            losses[role].backward()
        between()
    return _gradients(roles)


def _assert_equal(got, expected) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            assert torch.equal(got[name], gradient), name
    assert sum(gradient is not None and bool(gradient.any()) for gradient in got.values()) > 4


def _trained(roles) -> set[str]:
    model = roles.adapters or roles.policy.model
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


class _Calls:
    """How often the first layer's MLP runs."""

    def __init__(self, body) -> None:
        self.count = 0
        mlp = next(module for name, module in body.named_modules() if name.endswith("0.mlp"))
        mlp.register_forward_pre_hook(self._add)  # recomputation stops at the last tensor it needs, before post hooks

    def _add(self, *_) -> None:
        self.count += 1


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: ", ".join(order))
@pytest.mark.parametrize("kind", ["lora", "trained adapter"])
def test_gradients_equal_those_without(kind, order, build, batch):
    """With a forward of the reference after every step: it switches adapters, and the model to evaluation mode."""
    expected = _run(build(kind), batch, order)
    roles = build(kind, gradient_checkpointing=True)
    trained = _trained(roles)

    @torch.no_grad()
    def reference():
        roles.reference.hidden(batch)
        assert _trained(roles) == trained

    _assert_equal(_run(roles, batch, order, reference), expected)
    assert all(gradient is not None for gradient in expected.values())


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi"])
def test_other_families(family, build, batch):
    order = ("policy forward", "value forward", "policy backward", "value backward")
    expected = _run(build("lora", family), batch, order)
    _assert_equal(_run(build("lora", family, gradient_checkpointing=True), batch, order), expected)


@pytest.mark.parametrize("settings", [{}, {"value_model": "head"}])
def test_full_weights(settings, build, batch):
    order = ("policy forward", "value forward", "policy backward", "value backward")
    expected = _run(build("full", **settings), batch, order)
    _assert_equal(_run(build("full", gradient_checkpointing=True, **settings), batch, order), expected)


def test_a_kept_graph_can_be_walked_twice(build, batch):
    def run(roles):
        loss = _value_loss(roles, batch)
        loss.backward(retain_graph=True)
        _policy_loss(roles, batch).backward()
        loss.backward()
        return _gradients(roles)

    _assert_equal(run(build("lora", gradient_checkpointing=True)), run(build("lora")))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_layers_run_again_in_backward(kind, build, batch):
    roles = build(kind, gradient_checkpointing=True)
    for body, loss_of in ((roles.policy.model, _policy_loss), (roles.critic_model or roles.policy.model, _value_loss)):
        calls = _Calls(body)
        loss = loss_of(roles, batch)
        assert calls.count == 1
        loss.backward()
        assert calls.count == 2


def test_without_checkpointing_they_dont(build, batch):
    roles = build("lora")
    calls = _Calls(roles.policy.model)
    _value_loss(roles, batch).backward()
    assert calls.count == 1


def test_scoring_without_gradients_runs_each_layer_once(build, batch):
    roles = build("lora", gradient_checkpointing=True)
    calls = _Calls(roles.policy.model)
    with torch.no_grad():
        _value_loss(roles, batch)
    assert calls.count == 1


@pytest.mark.parametrize("kind", ["lora", "trained adapter"])
def test_a_model_that_arrives_with_checkpointing_on(kind, build, batch):
    """It keeps it, with contexts that know the adapters."""
    order = ("value forward", "policy forward", "value backward", "policy backward")
    roles = build(kind, arrives_on=True)
    calls = _Calls(roles.policy.model)
    got = _run(roles, batch, order)
    assert calls.count == 4
    _assert_equal(got, _run(build(kind), batch, order))


def test_an_adapter_switched_by_hand_in_between_doesnt_matter(build, batch):
    """Backward called while another adapter is active, as a foreign loop may do."""
    expected = _run(build("lora"), batch, ("value forward", "value backward"))
    roles = build("lora", gradient_checkpointing=True)
    loss = _value_loss(roles, batch)
    with roles.reference.activated():
        loss.backward()
    _assert_equal(_gradients(roles), expected)
