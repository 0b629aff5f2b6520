"""Who shares what: every row of the table in roles.py, and the states that values and log-probs are read from."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaModel

from ppo_fast.errors import UserError
from ppo_fast.models.roles import build_roles

EOS = 1


@pytest.fixture
def batch(ragged, batch_of):
    return batch_of(ragged)


def _logprobs(actor, batch) -> torch.Tensor:
    logprobs = actor.head.logits(actor.hidden(batch)).log_softmax(-1)
    return logprobs.gather(-1, batch.response_ids[..., None])[..., 0] * batch.response_mask


@torch.no_grad()
def _scored(actor, batch) -> torch.Tensor:
    return _logprobs(actor, batch)


@torch.no_grad()
def _bare_logprobs(model, pairs) -> list[torch.Tensor]:
    """Of each row on its own, unpadded, through the model's own forward."""
    rows = []
    for prompt, reply in pairs:
        logits = model(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0])
    return rows


def _trained(roles) -> list[nn.Parameter]:
    owners = [roles.adapters or roles.policy.model, roles.critic_model, roles.critic.head]
    return [p for owner in owners if owner is not None for p in owner.parameters() if p.requires_grad]


def _check_parameters(roles) -> None:
    """Disjoint, and together all that trains."""
    policy = {id(p) for p in roles.policy_parameters.values()}
    value = {id(p) for p in roles.value_parameters.values()}
    assert len(policy) == len(roles.policy_parameters) > 0
    assert len(value) == len(roles.value_parameters) > 0
    assert not policy & value
    assert policy | value == {id(p) for p in _trained(roles)}


def _step(roles, batch, *, policy: bool = True, value: bool = True) -> None:
    """One plain gradient step of either or both, large enough to show."""
    if policy:
        _logprobs(roles.policy, batch).sum().backward()
    if value:
        values, bootstrap = roles.critic.values(batch)
        ((values * batch.response_mask).sum() + bootstrap.sum()).backward()
    with torch.no_grad():
        for parameter in _trained(roles):
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None


# What the forwards read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_id", [0, EOS, 41])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "phi"])
def test_hidden_is_the_state_that_predicts_each_token(family, pad_id, tiny_model, ragged, batch_of):
    """Against every row alone, unpadded. The pad id may be EOS or any other token of the replies."""
    roles = build_roles(tiny_model(family), value_model="head")
    batch = batch_of(ragged, pad_id)
    with torch.no_grad():
        states = roles.policy.hidden(batch, after_last=True)
        without = roles.policy.hidden(batch)
    assert states.shape == (4, 7, 32)
    assert torch.equal(states[:, :-1], without)
    for row, (prompt, reply) in enumerate(ragged):
        plain = tiny_model(family).base_model(input_ids=torch.tensor([prompt + reply])).last_hidden_state[0]
        expected = plain[len(prompt) - 1 :]
        assert len(expected) == len(reply) + 1
        torch.testing.assert_close(states[row, : len(reply) + 1], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "cohere", "granite", "gpt2", "mistral", "phi"])
def test_policy_logprobs_are_the_models_own(family, tiny_model, ragged, batch):
    roles = build_roles(tiny_model(family), value_model="head")
    got = _scored(roles.policy, batch)
    for row, expected in enumerate(_bare_logprobs(tiny_model(family), ragged)):
        torch.testing.assert_close(got[row, : len(expected)], expected, rtol=1e-5, atol=2e-5)


def test_values_and_bootstrap(tiny_model, shake, ragged, batch):
    """V(s_t) is read before each token, the bootstrap value after each row's own last one."""
    roles = build_roles(tiny_model(), value_model="head")
    shake(roles.critic.head.parameters())
    with torch.no_grad():
        values, bootstrap = roles.critic.values(batch)
        assert values.shape == (4, 6)
        assert values.dtype == bootstrap.dtype == torch.float32
        for row, (prompt, reply) in enumerate(ragged):
            plain = tiny_model().base_model(input_ids=torch.tensor([prompt + reply])).last_hidden_state[0]
            expected = roles.critic.head(plain)[:, 0]
            torch.testing.assert_close(values[row, : len(reply)], expected[len(prompt) - 1 : -1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(bootstrap[row], expected[-1], rtol=1e-5, atol=1e-5)


def test_values_are_float32_on_16_bit_models(tiny_model, batch):
    roles = build_roles(tiny_model().to(torch.bfloat16))
    assert roles.critic.values(batch)[0].dtype == torch.float32
    assert {p.dtype for p in roles.critic.head.parameters()} == {torch.float32}


def test_a_fresh_critic_says_zero(tiny_model, lora, batch):
    for roles in (
        build_roles(tiny_model(), peft_config=lora()),
        build_roles(tiny_model()),
        build_roles(tiny_model(), value_model="head"),
    ):
        values, bootstrap = roles.critic.values(batch)
        assert not values.any()
        assert not bootstrap.any()


@pytest.mark.parametrize("settings", [{}, {"peft": True}, {"value_model": "head"}])
def test_no_dropout_is_left_anywhere(settings, tiny_model, lora, shake, batch):
    """The model's own, and that of adapters made here: every forward repeats, with and without gradients."""
    model = tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).train()
    peft = {"peft_config": lora(lora_dropout=0.3)} if settings.get("peft") else {}
    roles = build_roles(model, value_model=settings.get("value_model"), **peft)
    shake(_trained(roles))
    logprobs, (values, _) = _logprobs(roles.policy, batch), roles.critic.values(batch)
    assert logprobs.requires_grad
    assert values.requires_grad
    again, (values_again, _) = _logprobs(roles.policy, batch), roles.critic.values(batch)
    assert torch.equal(logprobs, again)
    assert torch.equal(values, values_again)
    with torch.no_grad():
        torch.testing.assert_close(_logprobs(roles.policy, batch), logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(roles.critic.values(batch)[0], values, rtol=0, atol=1e-5)


# LoRA on a bare model --------------------------------------------------------------------------------------------


def test_lora_on_a_bare_model(tiny_model, lora, shake, ragged, batch):
    bare = _bare_logprobs(tiny_model(), ragged)
    roles = build_roles(tiny_model(), peft_config=lora())
    assert roles.reference.model is roles.policy.model
    assert roles.critic_model is None
    assert not roles.critic.shares_policy
    assert (roles.policy.adapter, roles.reference.adapter) == ("policy", None)
    _check_parameters(roles)
    assert all(".policy." in name and "lora_" in name for name in roles.policy_parameters)
    heads = {"value_head.weight", "value_head.bias"}
    assert heads < roles.value_parameters.keys()
    assert all(".value." in name and "lora_" in name for name in roles.value_parameters.keys() - heads)

    start, reference = _scored(roles.policy, batch), _scored(roles.reference, batch)
    assert torch.equal(start, reference)
    for row, expected in enumerate(bare):
        torch.testing.assert_close(start[row, : len(expected)], expected, rtol=1e-5, atol=2e-5)

    shake(roles.value_parameters.values())
    values = roles.critic.values(batch)[0].detach()
    assert torch.equal(_scored(roles.policy, batch), start)
    for _ in range(2):  # the first moves only lora_B, which starts at zero
        _step(roles, batch, value=False)
    assert (_scored(roles.policy, batch) - start).abs().max() > 1e-2
    assert torch.equal(_scored(roles.reference, batch), reference)
    assert torch.equal(roles.critic.values(batch)[0], values)
    after = _scored(roles.policy, batch)
    _step(roles, batch, policy=False)
    assert (roles.critic.values(batch)[0] - values).abs().max() > 1e-2
    assert torch.equal(_scored(roles.policy, batch), after)
    assert torch.equal(_scored(roles.reference, batch), reference)


def test_each_loss_reaches_its_own_adapter_alone(tiny_model, lora, shake, batch):
    roles = build_roles(tiny_model(), peft_config=lora())
    shake(_trained(roles))
    _logprobs(roles.policy, batch).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in roles.policy_parameters.values())
    assert all(p.grad is None for p in roles.value_parameters.values())
    for parameter in roles.policy_parameters.values():
        parameter.grad = None
    roles.critic.values(batch)[0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in roles.value_parameters.values())
    assert all(p.grad is None for p in roles.policy_parameters.values())


def test_the_callers_settings_are_left_as_they_were(tiny_model, lora):
    policy, value = lora(), lora(r=2)
    before = copy.deepcopy(policy.to_dict()), copy.deepcopy(value.to_dict())
    build_roles(tiny_model(), peft_config=policy, value_peft_config=value)
    assert (policy.to_dict(), value.to_dict()) == before


@pytest.mark.parametrize("modules", ["all-linear", ["v_proj"]])
def test_value_peft_config(modules, tiny_model, lora):
    """all-linear means the base's layers, not those of the policy's adapter."""
    roles = build_roles(tiny_model(), peft_config=lora(r=4), value_peft_config=lora(r=2, target_modules=modules))
    _check_parameters(roles)
    covered = {name.split(".lora_A")[0] for name in roles.value_parameters if ".lora_A." in name}
    linear = {name.split(".lora_A")[0] for name in roles.policy_parameters if ".lora_A." in name}
    assert covered == (linear if modules == "all-linear" else {name for name in linear if name.endswith("v_proj")})
    assert {p.shape[0] for name, p in roles.value_parameters.items() if ".lora_A." in name} == {2}
    assert {p.shape[0] for name, p in roles.policy_parameters.items() if ".lora_A." in name} == {4}


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "embed_tokens"]}, {"use_dora": True}, {"modules_to_save": ["norm"]},
     {"trainable_token_indices": [5, 31]}, {"init_lora_weights": "gaussian"}],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_parameters_go_to_their_role_whatever_they_are_called(settings, tiny_model, lora, shake, batch):
    """An embedding's adapter has its name at the very end of the parameter's, for one."""
    roles = build_roles(tiny_model(), peft_config=lora(**settings))
    _check_parameters(roles)
    assert torch.equal(_scored(roles.policy, batch), _scored(roles.reference, batch))
    reference = _scored(roles.reference, batch)
    shake(roles.value_parameters.values())
    values = roles.critic.values(batch)[0].detach()
    shake(roles.policy_parameters.values())
    assert torch.equal(roles.critic.values(batch)[0], values)
    assert torch.equal(_scored(roles.reference, batch), reference)
    own = {name.replace(".policy", "") for name in roles.policy_parameters}
    assert own == {name.replace(".value", "") for name in roles.value_parameters if not name.startswith("value_head")}


def test_a_plain_lora_config_works(tiny_model):
    """peft's defaults name no modules for a family: it knows llama's."""
    _check_parameters(build_roles(tiny_model(), peft_config=LoraConfig()))


# A model that arrives with a trained adapter ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "embed_tokens"]},
     {"rank_pattern": {"q_proj": 2}}, {"init_lora_weights": "pissa"}],
    ids=lambda settings: next(iter(settings), "plain"),
)  # fmt: skip
def test_reference_of_a_trained_adapter_is_a_frozen_copy(settings, with_adapter, shake, ragged, batch):
    model = with_adapter(lora_dropout=0.0, **settings)
    with torch.no_grad():
        arrived = _bare_logprobs(model.eval(), ragged)
        with model.disable_adapter():
            base = _bare_logprobs(model, ragged)
    assert max(float((a - b).abs().max()) for a, b in zip(arrived, base, strict=True)) > 0.1

    roles = build_roles(model)
    assert (roles.policy.adapter, roles.reference.adapter) == ("default", "reference")
    _check_parameters(roles)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "reference" in name.split("."))
    start, reference = _scored(roles.policy, batch), _scored(roles.reference, batch)
    assert torch.equal(start, reference)
    for row, expected in enumerate(arrived):
        torch.testing.assert_close(start[row, : len(expected)], expected, rtol=1e-5, atol=5e-5)

    shake(roles.value_parameters.values())
    for _ in range(2):
        _step(roles, batch)
    assert (_scored(roles.policy, batch) - start).abs().max() > 1e-2
    assert torch.equal(_scored(roles.reference, batch), reference)


def test_a_trained_adapter_from_disk(with_adapter, tiny_model, batch, tmp_path):
    """Loaded for inference, as from_pretrained does by default: it is trained on all the same."""
    saved = with_adapter(lora_dropout=0.0)
    expected = _scored(build_roles(saved, ref_model="none", value_model="head").policy, batch)
    saved.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert not any(p.requires_grad for p in model.parameters())
    roles = build_roles(model)
    _check_parameters(roles)
    assert torch.equal(_scored(roles.policy, batch), expected)
    assert torch.equal(_scored(roles.reference, batch), expected)
    _step(roles, batch)
    assert not torch.equal(_scored(roles.policy, batch), expected)


def test_another_adapter_on_the_model_is_left_alone(with_adapter, lora):
    model = with_adapter()
    model.add_adapter("other", lora())
    roles = build_roles(model)
    _check_parameters(roles)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".other." in name)


def test_a_trained_adapter_with_another_reference_needs_no_copy(with_adapter, tiny_model):
    model = with_adapter()
    roles = build_roles(model, ref_model=tiny_model(seed=5))
    assert "reference" not in model.peft_config
    assert roles.reference.adapter is None
    assert build_roles(with_adapter(), ref_model="none").reference is None


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2", {"target_modules": ["q_proj", "lm_head"]}), ("gemma2", {"target_modules": ["lm_head"]}),
     ("llama", {"target_modules": ["lm_head"], "use_dora": True}),
     ("phi", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})],
    ids=["lora", "softcap", "dora", "modules_to_save"],
)  # fmt: skip
def test_an_adapter_on_the_head(settings, family, tiny_model, lora, shake, ragged, batch):
    """Each role reads the head with its own adapter, and the gradients of all that trains are the model's own."""
    roles = build_roles(tiny_model(family), peft_config=lora(**settings))
    start = _scored(roles.policy, batch)
    shake([*roles.policy_parameters.values(), *roles.value_parameters.values()])
    assert any("lm_head" in name for name in roles.policy_parameters)
    base = roles.policy.model.eval()
    for row, expected in enumerate(_bare_logprobs(base, ragged)):  # the policy's adapter is the active one
        got = _scored(roles.policy, batch)[row]
        torch.testing.assert_close(got[: len(expected)], expected, rtol=1e-5, atol=1e-4)
    assert (_scored(roles.policy, batch) - start).abs().max() > 0.1
    assert torch.equal(_scored(roles.reference, batch), start)

    prompt, reply = ragged[2]
    parameters = list(roles.policy_parameters.values())
    got = torch.autograd.grad(_logprobs(roles.policy, batch)[2].sum(), parameters)
    logits = base(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    expected = torch.autograd.grad(logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None]).sum(), parameters)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_dora_on_a_tied_head_is_named_where_peft_makes_nan_of_it(tiny_model, lora):
    with pytest.raises(UserError, match="Qwen2ForCausalLM gives NaN for logits"):
        build_roles(tiny_model("qwen2"), peft_config=lora(target_modules=["lm_head"], use_dora=True))


# Full weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_weights(family, tiny_model, shake, batch):
    """qwen2's head is its embedding, and trains with the critic; llama's own has no gradient there."""
    model = tiny_model(family)
    roles = build_roles(model)
    assert roles.policy.model is model
    assert roles.adapters is None
    bodies = (model, roles.reference.model, roles.critic_model)
    storages = [{p.data_ptr() for p in body.parameters()} for body in bodies]
    assert len(set.union(*storages)) == sum(len(own) for own in storages)  # nothing is shared
    assert not any(p.requires_grad for p in roles.reference.model.parameters())
    _check_parameters(roles)
    assert len(roles.policy_parameters) == len(list(model.parameters()))
    expected = {f"critic.{name}" for name, _ in model.named_parameters()} - {"critic.lm_head.weight"}
    assert roles.value_parameters.keys() == expected | {"value_head.weight", "value_head.bias"}

    start, reference = _scored(roles.policy, batch), _scored(roles.reference, batch)
    assert torch.equal(start, reference)
    shake(roles.critic.head.parameters())
    values = roles.critic.values(batch)[0].detach()
    _step(roles, batch, value=False)
    assert (_scored(roles.policy, batch) - start).abs().max() > 1e-2
    assert torch.equal(_scored(roles.reference, batch), reference)
    assert torch.equal(roles.critic.values(batch)[0], values)
    after = _scored(roles.policy, batch)
    _step(roles, batch, policy=False)
    assert (roles.critic.values(batch)[0] - values).abs().max() > 1e-3
    assert torch.equal(_scored(roles.policy, batch), after)
    assert torch.equal(_scored(roles.reference, batch), reference)


def test_frozen_layers_of_the_policy_stay_frozen(tiny_model):
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    roles = build_roles(model, value_model="head")
    assert "model.embed_tokens.weight" not in roles.policy_parameters
    _check_parameters(roles)


# Value models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [False, True])
def test_value_head_on_the_policys_states(peft, tiny_model, lora, shake, batch):
    roles = build_roles(tiny_model(), value_model="head", peft_config=lora() if peft else None)
    assert roles.critic.shares_policy
    assert roles.critic_model is None
    assert roles.value_parameters.keys() == {"value_head.weight", "value_head.bias"}
    _check_parameters(roles)
    assert peft == (roles.adapters is not None)
    if peft:
        assert list(roles.adapters.peft_config) == ["policy"]
    shake([*roles.policy_parameters.values(), *roles.critic.head.parameters()])
    values = roles.critic.values(batch)[0]
    assert torch.equal(values, roles.critic.values_of(roles.policy.hidden(batch, after_last=True))[:, :-1])
    values.sum().backward()
    moved = [name for name, p in roles.policy_parameters.items() if p.grad is not None and p.grad.any()]
    assert set(moved) == roles.policy_parameters.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("as_path", [False, True])
def test_a_separate_value_model(as_path, peft, tiny_model, tiny_model_dir, lora, shake, ragged, batch):
    body = str(tiny_model_dir) if as_path else tiny_model().model
    roles = build_roles(tiny_model(seed=3), value_model=body, peft_config=lora() if peft else None)
    assert not roles.critic.shares_policy
    assert isinstance(roles.critic_model, LlamaModel)
    assert as_path or roles.critic_model is body
    _check_parameters(roles)
    expected = {f"critic.{name}" for name, _ in tiny_model().model.named_parameters()}
    assert roles.value_parameters.keys() == expected | {"value_head.weight", "value_head.bias"}
    if peft:
        assert list(roles.adapters.peft_config) == ["policy"]
    shake(roles.critic.head.parameters())
    with torch.no_grad():
        bootstrap = roles.critic.values(batch)[1]
        for row, (prompt, reply) in enumerate(ragged):
            plain = tiny_model().model(input_ids=torch.tensor([prompt + reply])).last_hidden_state[0, -1]
            torch.testing.assert_close(bootstrap[row], roles.critic.head(plain)[0], rtol=1e-5, atol=1e-5)


def _classifier(tiny_model, labels: int = 1, family: str = "llama", hidden_size: int = 32):
    config = tiny_model(family, seed=9, hidden_size=hidden_size).config
    config.num_labels = labels
    torch.manual_seed(2)
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.mark.parametrize("as_path", [False, True])
def test_a_reward_model_as_critic_keeps_its_score_head(as_path, tiny_model, tmp_path, ragged, batch):
    """Its value after the last token is the very score it gives; hidden size and family may differ."""
    model = _classifier(tiny_model, hidden_size=48)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        scores = [float(model(input_ids=torch.tensor([prompt + reply])).logits) for prompt, reply in ragged]
    roles = build_roles(tiny_model(), value_model=str(tmp_path) if as_path else model)
    assert torch.equal(roles.critic.head.weight, model.score.weight)
    assert "critic.score.weight" not in roles.value_parameters
    _check_parameters(roles)
    assert roles.critic.values(batch)[1].tolist() == pytest.approx(scores, abs=5e-5)
    head = roles.critic.head.weight
    with torch.no_grad():
        head += 1
    assert not torch.equal(head, roles.critic_model.score.weight)


def test_a_classifier_of_two_labels_has_no_score_to_keep(tiny_model, batch):
    roles = build_roles(tiny_model(), value_model=_classifier(tiny_model, labels=2))
    assert not roles.critic.values(batch)[0].any()


# References ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [False, True])
def test_another_reference(peft, tiny_model, lora, ragged, batch):
    given = tiny_model(seed=5)
    roles = build_roles(tiny_model(), ref_model=given, peft_config=lora() if peft else None, value_model="head")
    assert roles.reference.model is given
    assert not any(p.requires_grad for p in given.parameters())
    got = _scored(roles.reference, batch)
    for row, expected in enumerate(_bare_logprobs(tiny_model(seed=5), ragged)):
        torch.testing.assert_close(got[row, : len(expected)], expected, rtol=1e-5, atol=2e-5)
    _step(roles, batch)
    assert torch.equal(_scored(roles.reference, batch), got)


@pytest.mark.parametrize("peft", [False, True])
def test_no_reference(peft, tiny_model, lora):
    assert build_roles(tiny_model(), ref_model="none", peft_config=lora() if peft else None).reference is None
