"""Writes a run's checkpoint as a Hugging Face directory that transformers loads.

    python launch/export.py --workdir=runs/quickstart --output=exported

The newest checkpoint, or that of optimizer step `--step`. Tokenizer, chat template and generation
defaults are those of the model the run started from.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from command_line import required, run_main
from pipeline_rl_jax.settings import Settings, SettingsError, settings_errors
from pipeline_rl_jax.telemetry.workdir import Workdir, read_config

_DTYPES = ("bfloat16", "float16", "float32")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make; it must not exist.")
_STEP = flags.DEFINE_integer("step", None, "Optimizer step; the newest if not given.")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", f"Of the weights: {', '.join(_DTYPES)}.")


def main() -> None:
    workdir = Workdir(Path(required(_WORKDIR, example="runs/quickstart")).expanduser())
    output = Path(required(_OUTPUT, example="exported")).expanduser()
    if _DTYPE.value not in _DTYPES:
        raise SettingsError(f"--dtype ({_DTYPE.value}) must be one of {', '.join(_DTYPES)}")
    if not workdir.config.is_file():
        raise SettingsError(
            f"--workdir ({workdir.root}) holds no config.json; name a run's workdir"
        )

    # Only now: a mistake above is told before JAX has been imported.
    from pipeline_rl_jax.checkpointing.store import restore_params
    from pipeline_rl_jax.models.atomic_directory import require_free
    from pipeline_rl_jax.orchestrate.export import export_params

    with settings_errors():
        require_free(output)
        settings = _read_settings(workdir)
        params = restore_params(workdir.checkpoints, _STEP.value)
        export_params(params, settings.model, directory=output, dtype=_DTYPE.value)
    print(f"wrote {output}")


def _read_settings(workdir: Workdir) -> Settings:
    try:
        return read_config(workdir)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(
            f"--workdir ({workdir.root}) holds a config.json that is not JSON ({error}); the same "
            "training command writes it anew"
        ) from error


if __name__ == "__main__":
    run_main(main)
