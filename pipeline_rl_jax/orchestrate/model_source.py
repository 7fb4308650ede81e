"""`model.source` as a Hugging Face directory, whatever it names.

Owns the converted SmolLM2 in the cache: the join of its weights (`models/gguf_import.py`) and its
tokenizer (`data/gguf_tokenizer.py`), which must not know each other.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pipeline_rl_jax.data.gguf_tokenizer import write_tokenizer_files
from pipeline_rl_jax.models.atomic_directory import atomic_directory
from pipeline_rl_jax.models.gguf_import import convert_gguf, smollm2_gguf_path
from pipeline_rl_jax.models.loading import resolve_source

SMOLLM2_SOURCE = "smollm2-135m"
CACHE_VARIABLE = "PIPELINE_RL_JAX_CACHE"
# Raise it when a conversion would come out differently: cached ones are then made again.
CONVERTER_VERSION = 1
_MARKER = "converted.json"


def prepare_model(source: str) -> Path:
    """The directory with config.json, weights and tokenizer behind `model.source`.

    `smollm2-135m` is converted once and then found in the cache, `~/.cache/pipeline_rl_jax` or
    `$PIPELINE_RL_JAX_CACHE`. ValueError with one line when there is no such model.
    """
    if source != SMOLLM2_SOURCE:
        return resolve_source(source)
    directory = cache_directory() / SMOLLM2_SOURCE
    if not _is_current(directory):
        _convert_into_cache(directory)
    return directory


def cache_directory() -> Path:
    """Where converted models are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "pipeline_rl_jax"


def convert_to_directory(gguf_path: Path, directory: Path) -> None:
    """Writes a llama-type GGUF file as a Hugging Face directory, whole or not at all."""
    with atomic_directory(directory) as partial:
        convert_gguf(gguf_path, partial)
        write_tokenizer_files(gguf_path, partial)
        marker = {"converter_version": CONVERTER_VERSION, "gguf": gguf_path.name}
        (partial / _MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _is_current(directory: Path) -> bool:
    return _cached_version(directory) == CONVERTER_VERSION


def _cached_version(directory: Path) -> int | None:
    """The version of the converter that wrote `directory`, None when it was not the converter."""
    marker = directory / _MARKER
    if not marker.is_file():
        return None
    return json.loads(marker.read_text(encoding="utf-8"))["converter_version"]


def _convert_into_cache(directory: Path) -> None:
    gguf_path = smollm2_gguf_path()
    if _cached_version(directory) is not None:
        shutil.rmtree(directory)
    try:
        convert_to_directory(gguf_path, directory)
    except ValueError:
        if not _is_current(directory):  # else another process finished first
            raise
