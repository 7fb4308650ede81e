import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipeline_rl_jax.settings import TrainerSettings
from pipeline_rl_jax.trainer.optimizer import build_optimizer, decayed, learning_rate_schedule
from tests.fakes.settings import make_settings


def trainer_settings(**changes) -> TrainerSettings:
    plain = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_gradient_norm": 1e9,
    }
    return dataclasses.replace(make_settings().trainer, **(plain | changes))


def first_update(settings: TrainerSettings, params: dict, gradients: dict) -> dict:
    optimizer = build_optimizer(settings, num_steps=10)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_first_step_of_adam_is_the_learning_rate_against_the_sign():
    # m/(1-β1) = g and v/(1-β2) = g², so the first step is lr · g/|g| whatever the size of g.
    params, gradients = {"gate": jnp.array([1.0, 2.0])}, {"gate": jnp.array([0.5, -30.0])}
    after = first_update(trainer_settings(), params, gradients)
    np.testing.assert_allclose(after["gate"], [0.9, 2.1], rtol=1e-6)


def test_second_step_by_hand():
    optimizer = build_optimizer(trainer_settings(), num_steps=10)
    params = {"gate": jnp.array([0.0])}
    state = optimizer.init(params)
    for gradient in (1.0, 3.0):
        updates, state = optimizer.update({"gate": jnp.array([gradient])}, state, params)
    # m = 0.9·0.1 + 0.1·3 = 0.39, / (1-0.81) ; v = 0.99·0.01 + 0.01·9 = 0.0999, / (1-0.9801)
    expected = -0.1 * (0.39 / 0.19) / np.sqrt(0.0999 / 0.0199)
    np.testing.assert_allclose(updates["gate"], [expected], rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    # The norm of (3, 4) is 5: clipped to 0.5 the moments hold (0.3, 0.4) · (1 - β1).
    optimizer = build_optimizer(trainer_settings(max_gradient_norm=0.5), num_steps=10)
    params = {"gate": jnp.array([0.0]), "up": jnp.array([0.0])}
    gradients = {"gate": jnp.array([3.0]), "up": jnp.array([4.0])}
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([moments["gate"][0], moments["up"][0]], [0.03, 0.04], rtol=1e-6)


def test_decay_is_decoupled_and_leaves_norms_and_biases_alone():
    names = ("embedding", "unembedding", "query", "final_norm", "query_norm", "key_bias")
    params = {name: jnp.array([2.0]) for name in names}
    zeros = {name: jnp.array([0.0]) for name in names}
    after = first_update(trainer_settings(weight_decay=0.5), params, zeros)
    shrunk = 2.0 - 0.1 * 0.5 * 2.0  # learning rate · decay · weight, no gradient needed
    expected = {name: 2.0 if name.endswith(("norm", "bias")) else shrunk for name in names}
    assert {name: float(value[0]) for name, value in after.items()} == pytest.approx(expected)
    assert decayed(params) == {name: value != 2.0 for name, value in expected.items()}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0]),
        ("cosine", [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447, 0.0]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule, expected):
    settings = trainer_settings(learning_rate_schedule=schedule, warmup_steps=2)
    rate = learning_rate_schedule(settings, num_steps=6)
    np.testing.assert_allclose([rate(count) for count in range(7)], expected, atol=1e-6)


def test_without_warmup_the_first_step_has_the_full_rate():
    rate = learning_rate_schedule(trainer_settings(warmup_steps=0), num_steps=6)
    assert float(rate(0)) == pytest.approx(0.1)


def test_the_optimizer_follows_the_schedule():
    settings = trainer_settings(learning_rate_schedule="linear")
    optimizer = build_optimizer(settings, num_steps=2)
    params = {"gate": jnp.array([1.0])}
    state, sizes = optimizer.init(params), []
    for _ in range(3):
        updates, state = optimizer.update({"gate": jnp.array([1.0])}, state, params)
        sizes.append(float(updates["gate"][0]))
    np.testing.assert_allclose(sizes, [-0.1, -0.05, 0.0], atol=1e-6)
