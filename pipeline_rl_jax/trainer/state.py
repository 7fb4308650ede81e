"""What an optimizer step reads and writes.

Owns `TrainState`, how it lies on the trainer mesh and how it starts. Saving it is in
`checkpointing/`, changing it in `step.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.partition import tree_shardings
from pipeline_rl_jax.models.transformer import abstract_params
from pipeline_rl_jax.models.value_head import VALUE_HEAD, abstract_value_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything training needs to go on, all on the trainer mesh.

    The same tree may hold `jax.ShapeDtypeStruct` or shardings in place of arrays.
    """

    params: dict  # nested as `trained_params` has them
    opt_state: optax.OptState
    step: Any  # [] int32, optimizer steps taken: the weight version of `params`
    skipped_steps: Any  # [] int32, updates that were not finite and left out
    critic: TrainState | None = None  # of a critic with weights of its own, on its mesh


def trained_params(
    config: ModelConfig, *, dtype: str = "float32", value_head: bool = False
) -> dict:
    """What is optimised, as shapes: the model in `dtype` and, if asked for, its value head."""
    params = abstract_params(config, dtype)
    return params | {VALUE_HEAD: abstract_value_head(config)} if value_head else params


def create_state(
    params: dict,
    optimizer: optax.GradientTransformation,
    *,
    config: ModelConfig,
    mesh: Mesh,
    value_head: bool = False,
) -> TrainState:
    """The state before the first step; moments are made on the mesh, sharded like `params`.

    Takes `params` over: they lie on the mesh as `param_shardings` has them, and their buffers are
    given up at the first step. A value head that is not among them is added and starts at zero.
    """
    shardings = state_shardings(optimizer, config=config, mesh=mesh, value_head=value_head)
    if value_head and VALUE_HEAD not in params:
        zeros = {
            name: np.zeros(leaf.shape, leaf.dtype)
            for name, leaf in abstract_value_head(config).items()
        }
        params = params | {VALUE_HEAD: jax.device_put(zeros, shardings.params[VALUE_HEAD])}
    init = functools.partial(_init_optimizer, optimizer)
    opt_state = jax.jit(init, out_shardings=shardings.opt_state)(params)
    return TrainState(
        params=params,
        opt_state=opt_state,
        step=jax.device_put(np.int32(0), shardings.step),
        skipped_steps=jax.device_put(np.int32(0), shardings.skipped_steps),
    )


def _init_optimizer(optimizer: optax.GradientTransformation, params: dict) -> optax.OptState:
    """Moments are float32 whatever the weights are, as gradients and updates are."""
    return optimizer.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))


def abstract_state(
    optimizer: optax.GradientTransformation,
    *,
    config: ModelConfig,
    mesh: Mesh,
    param_dtype: str = "float32",
    value_head: bool = False,
) -> TrainState:
    """A `TrainState` of `jax.ShapeDtypeStruct` with shardings: what to restore into."""
    params = trained_params(config, dtype=param_dtype, value_head=value_head)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(
        params=params,
        opt_state=jax.eval_shape(functools.partial(_init_optimizer, optimizer), params),
        step=scalar,
        skipped_steps=scalar,
    )
    shardings = state_shardings(optimizer, config=config, mesh=mesh, value_head=value_head)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )


def state_shardings(
    optimizer: optax.GradientTransformation,
    *,
    config: ModelConfig,
    mesh: Mesh,
    value_head: bool = False,
) -> TrainState:
    """A `TrainState` of shardings: moments lie like the weights they belong to."""
    shapes = trained_params(config, value_head=value_head)
    params = tree_shardings(shapes, config, mesh)
    everywhere = replicated(mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params=params, opt_state=opt_state, step=everywhere, skipped_steps=everywhere)
