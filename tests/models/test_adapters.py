"""Switching adapters: what trains never changes, and None is the bare base to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import get_peft_model
from torch import nn

from ppo_fast.models.adapters import Adapters

IDS = torch.tensor([[9, 33, 3, 60, 41, 41, 17]])
NAMES = ("policy", "value", "reference", None)
KINDS = {
    "linear": {},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "norms": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [3, 9]},
}


@pytest.fixture(params=KINDS, scope="module")
def switched(request, tiny_model, lora, shake):
    """(bare model, the same with three adapters, Adapters over policy and value); the third is frozen."""
    config = lora(lora_dropout=0.0, **KINDS[request.param])
    model = get_peft_model(tiny_model("llama"), config, adapter_name="policy")
    for name in ("value", "reference"):
        model.add_adapter(name, lora(lora_dropout=0.0, **KINDS[request.param]))
    shake((p for name, p in model.named_parameters() if _owner(name) is not None), seed=3)
    model.base_model.set_requires_grad("reference", True)  # as whoever loaded it may have left it
    return tiny_model("llama"), model, Adapters(model, ("policy", "value"))


def _owner(name: str) -> str | None:
    """The adapter a parameter belongs to; none of these models has a module of such a name."""
    return next((adapter for adapter in ("policy", "value", "reference") if adapter in name.split(".")), None)


def _trained(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def _logits(model) -> torch.Tensor:
    return model.get_base_model()(input_ids=IDS).logits


def test_only_the_given_adapters_train_whatever_is_active(switched):
    _, model, adapters = switched
    expected = {name for name, _ in model.named_parameters() if _owner(name) in ("policy", "value")}
    assert expected
    assert _trained(model) == expected
    for outer, inner in itertools.product(NAMES, NAMES):
        with adapters.use(outer), adapters.use(inner):
            assert _trained(model) == expected
        assert _trained(model) == expected


def test_the_first_is_active_outside(switched):
    _, model, adapters = switched
    outside = _logits(model)
    with adapters.use("policy"):
        assert torch.equal(_logits(model), outside)
    for name in ("value", "reference", None):
        with adapters.use(name):
            assert not torch.allclose(_logits(model), outside, atol=1e-3)
        assert torch.equal(_logits(model), outside)


def test_none_is_the_bare_base_to_the_bit(switched):
    bare, model, adapters = switched
    with torch.no_grad():
        expected = bare(input_ids=IDS).logits
    with adapters.use(None):
        assert torch.equal(_logits(model), expected)


def test_outputs_depend_on_the_active_adapter_alone(switched):
    """After every switch there is, from each adapter to each."""
    _, model, adapters = switched
    expected = {}
    for name in NAMES:
        with adapters.use(name):
            expected[name] = _logits(model)
    for outer, inner in itertools.product(NAMES, NAMES):
        with adapters.use(outer):
            with adapters.use(inner):
                assert torch.equal(_logits(model), expected[inner])
            assert torch.equal(_logits(model), expected[outer])
        assert torch.equal(_logits(model), expected["policy"])


def test_the_active_adapter_is_peft_own(switched):
    """Against peft's own switch, on a second copy."""
    _, model, adapters = switched
    expected = {}
    for name in ("policy", "value", "reference"):
        model.set_adapter(name)
        expected[name] = _logits(model)
    adapters = Adapters(model, ("policy", "value"))  # the switches above have changed what trains
    for name, logits in expected.items():
        with adapters.use(name):
            assert torch.equal(_logits(model), logits)


def test_an_exception_inside_goes_back_too(switched):
    _, model, adapters = switched
    outside, trained = _logits(model), _trained(model)
    for name in NAMES:
        with pytest.raises(ZeroDivisionError), adapters.use("value"), adapters.use(name):
            raise ZeroDivisionError
        assert torch.equal(_logits(model), outside)
        assert _trained(model) == trained


def test_one_context_can_be_entered_again_and_within_itself(switched):
    _, model, adapters = switched
    outside = _logits(model)
    value = adapters.use("value")
    with adapters.use(None):
        bare = _logits(model)
    with value:
        inside = _logits(model)
        with adapters.use(None):
            with value:
                assert torch.equal(_logits(model), inside)
            assert torch.equal(_logits(model), bare)
        assert torch.equal(_logits(model), inside)
    assert torch.equal(_logits(model), outside)
    with value:
        assert torch.equal(_logits(model), inside)
    assert torch.equal(_logits(model), outside)


def test_an_unknown_name_changes_nothing(switched):
    _, model, adapters = switched
    outside = _logits(model)
    with pytest.raises(ValueError, match="adapter is 'critic', expected one of"), adapters.use("critic"):
        pass
    assert torch.equal(_logits(model), outside)


def test_parameters_are_each_adapters_own(switched):
    _, model, adapters = switched
    trained = _trained(model)
    policy, value = adapters.parameters("policy"), adapters.parameters("value")
    assert {_owner(name) for name in policy} == {"policy"}
    assert {_owner(name) for name in value} == {"value"}
    assert policy.keys() | value.keys() == trained == _trained(model)
    named = dict(model.named_parameters())
    assert all(named[name] is parameter for name, parameter in (policy | value).items())


def test_an_adapter_on_other_layers_leaves_the_rest_alone(tiny_model, lora, shake):
    """The value adapter covers fewer modules than the policy's, and has no copy of the norm."""
    policy = lora(target_modules=["q_proj", "v_proj"], modules_to_save=["norm"])
    model = get_peft_model(tiny_model("llama"), policy, adapter_name="policy")
    model.add_adapter("value", lora(target_modules=["v_proj"]))
    adapters = Adapters(model, ("policy", "value"))
    shake((p for p in model.parameters() if p.requires_grad), seed=1)
    with adapters.use("value"):
        got = _logits(model.eval())
        norm = model.get_base_model().model.norm
        assert norm.weight is norm.original_module.weight  # as model code may read it
    alone = get_peft_model(tiny_model("llama"), lora(target_modules=["v_proj"]), adapter_name="value").eval()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(named[name.replace("v_proj.base_layer", "v_proj")])
    assert torch.equal(got, _logits(alone))


def test_an_adapter_that_arrives_disabled_or_frozen_is_active_and_trained(tiny_model, lora, shake):
    model = get_peft_model(tiny_model("llama"), lora(lora_dropout=0.0, inference_mode=True), adapter_name="policy")
    shake((p for name, p in model.named_parameters() if ".policy." in name), seed=1)
    expected = _logits(model)
    model.base_model.disable_adapter_layers()
    assert not torch.equal(_logits(model), expected)
    assert not _trained(model)
    Adapters(model, ("policy",))
    assert torch.equal(_logits(model), expected)
    assert _trained(model) == {name for name, _ in model.named_parameters() if ".policy." in name}


def test_a_switch_doesnt_walk_the_model(switched, monkeypatch):
    """It happens twice a block in a checkpointed backward: peft's own walks took longer than the blocks."""
    _, _, adapters = switched
    walks = []
    modules = nn.Module.modules
    monkeypatch.setattr(nn.Module, "modules", lambda self: walks.append(self) or modules(self))
    with adapters.use("value"), adapters.use(None):
        pass
    assert not walks


@pytest.mark.parametrize("other", ["value", "reference", None])
def test_a_switch_of_pefts_own_in_between_is_seen(switched, other):
    _, model, adapters = switched
    expected = {}
    for name in NAMES:
        with adapters.use(name):
            expected[name] = _logits(model)
    if other is None:
        model.base_model.disable_adapter_layers()
    else:
        model.set_adapter(other)
    outside = _logits(model)
    for name in NAMES:
        with adapters.use(name):
            assert torch.equal(_logits(model), expected[name])
        assert torch.equal(_logits(model), outside)  # as the other left it
    model.base_model.enable_adapter_layers()
    Adapters(model, ("policy", "value"))  # as the other tests find it
