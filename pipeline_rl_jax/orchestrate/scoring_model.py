"""The model behind `reward_model.source`, found, checked and read.

Owns where its weights come from: their source at every start, also of a resumed run, never a
checkpoint. Whether it can read the actor's token ids is decided here, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.data.vocabulary import (
    check_same_vocabulary,
    encode_again,
    own_tokens,
    vocabulary_hash,
)
from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_reward import (
    has_score_head,
    load_reward_params,
    read_reward_config,
)
from pipeline_rl_jax.models.reward_model import reward_shardings
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.orchestrate.reference_model import check_beside_mesh
from pipeline_rl_jax.rewards.reward_model_scorer import TokensOf
from pipeline_rl_jax.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoringModel:
    """A reward model's directory and what its config.json says; no weights yet."""

    directory: Path
    config: ModelConfig
    tokens_of: TokensOf  # what it reads of a completion

    @property
    def num_parameters(self) -> int:
        return self.config.num_parameters + self.config.width  # with its head

    def load(self, settings: Settings, *, mesh: Mesh) -> dict[str, Any]:
        """The weights on the mesh, in `reward_model.param_dtype`."""
        return load_reward_params(
            self.directory,
            self.config,
            shardings=reward_shardings(self.config, mesh),
            dtype=settings.reward_model.param_dtype,
        )


def find_scoring_model(
    settings: Settings, actor: Path, *, policy: ModelConfig, meshes: Meshes
) -> ScoringModel | None:
    """The reward model; None without one.

    `actor` is the directory with the policy's tokenizer.json. ValueError, in one line, when the
    model cannot be found, is none, or does not fit the policy, its tokens or the mesh.
    """
    source = settings.reward_model.source
    if not source:
        return None
    directory = prepare_model(source, setting="reward_model.source")
    config = read_reward_config(directory)
    if not has_score_head(directory):
        raise ValueError(
            f"reward_model.source ({source}) is a language model without a score head; train a "
            "reward model from it with launch/train_reward.py"
        )
    check_beside_mesh(config, meshes, name="scoring")
    tokens_of = _find_tokens_of(settings, actor, directory)
    if tokens_of is own_tokens:
        _check_context(config, settings, policy=policy)
    return ScoringModel(directory=directory, config=config, tokens_of=tokens_of)


def longest_text(settings: Settings, policy: ModelConfig) -> int:
    """Tokens of the longest prompt and completion that the actor writes."""
    generation = settings.generation
    longest = generation.max_prompt_tokens + generation.max_new_tokens
    return min(longest, policy.max_positions)


def _find_tokens_of(settings: Settings, actor: Path, scorer: Path) -> TokensOf:
    """The actor's own ids where both mean the same by them, else the text encoded again."""
    if settings.reward_model.streaming:
        way_out = "set reward_model.streaming=False, and whole texts are encoded again for it"
        check_same_vocabulary(actor, scorer, setting="reward_model.source", way_out=way_out)
        return own_tokens
    if vocabulary_hash(actor) == vocabulary_hash(scorer):
        return own_tokens
    return functools.partial(encode_again, tokenizer=load_tokenizer(scorer))


def _check_context(config: ModelConfig, settings: Settings, *, policy: ModelConfig) -> None:
    longest = longest_text(settings, policy)
    if config.max_positions < longest:
        raise ValueError(
            f"reward_model.source ({settings.reward_model.source}) has a context of "
            f"{config.max_positions} tokens, the longest rollout is of {longest}; lower "
            "generation.max_new_tokens, or give another model"
        )
