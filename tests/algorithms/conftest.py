"""Checks the shapes in the signatures of `algorithms/` while its tests run."""

from jaxtyping import install_import_hook

install_import_hook("pipeline_rl_jax.algorithms", "beartype.beartype")
