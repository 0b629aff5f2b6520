"""vLLM as a server, on this machine or another: weights through a folder that both see, the rest over HTTP.

The server is started in its development mode, for the two routes that trainers need:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs
"""

from __future__ import annotations

import http.client
import json
import math
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ppo_fast.errors import UserError
from ppo_fast.rollout.vllm import Reply

_SHARD_BYTES = 2**30
_REQUESTS = 256  # open at a time; the server runs as many of them together as it has room for
_FIRST_ANSWER_S, _ANSWER_S = 10.0, 3600.0


class ServedEngine:
    """``vllm serve`` behind ``url``.

    Args:
        folder: where the weights are written for the server to read, before each rollout, in a folder of their own; the
            server's own path to it must be the same. None for a temporary one, which goes with this object.

    Raises:
        UserError: nobody answers, or not as vLLM in its development mode does.
    """

    def __init__(self, url: str, folder: str | None) -> None:
        self._url = url.rstrip("/")
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="ppo_fast-vllm-")
            folder = self._temporary.name
        self._folder = Path(folder).resolve() / "ppo_fast-weights"  # what else lies there is the user's
        models = self._ask("/v1/models", timeout=_FIRST_ANSWER_S).get("data") or [{}]
        if "max_model_len" not in models[0]:
            raise UserError(f"what answers at {self._url} isn't vLLM: its /v1/models names no max_model_len")
        self._model, self.context = models[0]["id"], int(models[0]["max_model_len"])
        self._forget(timeout=_FIRST_ANSWER_S)

    def generate(
        self, prompts: list[list[int]], settings: list[dict[str, Any]], on_tokens: Callable[[int], None] | None
    ) -> list[Reply]:
        """As `rollout.vllm.Engine` has it; ``on_tokens`` is called after each reply."""
        with ThreadPoolExecutor(max_workers=min(_REQUESTS, len(prompts))) as pool:
            waiting = [pool.submit(self._complete, *pair) for pair in zip(prompts, settings, strict=True)]
            try:
                for done in as_completed(waiting):
                    if on_tokens is not None:
                        on_tokens(len(done.result().ids))
                return [future.result() for future in waiting]
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """As `rollout.vllm.Engine` has it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob("model-*.safetensors"):
                old.unlink()
            for number, shard in enumerate(_shards(weights)):
                save_file(shard, self._folder / f"model-{number:05}.safetensors")
        except OSError as error:
            raise UserError(
                f"the weights for vLLM can't be written to {str(self._folder)!r} ({error.strerror}); set "
                "vllm_weights_dir to a folder that trainer and server both see"
            ) from error
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}})
        self._forget()

    def _complete(self, prompt: list[int], fields: dict[str, Any]) -> Reply:
        answer = self._ask(
            "/v1/completions", {"model": self._model, "prompt": prompt, "return_token_ids": True, **fields}
        )
        choice = answer["choices"][0]
        if choice.get("token_ids") is None or choice.get("logprobs") is None:
            raise UserError(f"vLLM at {self._url} returns no token ids or log-probs; update it to 0.11 or later")
        logprobs = [math.nan if value is None else value for value in choice["logprobs"]["token_logprobs"]]
        return Reply(choice["token_ids"], logprobs, choice["finish_reason"])

    def _forget(self, timeout: float = _ANSWER_S) -> None:
        if not self._ask("/reset_prefix_cache", {}, timeout=timeout).get("success", True):
            raise UserError(f"vLLM at {self._url} kept a cache of the old weights; does somebody else use the server?")

    def _ask(self, route: str, body: dict[str, Any] | None = None, timeout: float = _ANSWER_S) -> dict[str, Any]:
        """GET, or POST of ``body``; the answer's JSON, {} if it has none."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + route, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
            return json.loads(text) if text else {}
        except urllib.error.HTTPError as error:
            if error.code == 404 and route != "/v1/completions":
                raise UserError(
                    f"the server at {self._url} has no {route}; start vLLM with VLLM_SERVER_DEV_MODE=1 in "
                    "its environment"
                ) from error
            message = " ".join(error.read().decode(errors="replace").split())[:300]
            raise UserError(f"vLLM at {self._url} refused {route} ({error.code}: {message})") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"vLLM at {self._url} can't be reached ({reason}); start it, or correct vllm_server"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{self._url}{route} can't be asked ({error}); vllm_server must be the address of a vLLM server, such "
                "as http://localhost:8000"
            ) from error


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
