from pathlib import Path

import pytest

from ppo_fast.errors import UserError
from ppo_fast.training import PPOConfig


def config(**settings):
    return PPOConfig(output_dir="run", **settings)


def test_sizes_follow_from_batch_settings():
    made = config(per_device_train_batch_size=4, gradient_accumulation_steps=6, num_mini_batches=3)
    assert (made.rollout_size, made.minibatch_size, made.micro_batch_size) == (24, 8, 4)
    assert config(per_device_train_batch_size=8, num_mini_batches=4).micro_batch_size == 2


def test_rows_of_a_pass_without_gradients():
    made = config(per_device_train_batch_size=4)
    assert [made.forward_batch_size(tokens) for tokens in (1, 128, 500, 5000)] == [2048, 16, 4, 4]
    assert config(local_rollout_forward_batch_size=3).forward_batch_size(5000) == 3


def test_iterations_from_episodes_or_epochs():
    assert config(total_episodes=64, per_device_train_batch_size=16).iterations(prompts=10) == 4
    assert config(num_train_epochs=2.0, per_device_train_batch_size=16).iterations(prompts=40) == 5
    assert config(per_device_train_batch_size=16).iterations(prompts=2) == 1


def test_rollout_that_does_not_divide_into_minibatches_shows_the_arithmetic():
    with pytest.raises(
        UserError, match=r"12 replies \(per_device_train_batch_size 4 \* gradient_accumulation_steps 3\)"
    ):
        config(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_mini_batches=5)


def test_minibatch_that_does_not_divide_into_micro_batches_shows_the_arithmetic():
    with pytest.raises(UserError, match=r"minibatch of 6 replies \(12 / 2\)"):
        config(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_mini_batches=2)


def test_episodes_that_are_not_whole_iterations_name_a_number_that_works():
    with pytest.raises(UserError, match=r"total_episodes = 100 isn't a multiple of the 16 replies.*use 96"):
        config(total_episodes=100, per_device_train_batch_size=16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "pqo"}, "objective is 'pqo'; choose one of ppo, cispo"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be finite and above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"entropy_coef": -0.1}, "entropy_coef is -0.1"),
        ({"gamma": 1.2}, "gamma is 1.2; it must be between 0 and 1"),
        ({"dual_clip": 0.9}, "dual_clip is 0.9; it must be above 1"),
        ({"cliprange": 0.0}, "cliprange is 0.0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; it must be"),
        ({"min_new_tokens": 9, "response_length": 8}, "min_new_tokens is 9 and a reply has response_length = 8 tokens"),
        ({"min_new_tokens": 1, "aggregation": "sequence_mean"}, "min_new_tokens doesn't go with aggregation"),
        ({"num_ppo_epochs": 0}, "num_ppo_epochs is 0; it must be at least 1"),
        ({"local_rollout_forward_batch_size": 0}, "local_rollout_forward_batch_size is 0; it must be above 0"),
        ({"missing_eos_penalty": 1.0, "missing_eos_score": -1.0}, "both set"),
        ({"truncation": "bootstrap", "missing_eos_penalty": 1.0}, "bootstrap"),
        ({"total_episodes": 0}, "total_episodes is 0"),
        ({"local_rollout_forward_batch_size": 2.5}, "local_rollout_forward_batch_size is 2.5; it must be of type int"),
        ({"local_rollout_forward_batch_size": True}, "local_rollout_forward_batch_size is True; it must be of type"),
        ({"local_rollout_forward_batch_size": "2"}, "local_rollout_forward_batch_size is '2'; it must be of type int"),
        ({"response_length": 8.0}, "response_length is 8.0; it must be of type int"),
        ({"learning_rate": "3e-6"}, "learning_rate is '3e-6'; it must be of type float"),
        ({"gamma": True}, "gamma is True; it must be of type float"),
        ({"whiten_rewards": 1}, "whiten_rewards is 1; it must be of type bool"),
        ({"seed": True}, "seed is True; it must be of type int"),
        ({"stop_strings": "END"}, "stop_strings is 'END'; it must be a list of texts"),
        ({"stop_strings": [5]}, r"stop_strings is \[5\]; it must be a list of texts"),
        ({"stop_strings": ["END", ""]}, "it must be a list of texts, none of them empty"),
        ({"temperature": 1e-39}, "temperature is 1e-39; it must be at least 1e-06"),
        ({"seed": -1}, "seed is -1; it must be from 0 to"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"report_to": "nope"}, "report_to is 'nope', which isn't among the trackers .*; install it, or use none"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        config(**settings)


def test_folders_may_be_paths():
    assert PPOConfig(output_dir=Path("runs") / "a").output_dir == str(Path("runs") / "a")


def test_numbers_may_be_whole_and_texts_a_tuple():
    made = config(gamma=1, learning_rate=0, stop_strings=("END", "."))
    assert (made.gamma, made.learning_rate, made.stop_strings) == (1, 0, ("END", "."))


def test_a_tracker_that_is_installed_is_accepted(monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard"])
    assert config(report_to="tensorboard", seed=2**32 - 1).report_to == "tensorboard"
    with pytest.raises(UserError, match=r"installed here \(tensorboard\)"):
        config(report_to="wandb")


def test_yaml_values_are_read_as_what_they_mean():
    # YAML 1.1 reads 3e-6 as text and 1 as an integer.
    made = PPOConfig.from_mapping({"output_dir": "run", "learning_rate": "3e-6", "gamma": 1, "target_kl": None})
    assert (made.learning_rate, made.gamma, made.target_kl) == (3e-6, 1.0, None)
    assert isinstance(made.gamma, float)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1e-6}, "unknown key 'learning_rat'.*did you mean 'learning_rate'"),
        ({"zzz": 1}, "unknown key 'zzz'.*known are"),
        ({"num_ppo_epochs": 1.5}, "num_ppo_epochs is 1.5; it must be of type int"),
        ({"num_ppo_epochs": True}, "num_ppo_epochs is True"),
        ({"whiten_rewards": "yes"}, "whiten_rewards is 'yes'; it must be of type bool"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; it must be of type float"),
        ({"kl_in": 3}, "kl_in is 3; it must be of type str"),
    ],
)
def test_bad_mappings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        PPOConfig.from_mapping({"output_dir": "run", **settings})


def test_missing_output_dir_is_named():
    with pytest.raises(UserError, match="output_dir isn't set"):
        PPOConfig.from_mapping({})


def test_sixteen_bits_have_their_own_step0_bounds():
    assert config().step0_bounds("float32") == config().step0_bounds("float64") == (1e-4, 1e-3)
    assert config().step0_bounds("float16") == (0.05, 0.5)
    assert config().step0_bounds("bfloat16") == config(rollout_dtype="bfloat16").step0_bounds("float32") == (0.4, 1.0)
    assert config(rollout_dtype="bfloat16").step0_bounds("float16") == (0.4, 1.0)
    assert config(step0_p99=0.2, step0_max=0.3).step0_bounds("bfloat16") == (0.2, 0.3)
