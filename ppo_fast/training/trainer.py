"""PPO with a critic for language models: text in, text out, one machine."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    get_scheduler,
    set_seed,
)
from transformers.trainer_callback import CallbackHandler

from ppo_fast.errors import UserError
from ppo_fast.models.loading import DTYPES, eos_token_ids, load_model, load_tokenizer, unused_sampling_settings
from ppo_fast.models.roles import Actor, adapter_settings, build_roles
from ppo_fast.rollout import Rollout, StopStrings, check_cache, generate, swaps
from ppo_fast.rollout.vllm import VllmSampler
from ppo_fast.rollout.vllm_colocated import ColocatedEngine
from ppo_fast.rollout.vllm_served import ServedEngine
from ppo_fast.training import checkpoint, metrics, record, update
from ppo_fast.training.callbacks import OwnFlow, ProgressCallback
from ppo_fast.training.checks import Agreement, agreement, require_agreement
from ppo_fast.training.config import PPOConfig
from ppo_fast.training.data import Prompt, PromptSampler, read_prompts, tokenize
from ppo_fast.training.experience import Experience, Forwards, Progress, score, shape
from ppo_fast.training.journal import Journal, identity
from ppo_fast.training.meter import Meter
from ppo_fast.training.rewards import RewardFunction, RewardFunctions, RewardModel, Scores
from ppo_fast.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Where a run is written and how often: all that may differ when it is resumed.
_MAY_CHANGE = {"output_dir", "save_steps", "save_total_limit", "report_to", "step0_p99", "step0_max",
               "vllm_server", "vllm_weights_dir", "vllm_memory"}  # fmt: skip
_SAMPLER_CAUSES = (
    "usual causes are weights that changed between sampling and training, a temperature or mask applied in one of them "
    "only, dropout, other position ids, or 16-bit arithmetic (see step0_p99 and step0_max)"
)
_REFERENCE_CAUSES = "the reference is the policy as it arrives: check that no weight changed before training"


class PPOTrainer:
    """Trains a policy and a critic on scored replies (Schulman et al., arXiv:1707.06347; Ouyang et al., 2022).

    Args:
        model: the policy: a path or hub id, a causal language model, or one with an adapter on it.
        reward_funcs: one or several of: functions ``f(prompts, completions, completion_ids=..., **columns)`` that
            return a number or None per completion; reward models (sequence classifiers with one label, an adapter on
            them or not); their paths.
        args: the settings.
        train_dataset: rows with a ``prompt`` (text, or a list of chat messages): a JSONL path, a list, a ``Dataset``.
        eval_dataset: held-out rows, for :meth:`generate_replies` and the command line's ``eval``.
        ref_model: a frozen reference other than the policy as it arrives, or ``"none"`` for no reference.
        value_model: None (a value adapter under LoRA, else a copy of the policy), ``"head"`` (a scalar head on the
            policy's own hidden states), a path, or a module.
        processing_class: the tokenizer; loaded from the model's path when None.
        reward_processing_classes: the reward models' tokenizers, one per entry of ``reward_funcs``, or None.
        callbacks: transformers' ``TrainerCallback``s.
        optimizers: (policy's, critic's); AdamW when None.
        peft_config: puts a LoRA adapter on a bare model.
        value_peft_config: the value adapter's settings, when they differ.

    Raises:
        UserError: whatever the caller can fix, in one sentence.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        *,
        ref_model: Any = None,
        value_model: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.Optimizer | None] = (None, None),
        peft_config: LoraConfig | None = None,
        value_peft_config: LoraConfig | None = None,
        **removed: Any,
    ) -> None:
        _refuse_old_form(model, removed)
        if args is None:
            raise UserError("args is missing; pass PPOConfig(output_dir=...)")
        if train_dataset is None:
            raise UserError("train_dataset is missing; PPO needs prompts to reply to")
        self.args = args
        self.accelerator = Accelerator(
            log_with=None if args.report_to == "none" else args.report_to, project_dir=args.output_dir
        )
        if self.accelerator.num_processes > 1:
            raise UserError("ppo_fast trains in one process for now; start it without accelerate launch or torchrun")
        self.prompts = read_prompts(train_dataset)
        self.eval_prompts = read_prompts(eval_dataset) if eval_dataset is not None else []

        set_seed(args.seed)
        path = model if isinstance(model, str) else model.config.name_or_path
        self.tokenizer = processing_class or load_tokenizer(path)
        policy = load_model(path, dtype=args.dtype) if isinstance(model, str) else model
        policy = policy.to(self.accelerator.device)
        model_identity = {"name": path, "hash": record.model_hash(policy)}
        self._reference_is_start = ref_model is None
        self.roles = build_roles(
            policy, peft_config=peft_config, value_peft_config=value_peft_config, ref_model=ref_model,
            value_model=value_model, gradient_checkpointing=args.gradient_checkpointing,
        )  # fmt: skip
        if unused := unused_sampling_settings(self.roles.policy.model):
            logger.warning(
                "the model's generation_config sets %s, which is not applied: replies are drawn from the whole "
                "vocabulary at temperature %s", unused, args.temperature,
            )  # fmt: skip
        self.eos_ids = eos_token_ids(self.roles.policy.model, self.tokenizer)
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad_id is None else pad_id
        check_cache(self.roles.policy.model)
        if args.rollout_dtype is not None and not swaps(self.accelerator.device):
            raise UserError("rollout_dtype needs the C++ kernels on a CPU; leave it out, or set dtype")
        if args.min_new_tokens and self.roles.policy.head.softcap is not None:
            raise UserError(
                "the model caps its logits, and EOS can't be excluded under a cap; leave min_new_tokens at 0"
            )
        self._stop_strings = StopStrings(self.tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
        self._prompt_ids = self._tokenize(self.prompts)
        highest, vocabulary = max(map(max, self._prompt_ids)), self.roles.policy.head.weight.shape[0]
        if highest >= vocabulary:
            raise UserError(
                f"the tokenizer gives id {highest} and the model has {vocabulary} tokens; use the model's own tokenizer"
            )
        self.reward = self._reward_functions(reward_funcs, reward_processing_classes)
        self._generate = self._sampler()

        self.optimizers = self._build_optimizers(*optimizers)
        self.iterations = args.iterations(len(self.prompts))
        self.schedulers = [
            get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, self.iterations)
            for optimizer in (self.optimizers.policy, self.optimizers.value)
        ]
        self.sampler = PromptSampler(len(self.prompts), args.seed)
        self.generator = torch.Generator().manual_seed(args.seed)  # of sampling and of minibatches
        self.kl_coef = args.kl_coef
        self.state = TrainerState(max_steps=self.iterations, is_local_process_zero=True, is_world_process_zero=True)
        self.control = TrainerControl()
        self.callbacks = CallbackHandler(
            [OwnFlow(), *(callbacks or [])], self.roles.policy.model, self.tokenizer, self.optimizers.policy,
            self.schedulers[0],
        )  # fmt: skip
        names = identity(
            args, model_identity, self.prompts, self.eval_prompts, self.reward.names, self.eos_ids, self.iterations
        )
        settings = {"ppo": dataclasses.asdict(args)}  # the command line puts its whole recipe there
        self.journal = Journal(RunFolder(args.output_dir), settings, names, self.accelerator.device)
        self._checked = False  # the step-0 check has passed

    # The algorithm ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | Path = False) -> TrainerState:
        """Runs to the end, or from a checkpoint (True: the newest in output_dir) to the end."""
        self._begin(resume_from_checkpoint)
        while self.state.global_step < self.iterations and not self.control.should_training_stop:
            meter = Meter(self.accelerator.device)
            prompts, prompt_ids = self._draw_prompts()
            with meter.phase("rollout"):
                rollout = self._rollout(prompt_ids)
            with meter.phase("score"):
                forwards = score(self.roles, rollout, self.args, self._progress("score", rollout))
                completions, scores = self._score(prompts, rollout)
                experience = shape(rollout, forwards, scores.total, self.kl_coef, self.args)
            with meter.phase("update"):
                step0: list[Agreement] = []
                stats = update.run(
                    self.roles, experience, self.optimizers, self.args, kl_coef=self.kl_coef,
                    progress=self._progress("update", rollout, self.args.num_ppo_epochs),
                    before_first_step=self._step0_check(experience, forwards, step0),
                )  # fmt: skip
            if stats.skipped_steps and not stats.policy_grad_norms:
                raise UserError(
                    f"no optimizer step of iteration {self.state.global_step + 1} had a finite gradient; lower "
                    "learning_rate, or look for infinite rewards or values"
                )
            results = metrics.collect(experience, scores, stats, step0[0] if step0 else Agreement(0.0, 0.0))
            results |= {"objective/kl_coef": self.kl_coef, "lr": self.schedulers[0].get_last_lr()[0]}
            self._adapt(results)
            self.state.global_step += 1
            line = self.journal.write(
                self.state.global_step, self.args, prompts, completions, scores, experience, results, meter
            )
            self._announce(line)
        return self._end()

    def _rollout(self, prompt_ids: list[list[int]]) -> Rollout:
        """One reply to each prompt, its rows shuffled into the order that training will take them in."""
        total = len(prompt_ids) * self.args.response_length
        done = 0

        def report(tokens: int) -> None:
            nonlocal done
            done += tokens
            self._report("rollout", done, total)

        return self._sample(self.roles.policy, prompt_ids, self.generator, report)

    def _sample(
        self, actor: Actor, prompt_ids: list[list[int]], generator: torch.Generator, report: Progress | None = None
    ) -> Rollout:
        args = self.args
        seeds = torch.randint(2**62, (len(prompt_ids),), generator=generator).tolist()
        try:
            return self._generate(
                actor, prompt_ids, max_new_tokens=args.response_length, min_new_tokens=args.min_new_tokens,
                temperature=args.temperature, eos_ids=self.eos_ids, pad_id=self.pad_id, seeds=seeds,
                stop_strings=self._stop_strings, on_tokens=report,
            )  # fmt: skip
        except FloatingPointError as error:
            raise UserError(
                f"the policy has diverged: after {self.state.global_step} iterations its logits aren't finite; "
                "lower learning_rate, and go on from a checkpoint before that"
            ) from error

    def _score(self, prompts: list[Prompt], rollout: Rollout) -> tuple[list[str], Scores]:
        completion_ids = rollout.completion_ids()
        completions = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return completions, self.reward(prompts, completions, completion_ids)

    def _step0_check(
        self, experience: Experience, forwards: Forwards, found: list[Agreement]
    ) -> Callable[[Tensor], None]:
        """What the update calls before its first step: measures in every iteration, refuses in the first."""
        rollout = experience.rollout
        mask = experience.mask[: self.args.minibatch_size]
        bounds = self.args.step0_bounds(str(self.roles.policy.model.dtype).removeprefix("torch."))

        def check(log_ratios: Tensor) -> None:
            difference, live = log_ratios, mask
            if forwards.rescored_logprobs is not None:
                difference, live = forwards.rescored_logprobs - rollout.logprobs, rollout.response_mask
            found.append(agreement(difference, live))
            if self._checked:
                return
            refuse = functools.partial(require_agreement, batch=rollout, tokenizer=self.tokenizer, bounds=bounds)
            refuse(difference, live, what="trainer and sampler", causes=_SAMPLER_CAUSES)
            if forwards.ref_logprobs is not None and self._reference_is_start and self.state.global_step == 0:
                gap = experience.old_logprobs - forwards.ref_logprobs
                refuse(gap, rollout.response_mask, what="policy and reference", causes=_REFERENCE_CAUSES)
            self._checked = True

        return check

    # Around it ----------------------------------------------------------------------------------------------------

    def generate_replies(self, prompts: Sequence[Prompt], *, seed: int, reference: bool = False) -> Rollout:
        """Replies to ``prompts`` by the policy or by the reference, from the same random numbers for equal seeds."""
        actor = self.roles.reference if reference else self.roles.policy
        if actor is None:
            raise UserError('there is no reference to compare with (ref_model="none")')
        if not prompts:
            raise UserError("there are no prompts to reply to; give at least one")
        generator = torch.Generator().manual_seed(seed)
        return self._sample(actor, self._tokenize(prompts), generator)

    def save_checkpoint(self) -> Path:
        """Writes checkpoint-N for the iterations done so far."""
        state = {
            "made_with": self._made_with(),
            "iteration": self.state.global_step,
            "kl_coef": self.kl_coef,
            "journal": self.journal.state(),
            "optimizers": [self.optimizers.policy.state_dict(), self.optimizers.value.state_dict()],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "prompts": self.sampler.state(),
            "generator": self.generator.get_state(),
            "torch_generator": torch.get_rng_state(),
        }
        return checkpoint.save(
            self.journal.folder.path,
            self.state.global_step,
            self.roles,
            self.tokenizer,
            state,
            self.args.save_total_limit,
        )

    def _load_checkpoint(self, folder: Path) -> None:
        _refuse_changes(folder, checkpoint.load_state(folder)["made_with"], self._made_with())
        state = checkpoint.load(folder, self.roles)
        self.state.global_step = state["iteration"]
        self.kl_coef = state["kl_coef"]
        for optimizer, saved in zip((self.optimizers.policy, self.optimizers.value), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.sampler.load(state["prompts"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_generator"])
        self.journal.resume(state["journal"], str(folder), self.state.global_step)

    def _made_with(self) -> dict[str, Any]:
        """What must not change between a run and its resumption."""
        settings = {name: value for name, value in dataclasses.asdict(self.args).items() if name not in _MAY_CHANGE}
        identity = self.journal.identity
        return settings | {
            "model": identity["model"]["hash"],
            "data": identity["data"]["hash"],
            "rewards": identity["rewards"],
            "adapters": adapter_settings(self.roles),
        }

    def _begin(self, resume: bool | str | Path) -> None:
        folder = self.journal.folder
        # Room for the checkpoint being written beside the ones that are kept.
        folder.require_room(checkpoint.size_in_bytes(self.roles) * (1 + (self.args.save_total_limit or 1)))
        if resume:
            self._load_checkpoint(checkpoint.resolve(folder.path, resume))
        else:
            folder.require_new()
        if self.args.kl_in == "loss" and self.args.kl_estimator == "k1" and self.kl_coef:
            logger.warning("k1 in the loss has zero expected gradient on-policy; use kl_estimator k3 there")
        self.journal.start_clock()
        self.control = self.callbacks.on_train_begin(self.args, self.state, self.control)

    def _draw_prompts(self) -> tuple[list[Prompt], list[list[int]]]:
        drawn = self.sampler.draw(self.args.rollout_size)
        order = torch.randperm(len(drawn), generator=self.generator).tolist()
        rows = [drawn[i] for i in order]
        return [self.prompts[row] for row in rows], [self._prompt_ids[row] for row in rows]

    def _adapt(self, results: dict[str, float]) -> None:
        """Learning rates and the KL coefficient of the next iteration."""
        args = self.args
        for scheduler in self.schedulers:
            scheduler.step()
        if args.kl_target is not None and "objective/kl" in results:
            error = min(max(results["objective/kl"] / args.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * args.rollout_size / args.kl_horizon

    def _announce(self, line: dict[str, float]) -> None:
        """Trackers, callbacks, and a checkpoint when one is due."""
        args, state = self.args, self.state
        state.epoch = state.global_step * args.rollout_size / len(self.prompts)
        if args.report_to != "none":
            if not self.accelerator.trackers:
                self.accelerator.init_trackers("ppo_fast", config=dataclasses.asdict(args))
            self.accelerator.log(line, step=state.global_step)
        self.control = self.callbacks.on_log(args, state, self.control, logs=line)
        self.control = self.callbacks.on_step_end(args, state, self.control)
        last = state.global_step == self.iterations or self.control.should_training_stop
        due = args.save_steps > 0 and state.global_step % args.save_steps == 0
        if last or due or self.control.should_save:
            self.save_checkpoint()
            self.control = self.callbacks.on_save(args, state, self.control)

    def _end(self) -> TrainerState:
        self.journal.close()
        self.control = self.callbacks.on_train_end(self.args, self.state, self.control)
        if self.args.report_to != "none":
            self.accelerator.end_training()
        return self.state

    def _report(self, phase: str, done: int, total: int) -> None:
        for callback in self.callbacks.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.on_progress(phase, done, total)

    def _progress(self, phase: str, rollout: Rollout, passes: int = 1) -> Progress:
        total = int(rollout.response_mask.sum()) * passes
        done = 0

        def report(tokens: int) -> None:
            nonlocal done
            done += tokens
            self._report(phase, done, total)

        return report

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        context = getattr(self.roles.policy.model.config.get_text_config(), "max_position_embeddings", None)
        limit = None if context is None else context - self.args.response_length
        return tokenize(prompts, self.tokenizer, limit)

    def _sampler(self) -> Callable[..., Rollout]:
        """`generate`, or vLLM in its place."""
        args, policy = self.args, self.roles.policy
        if args.rollout_backend == "transformers":
            dtype = None if args.rollout_dtype is None else DTYPES[args.rollout_dtype]
            return functools.partial(
                generate, top_k=args.top_k, top_p=args.top_p, slots=args.rollout_slots, dtype=dtype
            )
        if args.vllm_server is not None:
            return VllmSampler(ServedEngine(args.vllm_server, args.vllm_weights_dir)).generate
        prompt_ids = self._prompt_ids + self._tokenize(self.eval_prompts)
        engine = ColocatedEngine(
            policy.model.config.name_or_path, dtype=policy.model.dtype, device=policy.device, seed=args.seed,
            context=max(map(len, prompt_ids)) + args.response_length, memory=args.vllm_memory,
            text=self._stop_strings is not None,
        )  # fmt: skip
        return VllmSampler(engine).generate

    def _reward_functions(
        self, reward_funcs: Any, tokenizers: Sequence[PreTrainedTokenizerBase | None] | None
    ) -> RewardFunctions:
        given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        given = [reward for reward in given if reward is not None]
        tokenizers = list(tokenizers) if tokenizers is not None else [None] * len(given)
        if len(tokenizers) != len(given):
            raise UserError(f"{len(tokenizers)} reward_processing_classes for {len(given)} reward_funcs; give one each")
        functions: list[RewardFunction] = []
        for reward, tokenizer in zip(given, tokenizers, strict=True):
            if isinstance(reward, (str, PreTrainedModel, PeftModel)):
                functions.append(RewardModel(reward, tokenizer, self.accelerator.device, self.args.forward_batch_size))
            elif callable(reward):
                functions.append(reward)
            else:
                raise UserError(f"a reward must be a function, a model or a path, got {type(reward).__name__}")
        return RewardFunctions(functions)

    def _build_optimizers(
        self, policy: torch.optim.Optimizer | None, value: torch.optim.Optimizer | None
    ) -> update.Optimizers:
        args = self.args

        def adamw(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
            return torch.optim.AdamW(
                list(parameters), lr=learning_rate, eps=args.adam_epsilon, weight_decay=args.weight_decay
            )

        value_learning_rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
        return update.Optimizers(
            policy or adamw(self.roles.policy_parameters.values(), args.learning_rate),
            value or adamw(self.roles.value_parameters.values(), value_learning_rate),
        )


def _refuse_changes(folder: Path, made_with: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [name for name in now if now[name] != made_with.get(name)]
    if changed:
        name = changed[0]
        raise UserError(
            f"{str(folder)!r} was made with {name} = {made_with.get(name)!r}, and it is {now[name]!r} now; resume with "
            "the run's own config.yaml, or start a new run"
        )


def _refuse_old_form(model: Any, removed: dict[str, Any]) -> None:
    form = "PPOTrainer(model, reward_funcs, args, train_dataset, ...)"
    if isinstance(model, PPOConfig):
        raise UserError(f"args came first, as in TRL's PPOTrainer; here the model does: {form}")
    if "reward_model" in removed:
        raise UserError(f"reward_model= is now an entry of reward_funcs, next to Python functions: {form}")
    if removed:
        raise UserError(f"unknown argument {next(iter(removed))!r}; the form is {form}")
