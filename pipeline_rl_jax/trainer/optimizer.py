"""AdamW as the settings ask for it.

Owns the learning-rate schedule, the clip by global norm and which weights decay. When an update is
skipped is decided in `step.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipeline_rl_jax.settings import Settings, TrainerSettings


def build_optimizer(settings: TrainerSettings, *, num_steps: int) -> optax.GradientTransformation:
    """Clip by global norm, Adam moments, decoupled weight decay, learning rate; in this order.

    The decay (AdamW, arXiv 1711.05101) is `-learning_rate · weight_decay · w`, on matrices and
    embeddings only: norms and biases do not decay. `num_steps` is where the schedule ends, in
    updates of the weights.
    """
    return optax.chain(
        _clip_by_global_norm(settings.max_gradient_norm),
        _scale_by_adam(settings),
        optax.add_decayed_weights(settings.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate_schedule(settings, num_steps=num_steps)),
    )


def trainer_schedule(settings: Settings) -> optax.Schedule:
    """Learning rate by updates so far; it ends with the last update of `schedule.num_steps`."""
    return learning_rate_schedule(settings.trainer, num_steps=settings.num_updates)


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """[] int32: updates in a state of `build_optimizer`, without those that were left out."""
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))
    (state,) = [each for each in found if isinstance(each, optax.ScaleByScheduleState)]
    return jnp.asarray(state.count)


def learning_rate_schedule(settings: TrainerSettings, *, num_steps: int) -> optax.Schedule:
    """Learning rate of the update that follows `count` earlier ones.

    Warm-up: the peak times `(count + 1) / warmup_steps`, so that the first update is not lost on a
    rate of 0. Then `constant`, or `linear` or `cosine` from the peak at the first step after
    the warm-up towards 0 at `count = num_steps`.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    decay_steps = max(1, num_steps - warmup)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((count - warmup) / decay_steps, 0.0, 1.0)
        decayed_share = {
            "constant": jnp.ones_like(progress),
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
        }[settings.learning_rate_schedule]
        warmed_share = jnp.minimum(1.0, (count + 1.0) / max(1, warmup))
        return peak * warmed_share * decayed_share

    return schedule


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`g · min(1, max_norm / ‖g‖)`, the factor one scalar, so that no clipped copy is made."""

    def clip(gradients: Any, params: Any) -> Any:
        del params
        factor = max_norm / jnp.maximum(optax.tree.norm(gradients), max_norm)
        return jax.tree.map(lambda gradient: gradient * factor, gradients)

    return optax.stateless(clip)


def _scale_by_adam(settings: TrainerSettings) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with the direction computed from the new moments.

    The barrier keeps the old moments out of the update of the weights: the moments are then
    overwritten in place, where they would be copied first (twice the size of the params).
    """
    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = adam.update(updates, state, params)
        state = jax.lax.optimization_barrier(state)
        mean_scale = 1 / (1 - settings.beta1**state.count)
        square_scale = 1 / (1 - settings.beta2**state.count)

        def direction(mean: jax.Array, square: jax.Array) -> jax.Array:
            return mean * mean_scale / (jnp.sqrt(square * square_scale) + settings.epsilon)

        return jax.tree.map(direction, state.mu, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def decayed(params: Any) -> Any:
    """The parameter tree with True where weight decay applies."""

    def decays(path, _) -> bool:
        return not path[-1].key.endswith(("_norm", "_bias"))

    return jax.tree_util.tree_map_with_path(decays, params)
