"""Every setting of a PPO run, flat, with its unit and the reason for its default, and the sizes that follow."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_fast.errors import UserError
from ppo_fast.rollout.batch import MOST_KEPT
from ppo_fast.rollout.generate import LOWEST_TEMPERATURE
from ppo_fast.rollout.vllm import LEAST_TEMPERATURE

_FORWARD_TOKENS = 2048  # enough for a matrix product to be at its best

SEEDS = 2**32
"""How many seeds there are: NumPy takes no larger ones, and set_seed gives it the same one."""

_COUNTS = (
    "response_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_mini_batches",
    "num_ppo_epochs",
    "kl_horizon",
)
_NOT_NEGATIVE = (
    "learning_rate",
    "adam_epsilon",
    "weight_decay",
    "vf_coef",
    "entropy_coef",
    "kl_coef",
    "warmup_steps",
    "save_steps",
    "min_new_tokens",
)
_POSITIVE = ("temperature", "max_grad_norm", "num_train_epochs", "importance_cap")
_POSITIVE_OR_NULL = (
    "cliprange_value",
    "cliprange_high",
    "value_learning_rate",
    "kl_target",
    "target_kl",
    "step0_p99",
    "step0_max",
    "total_episodes",
    "save_total_limit",
    "rollout_slots",
    "local_rollout_forward_batch_size",
)
_CHOICES = {
    "objective": ("ppo", "cispo"),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum_constant"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("reward", "loss"),
    "truncation": ("terminal", "bootstrap", "mask"),
    "old_logprobs": ("sampler", "rescored"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "dtype": ("float32", "bfloat16", "float16"),
    "rollout_dtype": (None, "bfloat16", "float16"),
    "rollout_backend": ("transformers", "vllm"),
    "importance_correction": (None, "truncate", "mask"),
}


@dataclass(frozen=True)
class PPOConfig:
    """Settings of :class:`~ppo_fast.training.trainer.PPOTrainer`.

    Names follow TRL's ``PPOConfig`` where it had one and Hugging Face elsewhere. Defaults are TRL's, except AdamW's
    epsilon 1e-5 and no weight decay (the N+ implementation details, arXiv:2403.17031), gradient norm 1 for each
    optimizer, and dropout off. Bad values raise :class:`~ppo_fast.errors.UserError` on construction.
    """

    output_dir: str
    """Folder of the run: configuration, metrics, completions, checkpoints, record. Never overwritten."""

    response_length: int = 53
    """New tokens at most, EOS included."""
    min_new_tokens: int = 0
    """Before so many tokens EOS has no probability, in sampling and in every log-prob of those tokens, and no stop
    string ends a reply. Not for models that cap their logits (Gemma 2)."""
    temperature: float = 0.7
    """Divides the logits in sampling and in every log-prob, the reference's too; never the values."""
    top_k: int | None = None
    """Draw from the k most probable tokens alone, 1024 at most; None: from all. Every log-prob, the reference's too, is
    then that of the distribution on the tokens that were kept at sampling."""
    top_p: float | None = None
    """Draw from the fewest tokens that together hold this share of the probability (of top_k's, 1024 if it isn't set);
    None: from all. Log-probs as under top_k."""
    stop_strings: list[str] | None = None
    """Texts that end a reply like an EOS token. Their tokens belong to the reply, and are trained on."""
    rollout_backend: str = "transformers"
    """transformers: the decode loop here. vllm: vLLM in this process, or the one at vllm_server."""
    vllm_server: str | None = None
    """Address of a vLLM server (http://host:8000) that samples; None: vLLM runs in this process."""
    vllm_weights_dir: str | None = None
    """Folder through which vllm_server gets the weights, under the same path on both machines; None: a temporary one,
    for a server on this machine."""
    vllm_memory: float = 0.3
    """Share of the GPU's memory for a vLLM in this process: weights and cache. The rest is for training."""
    rollout_slots: int | None = None
    """Replies that are generated at a time, the others wait for a free slot; None: all, up to 64. The cache of keys and
    values has so many rows. Which replies come out doesn't depend on it, up to rounding."""
    rollout_dtype: str | None = None
    """bfloat16: generation multiplies by weights rounded to it, on CPUs with the C++ extension; faster where the CPU
    has AVX512-BF16. Log-probs are those of the rounded policy, the ratio of the first step isn't 1. None: as the model
    is, which is exact."""

    per_device_train_batch_size: int = 8
    """Replies in one forward pass (a micro-batch)."""
    local_rollout_forward_batch_size: int | None = None
    """Replies in one pass without gradients, of the reference, the critic and reward models. None: as many as have 2048
    tokens together, a micro-batch at least. With old_logprobs="rescored" a micro-batch, but for reward models."""
    gradient_accumulation_steps: int = 1
    """Replies of one iteration = per_device_train_batch_size * gradient_accumulation_steps."""
    num_mini_batches: int = 1
    """Optimizer steps an epoch makes: minibatch = replies of one iteration / num_mini_batches."""
    num_ppo_epochs: int = 4
    """Passes over one iteration's replies."""
    total_episodes: int | None = None
    """Replies of the whole run; None: num_train_epochs passes over the prompts."""
    num_train_epochs: float = 3.0
    """Passes over the prompts, where total_episodes is None."""

    learning_rate: float = 3e-6
    """AdamW, policy."""
    value_learning_rate: float | None = None
    """AdamW, critic; None: as the policy."""
    lr_scheduler_type: str = "linear"
    """linear, cosine, constant or constant_with_warmup, over iterations, both optimizers."""
    warmup_steps: int = 0
    """Iterations of rising learning rate."""
    adam_epsilon: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradient norm at which each optimizer's parameters are clipped, apart from each other."""

    objective: str = "ppo"
    """ppo: clipped ratio. cispo: clipped, detached importance weight (arXiv:2506.13585)."""
    cliprange: float = 0.2
    """Lower clip distance of the ratio from 1, and the upper one unless cliprange_high is set."""
    cliprange_high: float | None = None
    dual_clip: float | None = None
    """Lower bound c > 1 of the objective at negative advantages (arXiv:1912.09729); None: off."""
    cliprange_value: float | None = 0.2
    """Clip distance of the values from their rollout values; None: off."""
    vf_coef: float = 0.1
    """Weight of the value loss where policy and critic share a body (value_model="head"); else it has no effect."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    aggregation: str = "token_mean"
    """token_mean, sequence_mean or sequence_sum_constant, always over the whole optimizer step."""

    kl_coef: float = 0.05
    """Price of a nat of divergence from the reference, in units of reward (or of loss, with kl_in="loss")."""
    kl_estimator: str = "k1"
    kl_in: str = "reward"
    """reward: shapes the token rewards. loss: a differentiated term. Never both."""
    kl_target: float | None = None
    """Nats per reply that kl_coef is steered to (Ziegler et al., arXiv:1909.08593); None: kl_coef stays fixed."""
    kl_horizon: int = 10_000
    """Replies over which that controller acts."""
    target_kl: float | None = None
    """k3 between rollout and current policy, nats per token, beyond which the remaining epochs are skipped."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation before GAE."""
    missing_eos_penalty: float | None = None
    """Subtracted from the score of a reply that did not end."""
    missing_eos_score: float | None = None
    """Replaces the score of a reply that did not end."""
    truncation: str = "terminal"
    """A reply cut at the limit: terminal (scored, ends there), bootstrap (goes on with the critic), mask (left out)."""

    old_logprobs: str = "sampler"
    """sampler: the log-probs recorded while sampling. rescored: the trainer's own, before the first update."""
    importance_correction: str | None = None
    """With rescored old log-probs, weigh each token's surrogate by exp(old - sampler): truncate (at importance_cap) or
    mask (weight 0 beyond it). None: no weight. With the sampler's own log-probs the ratio is the whole correction."""
    importance_cap: float = 2.0
    """Largest importance weight; 2 as in verl and TIS (Yao et al., 2025)."""
    step0_p99: float | None = None
    """Bound on the 99th percentile of |trainer - sampler|, nats, before the first update. None: 1e-4 in float32; 0.05
    in float16, 0.4 in bfloat16, since a logit near 20 is only known to 2^-11 and 2^-8 of itself there. (SmolLM2-135M in
    bfloat16, temperature 0.7: 0.16 to 0.21 between trainer and sampler, each of which is 0.13 to 0.2 off float32.)"""
    step0_max: float | None = None
    """Bound on the maximum of the same. None: 1e-3 in float32, 0.5 in float16, 1 in bfloat16."""

    dtype: str = "float32"
    """Of a model given by name."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    save_steps: int = 10
    """Iterations between checkpoints; 0: only the last."""
    save_total_limit: int | None = 2
    """Checkpoints kept; None: all. The one being written is never counted before it is whole."""
    report_to: str = "none"
    """A tracker of accelerate (tensorboard, wandb, ...), or none. metrics.jsonl is written in any case."""
    seed: int = 42
    """Of adapters' initial weights, prompt order, sampling and minibatches."""

    def __post_init__(self) -> None:
        for name in ("output_dir", "vllm_weights_dir"):
            if isinstance(path := getattr(self, name), os.PathLike):  # the record of a run holds texts
                object.__setattr__(self, name, os.fspath(path))
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(str, allowed))}")
        self._require(_COUNTS, lambda value: value >= 1, "at least 1")
        self._require(_NOT_NEGATIVE, lambda value: math.isfinite(value) and value >= 0, "finite and at least 0")
        self._require(_POSITIVE, lambda value: math.isfinite(value) and value > 0, "finite and above 0")
        self._require(("temperature",), lambda value: value >= LOWEST_TEMPERATURE, f"at least {LOWEST_TEMPERATURE}")
        self._require(("gamma", "lam"), lambda value: 0 <= value <= 1, "between 0 and 1")
        self._require(_POSITIVE_OR_NULL, lambda value: value is None or value > 0, "above 0, or null")
        self._require(("cliprange", "vllm_memory"), lambda value: 0 < value < 1, "between 0 and 1")
        self._require(
            ("top_k",), lambda value: value is None or 1 <= value <= MOST_KEPT, f"from 1 to {MOST_KEPT}, or null"
        )
        self._require(("top_p",), lambda value: value is None or 0 < value <= 1, "above 0 and at most 1, or null")
        self._require(("dual_clip",), lambda value: value is None or value > 1, "above 1, or null")
        self._require(("seed",), lambda value: 0 <= value < SEEDS, "from 0 to 2**32 - 1")
        if self.report_to != "none":
            self._require_tracker()
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise UserError("missing_eos_penalty and missing_eos_score are both set; keep the one you mean")
        if self.truncation == "bootstrap" and (self.missing_eos_penalty, self.missing_eos_score) != (None, None):
            raise UserError('truncation="bootstrap" gives a cut reply no EOS rule; unset missing_eos_penalty/_score')
        self._check_backend()
        if self.importance_correction is not None and self.old_logprobs != "rescored":
            raise UserError(
                'importance_correction needs old_logprobs="rescored": with the sampler\'s log-probs the ratio corrects '
                "for the sampler already; set one of the two"
            )
        if self.min_new_tokens > self.response_length:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens} and a reply has response_length = {self.response_length} "
                "tokens at most; lower one or raise the other"
            )
        if self.min_new_tokens and self.aggregation == "sequence_mean":
            raise UserError(
                "min_new_tokens doesn't go with aggregation=\"sequence_mean\": a reply's tokens are then scored in two "
                "parts, which have no common mean; use token_mean"
            )
        if self.rollout_size % self.num_mini_batches:
            raise UserError(
                f"an iteration's {self.rollout_size} replies (per_device_train_batch_size "
                f"{self.per_device_train_batch_size} * gradient_accumulation_steps {self.gradient_accumulation_steps}) "
                f"don't divide into num_mini_batches = {self.num_mini_batches}; change one of the three"
            )
        if self.minibatch_size % self.micro_batch_size:
            raise UserError(
                f"a minibatch of {self.minibatch_size} replies ({self.rollout_size} / {self.num_mini_batches}) doesn't "
                f"divide into micro-batches of per_device_train_batch_size = {self.micro_batch_size}; change one"
            )
        if self.total_episodes is not None and self.total_episodes % self.rollout_size:
            raise UserError(
                f"total_episodes = {self.total_episodes} isn't a multiple of the {self.rollout_size} replies of an "
                f"iteration; use {max(1, self.total_episodes // self.rollout_size) * self.rollout_size}, for instance"
            )

    def _check_backend(self) -> None:
        if self.rollout_backend == "transformers":
            refused = {name: getattr(self, name) for name in ("vllm_server", "vllm_weights_dir")}
            why = 'it belongs to rollout_backend="vllm"'
        else:
            refused = {"top_k": self.top_k, "top_p": None if self.top_p == 1 else self.top_p}
            why = "vLLM returns no ids of the tokens it kept, and log-probs can't be scored again without them"
            if self.rollout_slots is not None or self.rollout_dtype is not None:
                refused = {"rollout_slots": self.rollout_slots, "rollout_dtype": self.rollout_dtype}
                why = 'it belongs to rollout_backend="transformers"; vLLM has settings of its own'
            elif self.temperature < LEAST_TEMPERATURE:
                raise UserError(
                    f"temperature is {self.temperature}, and vLLM would sample at {LEAST_TEMPERATURE}; use that or more"
                )
        for name, value in refused.items():
            if value is not None:
                raise UserError(f"{name} is {value!r} with rollout_backend={self.rollout_backend!r}: {why}; unset it")
        if self.vllm_weights_dir is not None and self.vllm_server is None:
            raise UserError("vllm_weights_dir is set without vllm_server; a vLLM in this process needs no folder")

    def _require(self, names: tuple[str, ...], holds: Callable[[Any], bool], wanted: str) -> None:
        for name in names:
            if not holds(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def _require_tracker(self) -> None:
        from accelerate.tracking import get_available_trackers

        available = [str(tracker) for tracker in get_available_trackers()]
        if self.report_to not in available:
            raise UserError(
                f"report_to is {self.report_to!r}, which isn't among the trackers installed here "
                f"({', '.join(available) or 'there are none'}); install it, or use none"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> PPOConfig:
        """A configuration from parsed YAML.

        Raises:
            UserError: an unknown key (with the nearest known one) or a value of the wrong type.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        check_keys(settings, fields, "ppo")
        values = {name: _number(fields[name], value) for name, value in settings.items()}
        if "output_dir" not in values:
            raise UserError("output_dir isn't set; name the folder the run shall write")
        return cls(**values)

    @property
    def rollout_size(self) -> int:
        """Replies of one iteration."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def minibatch_size(self) -> int:
        """Replies of one optimizer step."""
        return self.rollout_size // self.num_mini_batches

    @property
    def micro_batch_size(self) -> int:
        """Replies of one forward and backward pass."""
        return min(self.per_device_train_batch_size, self.minibatch_size)

    def forward_batch_size(self, tokens: int) -> int:
        """Rows of ``tokens`` tokens each to a pass without gradients."""
        if self.local_rollout_forward_batch_size is not None:
            return self.local_rollout_forward_batch_size
        return max(self.micro_batch_size, _FORWARD_TOKENS // max(1, tokens))

    def iterations(self, prompts: int) -> int:
        """Rollouts of the whole run over a dataset of ``prompts`` prompts."""
        episodes = self.total_episodes or math.ceil(self.num_train_epochs * prompts)
        return max(1, episodes // self.rollout_size)

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(clip_low, clip_high) of the ops."""
        return self.cliprange, self.cliprange if self.cliprange_high is None else self.cliprange_high

    def step0_bounds(self, dtype: str) -> tuple[float, float]:
        """(99th percentile, maximum) allowed for |trainer - sampler| log-probs, nats, of a policy in ``dtype``."""
        p99, maximum = 1e-4, 1e-3
        for name, bounds in {"float16": (0.05, 0.5), "bfloat16": (0.4, 1.0)}.items():
            if name in (dtype, self.rollout_dtype):
                p99, maximum = bounds
        return self.step0_p99 or p99, self.step0_max or maximum


def check_keys(settings: Mapping[str, Any], known: Mapping[str, Any], section: str) -> None:
    """Raises UserError for a key that isn't known, with the nearest one that is."""
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise UserError(f"unknown key {key!r} in section {section!r}; {hint}")


def _number(field: dataclasses.Field[Any], value: Any) -> Any:
    """YAML reads 3e-6 as a string and 1 as an int."""
    if str(field.type).startswith("float") and isinstance(value, (str, int)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _check_type(field: dataclasses.Field[Any], value: Any) -> None:
    annotation = str(field.type)
    if value is None and "None" in annotation:
        return
    if annotation.startswith("list[str]"):
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(x, str) and x for x in value):
            raise UserError(f"{field.name} is {value!r}; it must be a list of texts, none of them empty")
        return
    kinds = {"float": (float, int), "int": (int,), "bool": (bool,), "str": (str,)}[annotation.split(" | ")[0]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
        raise UserError(f"{field.name} is {value!r}; it must be of type {annotation}")
