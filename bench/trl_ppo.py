"""TRL's own PPO, as its last users have it: iterations of ``PPOTrainer`` of TRL 0.22.2, stage by stage.

    .venv-trl-ppo/bin/python bench/trl_ppo.py < job.json

The peer of bench_iteration.py, in an environment of its own (`make .venv-trl-ppo/installed`): this version asks for
transformers 4, the project for 5, so nothing of ppo_fast is imported here. The work comes as JSON on standard input,
see `Job`; the last line of the output is a list with one entry an iteration. LoRA on the policy, whose reference is the
policy without it; the critic is a second model and trained whole, which is what ``peft_config`` means there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from harness.stages import Stages


@dataclass(frozen=True)
class Job:
    """What is run."""

    folder: str  # of the model
    dtype: str  # that all models are loaded in
    prompts: list[list[int]]  # token ids, equally many in each; one iteration takes them all
    reward_head: list[float]  # [H], the reward model's: the model's body under this head
    new_tokens: int  # of every reply: there is no EOS
    epochs: int
    minibatches: int
    iterations: int
    temperature: float
    kl_coef: float
    rank: int
    threads: int

    def json(self) -> str:
        """For standard input."""
        return json.dumps(asdict(self))


def trainer(job: Job) -> Any:
    """TRL's trainer with its four models."""
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from trl import PPOConfig, PPOTrainer

    config = transformers.AutoConfig.from_pretrained(job.folder, num_labels=1)
    # transformers 5 wrote the folder; version 4 reads over the new place of this and would take its default.
    config.rope_theta = json.loads((Path(job.folder) / "config.json").read_text())["rope_parameters"]["rope_theta"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(job.folder) / "tokenizer.json"), padding_side="left",
        pad_token="<|endoftext|>", eos_token="<|im_end|>",
    )  # fmt: skip
    loading = {"config": config, "dtype": getattr(torch, job.dtype)}
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_pretrained(job.folder, **loading)
    value, reward = (
        transformers.AutoModelForSequenceClassification.from_pretrained(job.folder, **loading) for _ in range(2)
    )
    reward.score.weight.data.copy_(torch.tensor([job.reward_head]))
    prompts = Dataset.from_dict({"input_ids": job.prompts})
    replies = len(job.prompts)
    arguments = PPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=replies, local_rollout_forward_batch_size=replies,
        num_ppo_epochs=job.epochs, num_mini_batches=job.minibatches, total_episodes=job.iterations * replies,
        response_length=job.new_tokens, temperature=job.temperature, kl_coef=job.kl_coef, learning_rate=1e-5,
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
        num_sample_generations=0, disable_tqdm=True, seed=1,
    )  # fmt: skip
    lora = LoraConfig(
        r=job.rank, lora_alpha=2 * job.rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=None, reward_model=reward,
        value_model=value, train_dataset=prompts, eval_dataset=prompts.select([0]), peft_config=lora,
    )  # fmt: skip


def run(job: Job) -> list[dict[str, Any]]:
    """The stages of every iteration. TRL has no seams for this: functions that begin a stage are wrapped."""
    from trl.trainer import ppo_trainer

    made = trainer(job)
    generate, forward = ppo_trainer.batch_generation, ppo_trainer.forward
    found: list[dict[str, Any]] = []
    stages, now = Stages(), ""

    def begin(name: str) -> None:
        nonlocal now
        if now != name:
            now = name
            stages.begin(name)

    def generate_then_score(*arguments: Any) -> Any:
        begin("rollout")
        replies = generate(*arguments)
        if replies[0].shape[1] != len(job.prompts[0]) + job.new_tokens:
            raise RuntimeError(f"replies and prompts have {replies[0].shape[1]} tokens")
        begin("score")
        return replies

    def forward_of_stage(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            begin("update")
        return forward(*arguments)

    def log(*_: Any) -> None:
        nonlocal stages, now
        stages.end()
        found.append(stages.figures())
        stages, now = Stages(), ""

    ppo_trainer.batch_generation, ppo_trainer.forward, made.log = generate_then_score, forward_of_stage, log
    made.train()
    return found


if __name__ == "__main__":
    job = Job(**json.load(sys.stdin))
    torch.set_num_threads(job.threads)
    print(json.dumps(run(job)))
