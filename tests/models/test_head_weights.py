"""What an adapted output layer multiplies by, against the layer's own forward pass and its autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import ppo_fast
from ppo_fast import head_weights
from ppo_fast.models.head import head_of

V, H = 37, 8


class _Body(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.other, self.lm_head = nn.Linear(H, H), nn.Linear(H, V, bias=bias)

    def forward(self, x):
        return self.lm_head(self.other(x))


def _shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def adapted(bias: bool = False, dtype=torch.float64, more: tuple[str, ...] = (), **settings):
    """A PeftModel with an adapter on lm_head that does something, all parameters trainable, in float64."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["lm_head"], **settings})
    model = get_peft_model(_Body(bias).to(dtype), config)
    for name in more:
        model.add_adapter(name, copy.deepcopy(config))
    _shaken(model.to(dtype))
    return model.requires_grad_(True)


def assert_exact(layer: nn.Module) -> None:
    """Values, and the gradients of every parameter, are those of the layer's forward pass."""
    x, upstream = torch.randn(6, H, dtype=torch.float64), torch.randn(6, V, dtype=torch.float64)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    expected = layer(x)
    weight, bias = head_weights(layer)
    got = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got, parameters, upstream, allow_unused=True),
        torch.autograd.grad(expected, parameters, upstream, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_layer_gives_its_own_parameters(bias):
    layer = nn.Linear(H, V, bias=bias)
    weight, got = head_weights(layer)
    assert weight is layer.weight
    assert got is layer.bias
    assert ppo_fast.head_weights is head_weights


def test_a_parametrised_layer_gives_what_it_computes():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(H, V).double())
    assert_exact(_shaken(layer))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}, {"rank_pattern": {"lm_head": 7}},
     {"lora_dropout": 0.5}, {"use_dora": True, "lora_dropout": 0.5}],
    ids=str,
)  # fmt: skip
def test_lora(settings, bias):
    layer = adapted(bias=bias or "lora_bias" in settings, **settings).eval().base_model.model.lm_head
    assert (head_weights(layer)[0] - layer.weight).abs().max() > 0.1  # .weight is the base
    assert_exact(layer)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=str)
def test_the_state_of_the_adapters(settings):
    """Several active, one of them, another scale, disabled, merged, and disabled while merged."""
    model = adapted(more=("second", "third"), **settings)
    layer = model.base_model.model.lm_head
    seen = []
    together = [] if settings else [["default", "third"], ["third", "second", "default"]]
    for active in (*together, ["second"], ["default"]):
        model.base_model.set_adapter(active)
        layer.requires_grad_(True)
        assert_exact(layer)
        seen.append(head_weights(layer)[0].detach().clone())
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(seen) for b in seen[:i])
    layer.set_scale("default", 2.5)
    assert_exact(layer)
    with model.disable_adapter():
        assert head_weights(layer)[0] is layer.base_layer.weight
        assert_exact(layer)
    base, folded = layer.base_layer.weight.detach().clone(), head_weights(layer)[0].detach()
    layer.merge()
    assert head_weights(layer)[0] is layer.base_layer.weight
    torch.testing.assert_close(layer.base_layer.weight.detach(), folded, rtol=1e-12, atol=1e-12)
    with model.disable_adapter():
        torch.testing.assert_close(head_weights(layer)[0].detach(), base, rtol=1e-12, atol=1e-12)
    assert_exact(layer)


def test_modules_to_save():
    model = adapted(target_modules=["other"], modules_to_save=["lm_head"], more=("second",))
    wrapper = model.base_model.model.lm_head
    for name in ("default", "second"):
        model.base_model.set_adapter(name)
        wrapper.requires_grad_(True)
        assert head_weights(wrapper)[0] is wrapper.modules_to_save[name].weight
        assert_exact(wrapper)
    with model.disable_adapter():
        assert head_weights(wrapper)[0] is wrapper.original_module.weight
        assert_exact(wrapper)
    wrapper._active_adapter = []  # as for an adapter that has no copy of it
    assert head_weights(wrapper)[0] is wrapper.original_module.weight
    assert_exact(wrapper)


def test_a_tied_head_with_lora_shares_the_embedding(tiny_model):
    """qwen2: the base is the embedding, whose gradient comes from both its uses."""
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4, target_modules=["lm_head"])).double()
    _shaken(model).requires_grad_(True)
    base = model.get_base_model()
    ids = torch.tensor([[9, 33, 3, 60, 41, 41, 17]])
    assert base.lm_head.base_layer.weight is base.get_input_embeddings().weight

    def gradients(logprobs):
        return torch.autograd.grad(logprobs.sum(), list(model.parameters()))

    expected = base(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    head = head_of(base)
    hidden = base.base_model(input_ids=ids).last_hidden_state[:, :-1]
    got = ppo_fast.linear_selected_logprobs(hidden, head.weight, ids[:, 1:], **head.kwargs())
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_a_16_bit_base_does_not_round_a_small_adapter_away(adapter_dtype):
    model = adapted(dtype=torch.bfloat16)
    layer = model.base_model.model.lm_head
    layer.lora_A.to(adapter_dtype)
    layer.lora_B.to(adapter_dtype)
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1e-4)
    weight, _ = head_weights(layer)
    assert weight.dtype == torch.float32
    a, b = (x["default"].weight.double() for x in (layer.lora_A, layer.lora_B))
    exact = layer.weight.double() + layer.scaling["default"] * b @ a
    assert (weight.double() - exact).abs().max() <= 2**-23 * float(layer.weight.abs().max())
    assert (exact.bfloat16() == layer.weight).float().mean() > 0.9  # in 16 bits hardly anything would be left of it


def test_dropout_in_training_is_refused():
    model = adapted(lora_dropout=0.25).train()
    with pytest.raises(ValueError, match=r"adapter 'default' has dropout 0\.25 on the model's head"):
        head_weights(model.base_model.model.lm_head)
    with model.disable_adapter():
        head_weights(model.base_model.model.lm_head)


def test_autocast_with_an_adapter_is_refused():
    model = adapted()
    layer = model.base_model.model.lm_head
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="call head_weights, and the op that gets its weight, outside of autocast"):
            head_weights(layer)
        head_weights(nn.Linear(H, V))
        with model.disable_adapter():
            head_weights(layer)


class _Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class _Quantised(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, V)
        self.weight = nn.Parameter(torch.zeros(V, H, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (None, "the model's head is a NoneType, not a plain linear layer"),
        (nn.Embedding(V, H), "is a Embedding, not a plain linear layer; give a causal .* get_output_embeddings"),
        (Conv1D(V, H), "is a Conv1D, not a plain linear layer"),
        (_Scaled(H, V), "is a _Scaled, not a plain linear layer"),
        (_Quantised(), r"the model's head is quantised \(torch\.int8\)"),
    ],
)
def test_what_is_no_linear_layer_is_refused(layer, match):
    with pytest.raises(TypeError, match=match):
        head_weights(layer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"alora_invocation_tokens": [1]}, "adapter 'default' on the model's head is a ALoraLinearVariant, one of 1"),
        ({"target_modules": ["other"], "trainable_token_indices": {"lm_head": [1]}}, "TrainableTokensWrapper"),
    ],
)
def test_adapters_that_are_no_single_matrix_are_refused(settings, match):
    with pytest.raises(TypeError, match=match):
        head_weights(adapted(**{"task_type": None, **settings}).base_model.model.lm_head)


def test_dora_beside_another_adapter_is_refused():
    model = adapted(use_dora=True, more=("second",))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(TypeError, match="is a DoraLinearVariant, one of 2 active"):
        head_weights(model.base_model.model.lm_head)


def test_an_adapted_embedding_is_refused(tiny_model):
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["embed_tokens"]))
    with pytest.raises(TypeError, match=r"adapted by peft\.tuners\.lora\.layer\.Embedding, which can't be read as one"):
        head_weights(model.get_base_model().get_input_embeddings())
