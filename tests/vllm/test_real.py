"""Two iterations on vLLM itself, in this process and served; `make test-vllm` runs them where vLLM is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from ppo_fast.training import PPOConfig, PPOTrainer

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make test-vllm")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
START_S = 900


def reward(completions, completion_ids, **columns):
    return [-0.1 * len(ids) + 0.01 * (sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def model_dir(tiny_model, tiny_tokenizer, tmp_path_factory):
    """A tiny Llama with heads of 32 numbers, the least that vLLM's attention takes on CPUs."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=128, initializer_range=0.2).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def train(model_dir, tmp_path):
    """``train(**config)``: the metrics of two iterations, and the replies."""

    def run(**config):
        args = PPOConfig(
            output_dir=str(tmp_path / "run"), rollout_backend="vllm", total_episodes=16, per_device_train_batch_size=8,
            num_ppo_epochs=2, learning_rate=0.02, seed=3, **{"response_length": 16, **config},
        )  # fmt: skip
        words = [
            "the hotel was",
            "a kind letter",
            "my soup",
            "the train and the garden",
            "so late",
            "we called",
            "it is",
        ]
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        PPOTrainer(model, reward, args, [{"prompt": text} for text in words], peft_config=lora).train()
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        paths = sorted((tmp_path / "run" / "completions").iterdir())
        return lines, [json.loads(line) for path in paths for line in path.open()]

    return run


def check(lines, rows, response_length=16):
    assert len(lines) == 2
    for line in lines:  # in the second one the weights have changed: vLLM has the new ones, or this is large
        assert line["rollout/logp_diff_max"] < 1e-4
    assert abs(lines[0]["objective/kl"]) < 1e-3 < lines[1]["objective/kl"]
    assert any(row["finished"] for row in rows)
    assert all(row["finished"] for row in rows if row["length"] < response_length)


def test_in_this_process(train):
    lines, rows = train(min_new_tokens=4, stop_strings=["the", "cold door"])
    check(lines, rows)
    assert min(row["length"] for row in rows) >= 4
    assert any("the" in row["completion"].split() for row in rows)
    for row in rows:
        words = row["completion"].split()
        assert "the" not in words[4:-1]  # it ends a reply once that has min_new_tokens


def test_served(train, model_dir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [  # `vllm serve` of vllm-cpu 0.32 asks for the version of a package named vllm, and stops
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    log = (tmp_path / "server.log").open("w")
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "vllm serve didn't start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        check(*train(vllm_server=f"http://127.0.0.1:{port}", old_logprobs="rescored", importance_correction="truncate"))
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()
