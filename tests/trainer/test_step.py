import functools
from collections.abc import Callable

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
    tiny_batch,
    tiny_meshes,
    tiny_settings,
    tiny_trainer,
)

ONE_DEVICE = tiny_meshes()
GOLDEN_LOSS, GOLDEN_NORM, GOLDEN_SQUARES = -1.763768, 8.591891, 676.27616


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_is_the_policy_gradient_of_rollouts_taken_one_by_one(temperature):
    """Unpacked, whole logits, one loss over everything: PipelineRL's equation 5 as it stands."""
    settings = tiny_settings(generation={"temperature": temperature})
    trainer, batch = tiny_trainer(settings, ONE_DEVICE), tiny_batch()
    graph = build_model(TINY, settings.model)

    def rollout_loss(params: dict, rollout: dict[str, jax.Array]) -> jax.Array:
        token_ids = rollout["token_ids"][None]
        positions, segment_ids = jnp.arange(token_ids.size)[None], jnp.ones_like(token_ids)
        model = nnx.merge(graph, params)
        hidden = model(token_ids, positions=positions, segment_ids=segment_ids)
        scores = jax.nn.log_softmax(logits(model, hidden)[0, :-1] / temperature)
        current = scores[jnp.arange(token_ids.size - 1), token_ids[0, 1:]]
        ratio = jnp.exp(current - rollout["behaviour_logprobs"][1:])
        weight = jax.lax.stop_gradient(jnp.minimum(5.0, ratio)) * rollout["advantages"][1:]
        return -jnp.sum(jnp.where(rollout["loss_mask"][1:], weight * current, 0.0))

    total, gradients = 0.0, None
    for segment in (1, 2, 3):  # rollouts of one length share a program
        columns = np.flatnonzero(batch.segment_ids[0] == segment)
        names = ("token_ids", "behaviour_logprobs", "advantages", "loss_mask")
        arrays = {name: jnp.asarray(getattr(batch, name)[:, columns]) for name in names}
        value, part = _mean_gradient(rollout_loss, trainer.state.params, arrays)
        total += value / 3
        gradients = part if gradients is None else jax.tree.map(jnp.add, gradients, part)
    metrics = trainer.train(batch).fetch()
    assert metrics["trainer/loss"] == pytest.approx(total, rel=1e-5)
    norm = float(optax.tree.norm(gradients)) / 3
    assert metrics["trainer/gradient_norm"] == pytest.approx(norm, rel=1e-5)


LEARNING = {
    "baseline": "value",
    "value_coefficient": 0.5,
    "kl_coefficient": 0.2,
    "group_size": 1,
}


def learning_batch(**changes) -> PackedBatch:
    """`tiny_batch` with a reward for every rollout and a reference near the sampler."""
    batch = tiny_batch(**changes)
    rewards = np.random.default_rng(1).integers(0, 2, 64).astype(np.float32)
    noise = np.random.default_rng(2).normal(size=batch.token_ids.shape).astype(np.float32)
    return _with(
        batch,
        returns=np.where(batch.loss_mask, rewards[batch.sequence_index], 0.0),
        reference_logprobs=np.where(batch.loss_mask, batch.behaviour_logprobs + 0.1 * noise, 0.0),
    )


def test_value_and_kl_terms_split_in_any_way_and_over_four_devices_give_one_gradient():
    (whole, params), *others = [
        one_step(
            learning_batch(),
            algorithm=LEARNING,
            trainer={"rows_per_micro_batch": rows},
            meshes=meshes,
        )
        for rows, meshes in (
            (8, ONE_DEVICE),
            (2, ONE_DEVICE),
            (4, tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=(1, 2, 2))),
        )
    ]
    for metrics, other_params in others:
        assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-5)
        assert_same_params(other_params, params, atol=1e-4)
    assert np.abs(params["['value_head']['head_weight']"]).max() > 0
    # The head starts at zero: v = 0, A = R, and half the mean square of R remains.
    batch = learning_batch()
    mean_return = batch.returns[batch.loss_mask].mean()
    assert whole["value/loss"] == pytest.approx(mean_return / 2, rel=1e-5)
    assert whole["value/explained_variance"] == pytest.approx(0.0, abs=1e-5)


def one_rollout_a_row(batch: PackedBatch) -> PackedBatch:
    """The same rollouts, each at the start of a row of its own."""
    arrays = {name: x for name, x in vars(batch).items() if np.ndim(x)}
    alone = {name: [] for name in arrays}
    for row, segment in np.ndindex(int(batch.num_rows), int(batch.segment_ids.max())):
        columns = np.flatnonzero(batch.segment_ids[row] == segment + 1)
        for name, x in arrays.items():
            width, fill = x.shape[1], x[row, -1]  # every row ends in padding
            alone[name].append(np.concatenate([x[row, columns], np.full(width, fill)])[:width])
    rows = {name: np.stack(x).astype(arrays[name].dtype) for name, x in alone.items()}
    rows["segment_ids"] = np.minimum(rows["segment_ids"], 1)
    return _with(batch, **rows, num_rows=np.int32(len(rows["segment_ids"])))


def test_value_and_kl_terms_packed_or_not_give_one_gradient():
    packed = learning_batch(num_rows=4, padded_rows=12)  # one shape, one compilation
    unpacked = one_rollout_a_row(packed)
    assert packed.token_ids.shape == unpacked.token_ids.shape
    assert (int(packed.num_rows), int(unpacked.num_rows)) == (4, 12)
    assert packed.loss_mask.sum() == unpacked.loss_mask.sum()
    (expected, expected_params), (metrics, params) = (
        one_step(batch, algorithm=LEARNING) for batch in (packed, unpacked)
    )
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_same_params(params, expected_params, atol=1e-4)


def test_the_value_head_learns_the_returns():
    settings = tiny_settings(
        algorithm=LEARNING | {"kl_coefficient": 0.0, "aggregation": "token_mean"},
        trainer={"learning_rate": 3e-2, "max_gradient_norm": 100.0},
    )
    trainer, batch = tiny_trainer(settings, ONE_DEVICE), learning_batch()
    metrics = [trainer.train(batch).fetch() for _ in range(12)]
    assert metrics[-1]["value/explained_variance"] > 0.3
    assert metrics[-1]["value/loss"] < 0.6 * metrics[0]["value/loss"]


@pytest.mark.parametrize(
    ("aggregation", "splits"),
    [("sequence_sum", (4, 8)), ("sequence_mean", (8, 2)), ("token_mean", (8, 1))],
)
def test_one_batch_split_in_any_way_gives_one_gradient(aggregation, splits):
    algorithm = {"aggregation": aggregation}
    steps = [
        one_step(tiny_batch(), algorithm=algorithm, trainer={"rows_per_micro_batch": rows})
        for rows in splits
    ]
    (whole, params), (split, split_params) = steps
    assert split == pytest.approx(whole, rel=2e-5, abs=1e-6)
    assert_same_params(split_params, params, atol=2e-5)


def test_padding_rows_change_nothing_and_do_not_compile_again():
    trainer = tiny_trainer(tiny_settings(), ONE_DEVICE)
    outputs = [trainer.train(tiny_batch(rows, padded_rows=16)).fetch() for rows in (8, 5, 16, 1)]
    assert trainer.num_compilations == 1
    whole, _ = reference_step()
    assert outputs[0] == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert outputs[3]["batch/loss_tokens"] == 19.0


@pytest.mark.parametrize(("axes", "remat"), [((1, 2, 2), "full"), ((2, 2, 1), "dots")])
def test_neither_meshes_of_four_nor_rematerialisation_change_the_step(axes, remat):
    meshes = tiny_meshes(trainer_devices=(0, 1, 2, 3), trainer=axes)
    metrics, params = one_step(tiny_batch(), meshes=meshes, model={"remat": remat})
    expected_metrics, expected_params = reference_step()
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    assert_same_params(params, expected_params, atol=1e-4)


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


def test_a_batch_without_loss_tokens_moves_no_weight_by_its_gradient():
    batch = tiny_batch()
    empty = _with(batch, loss_mask=np.zeros_like(batch.loss_mask))
    metrics, _ = one_step(empty)
    assert metrics["trainer/loss"] == metrics["trainer/gradient_norm"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())


def _mean_gradient(
    rollout_loss: Callable[..., jax.Array], params: dict, arrays: dict[str, jax.Array]
) -> tuple[float, dict]:
    """Of the mean loss over the first axis of `arrays`, one rollout an entry."""

    def mean_loss(params: dict) -> jax.Array:
        return jnp.mean(jax.vmap(rollout_loss, in_axes=(None, 0))(params, arrays))

    value, gradients = jax.jit(jax.value_and_grad(mean_loss))(params)
    return float(value), gradients


def _with(batch: PackedBatch, **changes) -> PackedBatch:
    return PackedBatch(**(vars(batch) | changes))
