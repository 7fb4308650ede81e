import jax
import jax.numpy as jnp
import pytest

from pipeline_rl_jax.publication.param_check import check_params

EXPECTED = {
    "embedding": jax.ShapeDtypeStruct((4, 2), jnp.float32),
    "layers": {"gate": jax.ShapeDtypeStruct((3, 2, 5), jnp.float32)},
}


def params() -> dict:
    return {"embedding": jnp.zeros((4, 2)), "layers": {"gate": jnp.zeros((3, 2, 5))}}


def test_params_that_fit():
    check_params(params(), EXPECTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("embedding"), "embedding is missing"),
        (lambda p: p.update(head=jnp.zeros(1)), "head is unknown"),
        (
            lambda p: p["layers"].update(gate=jnp.zeros((3, 5, 2))),
            r"layers.gate is float32\[3, 5, 2\], not float32\[3, 2, 5\]",
        ),
        (
            lambda p: p.update(embedding=jnp.zeros((4, 2), jnp.bfloat16)),
            r"embedding is bfloat16\[4, 2\], not float32\[4, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    tree = params()
    change(tree)
    with pytest.raises(ValueError, match="none was published: .*" + message):
        check_params(tree, EXPECTED)


def test_a_long_list_is_cut():
    with pytest.raises(ValueError, match="and 3 more"):
        check_params({str(index): jnp.zeros(1) for index in range(8)}, {})
