"""Command lines of the programs beside this file: flags in, one line per mistake out.

Owns how a user's mistake looks: a line with the way out on standard error, exit code 2, and no
traceback. Any other error is ours: it keeps its traceback and exits with 1. Importing this module
also makes the package and `configs` importable (`search_path.py`).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_flags

from config_file import load_config
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.settings_parsing import unknown_key_problem

_Value = TypeVar("_Value")
_MISTAKE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130  # what a shell reports for a program ended by Ctrl-C
_BROKEN_PIPE_EXIT_CODE = 141  # and for one whose output nobody reads any more
_CONFIG = re.compile(r"--?config(=(?P<file>.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"--?(no)?config\.(?P<path>[^=]*)(=(?P<value>.*))?", re.DOTALL)
_HELP = ("--help", "-help", "-h", "--helpfull", "-helpfull")
_TYPE_WORDS = {bool: "True or False", int: "a whole number", float: "a number"}


def define_config() -> flags.FlagHolder[Any]:
    """The flag `--config=FILE`, whose every key `--config.section.key=value` overrides."""
    try:
        return config_flags.DEFINE_config_file(
            "config", None, "Config file, for example configs/quickstart.py.", lock_config=True
        )
    except (flags.CantOpenFlagFileError, UnicodeDecodeError) as error:
        # The definition already looks for --config in the files that --flagfile names.
        _exit_with_problems(SettingsError(_flag_file_problem(error)))


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Parses `sys.argv` into the flags that are defined, runs `main`, and exits.

    Exit codes: what `main` returns (None is 0), 2 for a `SettingsError`, 130 for Ctrl-C, and 1
    with a traceback for everything else.
    """
    try:
        read_flags(sys.argv)
        exit_code = main()
    except SettingsError as error:
        _exit_with_problems(error)
    except BrokenPipeError:  # whoever read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_at_once(_BROKEN_PIPE_EXIT_CODE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _exit_at_once(_INTERRUPTED_EXIT_CODE)
    except Exception:  # noqa: BLE001  # not swallowed: it is shown, and is the exit code
        traceback.print_exc()
        _exit_at_once(1)
    sys.exit(exit_code)


def _exit_with_problems(error: SettingsError) -> NoReturn:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    _exit_at_once(_MISTAKE_EXIT_CODE)  # some mistakes show in the middle of a run


def _flag_file_problem(error: Exception) -> str:
    reason = str(error).removeprefix("ERROR:: ")
    return " ".join(f"--flagfile cannot be read: {reason}".split())


def _exit_at_once(exit_code: int) -> NoReturn:
    """Ends the process whatever its other threads do.

    One of them may be in the middle of a device computation, and the interpreter's own way out
    would abort the process there, with another exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def required(flag: flags.FlagHolder[_Value | None], *, example: str) -> _Value:
    """The value of a flag. Raises `SettingsError` when it was not given or is empty."""
    if flag.value is None or flag.value == "":
        raise SettingsError(f"--{flag.name} is missing; for example --{flag.name}={example}")
    return flag.value


def read_flags(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Parses a command line. Raises `SettingsError` with a line for every mistake in it.

    `--help` prints the program's docstring and its flags, and exits with 0.
    """
    if any(argument in _HELP for argument in argv[1:]):
        print(_help(flag_values))
        sys.exit(0)
    config = _check_config(argv) if "config" in flag_values else None
    try:
        rest = flag_values(argv)
    except flags.IllegalFlagValueError as error:
        raise SettingsError(_value_problem(str(error), config, flag_values)) from error
    except flags.UnrecognizedFlagError as error:
        raise SettingsError(_unknown_flag_problem(error.flagname, flag_values)) from error
    except flags.Error as error:
        raise SettingsError(" ".join(str(error).split())) from error
    if len(rest) > 1:
        raise SettingsError(
            f"{rest[1]!r} belongs to no flag; write --name=value, without spaces around ="
        )


def _help(flag_values: flags.FlagValues) -> str:
    """The docstring of the program and every flag that is not absl's own."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    for module, defined in flag_values.flags_by_module_dict().items():
        if not module.startswith("absl."):
            lines += [f"--{flag.name}: {flag.help}" for flag in defined]
    return "\n".join(lines)


def _check_config(argv: Sequence[str]) -> ConfigDict | None:
    """The config that `--config` names, after a look at the keys that flags override."""
    file, position = _config_argument(argv)
    overrides = [
        (index, match)
        for index, argument in enumerate(argv[1:], 1)
        if (match := _OVERRIDE.fullmatch(argument))
    ]
    if overrides and overrides[0][0] < position:
        raise SettingsError(
            f"{argv[overrides[0][0]]} overrides a key of --config=FILE, which must stand before it"
        )
    if file is None:
        return None
    if not file:
        raise SettingsError("--config is empty; for example --config=configs/quickstart.py")
    config = load_config(file)
    problems = [*_override_problems([match for _, match in overrides], config)]
    if problems:
        raise SettingsError(*problems)
    return config


def _config_argument(argv: Sequence[str]) -> tuple[str | None, int]:
    """The value of `--config` and where it stands; None and past the end when it is not there."""
    for index, argument in enumerate(argv[1:], 1):
        match = _CONFIG.fullmatch(argument)
        if match and match["file"] is not None:
            return match["file"], index
        if match and index + 1 < len(argv):
            return argv[index + 1], index
    return None, len(argv)


def _override_problems(overrides: Sequence[re.Match[str]], config: ConfigDict) -> Iterator[str]:
    for match in overrides:
        path = match["path"]
        if not path:
            yield f"{match[0]} names no setting; write --config.section.key=value"
            continue
        value = _find(config, path)
        if value is _ABSENT:
            yield unknown_key_problem(path, list(_paths(config)))
        elif isinstance(value, ConfigDict):
            key = next(iter(value), "key")
            yield f"{path} is a section; set one of its keys, for example --config.{path}.{key}=…"


_ABSENT = object()


def _paths(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """The dotted path of every value in a config."""
    for key in config:
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _find(config: ConfigDict, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, ConfigDict) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def _value_problem(text: str, config: ConfigDict | None, flag_values: flags.FlagValues) -> str:
    """absl's "flag --a=b: reason" in our words."""
    match = re.fullmatch(r"flag --(?P<name>[^=]+)=(?P<value>.*?): (?P<reason>.*)", text, re.DOTALL)
    if match is None:
        return " ".join(text.split())
    name, value = match["name"], match["value"]
    path = name.removeprefix("config.")
    present = _find(config, path) if config is not None and path != name else _ABSENT
    if type(present) in _TYPE_WORDS:
        words = _TYPE_WORDS[type(present)]
        return f"{path} ({value}) must be {words}; the config file has {present!r}"
    reason = "must be True or False" if flag_values[name].boolean else match["reason"]
    return " ".join(f"--{name} ({value}) {reason}".split())


def _unknown_flag_problem(name: str, flag_values: flags.FlagValues) -> str:
    if name.startswith("config."):
        return f"--{name} overrides a key of --config=FILE, which must stand before it"
    near = difflib.get_close_matches(name, list(flag_values), n=1)
    way_out = f"did you mean --{near[0]}?" if near else "--help lists the flags"
    return f"--{name} is not a flag; {way_out}"
