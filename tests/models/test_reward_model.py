from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pipeline_rl_jax.models.reward_model import (
    RewardModel,
    abstract_reward_params,
    body_config,
    build_reward_model,
    reward_shardings,
    score_states,
)


def test_a_score_is_that_of_the_last_token_and_of_nothing_after_it(tiny_config):
    model = RewardModel(tiny_config, rngs=nnx.Rngs(0))
    ids = jnp.asarray([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    scores = model.sequence_scores(ids, jnp.asarray([5, 3]))
    alone = model.sequence_scores(ids[1:, :3], jnp.asarray([3]))
    np.testing.assert_allclose(scores[1], alone[0], atol=1e-6)
    junk = model.sequence_scores(ids.at[1, 3:].set(31), jnp.asarray([5, 3]))
    np.testing.assert_array_equal(scores, junk)
    hidden = model(ids, positions=jnp.arange(5)[None] + 0 * ids, segment_ids=jnp.ones_like(ids))
    np.testing.assert_allclose(scores[0], hidden[0, 4] @ model.score[...][0], atol=1e-6)


def test_a_text_may_end_with_the_id_that_pads(tiny_config):
    model = RewardModel(tiny_config, rngs=nnx.Rngs(0))
    scores = model.sequence_scores(jnp.asarray([[5, 6, 0, 0]] * 2), jnp.asarray([2, 3]))
    assert abs(scores[0] - scores[1]) > 1e-4


def test_an_empty_row_scores_zero(tiny_config):
    model = RewardModel(tiny_config, rngs=nnx.Rngs(0))
    assert model.sequence_scores(jnp.ones((1, 4), jnp.int32), jnp.asarray([0]))[0] == 0.0


def test_score_states_by_hand():
    hidden = jnp.asarray([[1.0, 2.0], [0.0, -1.0]], jnp.bfloat16)
    scores = score_states(hidden, jnp.asarray([[3.0, 0.5]]))
    np.testing.assert_array_equal(scores, [4.0, -0.5])
    assert scores.dtype == jnp.float32


def test_the_tree_has_a_score_and_no_output_embedding(tiny_config):
    tree = abstract_reward_params(tiny_config)
    assert set(tree) == {"embedding", "final_norm", "layers", "score"}
    assert tree["score"].shape == (1, 16)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
    shardings = reward_shardings(tiny_config, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), tree)
    model = nnx.merge(build_reward_model(tiny_config), params)
    assert model.config == body_config(tiny_config)
