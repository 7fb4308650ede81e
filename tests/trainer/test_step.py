import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.transformer import logits
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.trainer.trainer import Trainer
from tests.fakes.tiny_training import (
    TINY,
    pad_rows,
    tiny_batch,
    tiny_meshes,
    tiny_settings,
    tiny_trainer,
)

ONE_DEVICE = tiny_meshes()
GOLDEN_LOSS, GOLDEN_NORM, GOLDEN_SQUARES = 0.0, 0.0, 0.0


def one_step(
    batch: PackedBatch, *, meshes: Meshes = ONE_DEVICE, **sections
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of a first step and the params after it."""
    trainer = tiny_trainer(tiny_settings(**sections), meshes)
    metrics = trainer.train(batch).fetch()
    return metrics, params_of(trainer)


def params_of(trainer: Trainer) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(trainer.state.params))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same_params(left: dict, right: dict, *, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=atol, err_msg=name)


@functools.cache
def reference_step() -> tuple[dict[str, float], dict[str, np.ndarray]]:
    return one_step(tiny_batch())


def test_golden_step():
    metrics, params = reference_step()
    assert metrics["trainer/loss"] == pytest.approx(GOLDEN_LOSS, rel=1e-5)
    assert metrics["trainer/gradient_norm"] == pytest.approx(GOLDEN_NORM, rel=1e-5)
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2)
    squares = sum(float(np.sum(np.square(leaf))) for leaf in params.values())
    assert squares == pytest.approx(GOLDEN_SQUARES, rel=1e-5)


def test_a_step_is_the_plain_policy_gradient_of_rollouts_taken_one_by_one():
    """Unpacked, unbatched, whole logits, one loss over everything: eq. 5 of PipelineRL as it stands."""
    settings, batch = tiny_settings(), tiny_batch(4)
    trainer = tiny_trainer(settings, ONE_DEVICE)
    graph = build_model(TINY, settings.model)

    def rollout_loss(params: dict, row: int, segment: int) -> jax.Array:
        columns = np.flatnonzero(batch.segment_ids[row] == segment)
        token_ids = jnp.asarray(batch.token_ids[row, columns])[None]
        model = nnx.merge(graph, params)
        hidden = model(
            token_ids,
            positions=jnp.arange(len(columns))[None],
            segment_ids=jnp.ones_like(token_ids),
        )
        table = jax.nn.log_softmax(logits(model, hidden)[0, :-1])
        current = table[jnp.arange(len(columns) - 1), token_ids[0, 1:]]
        trained, columns = batch.loss_mask[row, columns][1:], columns[1:]
        ratio = jnp.exp(current - batch.behaviour_logprobs[row, columns])
        weight = jax.lax.stop_gradient(jnp.minimum(5.0, ratio)) * batch.advantages[row, columns]
        return -jnp.sum(jnp.where(trained, weight * current, 0.0))

    def loss(params: dict) -> jax.Array:
        rollouts = [(row, segment) for row in range(4) for segment in (1, 2, 3)]
        return sum(rollout_loss(params, *rollout) for rollout in rollouts) / len(rollouts)

    expected_loss, gradients = jax.value_and_grad(loss)(trainer.state.params)
    expected_norm = float(optax.global_norm(gradients))
    metrics = trainer.train(batch).fetch()
    assert metrics["trainer/loss"] == pytest.approx(float(expected_loss), rel=1e-5)
    assert metrics["trainer/gradient_norm"] == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence_sum", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 8])
def test_one_batch_split_in_any_way_gives_one_gradient(aggregation, rows_per_micro_batch):
    algorithm = dict(vars(tiny_settings().algorithm)) | {"aggregation": aggregation}
    whole, params = one_step(tiny_batch(), algorithm=algorithm)
    split, split_params = one_step(
        tiny_batch(), algorithm=algorithm, trainer={"rows_per_micro_batch": rows_per_micro_batch}
    )
    assert split == pytest.approx(whole, rel=2e-5, abs=1e-6)
    assert_same_params(split_params, params, atol=2e-5)


def test_padding_rows_change_nothing_and_do_not_compile_again():
    trainer = tiny_trainer(tiny_settings(), ONE_DEVICE)
    outputs = [trainer.train(tiny_batch(rows, padded_rows=16)).fetch() for rows in (8, 5, 16, 1)]
    assert trainer.num_compilations == 1
    whole, _ = reference_step()
    assert outputs[0] == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert outputs[3]["batch/loss_tokens"] == 19.0


@pytest.mark.parametrize(
    "axes",
    [(1, 2, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4)],
    ids=lambda axes: "data{}_fsdp{}_tensor{}".format(*axes),
)
def test_meshes_of_four_give_the_step_of_one_device(axes):
    meshes = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=axes)
    metrics, params = one_step(tiny_batch(), meshes=meshes)
    expected_metrics, expected_params = reference_step()
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    assert_same_params(params, expected_params, atol=1e-4)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_memory_and_not_the_step(remat):
    metrics, params = one_step(tiny_batch(), model={"remat": remat})
    assert metrics == pytest.approx(reference_step()[0], rel=1e-5, abs=1e-6)
    assert_same_params(params, reference_step()[1], atol=1e-5)


def test_bfloat16_activations_leave_params_and_moments_in_float32():
    metrics, _ = one_step(tiny_batch(), model={"compute_dtype": "bfloat16"})
    assert metrics["trainer/loss"] == pytest.approx(GOLDEN_LOSS, rel=0.05)
    assert metrics["trainer/gradient_norm"] == pytest.approx(GOLDEN_NORM, rel=0.05)
    trainer = tiny_trainer(tiny_settings(model={"compute_dtype": "bfloat16"}), ONE_DEVICE)
    trainer.train(tiny_batch())
    floats = [x for x in jax.tree.leaves(trainer.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def test_a_gradient_that_is_not_finite_is_left_out_counted_and_survived():
    batch = tiny_batch()
    poisoned = np.array(batch.advantages)
    poisoned[batch.loss_mask.nonzero()[0][0], batch.loss_mask.nonzero()[1][0]] = np.inf
    trainer = tiny_trainer(tiny_settings(), ONE_DEVICE)
    before = params_of(trainer)
    bad = trainer.train(_with(batch, advantages=poisoned)).fetch()
    assert not np.isfinite(bad["trainer/gradient_norm"])
    assert bad["trainer/skipped_steps"] == 1
    assert (trainer.version, int(trainer.state.step)) == (1, 1)
    assert_same_params(params_of(trainer), before, atol=0.0)
    good = trainer.train(batch).fetch()
    assert good["trainer/skipped_steps"] == 1
    assert good["trainer/loss"] == pytest.approx(GOLDEN_LOSS, rel=1e-5)
    assert good["lag/mean_steps"] == 1.0  # the batch is of version 0, the weights count as 1
    assert_same_params(params_of(trainer), reference_step()[1], atol=1e-6)


def test_the_temperature_of_sampling_is_that_of_the_loss():
    cold, _ = one_step(tiny_batch(), generation={"temperature": 0.7})
    warm, _ = reference_step()
    assert cold["policy/entropy_nats"] < warm["policy/entropy_nats"] - 0.001


def test_a_batch_without_loss_tokens_moves_no_weight_by_its_gradient():
    batch = tiny_batch()
    empty = _with(batch, loss_mask=np.zeros_like(batch.loss_mask))
    metrics, _ = one_step(empty)
    assert metrics["trainer/loss"] == metrics["trainer/gradient_norm"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())


def _with(batch: PackedBatch, **changes) -> PackedBatch:
    return PackedBatch(**(vars(batch) | changes))
