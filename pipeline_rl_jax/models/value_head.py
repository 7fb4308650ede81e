"""The value head: one vector and a bias on the policy's final hidden states.

Owns its parameters, which lie beside the model's under `VALUE_HEAD` and belong to the trainer only:
they are optimised and saved with it, but neither published to generation nor exported. What is
done with the values is in `algorithms/values.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.token_logprobs import before_each_token

VALUE_HEAD = "value_head"


def abstract_value_head(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the head; float32 whatever the dtype of the model. It starts at zero."""
    return {
        "head_bias": jax.ShapeDtypeStruct((), jnp.float32),
        "head_weight": jax.ShapeDtypeStruct((config.width,), jnp.float32),
    }


def without_value_head(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree of the language model alone; the same leaves, nothing is copied."""
    return {name: value for name, value in params.items() if name != VALUE_HEAD}


def values_after(
    hidden: Float[Array, "B T D"],
    head: Mapping[str, jax.Array],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """h_t·w + b: the return expected of what follows token t. Float32, 0 where masked."""
    return jnp.where(mask, _at_tokens(hidden, head), 0.0)


def token_values(
    hidden: Float[Array, "B T D"],
    head: Mapping[str, jax.Array],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """v_t = h_{t−1}·w + b: the return expected before token t is known. Float32, 0 where masked.

    Column 0 has nothing before it and is always 0.
    """
    return jnp.where(mask, before_each_token(_at_tokens(hidden, head)), 0.0)


def _at_tokens(hidden: jax.Array, head: Mapping[str, jax.Array]) -> jax.Array:
    return hidden.astype(jnp.float32) @ head["head_weight"] + head["head_bias"]
