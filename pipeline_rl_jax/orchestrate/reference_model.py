"""The model behind `algorithm.reference`, found and read.

Owns where the reference policy's weights come from: the weights the run starts from, or a model of
its own with the same vocabulary. They are read from there at every start, also of a resumed run,
whose checkpoint holds weights that have moved. Scoring with them is in `preprocess/reference.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.loading import initial_params
from pipeline_rl_jax.models.partition import check_divisible, param_shardings
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceModel:
    """A model directory and what its config.json says; no weights yet."""

    directory: Path
    config: ModelConfig
    is_start: bool  # the weights the run starts from

    def load(self, settings: Settings, *, mesh: Mesh) -> dict[str, Any]:
        """The weights on the mesh, in `held_dtype`."""
        model, dtype = settings.model, held_dtype(settings)
        shardings = param_shardings(self.config, mesh)
        if not self.is_start:
            return load_params(self.directory, self.config, shardings=shardings, dtype=dtype)
        # As the trainer has them at step 0, rounded to its own dtype first where that is coarser
        # (and always where they are drawn: a draw depends on its dtype).
        rounded = model.param_dtype
        if model.init == "pretrained" and _itemsize(dtype) < _itemsize(rounded):
            rounded = dtype
        params = initial_params(
            self.directory,
            self.config,
            dataclasses.replace(model, param_dtype=rounded),
            shardings=shardings,
            seed=settings.seed,
        )
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def find_reference(
    settings: Settings, start: Path, *, policy: ModelConfig, meshes: Meshes
) -> ReferenceModel | None:
    """The model of the reference policy; None when no coefficient asks for one.

    `start` is the directory of the model the run starts from. ValueError, in one line, when the
    reference cannot be found or does not fit the policy or the mesh.
    """
    algorithm = settings.algorithm
    if not algorithm.needs_reference:
        return None
    if not algorithm.reference:
        model = ReferenceModel(directory=start, config=policy, is_start=True)
    else:
        directory = prepare_model(algorithm.reference, setting="algorithm.reference")
        model = ReferenceModel(directory=directory, config=read_config(directory), is_start=False)
        name = f"algorithm.reference ({algorithm.reference})"
        check_same_tokens(model.config, settings, policy=policy, name=name)
    check_beside_mesh(model.config, meshes, name="reference")
    return model


def held_dtype(settings: Settings) -> str:
    """What the reference weights are held in."""
    dtype = settings.algorithm.reference_dtype
    return settings.model.compute_dtype if dtype == "compute" else dtype


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def check_same_tokens(
    config: ModelConfig, settings: Settings, *, policy: ModelConfig, name: str
) -> None:
    """ValueError when a model cannot read what the policy writes; `name` is its setting."""
    generation = settings.generation
    if config.vocabulary_size != policy.vocabulary_size:
        raise ValueError(
            f"{name} knows {config.vocabulary_size} tokens, the policy {policy.vocabulary_size}; "
            "give a model of the same tokenizer"
        )
    longest = generation.max_prompt_tokens + generation.max_new_tokens
    longest = min(longest, policy.max_positions)
    if config.max_positions < longest:
        raise ValueError(
            f"{name} has a context of {config.max_positions} tokens, the longest rollout is of "
            f"{longest}; lower generation.max_new_tokens, or give another model"
        )


def check_beside_mesh(config: ModelConfig, meshes: Meshes, *, name: str) -> None:
    """ValueError when a model does not divide over its mesh: the trainer's or devices of its own.

    `name` is the mesh's: reference, critic.
    """
    mesh = getattr(meshes, name)
    if mesh is meshes.trainer:
        check_divisible(config, meshes.trainer, section="meshes.trainer")
        return
    if config.width % mesh.size:
        raise ValueError(
            f"meshes.{name}_devices lists {mesh.size}, which must divide the {name} "
            f"model's width ({config.width}); list another number"
        )
