"""Models and tokenizers from disk, and what is put right on the way."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_fast.errors import UserError
from ppo_fast.models.loading import (
    disable_dropout,
    eos_token_ids,
    load_model,
    load_tokenizer,
    unused_sampling_settings,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi")
IDS = torch.tensor([[9, 33, 3, 60, 41]])


@pytest.fixture
def folder(tiny_model_dir, tmp_path):
    """A copy of the tiny model that a test may spoil."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


# Models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_whole(family, tiny_model, tmp_path):
    """Tied heads, which safetensors leaves out, aren't taken for missing."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded) is type(model)
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype, tiny_model_dir):
    model = load_model(str(tiny_model_dir), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_a_missing_path():
    with pytest.raises(UserError, match=r"the model '/nowhere/at/all' can't be loaded .*; give a folder") as error:
        load_model("/nowhere/at/all")
    assert "\n" not in str(error.value)


def test_a_hub_id_that_cant_be_reached():
    with pytest.raises(UserError, match=r"the model 'nobody/nothing' can't be loaded .*a hub id that this machine can"):
        load_model("nobody/nothing")


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"can't be loaded .*safetensors weights"):
        load_model(str(folder))


def test_weights_that_arent_safetensors_are_not_unpickled(folder, tiny_model):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_cut_off_weights(size, folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model_type": "no such family"}'])
def test_a_configuration_that_makes_no_sense(text, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="can't be loaded") as error:
        load_model(str(folder))
    assert "\n" not in str(error.value)


def test_code_in_a_checkpoint_is_not_run(folder):
    config = AutoConfig.from_pretrained(folder).to_dict()
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    ran = folder / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (folder / "config.json").write_text(str(config).replace("'", '"').replace("None", "null").replace("False", "false"))
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(str(folder))
    assert not ran.exists()


def test_weights_that_lack_a_tensor(folder):
    """transformers would fill in random numbers and say so in a table."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 'lm_head\.weight' and 1 other tensors of a LlamaForCausalLM"):
        load_model(str(folder))


def test_a_causal_model_has_no_score_head(tiny_model_dir):
    with pytest.raises(UserError, match=r"lack 'score\.weight' .* of a LlamaForSequenceClassification"):
        load_model(str(tiny_model_dir), auto_class=AutoModelForSequenceClassification)


def test_the_body_of_a_causal_model_is_whole(tiny_model_dir, tiny_model):
    body = load_model(str(tiny_model_dir), auto_class=AutoModel)
    with torch.no_grad():
        assert torch.equal(body(input_ids=IDS)[0], tiny_model().model(input_ids=IDS)[0])


def test_an_adapter_is_not_a_model(with_adapter, tiny_model_dir, tmp_path):
    model = with_adapter()
    model.peft_config["default"].base_model_name_or_path = str(tiny_model_dir)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds an adapter, not a model"):
        load_model(str(tmp_path))


# Tokenizers ------------------------------------------------------------------------------------------------------


def test_tokenizer(tiny_model_dir, tiny_tokenizer):
    loaded = load_tokenizer(str(tiny_model_dir))
    assert loaded("the hotel was lovely").input_ids == tiny_tokenizer("the hotel was lovely").input_ids
    chat = [{"role": "user", "content": "the hotel was lovely"}]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user : the hotel was lovely <eos> assistant : "
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)


def test_a_missing_tokenizer(tmp_path):
    for path in ("/nowhere/at/all", str(tmp_path)):
        with pytest.raises(UserError, match=f"the tokenizer of '{path}' can't be loaded") as error:
            load_tokenizer(path)
        assert "\n" not in str(error.value)


def test_a_model_without_its_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="save it into the model's folder or pass processing_class="):
        load_tokenizer(str(folder))


# EOS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "tokenizers", "expected"),
    [(1, 1, (1,)), (None, 1, (1,)), (5, None, (5,)), (5, 1, (1, 5)), ([9, 5], 1, (1, 5, 9)), ([1, 1], 1, (1,)),
     ([0], None, (0,)), (63, 0, (0, 63))],
)  # fmt: skip
def test_eos_ids(configured, tokenizers, expected, tiny_model):
    model = tiny_model()
    model.generation_config.eos_token_id = configured
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=tokenizers)) == expected


def test_eos_ids_without_a_generation_config(tiny_model, tiny_tokenizer):
    model = tiny_model()
    model.generation_config = None
    assert eos_token_ids(model, tiny_tokenizer) == (1,)


def test_eos_ids_of_a_saved_list(folder, tiny_tokenizer):
    model = load_model(str(folder))
    model.generation_config.eos_token_id = [7, 3]
    model.save_pretrained(folder)
    assert eos_token_ids(load_model(str(folder)), tiny_tokenizer) == (1, 3, 7)


@pytest.mark.parametrize(("configured", "tokenizers"), [(64, 1), ([1, 200], 1), (None, 64)])
def test_eos_outside_the_vocabulary(configured, tokenizers, tiny_model):
    model = tiny_model()
    model.generation_config.eos_token_id = configured
    with pytest.raises(UserError, match="is outside the model's vocabulary of 64"):
        eos_token_ids(model, SimpleNamespace(eos_token_id=tokenizers))


def test_no_eos_at_all(tiny_model):
    model = tiny_model()
    model.generation_config.eos_token_id = None
    with pytest.raises(UserError, match=r"set tokenizer\.eos_token"):
        eos_token_ids(model, SimpleNamespace(eos_token_id=None))


# Sampling settings -----------------------------------------------------------------------------------------------


def test_a_model_without_sampling_settings_has_none_to_override(tiny_model, tiny_model_dir):
    assert unused_sampling_settings(tiny_model()) == {}
    assert unused_sampling_settings(load_model(str(tiny_model_dir))) == {}
    model = tiny_model()
    model.generation_config = None
    assert unused_sampling_settings(model) == {}


def test_a_models_own_sampling_settings(folder):
    """As Qwen's instruct models bring them. What doesn't touch the distribution isn't named."""
    model = load_model(str(folder))
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    model.generation_config.update(**own, do_sample=True, max_new_tokens=40, eos_token_id=[1, 2])
    assert unused_sampling_settings(model) == own
    model.save_pretrained(folder)
    assert unused_sampling_settings(load_model(str(folder))) == own


# Dropout ---------------------------------------------------------------------------------------------------------

NOISY = {
    "gpt2": {"attn_pdrop": 0.4, "resid_pdrop": 0.4, "embd_pdrop": 0.4},  # modules
    "llama": {"attention_dropout": 0.4},  # a float of each attention layer
    "phi": {"attention_dropout": 0.4, "resid_pdrop": 0.4, "embd_pdrop": 0.4},  # both
}


@pytest.mark.parametrize("family", NOISY)
def test_dropout(family, tiny_model):
    model = tiny_model(family, **NOISY[family]).train()
    quiet = tiny_model(family)(input_ids=IDS).logits
    assert not torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)
    disable_dropout(model)
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)
    torch.testing.assert_close(model(input_ids=IDS).logits, quiet, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("opt", {"layerdrop": 0.5, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 32, "ffn_dim": 48}),
     ("mixtral", {"router_jitter_noise": 0.4, "num_local_experts": 2})],
)  # fmt: skip
def test_other_noise_of_training_mode(family, settings):
    """Whole layers left out, and routing: as bad for the ratio as dropout."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **settings)).train()

    def repeats() -> bool:
        first, *others = (model(input_ids=IDS).logits for _ in range(8))
        return all(torch.equal(logits, first) for logits in others)

    assert not repeats()
    disable_dropout(model)
    assert repeats()


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_every_kind_of_module(kind):
    module = nn.Sequential(nn.Linear(3, 3), kind(0.5)).train()
    disable_dropout(module)
    x = torch.randn(4, 3)
    assert torch.equal(module(x), module[0](x))
