"""The score pass: what it says about replies, and how often it runs which body and which head."""

import contextlib

import pytest
import torch

import ppo_fast
from ppo_fast import ops
from ppo_fast.training import experience, update
from ppo_fast.training.experience import policy_logprobs, score, shape


def scored(trainer):
    rollout = trainer._rollout(trainer._draw_prompts()[1])
    return rollout, score(trainer.roles, rollout, trainer.args, lambda tokens: None)


@pytest.mark.parametrize("rescored", [False, True])
@pytest.mark.parametrize("value_model", [None, "head"])
@pytest.mark.parametrize("lora", [False, True])
def test_each_role_says_what_it_says_alone(make_trainer, lora, value_model, rescored):
    trainer = make_trainer(
        lora=lora, trainer={"value_model": value_model}, old_logprobs="rescored" if rescored else "sampler"
    )
    roles = trainer.roles
    with torch.no_grad():  # the critic's head starts at zero, and adapters as nothing
        for parameter in (roles.policy_parameters | roles.value_parameters).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    rollout, forwards = scored(trainer)
    with torch.no_grad():
        reference = policy_logprobs(roles.reference, rollout, trainer.args.temperature)
        own = policy_logprobs(roles.policy, rollout, trainer.args.temperature)
        values, last = roles.critic.values(rollout)
    torch.testing.assert_close(forwards.ref_logprobs, reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(forwards.values, values.where(rollout.response_mask, 0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(forwards.bootstrap_values, last, rtol=0, atol=1e-5)
    assert (forwards.rescored_logprobs is not None) == rescored
    if rescored:
        torch.testing.assert_close(forwards.rescored_logprobs, own, rtol=0, atol=1e-5)
        assert not torch.allclose(own, reference, atol=1e-3)


@pytest.mark.parametrize(
    ("lora", "value_model", "rescored", "bodies", "heads"),
    [
        (True, None, False, 2, 1),  # reference, critic
        (True, None, True, 3, 1),  # the policy too; its head is the reference's
        (True, "head", True, 2, 1),  # policy and critic in one
        (True, "head", False, 2, 1),
        (False, "head", True, 2, 2),  # the reference is a copy, and so is its head
    ],
)
def test_nothing_runs_twice(make_trainer, monkeypatch, lora, value_model, rescored, bodies, heads):
    trainer = make_trainer(
        lora=lora,
        trainer={"value_model": value_model},
        old_logprobs="rescored" if rescored else "sampler",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
    )
    rollout = trainer._rollout(trainer._draw_prompts()[1])
    count = {"bodies": 0, "heads": 0}
    models = {id(m): m for m in (trainer.roles.policy.model, trainer.roles.reference.model)}.values()
    for model in [*models, *([trainer.roles.critic_model] if trainer.roles.critic_model is not None else [])]:
        model.base_model.register_forward_pre_hook(lambda *_: count.update(bodies=count["bodies"] + 1))
    original = ops.linear_selected_logprobs

    def counted(*args, **kwargs):
        count["heads"] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(experience.ops, "linear_selected_logprobs", counted)
    score(trainer.roles, rollout, trainer.args, lambda tokens: None)
    assert count == {"bodies": bodies, "heads": heads}


@pytest.mark.parametrize(
    ("together", "rescored", "passes"),
    [(None, False, [8]), (3, False, [3, 3, 2]), (1, False, [1] * 8), (None, True, [2] * 4), (3, True, [2] * 4)],
)
def test_rows_to_a_pass(make_trainer, monkeypatch, together, rescored, passes):
    """As many as are good for it, or as are asked for; those of a micro-batch where training must find equal bits."""
    trainer = make_trainer(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        local_rollout_forward_batch_size=together,
        old_logprobs="rescored" if rescored else "sampler",
    )
    with torch.no_grad():
        for parameter in (trainer.roles.policy_parameters | trainer.roles.value_parameters).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    rows, original = [], trainer.roles.critic.values
    monkeypatch.setattr(
        trainer.roles.critic, "values", lambda batch, *a: (rows.append(len(batch.token_ids)), original(batch, *a))[1]
    )
    rollout, forwards = scored(trainer)
    assert rows == passes
    with torch.no_grad():
        reference = policy_logprobs(trainer.roles.reference, rollout, trainer.args.temperature)
        values, last = original(rollout)
    torch.testing.assert_close(forwards.ref_logprobs, reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(forwards.values, values.where(rollout.response_mask, 0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(forwards.bootstrap_values, last, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", None])
@pytest.mark.parametrize("settings", [{}, {"top_k": 9}])
@pytest.mark.parametrize("value_model", [None, "head"])
def test_rescored_logprobs_have_the_bits_of_training(make_trainer, tmp_path, value_model, settings, backend):
    """Whatever the number of rows, and with the reference's in the same pass over the head."""
    for seed in range(4):
        trainer = make_trainer(
            trainer={"value_model": value_model},
            output_dir=str(tmp_path / str(seed)),
            old_logprobs="rescored",
            per_device_train_batch_size=2,
            response_length=4 + seed,
            seed=seed,
            **settings,
        )
        with contextlib.nullcontext() if backend is None else ppo_fast.backends.force(backend):
            rollout, forwards = scored(trainer)
            made = shape(rollout, forwards, [1.0] * len(rollout.finished), 0.05, trainer.args)
            log_ratios = [
                update._gradients(trainer.roles, made, start, 0.05, trainer.args, lambda tokens: None)[2]
                for start in range(0, trainer.args.rollout_size, trainer.args.minibatch_size)
            ]
        assert not torch.cat(log_ratios).any()
