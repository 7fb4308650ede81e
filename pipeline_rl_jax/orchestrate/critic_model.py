"""The model behind `algorithm.critic = "model"`, found and read.

Owns where a critic's first weights come from: the weights the run starts from, another language
model or a reward model, whose score head then begins as the value head. What the critic does with
them is in `trainer/critic.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_reward import (
    has_score_head,
    load_reward_params,
    read_reward_config,
)
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.models.partition import param_shardings, tree_shardings
from pipeline_rl_jax.models.reward_model import abstract_reward_params, body_config
from pipeline_rl_jax.models.value_head import VALUE_HEAD, abstract_value_head
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.orchestrate.reference_model import check_beside_mesh, check_same_tokens
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.critic import critic_settings
from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import TrainState, abstract_state, create_state


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CriticModel:
    """A model directory, what its config.json says, and the optimizer; no weights yet."""

    directory: Path
    config: ModelConfig  # of the part that makes hidden states
    optimizer: optax.GradientTransformation

    def abstract_state(self, settings: Settings, *, mesh: Mesh) -> TrainState:
        """What a checkpoint is restored into."""
        return abstract_state(
            self.optimizer,
            config=self.config,
            mesh=mesh,
            param_dtype=settings.model.param_dtype,
            value_head=True,
        )

    def initial_state(self, settings: Settings, *, mesh: Mesh) -> TrainState:
        """The state before the first update; the weights are read from their source."""
        model, config = settings.model, self.config
        if model.init == "random" and not settings.algorithm.critic_source:
            params = random_params(
                config,
                seed=settings.seed,
                dtype=model.param_dtype,
                shardings=param_shardings(config, mesh),
            )
        else:
            params = self._read(settings, mesh=mesh)
        return create_state(params, self.optimizer, config=config, mesh=mesh, value_head=True)

    def _read(self, settings: Settings, *, mesh: Mesh) -> dict:
        tree = abstract_reward_params(self.config)
        params = load_reward_params(
            self.directory,
            self.config,
            shardings=tree_shardings(tree, self.config, mesh),
            dtype=settings.model.param_dtype,
            seed=settings.seed,
        )
        score = params.pop("score")
        if not has_score_head(self.directory):
            return params  # its value head starts at zero
        heads = tree_shardings({VALUE_HEAD: abstract_value_head(self.config)}, self.config, mesh)
        head = {"head_weight": score[0].astype(jnp.float32), "head_bias": jnp.zeros(())}
        return params | {VALUE_HEAD: jax.device_put(head, heads[VALUE_HEAD])}


def find_critic(
    settings: Settings, start: Path, *, policy: ModelConfig, meshes: Meshes
) -> CriticModel | None:
    """The model of the critic; None unless it has weights of its own.

    `start` is the directory of the model the run starts from. ValueError, in one line, when the
    critic cannot be found or does not fit the policy or the mesh.
    """
    algorithm = settings.algorithm
    if not algorithm.has_critic_model:
        return None
    directory, config = start, body_config(policy)
    if algorithm.critic_source:
        name = "algorithm.critic_source"
        directory = prepare_model(algorithm.critic_source, setting=name)
        config = read_reward_config(directory)
        check_same_tokens(
            config, settings, policy=policy, name=f"{name} ({algorithm.critic_source})"
        )
    check_beside_mesh(config, meshes, name="critic")
    own = critic_settings(settings)
    optimizer = build_optimizer(own.trainer, num_steps=own.num_updates)
    return CriticModel(directory=directory, config=config, optimizer=optimizer)
