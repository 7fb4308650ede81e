import dataclasses

import jax
import numpy as np
import pytest

from pipeline_rl_jax.models.value_head import VALUE_HEAD
from pipeline_rl_jax.records import PackedBatch
from tests.fakes.tiny_training import tiny_batch, tiny_critic, tiny_meshes, tiny_settings

GAE = {"baseline": "gae", "critic": "model", "value_coefficient": 1.0}


def with_returns(batch: PackedBatch) -> PackedBatch:
    mask = np.asarray(batch.loss_mask)
    returns = np.where(mask, 1.0 + 0.1 * batch.positions, 0.0).astype(np.float32)
    return dataclasses.replace(batch, returns=returns)


def test_values_are_those_of_the_head_at_the_token_before_and_at_the_token():
    critic = tiny_critic(tiny_settings(algorithm=GAE), tiny_meshes())
    width = critic.state.params[VALUE_HEAD]["head_weight"].size
    generator = np.random.default_rng(0)
    weight = jax.device_put(generator.normal(size=width).astype(np.float32))
    head = {**critic.state.params[VALUE_HEAD], "head_weight": weight}
    params = {**critic.state.params, VALUE_HEAD: head}
    critic.state = dataclasses.replace(critic.state, params=params)
    batch = tiny_batch(5, padded_rows=8)  # two micro-batches, the second partly empty
    values = critic.values(batch)
    mask = np.asarray(batch.loss_mask)
    assert values.before.shape == mask.shape
    assert np.abs(values.before[mask]).min() > 0
    np.testing.assert_array_equal(values.before[~mask], 0.0)
    # What is expected after a token is what is expected before the next one.
    follows = mask[:, :-1] & mask[:, 1:]
    np.testing.assert_allclose(
        values.after[:, :-1][follows], values.before[:, 1:][follows], rtol=1e-6
    )


def test_updates_fit_the_returns():
    settings = tiny_settings(algorithm=GAE, trainer={"max_gradient_norm": 100.0})
    critic, batch = tiny_critic(settings, tiny_meshes()), with_returns(tiny_batch())
    losses = [float(critic.train(batch, advance=1)["value/loss"]) for _ in range(20)]
    mask = np.asarray(batch.loss_mask)
    assert losses[0] == pytest.approx(0.5 * np.mean(np.square(batch.returns[mask])), rel=1e-5)
    assert losses[-1] < 0.1 * losses[0]
    assert int(critic.state.step) == 20


def test_clipped_values_stop_at_the_clip():
    settings = tiny_settings(algorithm=GAE | {"value_clip": 0.05})
    critic, batch = tiny_critic(settings, tiny_meshes()), with_returns(tiny_batch())
    batch = dataclasses.replace(batch, values=np.zeros_like(batch.returns))
    metrics = [jax.device_get(critic.train(batch, advance=0)) for _ in range(15)]
    assert metrics[0]["value/clip_share"] == 0.0
    assert metrics[-1]["value/clip_share"] > 0.9  # all values have moved by more than 0.05
    assert int(critic.state.step) == 0


def test_it_has_its_own_learning_rate_and_mesh():
    meshes = tiny_meshes(critic_devices=(2, 3))
    settings = tiny_settings(algorithm=GAE | {"critic_learning_rate": 3e-3})
    critic, batch = tiny_critic(settings, meshes), with_returns(tiny_batch())
    alone = tiny_critic(settings, tiny_meshes())
    assert critic.train(batch, advance=1)["value/learning_rate"] == pytest.approx(3e-3)
    alone.train(batch, advance=1)
    devices = {device.id for device in critic.state.params["embedding"].devices()}
    assert devices == {2, 3}
    for left, right in zip(
        jax.tree.leaves(jax.device_get(critic.state.params)),
        jax.tree.leaves(jax.device_get(alone.state.params)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, atol=1e-5)
