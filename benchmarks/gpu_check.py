"""The whole product on an accelerator in one command of at most ten minutes.

    pip install -e '.[cuda13]'
    python benchmarks/gpu_check.py --output=gpu_check

Nothing is downloaded: the model has a known shape and random weights. Each part is a program of its
own with its own time limit, so that one that fails or hangs costs only itself. Writes a log of each
part and `report.md`, to be copied into docs/benchmarks.md. `--shape=tiny --platform=cpu` rehearses
it without an accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = "import jax; print(jax.__version__, [str(d.device_kind) for d in jax.devices()])"


@dataclasses.dataclass(frozen=True)
class Part:
    """One program of the check."""

    name: str
    arguments: tuple[str, ...]  # of the Python interpreter
    limit_seconds: float
    is_shown: bool = True  # its output belongs into the report


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything fits the machine."""

    shape: str
    slots: int
    new_tokens: int
    rows: int
    tokens_per_row: int


_SIZES = {
    "tiny": Size("tiny", 8, 32, 4, 256),
    "qwen2.5-1.5b": Size("qwen2.5-1.5b", 128, 256, 16, 4096),
    "qwen2.5-7b": Size("qwen2.5-7b", 64, 256, 8, 4096),
}


def parts(size: Size, model: Path, runs: Path) -> list[Part]:
    """What is run, in this order."""
    decode = (
        "benchmarks/decode.py",
        f"--model={model}",
        "--dtype=bfloat16",
        f"--new_tokens={size.new_tokens}",
        "--tokens_per_chunk=16",
        "--repeats=3",
        "--skip_transformers",
    )
    train = (
        "benchmarks/train_step.py",
        f"--model={model}",
        "--dtype=bfloat16",
        "--remat=full",
        f"--rows={size.rows}",
        f"--tokens_per_row={size.tokens_per_row}",
        "--rows_per_micro_batch=2",
        "--repeats=3",
        "--skip_torch",
    )
    return [
        Part("environment", ("-c", _ENVIRONMENT), 60),
        Part(
            "random model",
            ("benchmarks/random_model.py", f"--shape={size.shape}", f"--output={model}"),
            120,
            is_shown=False,
        ),
        Part("decode, all slots", (*decode, f"--sequences={size.slots}"), 120),
        Part("decode, half the slots", (*decode, f"--sequences={size.slots // 2}"), 90),
        Part("train step", train, 150),
        Part("pipeline", _run_arguments(size, model, runs / "pipeline"), 150),
        Part("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests"), 120),
    ]


def _run_arguments(size: Size, model: Path, workdir: Path) -> tuple[str, ...]:
    """Six steps of training and generation in turns on one device."""
    settings = {
        "model.source": model,
        "model.compute_dtype": "bfloat16",
        "model.remat": "full",
        "model.param_dtype": "bfloat16",
        "meshes.virtual_devices": 0,
        "meshes.trainer_devices": "(0,)",
        "meshes.generation_devices": "(0,)",
        "generation.slots": size.slots,
        "generation.min_slots": size.slots,
        "generation.tokens_per_chunk": 16,
        "generation.max_prompt_tokens": 64,
        "generation.prefill_buckets": "(64,)",
        "generation.max_new_tokens": size.new_tokens,
        "generation.ignore_eos": True,
        "generation.stop_strings": "()",
        "generation.compute_dtype": "bfloat16",
        "generation.cache_dtype": "bfloat16",
        "trainer.batch_rollouts": size.slots,
        "trainer.tokens_per_row": size.tokens_per_row,
        "schedule.num_steps": 6,
        "schedule.max_lag": 4,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpointing.at_end": False,
    }
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    config = f"--config={ROOT / 'configs' / 'quickstart.py'}"
    return ("launch/train.py", config, f"--workdir={workdir}", *overrides)


def run_part(part: Part, log: Path, environment: dict[str, str]) -> tuple[str, float]:
    """How a part ended, and its seconds."""
    start = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, *part.arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=part.limit_seconds,
            ).returncode
            outcome = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {part.limit_seconds:.0f} s"
    return outcome, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for logs and report")
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(_SIZES))
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "JAX_PLATFORMS": options.platform, "PYTHONUNBUFFERED": "1"}
    report = output / "report.md"
    report.write_text(f"# GPU check, {options.shape}\n")
    failed = False
    for part in parts(_SIZES[options.shape], output / "model", output):
        log = output / f"{part.name.replace(', ', '_').replace(' ', '_')}.log"
        outcome, seconds = run_part(part, log, environment)
        failed |= outcome != "ok"
        print(f"{part.name}: {outcome}, {seconds:.0f} s", flush=True)
        with report.open("a") as file:
            file.write(f"\n## {part.name}: {outcome}, {seconds:.0f} s\n")
            if part.is_shown:
                lines = [line for line in log.read_text().splitlines() if line.strip()]
                file.write("```\n" + "\n".join(lines[-25:]) + "\n```\n")
    print(f"report: {report}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
