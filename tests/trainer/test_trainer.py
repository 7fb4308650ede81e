import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipeline_rl_jax.algorithms.dpo import dpo_loss, sequence_log_ratios
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.trainer.optimizer import num_updates
from tests.fakes.tiny_training import (
    TINY,
    tiny_batch,
    tiny_meshes,
    tiny_settings,
    tiny_trainer,
)


def test_versions_count_steps_and_each_step_starts_from_the_last_ones_weights():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    assert trainer.version == 0
    outputs = [trainer.train(tiny_batch()) for _ in range(4)]
    assert [output.version for output in outputs] == [1, 2, 3, 4]
    assert trainer.version == int(trainer.state.step) == 4
    losses = [output.fetch()["trainer/loss"] for output in outputs]
    assert len(set(losses)) == 4


def test_a_step_needs_no_hidden_transfer():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    with jax.transfer_guard("disallow"):
        outputs = [trainer.train(tiny_batch()), trainer.train(tiny_batch(5, padded_rows=8))]
        metrics = [output.fetch() for output in outputs]
    assert all(isinstance(value, float) for value in metrics[0].values())


def test_the_state_before_a_step_is_given_up():
    trainer = tiny_trainer(tiny_settings(), tiny_meshes())
    before = trainer.state.params["layers"]["gate"]
    trainer.train(tiny_batch())
    trainer.wait()
    assert before.is_deleted()
    assert not trainer.state.params["layers"]["gate"].is_deleted()


def test_equal_batches_give_equal_runs():
    runs = []
    for _ in range(2):
        trainer = tiny_trainer(tiny_settings(), tiny_meshes())
        for seed in range(3):
            trainer.train(tiny_batch(seed=seed))
        runs.append(jax.device_get(trainer.state.params))
    for left, right in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        np.testing.assert_array_equal(left, right)


def test_weights_in_bfloat16_train_with_moments_in_float32():
    settings = tiny_settings(model={"param_dtype": "bfloat16"})
    trainer = tiny_trainer(settings, tiny_meshes())
    before = jax.device_get(trainer.state.params)
    losses = [trainer.train(tiny_batch()).fetch()["trainer/loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    after = jax.device_get(trainer.state.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"bfloat16"}
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    moments = [x for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim]
    assert {moment.dtype.name for moment in moments} == {"float32"}


def advantages_of(batch: PackedBatch) -> PackedBatch:
    """Rewards in place of advantages: 0 or 1, one for all tokens of a rollout."""
    mask, index = np.asarray(batch.loss_mask), np.asarray(batch.sequence_index)
    rewards = np.where(mask, index % 2, 0).astype(np.float32)
    return dataclasses.replace(batch, advantages=rewards, returns=rewards)


def test_gae_without_discounts_is_the_learned_baseline():
    """Advantages R - v and targets R, made before the step or in it."""
    runs = []
    for baseline in ("value", "gae"):
        algorithm = {"baseline": baseline, "gae_lambda": 1.0, "value_coefficient": 0.5}
        trainer = tiny_trainer(tiny_settings(algorithm=algorithm), tiny_meshes())
        metrics = [trainer.train(advantages_of(tiny_batch())).fetch() for _ in range(3)]
        runs.append((metrics, jax.device_get(trainer.state.params)))
    (value_metrics, value_params), (gae_metrics, gae_params) = runs
    for left, right in zip(value_metrics, gae_metrics, strict=True):
        assert right["trainer/loss"] == pytest.approx(left["trainer/loss"], rel=1e-5)
        assert right["value/loss"] == pytest.approx(left["value/loss"], rel=1e-5)
    for left, right in zip(*map(jax.tree.leaves, (value_params, gae_params)), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_epochs_and_minibatches_are_updates_of_one_version():
    settings = tiny_settings(
        algorithm={"loss": "ppo", "baseline": "none"},
        trainer={"epochs": 2, "minibatches": 3, "learning_rate_schedule": "linear"},
        schedule={"num_steps": 2},
    )
    trainer = tiny_trainer(settings, tiny_meshes())
    outputs = [trainer.train(tiny_batch(seed=seed)).fetch() for seed in range(2)]
    assert trainer.version == int(trainer.state.step) == 2
    # Six updates a step, twelve in all: the last one is number 11 of a decay to 0 at number 12.
    assert outputs[0]["trainer/learning_rate"] == pytest.approx(1e-2 * 7 / 12)
    assert outputs[1]["trainer/learning_rate"] == pytest.approx(1e-2 * 1 / 12)
    mask = np.asarray(tiny_batch().loss_mask)
    assert outputs[0]["batch/loss_tokens"] == pytest.approx(mask.sum())
    assert outputs[0]["lag/max_steps"] == 0.0  # every update trains the same version
    assert outputs[1]["lag/max_steps"] == 1.0


def test_several_updates_go_further_than_one_and_the_clip_takes_hold():
    def run(epochs: int) -> dict[str, float]:
        settings = tiny_settings(
            algorithm={"loss": "ppo", "baseline": "none"}, trainer={"epochs": epochs}
        )
        trainer = tiny_trainer(settings, tiny_meshes())
        known = trainer._logprobs(tiny_batch())
        batch = dataclasses.replace(tiny_batch(), behaviour_logprobs=known)
        return trainer.train(batch).fetch()

    assert run(1)["importance/clip_share"] == 0.0
    assert run(8)["importance/clip_share"] > 0.0


def test_one_dpo_step_has_the_gradient_of_the_loss_over_pairs():
    settings = tiny_settings(
        algorithm={"loss": "dpo", "baseline": "none", "aggregation": "sequence_sum"},
        trainer={"max_gradient_norm": 1e9},
    )
    trainer = tiny_trainer(settings, tiny_meshes())
    batch = tiny_batch()
    mask, index = np.asarray(batch.loss_mask), np.asarray(batch.sequence_index)
    pair = 1 + index // 3  # of the three rollouts of a row the first wins and the second loses
    signed = np.where(index % 3 == 0, pair, np.where(index % 3 == 1, -pair, 0))
    generator = np.random.default_rng(1)
    reference = np.where(mask, generator.uniform(-5, -3, mask.shape), 0).astype(np.float32)
    batch = dataclasses.replace(
        batch,
        advantages=np.where(mask, signed, 0).astype(np.float32),
        reference_logprobs=reference,
    )
    graph = build_model(TINY, settings.model)

    def mean_loss(params: dict) -> jax.Array:
        rows = TokenRows.of(batch)
        scored = score_rows(graph, params, rows, settings=settings, mesh=tiny_meshes().trainer)
        ratios = sequence_log_ratios(
            scored.logprobs,
            jnp.asarray(reference),
            mask=jnp.asarray(mask),
            sequence_index=jnp.asarray(index),
            num_sequences=24,
        )
        pairs = np.arange(0, 24, 3)
        losses = dpo_loss(ratios, winners=pairs, losers=pairs + 1, valid=np.ones(8, bool), beta=0.1)
        return losses.loss.mean()

    loss, gradients = jax.value_and_grad(mean_loss)(jax.device_get(trainer.state.params))
    norm = float(optax.tree.norm(gradients))
    metrics = trainer.train(batch).fetch()
    assert metrics["dpo/loss_nats"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["dpo/pairs"] == 8
    assert metrics["trainer/gradient_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_critic_model_is_kept_in_the_state_and_learns_beside_the_policy():
    settings = tiny_settings(
        algorithm={"baseline": "gae", "critic": "model", "loss": "ppo", "value_coefficient": 1.0},
        trainer={"epochs": 2, "minibatches": 2},
    )
    trainer = tiny_trainer(settings, tiny_meshes(critic_devices=(3,)))
    assert "value_head" not in trainer.state.params
    losses = []
    for _ in range(4):
        metrics = trainer.train(advantages_of(tiny_batch())).fetch()
        losses.append(metrics["value/loss"])
        assert math.isfinite(metrics["trainer/loss"])
        assert metrics["value/gradient_norm"] > 0
    assert losses[-1] < losses[0]
    critic = trainer.state.critic
    assert int(critic.step) == trainer.version == 4
    assert int(num_updates(critic.opt_state)) == 16
