"""Settings of the roles that contradict each other: one sentence that says what to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peft import IA3Config, get_peft_model
from torch import nn

from ppo_fast.errors import UserError
from ppo_fast.models.roles import build_roles


def _arrived(it, name="default", **settings):
    return get_peft_model(it.bare(), it.lora(**settings), adapter_name=name)


def _two_active(it):
    model = _arrived(it)
    model.add_adapter("other", it.lora())
    model.base_model.set_adapter(["default", "other"])
    return model


def _frozen_model(it):
    return it.bare().requires_grad_(False)


def _same(it, name, peft=False):
    model = _arrived(it) if peft else it.bare()
    return {"model": model, name: model.get_base_model() if peft else model}


CONTRADICTIONS = {
    "two adapters": (lambda it: {"model": _arrived(it), "peft_config": it.lora()}, "already carries an adapter"),
    "value config, no LoRA": (lambda it: {"value_peft_config": it.lora()}, "value_peft_config needs peft_config"),
    "value config, value model": (
        lambda it: {"peft_config": it.lora(), "value_peft_config": it.lora(), "value_model": "head"},
        "value_peft_config is for a critic on the policy's base",
    ),
    "two active": (lambda it: {"model": _two_active(it)}, "2 active adapters"),
    "not LoRA": (
        lambda it: {"model": get_peft_model(it.bare(), IA3Config(task_type="CAUSAL_LM"))},
        "only LoRA shares its base",
    ),
    "biases": (lambda it: {"peft_config": it.lora(bias="all")}, "bias='all'"),
    "value biases": (
        lambda it: {"peft_config": it.lora(), "value_peft_config": it.lora(bias="lora_only")},
        "bias='lora_only'",
    ),
    "arrived biases": (lambda it: {"model": _arrived(it, bias="all")}, "bias='all'"),
    "pissa": (lambda it: {"peft_config": it.lora(init_lora_weights="pissa")}, "init_lora_weights='pissa' changes the"),
    "value pissa": (
        lambda it: {"peft_config": it.lora(), "value_peft_config": it.lora(init_lora_weights="pissa_niter_4")},
        "init_lora_weights='pissa_niter_4' changes the base",
    ),
    "adapter value": (lambda it: {"model": _arrived(it, name="value")}, "an adapter named 'value'"),
    "adapter reference": (lambda it: {"model": _arrived(it, name="reference")}, "an adapter named 'reference'"),
    "head adapter": (
        lambda it: {"peft_config": it.lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3]})},
        "the model's head is adapted by peft.*TrainableTokensWrapper, which can't be read as one matrix",
    ),
    "no such target": (lambda it: {"peft_config": it.lora(target_modules=["nope"])}, "peft_config can't work .*nope"),
    "rank 0": (lambda it: {"peft_config": it.lora(r=0)}, "peft_config can't work with this model .*; give r >= 1"),
    "no such value target": (
        lambda it: {"peft_config": it.lora(), "value_peft_config": it.lora(target_modules=["nope"])},
        "value_peft_config can't work with this model",
    ),
    "nothing trains": (lambda it: {"model": _frozen_model(it)}, "no parameter of the model requires a gradient"),
    "reference is policy": (lambda it: _same(it, "ref_model"), "is the policy itself"),
    "reference is base": (lambda it: _same(it, "ref_model", peft=True), "is the policy itself"),
    "critic is policy": (lambda it: _same(it, "value_model"), "is the policy itself"),
    "critic is reference": (lambda it: dict.fromkeys(["ref_model", "value_model"], it.bare()), "are one module"),
    "reference vocabulary": (
        lambda it: {"ref_model": it.bare(vocab_size=80)},
        "ref_model has 80 token ids and the policy 64",
    ),
    "reference adapter": (lambda it: {"ref_model": _arrived(it)}, "ref_model carries an adapter"),
    "critic adapter": (lambda it: {"value_model": _arrived(it)}, "value_model carries an adapter"),
    "reference name": (lambda it: {"ref_model": "llama"}, "ref_model is a str"),
    "critic module": (lambda it: {"value_model": nn.Linear(3, 3)}, "value_model is a Linear"),
    "critic path": (lambda it: {"value_model": "/nowhere/at/all"}, "the model '/nowhere/at/all' can't be loaded"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(case, tiny_model, lora):
    arguments, message = CONTRADICTIONS[case]
    arguments = arguments(SimpleNamespace(bare=tiny_model, lora=lora))
    model = arguments.pop("model", None)
    with pytest.raises(UserError, match=message) as error:
        build_roles(tiny_model() if model is None else model, **arguments)
    assert "\n" not in str(error.value)
