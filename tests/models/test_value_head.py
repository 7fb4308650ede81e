import jax
import jax.numpy as jnp
import numpy as np

from pipeline_rl_jax.models.loading import build_model, random_params
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.models.value_head import VALUE_HEAD, token_values, without_value_head
from tests.fakes.tiny_training import TINY, tiny_batch, tiny_meshes, tiny_settings


def test_by_hand():
    hidden = jnp.array([[[1.0, 2.0], [3.0, 5.0], [jnp.nan, 1.0], [7.0, 7.0]]])
    head = {"head_weight": jnp.array([1.0, -1.0]), "head_bias": jnp.array(0.5)}
    mask = jnp.array([[False, True, True, False]])
    values = token_values(hidden, head, mask)
    # Token 1 is valued by the state at token 0: 1 - 2 + 0.5; token 2 by that at token 1.
    np.testing.assert_allclose(values, [[0.0, -0.5, -1.5, 0.0]])
    assert values.dtype == jnp.float32
    first = token_values(hidden, head, jnp.array([[True, False, False, False]]))
    np.testing.assert_array_equal(first, np.zeros((1, 4)))


def test_a_value_knows_the_tokens_before_its_own_and_no_other():
    """A baseline that saw its token would bias the gradient; one of another rollout would leak."""
    batch, mesh = tiny_batch(1), tiny_meshes().trainer
    settings = tiny_settings()
    params = random_params(TINY, seed=0, dtype="float32")
    head = {"head_weight": jnp.linspace(-1.0, 1.0, TINY.width), "head_bias": jnp.array(0.0)}
    graph = build_model(TINY, settings.model)

    @jax.jit
    def values_of(token_ids):
        rows = TokenRows.of(batch)._replace(token_ids=token_ids)
        scored = score_rows(graph, params, rows, settings=settings, mesh=mesh)
        return token_values(scored.hidden, head, rows.loss_mask)

    changed = 16  # in the second rollout, which covers columns 12 to 21; its prompt ends at 14
    tokens = np.array(batch.token_ids)
    before = np.asarray(values_of(tokens))[0]
    tokens[0, changed] = (tokens[0, changed] + 1) % TINY.vocabulary_size
    after = np.asarray(values_of(tokens))[0]
    moved = np.flatnonzero(before != after)
    np.testing.assert_array_equal(moved, np.arange(changed + 1, 22))


def test_the_model_without_its_head():
    params = {"embedding": 1, VALUE_HEAD: {"head_bias": 2}}
    assert without_value_head(params) == {"embedding": 1}
    assert VALUE_HEAD in params
