"""TRL's trainers with ppo_fast's output layer against the same trainers without, step by step. `make test-trl`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from ppo_fast.errors import UserError
from ppo_fast.integrations import trl as integration

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="TRL is not installed here; `make test-trl` has it",
)
STEPS = 3
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def _undone():
    yield
    integration.disable()


@dataclass
class Run:
    """What a training run leaves to be compared."""

    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Recorder(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.run.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.run.losses.append(logs["loss"])
            self.run.entropies.append(logs["entropy"])


@pytest.fixture
def make_trainer(tiny_model, tiny_tokenizer, tmp_path):
    """``make_trainer(algorithm="grpo", family="llama", lora=False, base=None, **settings) -> (trainer, run)``."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    def make(algorithm="grpo", family="llama", lora=False, base=None, **settings):
        run = Run()

        def reward(completions, completion_ids, **_):
            run.completions += completion_ids
            return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

        config, trainer = (GRPOConfig, GRPOTrainer) if algorithm == "grpo" else (RLOOConfig, RLOOTrainer)
        prompts = ["the hotel room was", "my kettle", "we liked the staff and the garden", "it is a cold", "the soup"]
        arguments = {
            "output_dir": str(tmp_path / "trl"),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 7,
            "max_steps": STEPS,
            "learning_rate": 0.02,
            "optim": "sgd",  # Adam would blow the rounding of a tiny gradient up to a whole step
            "max_grad_norm": 0.0,
            "temperature": 0.7,
            "beta": 0.05,
            "bf16": False,
            "use_cpu": True,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 3,
            **settings,
        }
        folder = tmp_path / family  # TRL loads the reference from where the policy came from
        tiny_model(family, seed=5).save_pretrained(folder)
        made = (base or trainer)(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=reward,
            args=config(**arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(**LORA) if lora else None,
            callbacks=[Recorder(run)],
        )
        return made, run

    return make


def trained(trainer, run: Run) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    run.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return run


def assert_same(ours: Run, stock: Run, tolerance: float = 2e-5) -> None:
    """The same texts, and losses, gradients and weights that differ by the rounding of float32."""
    assert len(ours.gradients) == len(stock.gradients) == STEPS
    assert ours.completions == stock.completions
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(stock.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(ours.entropies), torch.tensor(stock.entropies), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        whole = torch.cat([g.flatten() for g in theirs.values()])
        assert whole.norm() > 0
        error = torch.cat([(mine[n] - theirs[n]).flatten() for n in theirs])
        assert error.norm() <= tolerance * whole.norm()
    for name, weight in stock.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-4, atol=1e-4)


CASES = {
    "untied": {},
    "tied": {"family": "qwen2"},
    "softcap": {"family": "gemma2"},
    "logit scale": {"family": "cohere"},
    "divided logits": {"family": "granite"},
    "bias": {"family": "phi"},
    "lora": {"lora": True},
    "lora, tied": {"lora": True, "family": "qwen2"},
    "lora, entropy bonus": {"lora": True, "entropy_coef": 0.3},
    "entropy bonus": {"entropy_coef": 0.3},
    "high-entropy tokens": {"top_entropy_quantile": 0.4},
    "several epochs": {"num_iterations": 2, "lora": True},
    "sequence ratio": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "accumulated, checkpointed": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
}
RLOO = ("untied", "tied", "softcap", "lora", "accumulated, checkpointed")


@needs_trl
@pytest.mark.parametrize(
    ("algorithm", "name"), [*(("grpo", name) for name in CASES), *(("rloo", name) for name in RLOO)]
)
def test_training_is_the_same(make_trainer, algorithm, name):
    stock = trained(*make_trainer(algorithm, **CASES[name]))
    with integration.enabled() as calls:
        ours = trained(*make_trainer(algorithm, **CASES[name]))
    assert_same(ours, stock)
    micro_steps = STEPS * CASES[name].get("gradient_accumulation_steps", 1)
    assert calls.frozen == (micro_steps if "lora" in CASES[name] else 0)
    assert calls.trained == (0 if "lora" in CASES[name] else micro_steps)
    assert calls.scored > 0  # the reference, and RLOO's own log-probs
    assert not calls.left


@needs_trl
def test_only_reply_tokens_reach_the_output_layer(make_trainer):
    with integration.enabled() as calls:
        run = trained(*make_trainer())
    tokens = sum(map(len, run.completions))
    assert calls.rows == 2 * tokens  # the reference and the policy, each once


@needs_trl
def test_a_trainer_made_before_is_served_and_disable_gives_it_back(make_trainer):
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer import utils

    places = [
        (utils, "_use_triton"),
        (utils, "_ChunkedLogProbFunction"),
        (GRPOTrainer, "_compute_loss"),
        (RLOOTrainer, "_compute_loss"),
    ]
    before = [getattr(*place) for place in places]
    trainer, run = make_trainer()
    calls = integration.enable()
    assert integration.enable() is not calls  # twice is once, counted anew
    with integration.enabled() as calls:
        trained(trainer, run)
    assert calls.trained == STEPS
    assert all(getattr(*place) is not old for place, old in zip(places, before, strict=True))
    integration.disable()
    integration.disable()
    assert [getattr(*place) for place in places] == before


@needs_trl
@pytest.mark.parametrize(
    ("algorithm", "settings", "keeps_entropies", "expected"),
    [
        ("grpo", {}, False, False),
        ("grpo", {"entropy_coef": 0.1}, False, True),
        ("grpo", {"use_adaptive_entropy": True}, False, True),
        ("grpo", {}, True, True),
        ("rloo", {}, False, False),
        ("rloo", {}, True, True),
    ],
)
def test_the_entropy_is_differentiable_wherever_a_loss_may_use_it(
    make_trainer, monkeypatch, algorithm, settings, keeps_entropies, expected
):
    from trl import GRPOTrainer, RLOOTrainer

    class Keeps(GRPOTrainer if algorithm == "grpo" else RLOOTrainer):
        """Takes the entropies for an end of its own."""

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    asked = []
    op = integration.linear_selected_logprobs

    def spy(*args, **kwargs):
        if torch.is_grad_enabled():
            asked.append(kwargs["entropy_grad"])
        return op(*args, **kwargs)

    monkeypatch.setattr(integration, "linear_selected_logprobs", spy)
    integration.enable()
    trained(*make_trainer(algorithm, lora=True, base=Keeps if keeps_entropies else None, **settings))
    assert asked == [expected] * STEPS


def fused(model, ids, labels, **settings):
    """(log-probs, entropy, gradients by name) of a fused head outside of any trainer."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, **{"outputs": ("log_probs", "entropy"), **settings})
    out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    upstream = torch.linspace(-1, 1, labels[:, 1:].numel()).view_as(labels[:, 1:])
    ((out.log_probs + 0.5 * out.entropy) * upstream).sum().backward()
    return out.log_probs.detach(), out.entropy.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (3, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(3, 9, generator=generator) < 0.4, -100)
    labels[0, 4:] = 0  # a label of 0 is a token like any other
    return ids, labels


@needs_trl
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_models_are_at_least_as_exact_as_in_trl(tiny_model, batch, dtype, autocast):
    def made(kind=dtype):
        return tiny_model("qwen2", tie_word_embeddings=False).to(kind)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stock = fused(made(), *batch)
        with integration.enabled() as calls:
            ours = fused(made(), *batch)
        hidden = made().model(input_ids=batch[0]).last_hidden_state[:, :-1]
    assert calls.trained == 1
    weight = made().lm_head.weight
    if autocast:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    labels = batch[1][:, 1:]
    live = labels != -100
    exact = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
    for mine, theirs, true in zip(ours[:2], stock[:2], exact, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert not mine[~live].any()
        error = (mine - true)[live].abs().max()
        assert error <= max(1.1 * (theirs - true)[live].abs().max(), 1e-5)
    assert ours[2].keys() == stock[2].keys()
    for name, gradient in stock[2].items():
        assert ours[2][name].dtype == gradient.dtype
        rounding = 1e-5 if dtype == torch.float32 and not autocast else 3e-2
        assert (ours[2][name] - gradient).norm() <= rounding * gradient.norm()


@needs_trl
@pytest.mark.parametrize(("dtype", "head_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_head_in_float32(tiny_model, batch, dtype, head_dtype):
    """cast_lm_head_to_fp32: the hidden states are float32, outside of autocast, whatever the weight is."""

    def made():
        model = tiny_model("llama").to(dtype)
        model.lm_head.to(head_dtype)
        return model

    with torch.autocast("cpu", torch.bfloat16):
        stock = fused(made(), *batch, cast_lm_head_to_fp32=True, temperature=0.6)
        with integration.enabled():
            ours = fused(made(), *batch, cast_lm_head_to_fp32=True, temperature=0.6)
    torch.testing.assert_close(ours[:2], stock[:2], rtol=1e-5, atol=1e-5)
    for name, gradient in stock[2].items():
        torch.testing.assert_close(ours[2][name], gradient, rtol=2e-2, atol=2e-2 * float(gradient.abs().max()))


@needs_trl
def test_a_batch_without_labels_has_a_gradient_of_zero(tiny_model, batch):
    with integration.enabled() as calls:
        logprobs, entropy, gradients = fused(tiny_model("llama"), batch[0], torch.full_like(batch[1], -100))
    assert calls.trained == 1
    assert not logprobs.any()
    assert not entropy.any()
    assert not gradients["lm_head.weight"].any()


class Quantised(torch.nn.Parameter):
    """Pretends to be a plain parameter."""


@needs_trl
@pytest.mark.parametrize(
    ("change", "settings", "word"),
    [
        (None, {"outputs": ("log_probs", "entropy", "is_top1")}, "asked for is_top1"),
        ("weight", {}, "Quantised of torch.float32, not plain"),
        ("scale", {}, "logit scale -0.5"),
        ("zero", {}, "ZeRO-3"),
    ],
)
def test_what_is_left_to_trl(tiny_model, batch, monkeypatch, change, settings, word):
    def made():
        model = tiny_model("cohere" if change == "scale" else "llama")
        if change == "weight":
            model.lm_head.weight = Quantised(model.lm_head.weight.detach())
        if change == "scale":
            model.config.logit_scale = -0.5
        return model

    stock = fused(made(), *batch, **settings)
    if change == "zero":
        monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
        monkeypatch.setattr("trl.trainer.utils.maybe_gather_lm_head_ctx", lambda *_: contextlib.nullcontext())
    calls = integration.enable()
    with pytest.warns(UserWarning, match=f"leaves this output layer to TRL: .*{word}"):
        ours = fused(made(), *batch, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(made(), *batch, **settings)  # says so once
    assert list(calls.left.values()) == [2]
    assert calls.trained == calls.frozen == calls.scored == 0
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


@needs_trl
def test_readme_lines(make_trainer):
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"```python\n(from ppo_fast\.integrations import trl\n.*?)```", readme, re.DOTALL)[1]
    trainer, run = make_trainer("rloo")
    names = {}
    exec(lines, names)
    trained(trainer, run)
    assert names["calls"].trained == STEPS


@pytest.mark.parametrize("found", ["1.15.0", "1.16.1", "2.0.0", None])
def test_another_trl_is_refused(monkeypatch, found):
    def version(package):
        assert package == "trl"
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = f"supports TRL 1.16.0, and {found or 'none'} is installed: run `pip install trl==1.16.0`"
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        integration.enable()
