"""Reward models as Hugging Face directories: `*ForSequenceClassification` with one label.

Owns their config.json, reading their weights, and the start from a plain language model, which has
no score head yet. Names, shapes and files are those of `hf_tensors.py` and `hf_export.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pipeline_rl_jax.models.atomic_directory import atomic_directory
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import (
    ARCHITECTURES,
    Family,
    parse_config,
    raw_config,
    read_raw_config,
)
from pipeline_rl_jax.models.hf_export import (
    WeightFormat,
    copy_companions,
    host_tensors,
    merged_config,
    write_json,
    write_weights,
)
from pipeline_rl_jax.models.hf_import import check_shapes, find_tensors, load_leaves
from pipeline_rl_jax.models.hf_tensors import (
    SCORE_NAME,
    UNEMBEDDING_NAME,
    leaf_shapes,
    tree_leaves,
)
from pipeline_rl_jax.models.reward_model import (
    SCORE_DEVIATION,
    abstract_reward_params,
    body_config,
)

_BFLOAT16 = WeightFormat()
REWARD_ARCHITECTURES: Mapping[str, Family] = {
    name.replace("CausalLM", "SequenceClassification"): family
    for name, family in ARCHITECTURES.items()
}


def read_reward_config(directory: Path) -> ModelConfig:
    """The config of a reward model, or of a language model that is to become one.

    ValueError when neither is supported, or when the head has more than one label.
    """
    raw, origin = read_raw_config(directory), str(directory / "config.json")
    names = raw.get("architectures") or []
    if not _is_reward_model(raw):
        if len(names) == 1 and names[0] not in ARCHITECTURES:
            raise ValueError(
                f"{origin}: architectures ({names[0]}) is not supported; supported are "
                f"{', '.join(REWARD_ARCHITECTURES)}, and {', '.join(ARCHITECTURES)} to start from"
            )
        return body_config(parse_config(raw, origin=origin))
    labels = raw.get("id2label")
    if labels is not None and len(labels) != 1:
        raise ValueError(
            f"{origin}: id2label has {len(labels)} labels; a reward model has one, its score"
        )
    causal = next(
        name for name, family in ARCHITECTURES.items() if family == REWARD_ARCHITECTURES[names[0]]
    )
    return body_config(parse_config(raw | {"architectures": [causal]}, origin=origin))


def load_reward_params(
    directory: Path, config: ModelConfig, *, shardings: dict, dtype: str, seed: int | None = None
) -> dict[str, Any]:
    """The parameter tree of `abstract_reward_params`, every leaf on its sharding.

    With a `seed`, a language model without a score head is given a new one: normal, standard
    deviation `SCORE_DEVIATION`. ValueError, in one line, with all tensors that are missing, unknown
    or of the wrong shape; a directory that says it is a reward model must hold its head.
    """
    tensors = find_tensors(directory)
    tree = abstract_reward_params(config)
    leaves = tree_leaves(tree)
    is_new = seed is not None and not _is_reward_model(read_raw_config(directory))
    if is_new and SCORE_NAME not in tensors:
        leaves = tuple(leaf for leaf in leaves if SCORE_NAME not in leaf.tensor_names)
    check_shapes(tensors, leaf_shapes(leaves), directory=directory, ignored=(UNEMBEDDING_NAME,))
    params = load_leaves(leaves, tensors, shardings=shardings, dtype=dtype)
    if "score" not in params:
        assert seed is not None
        head = jax.random.normal(jax.random.key(seed), tree["score"].shape, jnp.dtype(dtype))
        params["score"] = jax.device_put(SCORE_DEVIATION * head, shardings["score"])
    return params


def has_score_head(directory: Path) -> bool:
    """False for a plain language model."""
    return SCORE_NAME in find_tensors(directory)


def save_reward_params(
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    directory: Path,
    source: Path,
    weight_format: WeightFormat = _BFLOAT16,
) -> None:
    """Writes a `*ForSequenceClassification` directory, whole or not at all.

    `source` is where training started: its tokenizer goes along, and what else its config.json
    says. ValueError when that describes another model, or when `directory` holds something.
    """
    is_same = read_reward_config(source) == body_config(config)
    raw = merged_config(raw_config(config, dtype=weight_format.dtype), source, is_same=is_same)
    raw["architectures"] = [raw["architectures"][0].replace("CausalLM", "SequenceClassification")]
    raw |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}  # transformers assumes two labels
    leaves = tree_leaves(abstract_reward_params(config))
    with atomic_directory(directory) as partial:
        write_weights(partial, leaf_shapes(leaves), host_tensors(params, leaves), weight_format)
        write_json(partial / "config.json", raw)
        copy_companions(source, partial)


def _is_reward_model(raw: Mapping[str, Any]) -> bool:
    names = raw.get("architectures") or []
    return len(names) == 1 and names[0] in REWARD_ARCHITECTURES
