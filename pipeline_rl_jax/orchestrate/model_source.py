"""`model.source` as a Hugging Face directory, whatever it names.

Owns the models that are made here once and kept in a cache: the converted SmolLM2, the join of its
weights (`models/gguf_import.py`) and its tokenizer (`data/gguf_tokenizer.py`), which must not know
each other; and the small ones that `teaching.py` and `judge_teaching.py` teach.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline_rl_jax.data.gguf_tokenizer import write_tokenizer_files
from pipeline_rl_jax.models.atomic_directory import atomic_directory
from pipeline_rl_jax.models.gguf_import import convert_gguf, smollm2_gguf_path
from pipeline_rl_jax.models.loading import resolve_source
from pipeline_rl_jax.orchestrate.judge_teaching import write_taught_judge
from pipeline_rl_jax.orchestrate.teaching import write_taught_model

SMOLLM2_SOURCE = "smollm2-135m"
TAUGHT_SOURCE = "worked-sums"
JUDGE_SOURCE = "worked-sums-judge"  # a reward model
CACHE_VARIABLE = "PIPELINE_RL_JAX_CACHE"
# Raise it when a conversion would come out differently: cached ones are then made again.
CONVERTER_VERSION = 1
TEACHING_VERSION = 1  # the same for lessons
_MARKER = "converted.json"

_LOGGER = logging.getLogger(__name__)


def prepare_model(source: str, *, setting: str = "model.source") -> Path:
    """The directory with config.json, weights and tokenizer behind `source`.

    `smollm2-135m` is converted, `worked-sums` and the reward model `worked-sums-judge` are taught,
    once and then found in the cache, `~/.cache/pipeline_rl_jax` or `$PIPELINE_RL_JAX_CACHE`.
    ValueError with one line, which names `setting`, when there is no such model.
    """
    try:
        return _prepare(source)
    except ValueError as error:
        raise ValueError(str(error).replace("model.source", setting)) from error


def _prepare(source: str) -> Path:
    if source not in (SMOLLM2_SOURCE, TAUGHT_SOURCE, JUDGE_SOURCE):
        return resolve_source(source)
    directory = cache_directory() / source
    version = CONVERTER_VERSION if source == SMOLLM2_SOURCE else TEACHING_VERSION
    if _cached_version(directory) == version:
        return directory
    if source == SMOLLM2_SOURCE:
        gguf_path = smollm2_gguf_path()  # before anything is removed
        _make_in_cache(directory, version, lambda: convert_to_directory(gguf_path, directory))
        return directory
    write: Callable[[Path], None] = write_taught_model
    if source == JUDGE_SOURCE:
        write = functools.partial(write_taught_judge, start=_prepare(TAUGHT_SOURCE))
    _LOGGER.warning("teaching %s, some minutes, once; kept in %s", source, directory)
    _make_in_cache(directory, version, lambda: _teach_to_directory(directory, write))
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
        _write_marker(partial, CONVERTER_VERSION, gguf=gguf_path.name)


def _teach_to_directory(directory: Path, write: Callable[[Path], None]) -> None:
    with atomic_directory(directory) as partial:
        write(partial)
        _write_marker(partial, TEACHING_VERSION)


def _write_marker(directory: Path, version: int, **origin: str) -> None:
    marker = {"converter_version": version, **origin}
    (directory / _MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _cached_version(directory: Path) -> int | None:
    """The version that made `directory`, None when it was not made here."""
    marker = directory / _MARKER
    if not marker.is_file():
        return None
    return json.loads(marker.read_text(encoding="utf-8"))["converter_version"]


def _make_in_cache(directory: Path, version: int, make: Callable[[], None]) -> None:
    """Makes `directory` in place of one that another version made."""
    if _cached_version(directory) is not None:
        shutil.rmtree(directory)
    try:
        make()
    except ValueError:
        if _cached_version(directory) != version:  # else another process finished first
            raise
