"""The head as data against the logits that transformers computes."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM, LlamaModel

from ppo_fast.errors import UserError
from ppo_fast.models.head import check_head, head_of

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi")
IDS = torch.tensor([[9, 33, 3, 60, 41, 41, 17], [5, 4, 3, 2, 1, 0, 63]])


@pytest.mark.parametrize("family", FAMILIES)
def test_formula_equals_the_models_logits(family, tiny_model):
    model = tiny_model(family)
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS).last_hidden_state
        expected = model(input_ids=IDS).logits
        got = head_of(model).logits(hidden)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "softcap", "scale", "has_bias"),
    [("llama", None, 1.0, False), ("gemma2", 3.0, 1.0, False), ("cohere", None, 0.25, False),
     ("granite", None, 0.25, False), ("phi", None, 1.0, True)],
)  # fmt: skip
def test_fields(family, softcap, scale, has_bias, tiny_model):
    model = tiny_model(family)
    head = head_of(model)
    assert head.weight is model.get_output_embeddings().weight
    assert head.kwargs() == {"bias": model.lm_head.bias if has_bias else None, "softcap": softcap, "logit_scale": scale}


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi"])
def test_softcap_scale_and_bias_matter_here(family, tiny_model):
    """Else the test of the formula would pass without them."""
    model = tiny_model(family)
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS).last_hidden_state
        bare = hidden @ model.get_output_embeddings().weight.T
        assert (bare - model(input_ids=IDS).logits).abs().max() > 0.1


def test_a_cap_that_isnt_in_the_configuration_is_none(tiny_model):
    assert head_of(tiny_model("gemma2", final_logit_softcapping=None)).softcap is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi"])
def test_16_bit_models_pass_the_trial(family, dtype, tiny_model):
    model = tiny_model(family).to(dtype)
    check_head(model)
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS).last_hidden_state
        got, expected = head_of(model).logits(hidden), model(input_ids=IDS).logits.float()
    assert got.dtype == torch.float32
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_tied_weights_are_the_embedding_itself(family, tiny_model):
    model = tiny_model(family)
    assert head_of(model).weight is model.get_input_embeddings().weight
    assert head_of(tiny_model("llama")).weight is not tiny_model("llama").get_input_embeddings().weight


class _Multiplied(LlamaForCausalLM):
    factor = 1.5

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.factor
        return output


class _Shifted(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1]) * 1e-2
        return output


@pytest.mark.parametrize(
    ("family", "changed", "dtype"),
    [("llama", _Multiplied, torch.float32), ("llama", _Multiplied, torch.bfloat16), ("gpt2", _Shifted, torch.float32)],
)
def test_unknown_logit_processing_is_refused(family, changed, dtype, tiny_model):
    model = tiny_model(family).to(dtype)
    check_head(model)
    model.__class__ = changed
    with pytest.raises(UserError, match=f"{changed.__name__} changes its logits"):
        check_head(model)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.bfloat16, 1.1)])
def test_a_small_unknown_factor_is_refused(dtype, factor, tiny_model, monkeypatch):
    model = tiny_model("llama").to(dtype)
    model.__class__ = _Multiplied
    monkeypatch.setattr(_Multiplied, "factor", factor)
    with pytest.raises(UserError, match="changes its logits"):
        check_head(model)


def test_a_quantised_head_is_refused(tiny_model):
    model = tiny_model("llama")
    weight = torch.zeros_like(model.lm_head.weight, dtype=torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UserError, match=r"quantised .*don't quantise it"):
        head_of(model)


def test_a_model_without_a_head_is_refused(tiny_model):
    with pytest.raises(UserError, match="the model's head is a NoneType"):
        head_of(LlamaModel(tiny_model("llama").config))


@pytest.mark.parametrize("family", ["llama", "granite", "phi"])
def test_a_head_without_some_tokens(family, tiny_model):
    """Their probability is 0, to the bit; the others' log-probs are renormalised."""
    head = head_of(tiny_model(family))
    hidden = torch.randn(5, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = head.without((1, 7)).logits(hidden).log_softmax(-1)
        expected = head.logits(hidden).index_fill(1, torch.tensor([1, 7]), -torch.inf).log_softmax(-1)
    assert torch.equal(got.exp() == 0, expected.exp() == 0)
    kept = expected > -torch.inf
    torch.testing.assert_close(got[kept], expected[kept])


def test_a_capped_head_excludes_nothing(tiny_model):
    with pytest.raises(ValueError, match="softcap"):
        head_of(tiny_model("gemma2")).without((1,))
