"""Loads the file that `--config` names, and says in one line what is wrong with it.

`ml_collections` loads the file again when it parses the flag; by then it is known to load.
"""

from __future__ import annotations

import difflib
import importlib.util
import traceback
from pathlib import Path

from ml_collections import ConfigDict, FrozenConfigDict

import search_path
from pipeline_rl_jax.settings import SettingsError


def load_config(flag_value: str) -> ConfigDict:
    """What `get_config()` of a file returns; `file.py:argument` hands it an argument.

    Raises `SettingsError` when there is no such file, when it fails, and when it gives no
    `ConfigDict`.
    """
    name, *arguments = flag_value.split(":", 1)
    path = Path(name)
    if not path.is_file():
        raise SettingsError(_missing_file_problem(path))
    try:
        spec = importlib.util.spec_from_file_location("config_file_under_check", path)
        if spec is None or spec.loader is None:
            raise SettingsError(f"--config ({path}) must be a Python file; its name ends in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise SettingsError(
                f"--config ({path}) has no function get_config(); start from configs/base.py"
            )
        config = module.get_config(*arguments)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:  # it is a program: for its author to mend
        raise SettingsError(_program_problem(path, error)) from error
    _check_config(path, config)
    return config


def _check_config(path: Path, config: object) -> None:
    if not isinstance(config, ConfigDict):
        raise SettingsError(
            f"--config ({path}): get_config() must return a ConfigDict, not "
            f"{type(config).__name__}; start from configs/base.py"
        )
    if isinstance(config, FrozenConfigDict):
        raise SettingsError(
            f"--config ({path}): get_config() must return a ConfigDict, which flags can change, "
            "not a FrozenConfigDict; return ConfigDict(config)"
        )
    if not config:
        raise SettingsError(
            f"--config ({path}): get_config() returns an empty ConfigDict; start from "
            "configs/base.py"
        )


def _missing_file_problem(path: Path) -> str:
    if path.is_dir():
        return f"--config ({path}) is a directory; name a file in it"
    shipped = sorted((search_path.ROOT / "configs").glob("*.py"))
    beside = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
    known = {f"configs/{file.name}": file.stem for file in shipped if file.stem != "__init__"}
    known |= {str(file): file.stem for file in beside if file.stem != "__init__"}
    near = difflib.get_close_matches(path.stem, known.values(), n=1)
    if near:
        meant = next(name for name, stem in known.items() if stem == near[0])
        return f"--config ({path}) does not exist; did you mean {meant}?"
    return f"--config ({path}) does not exist; there are {', '.join(known)}"


def _program_problem(path: Path, error: BaseException) -> str:
    """`configs/a.py, line 3: NameError: name 'x' is not defined`."""
    text = f"{type(error).__name__}: {error}"
    where = str(path)
    if isinstance(error, SyntaxError):
        place = f", line {error.lineno}" if error.lineno else ""
        where = f"{error.filename or path}{place}"
        text = f"SyntaxError: {error.msg}"
    else:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        if frames:
            where = f"{path}, line {frames[-1].lineno}"
    return " ".join(f"{where}: {text}".split())
