"""The update's invariants: what batching must not change, and what a learning rate of zero must show."""

import dataclasses

import pytest
import torch

from ppo_fast.errors import UserError
from ppo_fast.training import update
from ppo_fast.training.experience import score, shape


def experience_of(trainer):
    prompts, ids = trainer._draw_prompts()
    rollout = trainer._rollout(ids)
    forwards = score(trainer.roles, rollout, trainer.args, lambda _: None)
    _, scores = trainer._score(prompts, rollout)
    return shape(rollout, forwards, scores.total, trainer.kl_coef, trainer.args)


def run(trainer, experience, **config):
    args = dataclasses.replace(trainer.args, **config)
    first = []
    stats = update.run(
        trainer.roles, experience, trainer.optimizers, args, kl_coef=args.kl_coef, progress=lambda _: None,
        before_first_step=first.append,
    )  # fmt: skip
    return stats, first[0]


def gradients(trainer, experience, **config):
    """Of one optimizer step over the whole batch, before it is taken."""
    found = {}

    def keep(_):
        named = trainer.roles.policy_parameters | trainer.roles.value_parameters
        found.update({name: p.grad.clone() for name, p in named.items()})

    args = dataclasses.replace(trainer.args, num_mini_batches=1, num_ppo_epochs=1, **config)
    update.run(
        trainer.roles, experience, trainer.optimizers, args, kl_coef=args.kl_coef, progress=lambda _: None,
        before_first_step=keep,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
@pytest.mark.parametrize("value_model", [None, "head"])
def test_gradients_do_not_depend_on_micro_batches(make_trainer, aggregation, value_model):
    results = []
    for size, steps in ((8, 1), (2, 4), (1, 8)):
        trainer = make_trainer(
            trainer={"value_model": value_model}, learning_rate=0.0, per_device_train_batch_size=size,
            gradient_accumulation_steps=steps, num_mini_batches=1, aggregation=aggregation, entropy_coef=0.01,
        )  # fmt: skip
        results.append(gradients(trainer, experience_of(trainer)))
    assert any(gradient.abs().max() > 1e-6 for gradient in results[0].values())
    for other in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=2e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("lora", [True, False])
def test_at_zero_learning_rate_log_ratios_stay_in_bounds_and_repeat_to_the_bit(make_trainer, lora):
    trainer = make_trainer(lora=lora, learning_rate=0.0)
    experience = experience_of(trainer)
    one, _ = run(trainer, experience, num_ppo_epochs=1)
    three, _ = run(trainer, experience, num_ppo_epochs=3)
    assert float(one.policy.log_ratios.abs().max()) <= trainer.args.step0_bounds("float32")[1]
    assert torch.equal(three.policy.log_ratios, one.policy.log_ratios.repeat(3))


def test_at_zero_learning_rate_rescored_log_ratios_are_exactly_zero(make_trainer):
    trainer = make_trainer(learning_rate=0.0, old_logprobs="rescored", num_ppo_epochs=3)
    stats, _ = run(trainer, experience_of(trainer))
    assert torch.equal(stats.policy.log_ratios, torch.zeros_like(stats.policy.log_ratios))
    assert float(stats.policy.ratio_mean) == 1.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum_constant"])
def test_tokens_before_min_new_tokens_are_trained_without_eos(make_trainer, aggregation):
    """Loss, entropy and gradients are those of the logits with EOS at -inf in the first positions."""
    trainer = make_trainer(
        lora=False, trainer={"value_model": "head"}, min_new_tokens=3, response_length=8, aggregation=aggregation,
        num_mini_batches=1, per_device_train_batch_size=8, gradient_accumulation_steps=1, entropy_coef=0.1, vf_coef=0.0,
        learning_rate=0.0,
    )  # fmt: skip
    experience = experience_of(trainer)
    found = gradients(trainer, experience)
    rollout, args = experience.rollout, trainer.args
    trainer.optimizers.zero_grad()
    actor = trainer.roles.policy
    logits = torch.nn.functional.linear(actor.hidden(rollout), actor.head.weight) / args.temperature
    early = torch.zeros_like(logits, dtype=torch.bool)
    early[:, :3, list(trainer.eos_ids)] = True
    logprobs = logits.masked_fill(early, -1e30).log_softmax(-1)
    chosen = logprobs.gather(-1, rollout.response_ids[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(rollout.logprobs[experience.mask], chosen[experience.mask], rtol=0, atol=1e-5)
    count = experience.mask.sum() if aggregation == "token_mean" else 8 * args.response_length
    ratio = (chosen - experience.old_logprobs).exp()
    loss = (-ratio * experience.advantages - 0.1 * entropy)[experience.mask].sum() / count
    loss.backward()
    for name, parameter in trainer.roles.policy_parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_importance_weighs_the_surrogate_and_nothing_else(make_trainer, objective):
    trainer = make_trainer(learning_rate=0.0, objective=objective, num_mini_batches=1, entropy_coef=0.0)
    experience = experience_of(trainer)
    twice = dataclasses.replace(experience, importance=torch.full_like(experience.advantages, 2.0))
    plain, weighted = gradients(trainer, experience), gradients(trainer, twice)
    for name in plain:
        factor = 2.0 if name in trainer.roles.policy_parameters else 1.0  # the critic has no business with it
        torch.testing.assert_close(weighted[name], factor * plain[name], msg=name)
    quiet = {"advantages": torch.zeros_like(experience.advantages)}
    entropy = gradients(trainer, dataclasses.replace(experience, **quiet), entropy_coef=0.1)
    weighted = gradients(trainer, dataclasses.replace(twice, **quiet), entropy_coef=0.1)
    assert max(float(entropy[name].abs().max()) for name in trainer.roles.policy_parameters) > 0
    assert all(torch.equal(entropy[name], weighted[name]) for name in entropy)


def test_first_minibatch_is_reported_before_anything_changes(make_trainer):
    trainer = make_trainer(learning_rate=0.5)
    _, first = run(trainer, experience_of(trainer))
    assert first.shape[0] == trainer.args.minibatch_size
    assert float(first.abs().max()) < 1e-4


def test_target_kl_stops_before_the_step_that_would_follow(make_trainer):
    trainer = make_trainer(learning_rate=0.05, num_ppo_epochs=4)
    experience = experience_of(trainer)
    stats, _ = run(trainer, experience, target_kl=1e-6)
    assert stats.stopped_early
    # The first minibatch's ratio is 1, so one step is taken; the second minibatch exceeds the bound.
    assert len(stats.policy_grad_norms) == 1
    assert all(p.grad is None for p in trainer.roles.policy_parameters.values())


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(make_trainer):
    trainer = make_trainer()
    experience = experience_of(trainer)
    advantages = experience.advantages.clone()
    advantages[0, 0] = torch.nan
    before = {n: p.detach().clone() for n, p in trainer.roles.policy_parameters.items()}
    stats, _ = run(trainer, dataclasses.replace(experience, advantages=advantages), num_ppo_epochs=1)
    assert stats.skipped_steps == 1
    assert len(stats.policy_grad_norms) == 1  # the other minibatch went through
    assert any(not torch.equal(before[n], p) for n, p in trainer.roles.policy_parameters.items())
    assert all(torch.isfinite(p).all() for p in trainer.roles.policy_parameters.values())


def test_a_sampler_that_disagrees_is_refused_with_its_worst_position(make_trainer, monkeypatch):
    from ppo_fast.training import trainer as module

    original = module.generate

    def off_by_two_percent(*args, **kwargs):
        rollout = original(*args, **kwargs)
        logprobs = rollout.logprobs.clone()
        logprobs[:, 0] -= 0.02
        return dataclasses.replace(rollout, logprobs=logprobs)

    monkeypatch.setattr(module, "generate", off_by_two_percent)
    trainer = make_trainer()
    with pytest.raises(UserError, match=r"trainer and sampler differ.*\n  reply \d+, token 0 .*ratio 1\.0202"):
        trainer.train()
    assert not trainer.journal.folder.path.exists()


def test_a_reference_that_is_not_the_policy_is_refused(make_trainer):
    trainer = make_trainer(lora=False)
    with torch.no_grad():
        next(trainer.roles.reference.model.parameters()).mul_(1.5)
    with pytest.raises(UserError, match="policy and reference differ"):
        trainer.train()
    assert not trainer.journal.folder.path.exists()


@pytest.mark.parametrize("switch", ["disable_adapter", "set_adapter"])
def test_the_critic_trains_on_after_a_switch_of_pefts_own(make_trainer, switch):
    trainer = make_trainer()
    experience = experience_of(trainer)
    trained = trainer.roles.policy_parameters | trainer.roles.value_parameters
    before = {name: p.detach().clone() for name, p in trained.items()}
    if switch == "set_adapter":
        trainer.roles.adapters.set_adapter("policy")
    else:
        with trainer.roles.adapters.disable_adapter():
            pass
    assert not all(p.requires_grad for p in trained.values())
    run(trainer, experience)
    assert [name for name, p in trained.items() if torch.equal(p, before[name])] == []


def test_replies_are_the_policys_after_a_switch_of_pefts_own(make_trainer):
    trainer = make_trainer()
    run(trainer, experience_of(trainer))
    expected = trainer.generate_replies(trainer.prompts[:3], seed=1)
    trainer.roles.adapters.set_adapter("value")
    assert torch.equal(trainer.generate_replies(trainer.prompts[:3], seed=1).logprobs, expected.logprobs)
    trainer.roles.adapters.set_adapter("policy")
    with trainer.roles.adapters.disable_adapter():
        assert torch.equal(trainer.generate_replies(trainer.prompts[:3], seed=1).logprobs, expected.logprobs)


def test_gradients_that_were_there_before_are_no_part_of_the_first_step(make_trainer):
    """As a run that the step-0 check refuses leaves them to the next trainer on the same model."""
    norms = []
    for stale in (False, True):
        trainer = make_trainer(lora=False)
        experience = experience_of(trainer)
        for parameter in trainer.roles.trained:
            parameter.grad = torch.ones_like(parameter) if stale else None
        stats, _ = run(trainer, experience)
        norms.append((stats.policy_grad_norms, stats.value_grad_norms))
    assert norms[0] == norms[1]
