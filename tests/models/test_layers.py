"""Layers in one operation are peft's and transformers' own forward passes, in value and gradient, and keep less."""

from __future__ import annotations

import copy
from functools import partial, wraps

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from ppo_fast import ops
from ppo_fast.models.layers import _Linear, _Norm, _SwiGLU, fuse_layers


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
    fuse_layers(model)
    layer = model.base_model.model[0]
    assert isinstance(layer.forward, _Linear)
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


def test_what_an_adapter_is_made_of_keeps_its_forward():
    """A DoRA layer runs peft's forward, whose parts must compute alike where they are trained and where frozen."""
    layer = _layer(torch.float32, use_dora=True)
    assert [name for name, part in layer.named_modules() if "forward" in vars(part)] == [""]


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


# ----------------------------------------------------------------------------------------------- norms and perceptrons

GATED = ["llama", "qwen2", "qwen3", "mistral"]


def _stripped(model):
    """The same model with its classes' own forwards, but for norms, which compute in float32 whatever comes."""
    other = copy.deepcopy(model)
    for module in other.modules():
        before = vars(module).pop("forward", None)
        if isinstance(before, _Norm):
            shape, eps = module.weight.shape, module.variance_epsilon
            module.forward = partial(nn.functional.rms_norm, normalized_shape=shape, weight=module.weight, eps=eps)
    return other


def _kinds(model):
    return [type(vars(m).get("forward")) for m in model.modules()]


def _states_and_gradients(model, ids, **settings):
    """The last hidden states and the gradient of everything that is trained."""
    states = model.base_model(input_ids=ids, use_cache=False, **settings).last_hidden_state
    states.sin().sum().backward()
    found = {"states": states.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("family", GATED)
@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"], ["gate_proj", "down_proj"]])
def test_a_fused_model_is_the_model(family, targets, tiny_model):
    """All weights trained, or adapters on all layers, on attention alone, on a part of the perceptron."""
    torch.manual_seed(0)
    model = tiny_model(family).double()
    if targets is not None:
        config = LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config).double().get_base_model()
    fuse_layers(model)
    layers = model.config.num_hidden_layers
    assert _kinds(model).count(_SwiGLU) == layers
    norms = 2 + 2 * (family == "qwen3")  # those of queries and keys
    assert _kinds(model).count(_Norm) == norms * layers + 1
    ids = torch.randint(64, (2, 9))
    _assert_same(_states_and_gradients(model, ids), _states_and_gradients(_stripped(model), ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_transformers_own(dtype, tiny_model):
    torch.manual_seed(0)
    model = tiny_model("llama").to(dtype)
    norm = model.model.norm
    nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    fuse_layers(model)
    x, upstream = (torch.randn(2, 5, model.config.hidden_size).to(dtype) for _ in range(2))
    ours, theirs = _run(norm, norm, x, upstream), _run(_theirs(norm), norm, x, upstream)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_whatever_is_not_llamas_keeps_its_forward(tiny_model):
    """Gemma's norm counts from 1 and its perceptron has another activation; GPT-2 has neither layer."""
    for family in ("gemma", "gpt2"):
        model = tiny_model(family)
        fuse_layers(model)
        assert not {_SwiGLU, _Norm} & set(_kinds(model))


def test_a_gated_perceptron_keeps_gate_and_up_alone(tiny_model):
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model("llama"), config).get_base_model()
    fuse_layers(model)
    perceptron = model.model.layers[0].mlp
    own = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    hidden, wide = model.config.hidden_size, model.config.intermediate_size
    x = torch.randn(50, hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        perceptron(x)
    assert sum(kept.values()) == 50 * (hidden + 2 * wide + 3 * 3)


def test_a_frozen_layer_keeps_nothing():
    layer = nn.Linear(12, 20).requires_grad_(False)
    model = nn.Sequential(layer)
    fuse_layers(model)
    assert isinstance(layer.forward, _Linear)
    kept = []
    x = torch.randn(5, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    assert all(t.data_ptr() == layer.weight.data_ptr() or t.numel() == 0 for t in kept)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 12))


def test_hooks_on_the_last_layer_see_its_input(tiny_model):
    """Somebody who watches a perceptron's last layer sees the product that it multiplies."""
    model = tiny_model("llama").requires_grad_(False)
    fuse_layers(model)
    perceptron, seen = model.model.layers[0].mlp, []
    x = torch.randn(5, model.config.hidden_size)
    expected = perceptron(x)
    perceptron.down_proj.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    torch.testing.assert_close(perceptron(x), expected)
    torch.testing.assert_close(seen[0], ops.swiglu(perceptron.gate_proj(x), perceptron.up_proj(x)))


def test_other_activations_and_other_code_keep_theirs(tiny_model):
    model = tiny_model("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.act_fn = nn.GELU()

    class Clamped(type(second)):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    second.__class__ = Clamped
    model.model.norm.forward = lambda x: x  # somebody else's
    fuse_layers(model)
    assert "forward" not in vars(first)
    assert "forward" not in vars(second)
    assert not isinstance(model.model.norm.forward, _Norm)


def test_a_norm_over_weights_of_another_dtype_is_transformers_own(tiny_model):
    model = tiny_model("llama")
    fuse_layers(model)
    norm = model.model.norm
    norm.weight.data = norm.weight.data.double()
    x = torch.randn(3, model.config.hidden_size)
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    assert norm(x).dtype == torch.float64


def test_a_perceptron_over_weights_of_two_dtypes_is_transformers_own(tiny_model):
    """A layer before it that widens its result, as one kept in float32 does."""
    model = tiny_model("llama").bfloat16()
    fuse_layers(model)
    perceptron = model.model.layers[0].mlp
    perceptron.gate_proj.register_forward_hook(lambda module, arguments, y: y.float())
    perceptron.down_proj.float()
    x = torch.randn(3, model.config.hidden_size).bfloat16()
    assert torch.equal(perceptron(x), type(perceptron).forward(perceptron, x))


def test_fusing_twice_is_fusing_once(tiny_model):
    model = tiny_model("llama")
    fuse_layers(model)
    forwards = [vars(m).get("forward") for m in model.modules()]
    fuse_layers(model)
    assert [vars(m).get("forward") for m in model.modules()] == forwards


# ----------------------------------------------------------------------------------------- what others do to the layers


def _adapted(model):
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).get_base_model()


def _perceptron(tiny_model):
    """One with adapters, fused, and an input for it."""
    model = _adapted(tiny_model("llama"))
    fuse_layers(model)
    return model.model.layers[0].mlp, torch.randn(3, model.config.hidden_size, requires_grad=True)


def test_attention_may_clamp_its_queries_in_place(tiny_model):
    """OLMo's clip_qkv."""
    model = _adapted(tiny_model("olmo", clip_qkv=0.5).double())
    fuse_layers(model)
    ids = torch.randint(64, (2, 9))
    _assert_same(_states_and_gradients(model, ids), _states_and_gradients(_stripped(model), ids))


@pytest.mark.parametrize("part", ["input_layernorm", "mlp", "mlp.up_proj", "self_attn.q_proj"])
def test_hooks_may_change_what_they_see(part, tiny_model):
    model = _adapted(tiny_model("llama").double())
    fuse_layers(model)
    model.model.layers[0].get_submodule(part).register_forward_hook(lambda module, arguments, y: y.add_(1))
    ids = torch.randint(64, (2, 9))
    _assert_same(_states_and_gradients(model, ids), _states_and_gradients(_stripped(model), ids))


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "kind",
    [LlamaRMSNorm, LlamaMLP, Qwen2RMSNorm, Qwen2MLP, nn.Linear, LoraLinear, nn.Identity, type(ACT2FN["silu"])],
)
def test_a_patched_class_keeps_its_forward(kind, first, wrapped, tiny_model, monkeypatch):
    """Patched before its layers are fused, or after; with the names of the forward that it replaces, or its own."""
    model = _adapted(tiny_model("qwen2" if "Qwen2" in kind.__name__ else "llama"))
    plain, before, calls = copy.deepcopy(model), kind.forward, []

    def patch(self, *arguments, **keywords):
        calls.append(self)
        return before(self, *arguments, **keywords)

    if not first:
        fuse_layers(model)
    monkeypatch.setattr(kind, "forward", wraps(before)(patch) if wrapped else patch)
    if first:
        fuse_layers(model)
    ids = torch.randint(64, (2, 5))
    model(ids)
    ours = len(calls)
    plain(ids)
    assert ours == len(calls) - ours > 0


def test_llamas_own_forward_replaced(tiny_model, monkeypatch):
    """Another formula in Llama's class: its layers have that, and others' are not compared with it."""

    def clamped(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.1) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", clamped)
    for family, theirs in (("llama", clamped), ("qwen2", Qwen2MLP.forward)):
        model = tiny_model(family)
        fuse_layers(model)
        perceptron, x = model.model.layers[0].mlp, torch.randn(3, model.config.hidden_size)
        torch.testing.assert_close(perceptron(x), theirs(perceptron, x))


PARTS = ["act_fn", "down_proj", "up_proj", *(f"{name}.{part}" for name in ("up_proj", "down_proj") for part in (
    "base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default"
))]  # fmt: skip
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_any_part_is_called(part, hook, tiny_model):
    perceptron, x = _perceptron(tiny_model)
    calls = []
    getattr(perceptron.get_submodule(part), f"register_{hook}")(lambda module, *rest: calls.append(module))
    perceptron(x).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_a_layer_fused_before_its_adapter_came(hook, tiny_model):
    model = tiny_model("llama")
    fuse_layers(model)
    model = _adapted(model)
    fuse_layers(model)
    layer, calls = model.model.layers[0].mlp.up_proj, []
    assert isinstance(layer.base_layer.forward, _Linear)
    getattr(layer.base_layer, f"register_{hook}")(lambda module, *rest: calls.append(module))
    layer(torch.randn(3, model.config.hidden_size, requires_grad=True)).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_global_hooks_see_every_layer(hook, tiny_model):
    perceptron, x = _perceptron(tiny_model)
    calls = []
    handle = getattr(nn.modules.module, f"register_module_{hook}")(lambda module, *rest: calls.append(module))
    try:
        perceptron(x).sum().backward()
        ours, calls[:] = len(calls), []
        type(perceptron).__call__(_unfused(perceptron), x).sum().backward()
    finally:
        handle.remove()
    assert ours == len(calls) == 1 + 1 + 3 * 5


def _unfused(model):
    other = copy.deepcopy(model)
    for module in other.modules():
        vars(module).pop("forward", None)
    return other


def test_a_part_with_another_forward(tiny_model):
    """Set on the object, as quantisers and profilers do it."""
    perceptron, x = _perceptron(tiny_model)
    for part in PARTS:
        module, calls = perceptron.get_submodule(part), []
        before = module.forward
        module.forward = lambda *a, calls=calls, before=before: calls.append(1) or before(*a)
        perceptron(x)
        assert calls == [1], part
        module.forward = before


def test_another_activation_set_later(tiny_model):
    perceptron, x = _perceptron(tiny_model)
    perceptron.act_fn = nn.GELU()
    assert torch.equal(perceptron(x), type(perceptron).forward(perceptron, x))


def test_arguments_by_name(tiny_model):
    model = tiny_model("llama").requires_grad_(False)
    fuse_layers(model)
    x, layer = torch.randn(3, model.config.hidden_size), model.model.layers[0]
    torch.testing.assert_close(layer.input_layernorm(hidden_states=x), layer.input_layernorm(x))
    torch.testing.assert_close(layer.mlp(x=x), layer.mlp(x))
    torch.testing.assert_close(layer.mlp.up_proj(input=x), layer.mlp.up_proj(x))
    adapted = _layer(torch.float32)
    torch.testing.assert_close(adapted(x=torch.ones(2, 12)), adapted(torch.ones(2, 12)))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        layer.mlp()


def test_an_adapter_on_the_weight_of_a_fused_layer(tiny_model):
    """peft's target_parameters parametrises a weight while its layer runs."""
    model = tiny_model("llama").requires_grad_(False)
    fuse_layers(model)
    names = ["self_attn.q_proj.weight", "mlp.down_proj.weight"]
    config = LoraConfig(r=3, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(model, config).get_base_model()
    ids = torch.randint(64, (2, 9))
    ours, theirs = (_states_and_gradients(m, ids) for m in (model, _stripped(model).double()))
    assert len(ours) == 1 + 2 * 2 * model.config.num_hidden_layers
    for name, value in theirs.items():
        assert (ours[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("adapted", [True, False])
def test_other_kinds_of_weights_multiply_their_own_way(name, adapted, monkeypatch):
    """A computed one that requires grad; a subclass, as quantised weights are."""

    class Quantised(nn.Parameter):
        pass

    monkeypatch.setattr(ops, "lora_linear", None)
    layer = _layer(torch.float32) if adapted else nn.Linear(12, 20).requires_grad_(False)
    fuse_layers(layer)
    base, x = layer.base_layer if adapted else layer, torch.randn(3, 12)
    value = getattr(base, name).detach()
    setattr(base, name, Quantised(value, requires_grad=False))
    assert torch.equal(layer(x), type(layer).forward(layer, x))
    delattr(base, name)
    setattr(base, name, value.requires_grad_() * 1)
    layer(x).sum().backward()
    assert value.grad is not None


def test_torch_func_over_a_fused_model(tiny_model):
    """Over weights of both kinds, and over the adapters' alone."""
    model = _adapted(tiny_model("llama").double())
    fuse_layers(model)
    ids = torch.randint(64, (2, 5))
    states = {name: p.detach() for name, p in model.named_parameters() if "norm" not in name}
    for chosen in (states, {name: p for name, p in states.items() if "lora_" in name}):
        ours, theirs = (
            torch.func.grad(lambda p, m=m: torch.func.functional_call(m, p, (ids,)).logits.sin().sum())(chosen)
            for m in (model, _stripped(model))
        )
        _assert_same(ours, theirs)
