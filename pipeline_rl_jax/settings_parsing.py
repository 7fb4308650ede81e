"""Reads a `ConfigDict` into `Settings`, and writes `Settings` back as plain values.

Owns unknown and missing keys, types and choices. What a well-typed value must satisfy is in
`settings_checks.py`; every problem of one stage is reported together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ml_collections import ConfigDict

from pipeline_rl_jax.settings import Settings, SettingsError
from pipeline_rl_jax.settings_checks import find_problems

_Section = typing.TypeVar("_Section")
_TYPE_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


def parse_settings(config: ConfigDict | Mapping[str, Any]) -> Settings:
    """Checked settings of a run.

    Lists become tuples and whole numbers are taken where a float is asked for. Raises
    `SettingsError` with one line for every unknown key, missing key, wrong type or unknown choice;
    when there is none of these, with one line for every value that breaks a constraint.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    problems: list[str] = []
    settings = _parse_section(Settings, values, "", problems, known=setting_paths())
    if problems:
        raise SettingsError(*problems)
    problems = find_problems(settings)
    if problems:
        raise SettingsError(*problems)
    return settings


def parse_section(section_type: type[_Section], values: ConfigDict | Mapping[str, Any]) -> _Section:
    """Frozen dataclasses other than `Settings`, read by the same rules; constraints unchecked."""
    problems: list[str] = []
    plain = values.to_dict() if isinstance(values, ConfigDict) else values
    known = tuple(_leaf_paths(section_type, ""))
    section = _parse_section(section_type, plain, "", problems, known=known)
    if problems:
        raise SettingsError(*problems)
    return section


def settings_to_dict(settings: Settings) -> dict[str, Any]:
    """Nested plain values that JSON can hold and `parse_settings` reads back."""
    return _plain(dataclasses.asdict(settings))


def format_settings(settings: Settings) -> str:
    """One `path = value` line per setting, in the order of `configs/base.py`."""
    values = settings_to_dict(settings)
    lines = []
    for path in setting_paths():
        value = functools.reduce(lambda section, key: section[key], path.split("."), values)
        lines.append(f"{path} = {value!r}")
    return "\n".join(lines) + "\n"


@functools.cache
def setting_paths() -> tuple[str, ...]:
    """Dotted path of every setting that holds a value (sections themselves left out)."""
    return tuple(_leaf_paths(Settings, ""))


def unknown_key_problem(path: str, known: Sequence[str] = ()) -> str:
    """The line for a key that is no setting, with the likeliest one that is.

    `known` are the dotted paths of all settings there are; none = those of a run.

    >>> unknown_key_problem("trainer.learnin_rate")
    'trainer.learnin_rate is not a setting; did you mean trainer.learning_rate?'
    """
    section, _, key = path.rpartition(".")
    leaves = {each: each.rpartition(".")[2] for each in known or setting_paths()}
    misplaced = [each for each, leaf in leaves.items() if leaf == key]
    siblings = [each for each in leaves if each.rpartition(".")[0] == section]
    near = difflib.get_close_matches(path, siblings, n=1, cutoff=0.8)
    likely = near or misplaced or difflib.get_close_matches(path, leaves, n=1, cutoff=0.7)
    if likely:
        return f"{path} is not a setting; did you mean {' or '.join(likely[:3])}?"
    where, names = _nearest_section(section, leaves)
    return f"{path} is not a setting; {where or 'the top level'} has {', '.join(names)}"


def _leaf_paths(section_type: type, path: str) -> Iterator[str]:
    for name, annotation in typing.get_type_hints(section_type).items():
        if dataclasses.is_dataclass(annotation):
            yield from _leaf_paths(typing.cast(type, annotation), _join(path, name))
        else:
            yield _join(path, name)


def _nearest_section(path: str, known: Iterable[str]) -> tuple[str, list[str]]:
    """The deepest section that exists along a path, and the names in it."""
    while path and not any(each.startswith(f"{path}.") for each in known):
        path = path.rpartition(".")[0]
    prefix = f"{path}." if path else ""
    below = (each.removeprefix(prefix) for each in known if each.startswith(prefix))
    return path, list(dict.fromkeys(name.partition(".")[0] for name in below))


def _parse_section(
    section_type: type, values: Any, path: str, problems: list[str], *, known: Sequence[str]
) -> Any:
    """An instance of `section_type`, or None when a problem was noted."""
    hints = typing.get_type_hints(section_type)
    if not isinstance(values, Mapping):
        problems.append(f"{path} ({values!r}) must be a section with {', '.join(hints)}")
        return None
    num_problems = len(problems)
    problems.extend(
        unknown_key_problem(_join(path, key), known) for key in values if key not in hints
    )
    parsed = {}
    for name, annotation in hints.items():
        full_path = _join(path, name)
        if name not in values:
            problems.append(f"{full_path} is missing; start from configs/base.py, which has it")
        elif dataclasses.is_dataclass(annotation):
            section = typing.cast(type, annotation)
            parsed[name] = _parse_section(section, values[name], full_path, problems, known=known)
        else:
            parsed[name] = _parse_value(annotation, values[name], full_path, problems)
    return section_type(**parsed) if len(problems) == num_problems else None


def _parse_value(annotation: Any, value: Any, path: str, problems: list[str]) -> Any:
    """The value as its annotation wants it, or None when a problem was noted."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return _parse_tuple(typing.get_args(annotation)[0], value, path, problems)
    if origin is Literal:
        choices = typing.get_args(annotation)
        if value in choices:
            return value
        problems.append(_choice_problem(value, choices, path))
        return None
    if annotation is float:
        return _parse_float(value, path, problems)
    # bool is a subclass of int, yet True is no number of slots.
    if isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool)):
        return value
    problems.append(_type_problem(annotation, value, path))
    return None


def _parse_tuple(item_type: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        words = _TYPE_WORDS[item_type].removeprefix("a ")
        problems.append(f"{path} ({value!r}) must be a list of {words}s, for example ({value!r},)")
        return None
    return tuple(
        _parse_value(item_type, item, f"{path}[{index}]", problems)
        for index, item in enumerate(value)
    )


def _parse_float(value: Any, path: str, problems: list[str]) -> float | None:
    # JSON has no infinity: `settings_to_dict` writes it as a string.
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        problems.append(_type_problem(float, value, path))
        return None
    return float(value)


def _type_problem(wanted: type, value: Any, path: str) -> str:
    problem = f"{path} ({value!r}) must be {_TYPE_WORDS[wanted]}, not {type(value).__name__}"
    if wanted is int and isinstance(value, float) and value.is_integer():
        return f"{problem}; use {int(value)}"
    if isinstance(value, float) and math.isnan(value):
        return f"{path} (nan) must be a number"
    return problem


def _choice_problem(value: Any, choices: tuple[str, ...], path: str) -> str:
    problem = f"{path} ({value!r}) must be one of {', '.join(choices)}"
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"{problem}; did you mean {near[0]}?" if near else problem


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
