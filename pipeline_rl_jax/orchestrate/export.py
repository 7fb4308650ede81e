"""Trained weights as a Hugging Face directory, beside what their run took from its model.

Owns which directories lend config.json, tokenizer and generation defaults. Reading a checkpoint is
in `checkpointing/`, writing the files in `models/hf_export.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.settings import ModelSettings


def export_params(
    params: Mapping[str, Any], settings: ModelSettings, *, directory: Path, dtype: str
) -> None:
    """Writes `params`, trained from `settings.source`, to `directory` with weights in `dtype`.

    Tokenizer files are those of `settings.tokenizer` where it is set, else the source's. ValueError
    when `directory` holds something already or `params` do not fit the source's config.json.
    """
    source = prepare_model(settings.source)
    sources = [source]
    if settings.tokenizer:
        sources.append(Path(settings.tokenizer).expanduser())
    save_params(
        params,
        read_config(source),
        directory=directory,
        sources=sources,
        weight_format=WeightFormat(dtype=dtype),
    )
