"""The roles of PPO over as few copies of the weights as the settings allow.

| settings | policy | reference | critic |
|---|---|---|---|
| LoRA on a bare model | adapter `policy` | adapters off | adapter `value` + scalar head |
| LoRA, model with a trained adapter | that adapter | a frozen copy of it | adapter `value` + scalar head |
| full weights | the model | a frozen copy | a trained copy + scalar head |
| `value_model="head"` | | | scalar head on the policy's own hidden states |
| `value_model` a path or module | | | that model, separate |

All forwards go through the same left-padded layout and position ids as sampling, or log-probs would differ from it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from ppo_fast.errors import UserError
from ppo_fast.models.adapters import Adapters
from ppo_fast.models.head import Head, check_head, head_of
from ppo_fast.models.layers import fuse_layers
from ppo_fast.models.loading import disable_dropout, load_model
from ppo_fast.models.tokens import TokenBatch
from ppo_fast.profiling import annotate

POLICY, REFERENCE, VALUE = "policy", "reference", "value"


class _Body:
    """A transformer's hidden states, with the adapter that belongs to the role, if it has one."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters | None = None, adapter: str | None = None) -> None:
        self.model = model
        self._adapters = adapters
        self.adapter = adapter

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """The body with its own adapter active, in training mode where gradients are recorded.

        transformers caches keys and values in evaluation mode and checkpoints activations in training mode; dropout is
        off since loading, so the mode changes nothing else.
        """
        self.model.train(torch.is_grad_enabled())
        with self.adapted():
            yield

    def adapted(self) -> contextlib.AbstractContextManager[None]:
        """The body with its own adapter active."""
        return contextlib.nullcontext() if self._adapters is None else self._adapters.use(self.adapter)

    def hidden(self, batch: TokenBatch, *, after_last: bool = False) -> Tensor:
        """Hidden states of the positions that predict each reply token, [B, T, H].

        With ``after_last`` the state after the last token comes along: [B, T+1, H].
        """
        first = batch.prompt_length - 1
        end = batch.token_ids.shape[1] - (0 if after_last else 1)
        with self.activated():
            states = self.model.base_model(
                input_ids=batch.token_ids,
                attention_mask=batch.attention_mask.long(),
                position_ids=batch.position_ids,
                use_cache=False,
            ).last_hidden_state
        return states[:, first:end]


class Actor(_Body):
    """A body with a language-model head: the policy or the reference."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters | None = None, adapter: str | None = None) -> None:
        super().__init__(model, adapters, adapter)
        with self.adapted():
            check_head(model)

    @property
    def head(self) -> Head:
        """The head with the role's adapter as it is now. Read it once a pass: a LoRA on it is folded in each time."""
        with self.adapted():
            return head_of(self.model)


class Critic:
    """The value model: a body and a linear head to one number, in float32.

    The head starts at zero: the first values are 0, the first advantages are the observed returns, and nothing of the
    body's arbitrary scale reaches them.
    """

    def __init__(self, body: _Body, hidden_size: int, *, shares_policy: bool = False) -> None:
        self._body = body
        self.shares_policy = shares_policy
        self.head = nn.Linear(hidden_size, 1, device=body.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values_of(self, hidden: Tensor) -> Tensor:
        """Values [B, T] of hidden states [B, T, H], float32."""
        return self.head(hidden.float())[..., 0]

    def values(self, batch: TokenBatch, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``V(s_t)`` of the state before each reply token, [B, T], and of the state after each row's last, [B].

        ``states`` [B, T+1, H] are its body's, with ``after_last``, where they are there already.
        """
        with annotate("ppo_fast/value_forward"):
            values = self.values_of(self._body.hidden(batch, after_last=True) if states is None else states)
        return values[:, :-1], values.gather(1, batch.lengths[:, None])[:, 0]


@dataclass(frozen=True)
class Roles:
    """Who plays what, and which parameters each optimizer owns."""

    policy: Actor
    reference: Actor | None
    critic: Critic
    policy_parameters: dict[str, nn.Parameter]
    value_parameters: dict[str, nn.Parameter]
    adapters: PeftModel | None  # the model that holds the adapters, under LoRA
    critic_model: PreTrainedModel | None  # the critic's own body, when it has one

    @property
    def trained(self) -> list[nn.Parameter]:
        """Every parameter that an optimizer owns."""
        return [*self.policy_parameters.values(), *self.value_parameters.values()]


def build_roles(
    model: PreTrainedModel | PeftModel,
    *,
    peft_config: LoraConfig | None = None,
    value_peft_config: LoraConfig | None = None,
    ref_model: PreTrainedModel | Literal["none"] | None = None,
    value_model: PreTrainedModel | str | None = None,
    gradient_checkpointing: bool = False,
) -> Roles:
    """Assigns the four roles (the reward model aside) as the table above says.

    Args:
        model: the policy as it arrives; with an adapter on it, that adapter is trained on.
        peft_config: puts a new LoRA adapter on a bare model.
        value_peft_config: the value adapter's settings; the policy's when None.
        ref_model: another frozen reference, or ``"none"`` for no reference at all.
        value_model: None (value adapter under LoRA, else a copy), ``"head"``, a path, or a module.

    Raises:
        UserError: settings that contradict each other.
    """
    if value_peft_config is not None and value_model is not None:
        raise UserError("value_peft_config is for a critic on the policy's base; leave value_model out, or it")
    peft_model = _with_policy_adapter(model, peft_config)
    base = peft_model.get_base_model() if peft_model is not None else model
    if ref_model in (model, base) or value_model in (model, base):
        raise UserError("ref_model or value_model is the policy itself; leave it out, and it is shared or copied")
    if isinstance(value_model, nn.Module) and value_model is ref_model:
        raise UserError("ref_model and value_model are one module; the critic is trained: give the reference its own")
    critic_is_adapter = peft_model is not None and value_model is None

    adapters = None
    policy_adapter = None
    reference_adapter = None
    if peft_model is not None:
        policy_adapter = _active(peft_model)
        if isinstance(model, PeftModel) and ref_model is None:
            reference_adapter = REFERENCE
            _freeze_copy(peft_model, policy_adapter)
        if critic_is_adapter:
            config = value_peft_config or _config_like(peft_model.peft_config[policy_adapter])
            _add_adapter(peft_model, VALUE, config)
        adapters = Adapters(peft_model, (policy_adapter, VALUE) if critic_is_adapter else (policy_adapter,))
    elif value_peft_config is not None:
        raise UserError("value_peft_config needs peft_config: a LoRA critic lives on the policy's base; set both")
    disable_dropout(base)  # the adapters' own too
    fuse_layers(base)

    policy = Actor(base, adapters, policy_adapter)
    if ref_model == "none":
        reference = None
    elif ref_model is not None:
        reference = _other_reference(ref_model, policy)
    elif adapters is None:
        reference = Actor(_frozen(copy.deepcopy(base)))
    else:
        reference = Actor(base, adapters, reference_adapter)

    critic, critic_model = _critic(base, adapters, policy, value_model, critic_is_adapter)
    _checkpoint_activations(base, gradient_checkpointing, adapters)
    if critic_model is not None:
        _checkpoint_activations(critic_model, gradient_checkpointing)

    of_policy = {name: p for name, p in (peft_model or base).named_parameters() if p.requires_grad}
    of_value = adapters.parameters(VALUE) if adapters is not None and critic_is_adapter else {}
    of_policy = {name: p for name, p in of_policy.items() if name not in of_value}
    if not of_policy:
        raise UserError("no parameter of the model requires a gradient; give peft_config, or unfreeze it")
    if critic_model is not None:
        of_value |= {f"critic.{name}": p for name, p in critic_model.named_parameters() if p.requires_grad}
    of_value |= {f"value_head.{name}": p for name, p in critic.head.named_parameters()}
    return Roles(policy, reference, critic, of_policy, of_value, peft_model, critic_model)


def adapter_settings(roles: Roles) -> dict[str, str]:
    """Each adapter's settings, as text: two runs with equal ones compute the same function of the same weights."""
    configs = {} if roles.adapters is None else roles.adapters.peft_config
    return {
        name: ", ".join(
            f"{key} {sorted(value) if isinstance(value, set) else value}"
            for key, value in sorted(config.to_dict().items())
            if value not in (None, {}, [], False) and key not in ("base_model_name_or_path", "peft_version")
        )
        for name, config in configs.items()
    }


def _with_policy_adapter(model: PreTrainedModel | PeftModel, config: LoraConfig | None) -> PeftModel | None:
    if isinstance(model, PeftModel):
        if config is not None:
            raise UserError("the model already carries an adapter; merge or remove it before giving peft_config")
        return model
    if config is None:
        return None
    _check_lora(config)
    with _refusing("peft_config"):
        return get_peft_model(model, copy.deepcopy(config), adapter_name=POLICY)


def _active(model: PeftModel) -> str:
    active = model.active_adapters
    if len(active) != 1:
        raise UserError(f"the model has {len(active)} active adapters {active}; PPO trains one: call set_adapter first")
    config = model.peft_config[active[0]]
    if not isinstance(config, LoraConfig):
        raise UserError(f"the model's adapter is of type {config.peft_type}; only LoRA shares its base between roles")
    _check_bias(config)
    return active[0]


def _check_lora(config: LoraConfig) -> None:
    _check_bias(config)
    if _moves_base(config):
        raise UserError(
            f"init_lora_weights={config.init_lora_weights!r} changes the base weights, which reference and critic "
            "share; use True"
        )


def _check_bias(config: LoraConfig) -> None:
    if config.bias != "none":
        raise UserError(f"LoRA with bias={config.bias!r} trains the base's biases, which all roles share; use 'none'")


def _moves_base(config: LoraConfig) -> bool:
    return str(config.init_lora_weights).lower().startswith(("pissa", "corda", "olora", "loftq", "lora_ga"))


def _config_like(config: LoraConfig) -> LoraConfig:
    """Settings for another adapter beside it: its start must leave the base as it is."""
    config = copy.deepcopy(config)
    config.inference_mode = False
    if _moves_base(config):
        config.init_lora_weights = True
    return config


def _add_adapter(model: PeftModel, name: str, config: LoraConfig) -> None:
    if name in model.peft_config:
        raise UserError(f"the model has an adapter named {name!r}, a name that is needed here; delete or rename it")
    _check_lora(config)
    with _refusing("value_peft_config" if name == VALUE else "the adapter's configuration"):
        model.add_adapter(name, copy.deepcopy(config))


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """peft looks at most settings only when it puts the adapter on, and objects with whatever comes up there."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{what} can't work with this model ({message}); give r >= 1 and target_modules and layers that it has"
        ) from error


def _freeze_copy(model: PeftModel, name: str) -> None:
    """Adds adapter `reference`, equal to ``name`` as it is now."""
    _add_adapter(model, REFERENCE, _config_like(model.peft_config[name]))
    # Without the embeddings: they aren't the adapter's, and peft would ask the hub whether they changed.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    set_peft_model_state_dict(model, tensors, adapter_name=REFERENCE)


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    disable_dropout(model)
    fuse_layers(model)
    return model.requires_grad_(False).eval()


def _other_reference(model: PreTrainedModel, policy: Actor) -> Actor:
    _refuse_adapter(model, "ref_model")
    reference = Actor(_frozen(model.to(policy.device)))
    ours, theirs = policy.head.weight.shape[0], reference.head.weight.shape[0]
    if ours != theirs:
        raise UserError(f"ref_model has {theirs} token ids and the policy {ours}; both must share one tokenizer")
    return reference


def _refuse_adapter(model: object, name: str) -> None:
    if isinstance(model, PeftModel):
        raise UserError(f"{name} carries an adapter; call merge_and_unload() on it first")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{name} is a {type(model).__name__}; give a transformers model")


def _checkpoint_activations(body: PreTrainedModel, wanted: bool, adapters: Adapters | None = None) -> None:
    # A model that arrives with checkpointing on keeps it, but not as it was: it would recompute with any adapter.
    if not (wanted or any(getattr(module, "gradient_checkpointing", False) for module in body.modules())):
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if adapters is not None:
        settings["context_fn"] = adapters.checkpoint_contexts
    # transformers 5 renames this on the way, and warns about the old name.
    enable = getattr(body, "activation_checkpointing_enable", body.gradient_checkpointing_enable)
    enable(settings)


def _critic(
    base: PreTrainedModel,
    adapters: Adapters | None,
    policy: Actor,
    value_model: PreTrainedModel | str | None,
    is_adapter: bool,
) -> tuple[Critic, PreTrainedModel | None]:
    hidden_size = policy.head.weight.shape[1]
    if is_adapter:
        return Critic(_Body(base, adapters, VALUE), hidden_size), None
    if value_model == "head":
        return Critic(policy, hidden_size, shares_policy=True), None
    if value_model is not None and not isinstance(value_model, str):
        _refuse_adapter(value_model, "value_model")
    own = _critic_body(base, value_model)
    critic = Critic(_Body(own), own.config.get_text_config().hidden_size)
    score = getattr(own, "score", None)
    if isinstance(score, nn.Linear) and score.out_features == 1:
        # A reward model knows what a good reply looks like; its values are on its own scale from the start.
        critic.head.weight.data.copy_(score.weight)
        if score.bias is not None:
            critic.head.bias.data.copy_(score.bias)
        score.requires_grad_(False)
    return critic, own


def _critic_body(base: PreTrainedModel, value_model: PreTrainedModel | str | None) -> PreTrainedModel:
    if value_model is None:
        own = copy.deepcopy(base)
    elif isinstance(value_model, str):
        dtype = str(base.dtype).removeprefix("torch.")
        own = load_model(value_model, dtype=dtype, auto_class=_auto_class(value_model))
    else:
        own = value_model
    disable_dropout(own)
    fuse_layers(own)
    own.to(base.device).requires_grad_(True)
    vocabulary_head = own.get_output_embeddings()
    if vocabulary_head is not None and vocabulary_head.weight is not own.get_input_embeddings().weight:
        vocabulary_head.requires_grad_(False)  # a critic has no use for it
    return own


def _auto_class(path: str) -> type:
    try:
        architectures = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or [""]
    except (OSError, ValueError):
        return AutoModel  # loading it says what is wrong
    return AutoModelForSequenceClassification if "SequenceClassification" in architectures[0] else AutoModel
