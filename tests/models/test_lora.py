"""The adapted layer in one function is peft's own forward pass, in value and gradient, and keeps less."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ppo_fast.models.lora import _Forward, fuse_adapters


def _layer(dtype=torch.float64, *, bias=True, **config):
    """A fused LoRA layer, 12 -> 20, with two adapters that both do something; "one" is active."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=bias, dtype=dtype))
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["0"], **config)
    model = get_peft_model(model, config, adapter_name="one")
    model.add_adapter("two", config)
    for name, p in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            nn.init.normal_(p, mean=1.0 if "magnitude" in name else 0.0, std=0.1)
    model.set_adapter("one")
    fuse_adapters(model)
    layer = model.base_model.model[0]
    assert isinstance(layer.forward, _Forward)
    return layer


def _run(forward, layer, x, upstream):
    """Output and gradients of input and adapters."""
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(upstream)
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x": x.grad} | grads


def _theirs(layer):
    return lambda x: type(layer).forward(layer, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (7, 12), (2, 5, 12), (0, 12)])
def test_it_is_pefts_forward_and_backward(bias, shape):
    layer = _layer(bias=bias)
    for p in layer.parameters():
        p.data = p.data.double()
    x, upstream = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], 20, dtype=torch.float64)
    ours, theirs = _run(layer, layer, x, upstream), _run(_theirs(layer), layer, x, upstream)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_error_is_no_larger_than_pefts(dtype):
    layer = _layer(dtype)
    exact = copy.deepcopy(layer)
    for p in exact.parameters():
        p.data = p.data.double()
    x, upstream = torch.randn(400, 12).to(dtype), torch.randn(400, 20).to(dtype)
    ours, theirs = _run(layer, layer, x, upstream), _run(_theirs(layer), layer, x, upstream)
    truth = _run(_theirs(exact), exact, x.double(), upstream.double())
    for name, value in truth.items():
        assert ours[name].dtype == theirs[name].dtype
        error, allowed = ((found[name].double() - value).norm() for found in (ours, theirs))
        # peft makes an adapter's gradient in float32 also over bfloat16: there, the rounding of bfloat16 itself.
        allowed = max(1.5 * allowed, 2 * torch.finfo(dtype).eps * value.norm())
        assert error <= allowed, (name, error, allowed)


def test_gradients_flow_to_what_asks_for_them():
    layer = _layer(torch.float32)
    y = layer(torch.randn(4, 12))  # an input that needs none, as the first layer's
    y.sum().backward()
    assert layer.lora_A["one"].weight.grad is not None
    assert layer.lora_A["two"].weight.grad is None
    assert layer.base_layer.weight.grad is None
    with torch.no_grad():
        assert not layer(torch.randn(4, 12)).requires_grad


def test_a_second_backward_through_the_gradient_is_refused():
    layer = _layer(torch.float32)
    x = torch.randn(4, 12, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_input_and_the_narrow_product(dtype):
    layer = _layer(dtype)
    parameters = {p.data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    x = torch.randn(100, 12, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert sum(kept.values()) == 100 * (12 + 3) * dtype.itemsize


def _disable(layer):
    layer._disable_adapters = True


def _switch(layer):
    layer._active_adapter = ["two"]


def _both(layer):
    layer._active_adapter = ["one", "two"]


def _unfreeze(layer):
    layer.base_layer.requires_grad_(True)


@pytest.mark.parametrize("change", [_disable, _switch, _both, _unfreeze, lambda layer: layer.merge()])
def test_whatever_the_layer_is_set_to(change):
    layer = _layer(torch.float32)
    before = layer(torch.ones(1, 12)).detach()
    change(layer)
    x, upstream = torch.randn(5, 12), torch.randn(5, 20)
    ours, theirs = _run(layer, layer, x, upstream), _run(_theirs(layer), layer, x, upstream)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    if change in (_disable, _switch, _both):
        assert not torch.allclose(layer(torch.ones(1, 12)), before, atol=1e-3)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}])
def test_other_adapters_run_by_peft(config):
    layer = _layer(torch.float32, **config)
    x, upstream = torch.randn(5, 12), torch.randn(5, 20)
    torch.manual_seed(1)
    ours = _run(layer, layer, x, upstream)
    torch.manual_seed(1)
    theirs = _run(_theirs(layer), layer, x, upstream)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_a_copy_of_the_layer_runs_over_its_own_weights():
    layer = _layer(torch.float32)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.base_layer.weight.zero_()
        other.base_layer.bias.zero_()
        other.lora_B["one"].weight.zero_()
        assert not other(torch.ones(1, 12)).any()
        assert layer(torch.ones(1, 12)).any()
