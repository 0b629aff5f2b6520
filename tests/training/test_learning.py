"""PPO learns: a tiny model is paid for one word and comes to say it, whatever the seed."""

import itertools
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_fast.training import PPOConfig, PPOTrainer

WORD_SHARE = 0.6  # of all tokens, after training; 1/60 by chance
ITERATIONS = 25


def train(tmp_path, tokenizer, word, seed, **config):
    def says_the_word(completion_ids, **_):
        return [sum(i == word for i in ids) / len(ids) for ids in completion_ids]

    torch.manual_seed(seed)
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    args = PPOConfig(
        output_dir=str(tmp_path / f"seed{seed}"), response_length=8, temperature=1.0, per_device_train_batch_size=32,
        gradient_accumulation_steps=2, num_mini_batches=2, num_ppo_epochs=3, total_episodes=64 * ITERATIONS,
        learning_rate=5e-3, lr_scheduler_type="constant", kl_coef=0.01, save_steps=0, seed=seed, **config,
    )  # fmt: skip
    words = [w for w in sorted(tokenizer.get_vocab()) if w.isalpha()]
    prompts = [{"prompt": f"{a} {b}"} for a, b in itertools.pairwise(words)]
    PPOTrainer(model, says_the_word, args, prompts, processing_class=tokenizer).train()
    lines = (tmp_path / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_word_that_pays_is_learned(tmp_path, tiny_tokenizer, seed):
    word = tiny_tokenizer.convert_tokens_to_ids(sorted(w for w in tiny_tokenizer.get_vocab() if w.isalpha())[3])
    lines = train(tmp_path, tiny_tokenizer, word, seed)
    assert lines[0]["objective/scores"] < 0.1
    assert lines[-1]["objective/scores"] > WORD_SHARE
    assert lines[-1]["objective/kl"] > lines[0]["objective/kl"] + 1.0
    # The critic has learned to tell states apart by then; at the start its values are all 0.
    assert lines[0]["critic/explained_var"] == pytest.approx(0.0, abs=1e-6)
    assert max(line["critic/explained_var"] for line in lines[5:]) > 0.2
