"""Reads problems from .jsonl, .json and .parquet files.

Owns paths, parsing and the place (file and line) that an error names. What the fields of a record
mean is in `formats.py`.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline_rl_jax.data.formats import (
    IncompleteRecordError,
    RecordMapping,
    choose_format,
    read_problem,
)
from pipeline_rl_jax.data.problems import Problem

_SUFFIXES = (".jsonl", ".json", ".parquet")
# File names that say which part of a data set this is, but not which data set.
_PART_NAME = re.compile(r"(train|test|validation|valid|val|dev|data)(-\d+-of-\d+)?")

_LOGGER = logging.getLogger(__name__)


def read_problem_files(setting: str, paths: str, mapping: RecordMapping) -> list[Problem]:
    """Problems of every file in `paths`, in order; layouts are recognised file by file.

    `paths` is a file, a glob or a comma-separated list of them; `setting` is its name in the
    config, for errors. ValueError with file and line for anything that is not a problem. With
    `mapping.drop_incomplete`, records without problem or answer are left out; the log counts them.
    """
    problems: list[Problem] = []
    for path in expand_paths(setting, paths):
        count = len(problems)
        problems.extend(_read_file(path, mapping))
        if len(problems) == count:
            raise ValueError(f"{setting} ({path}) holds no problem; remove it from the list")
    return problems


def expand_paths(setting: str, paths: str) -> list[Path]:
    """The files that `paths` names, each once. ValueError when a part of it names none."""
    found: dict[Path, None] = {}
    for part in filter(None, (part.strip() for part in paths.split(","))):
        pattern = os.path.expanduser(part)
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            raise ValueError(f"{setting} ({part}) names no file; paths start at {os.getcwd()}")
        for match in map(Path, matches):
            if match.is_dir() and str(match) != os.path.normpath(pattern):
                raise ValueError(
                    f"{setting} ({part}) also finds {match}, which is a directory; use a pattern "
                    "that finds files only"
                )
            if match.is_dir():
                raise ValueError(
                    f"{setting} ({part}) is a directory; use {part.rstrip('/')}/*.jsonl"
                )
            if not match.exists():
                raise ValueError(f"{setting} ({match}) is a link that leads nowhere; mend it")
            if match.suffix not in _SUFFIXES:
                raise ValueError(f"{setting} ({match}) must end in {', '.join(_SUFFIXES)}")
            found[match] = None
    if not found:
        raise ValueError(f"{setting} ({paths!r}) must name a file")
    return list(found)


def _read_file(path: Path, mapping: RecordMapping) -> Iterator[Problem]:
    record_format = None
    num_dropped = 0
    task = _task_name(path)
    for place, record in read_records(path):
        try:
            if record_format is None:
                record_format = choose_format(record, mapping)
            yield read_problem(record, record_format, task=task)
        except ValueError as error:
            if mapping.drop_incomplete and isinstance(error, IncompleteRecordError):
                num_dropped += 1
                continue
            chosen = f" as {record_format.name}" if record_format else ""
            raise ValueError(f"{path}, {place}, cannot be read{chosen}: {error}") from error
    if num_dropped:
        _LOGGER.warning("%s: %d records without problem or answer dropped", path, num_dropped)


def read_records(path: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, record) of every record. ValueError with the place it cannot be read."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".json" and _starts_with_bracket(path):
        return _read_json_array(path)
    return _read_json_lines(path)


def _read_json_lines(path: Path) -> Iterator[tuple[str, object]]:
    # By lines of bytes: text mode would also break a line at a carriage return inside it.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error


def _read_json_array(path: Path) -> Iterator[tuple[str, object]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    for number, record in enumerate(records, start=1):
        yield f"record {number}", record


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    # Imported here: it costs a second, and only parquet files need it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file that can be read: {error}") from error


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _task_name(path: Path) -> str:
    """The file's name, or its folder's when the name only says train or test."""
    return path.absolute().parent.name if _PART_NAME.fullmatch(path.stem) else path.stem
