"""Training a reward model from a config file to a Hugging Face directory.

Owns the settings of `configs/train_reward.py`, their constraints, and the run: read, train, show,
write. The step is `trainer/reward_trainer.py`. A run is not resumed: the
model is written at its end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from pipeline_rl_jax.data.preferences import (
    PairWriter,
    TokenPair,
    fitting_pairs,
    read_preference_files,
)
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.models.atomic_directory import require_free
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_export import WeightFormat
from pipeline_rl_jax.models.hf_reward import (
    has_score_head,
    load_reward_params,
    read_reward_config,
    save_reward_params,
)
from pipeline_rl_jax.models.partition import check_divisible
from pipeline_rl_jax.models.reward_model import build_reward_model, reward_shardings
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.settings import SettingsError, settings_errors
from pipeline_rl_jax.settings_parsing import parse_section
from pipeline_rl_jax.telemetry.workdir import Workdir, write_atomically
from pipeline_rl_jax.trainer.reward_trainer import (
    PairMetrics,
    RewardTrainer,
    build_reward_optimizer,
    shuffled_batches,
)

Show = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelSource:
    source: str
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "full", "dots"]
    attention_block_tokens: int
    save_dtype: Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceData:
    files: str
    eval_files: str
    eval_pairs: int
    prompt_format: str
    max_tokens: int
    too_long: Literal["fail", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptimization:
    num_steps: int
    batch_pairs: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_gradient_norm: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardTraining:
    """All settings of a run; `configs/train_reward.py` explains each."""

    seed: int
    model: RewardModelSource
    data: PreferenceData
    trainer: RewardOptimization


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSummary:
    """Figures of a run, in `summary.json`."""

    accuracy_before: float  # share of held-out pairs with the chosen text above the other
    accuracy_after: float
    eval_pairs: int
    train_pairs: int
    dropped_pairs: int  # with a text beyond data.max_tokens
    optimizer_steps: int
    last_loss: float  # nats; log 2 is guessing
    new_score_head: bool  # the model started from had none
    train_seconds: float


def parse_reward_training(config: ConfigDict | Mapping[str, Any]) -> RewardTraining:
    """Checked settings. Raises `SettingsError` with one line for every mistake."""
    settings = parse_section(RewardTraining, config)
    problems = list(_problems(settings))
    if problems:
        raise SettingsError(*problems)
    return settings


def run_reward_training(settings: RewardTraining, *, workdir: Workdir, show: Show) -> RewardSummary:
    """Trains, writes `model/`, `metrics.jsonl` and `summary.json` below the workdir.

    Raises `SettingsError` with one line for what is wrong with model or data.
    """
    output = workdir.root / "model"
    with settings_errors():
        require_free(output)
        directory = prepare_model(settings.model.source)
        config = read_reward_config(directory)
        mesh = _mesh()
        _check_fit(settings, config, mesh)
        train, held_out, num_dropped = _read_pairs(settings.data, directory)
        is_new = not has_score_head(directory)
        trainer = _build_trainer(settings, directory, config, mesh)
    show(f"{len(train)} pairs to train on, {len(held_out)} held out, {num_dropped} too long")
    if is_new:
        show(f"{directory} has no score head: a new one, drawn at random from seed {settings.seed}")

    size = settings.trainer.batch_pairs
    before = trainer.accuracy(held_out, num_pairs=size)
    show(f"accuracy on held-out pairs before training: {before:.3f}")
    start = time.monotonic()
    last_loss = _train(settings, trainer, train, workdir=workdir, show=show)
    seconds = time.monotonic() - start
    after = trainer.accuracy(held_out, num_pairs=size)
    show(f"accuracy on held-out pairs: {before:.3f} before, {after:.3f} after")
    save_reward_params(
        trainer.params,
        config,
        directory=output,
        source=directory,
        weight_format=WeightFormat(dtype=settings.model.save_dtype),
    )
    summary = RewardSummary(
        accuracy_before=before,
        accuracy_after=after,
        eval_pairs=len(held_out),
        train_pairs=len(train),
        dropped_pairs=num_dropped,
        optimizer_steps=settings.trainer.num_steps,
        last_loss=last_loss,
        new_score_head=is_new,
        train_seconds=seconds,
    )
    write_atomically(workdir.summary, json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    show(f"wrote {output}")
    return summary


def _train(
    settings: RewardTraining,
    trainer: RewardTrainer,
    pairs: list[TokenPair],
    *,
    workdir: Workdir,
    show: Show,
) -> float:
    """All steps, one line each; the loss of the last one."""
    size, num_steps = settings.trainer.batch_pairs, settings.trainer.num_steps
    batches = shuffled_batches(pairs, num_pairs=size, seed=settings.seed)
    loss = float("nan")

    with workdir.metrics.open("w", encoding="utf-8") as file:

        def report(step: int, metrics: PairMetrics) -> float:
            values = {name: float(value) for name, value in metrics._asdict().items()}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["gradient_norm"])):
                raise SettingsError(
                    f"loss or gradient of step {step} is NaN or infinite, and so are the weights "
                    f"after it; lower trainer.learning_rate ({settings.trainer.learning_rate})"
                )
            accuracy = values.pop("num_right") / size
            line = {"step": step, "reward_model/accuracy_share": accuracy}
            line |= {f"reward_model/{name}": value for name, value in values.items()}
            file.write(json.dumps(line) + "\n")
            file.flush()
            show(f"step {step} of {num_steps}  loss {values['loss']:.4f}  accuracy {accuracy:.3f}")
            return values["loss"]

        waiting: PairMetrics | None = None
        for step in range(1, num_steps + 1):
            metrics = trainer.step(next(batches))
            if waiting is not None:  # fetched once the next step is on its way
                report(step - 1, waiting)
            waiting = metrics
        if waiting is not None:
            loss = report(num_steps, waiting)
    return loss


def _build_trainer(
    settings: RewardTraining, directory: Path, config: ModelConfig, mesh: Mesh
) -> RewardTrainer:
    model, trainer = settings.model, settings.trainer
    params = load_reward_params(
        directory,
        config,
        shardings=reward_shardings(config, mesh),
        dtype="float32",
        seed=settings.seed,
    )
    graph = build_reward_model(
        config,
        compute_dtype=model.compute_dtype,
        remat=model.remat,
        attention_block_tokens=model.attention_block_tokens,
    )
    optimizer = build_reward_optimizer(
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        weight_decay=trainer.weight_decay,
        max_gradient_norm=trainer.max_gradient_norm,
    )
    return RewardTrainer(graph, params, optimizer=optimizer, mesh=mesh)


def _read_pairs(
    data: PreferenceData, directory: Path
) -> tuple[list[TokenPair], list[TokenPair], int]:
    """Pairs to train on, held-out ones, and how many were too long."""
    writer = PairWriter(load_tokenizer(directory), prompt_format=data.prompt_format)
    found = read_preference_files("data.files", data.files)
    if data.eval_files:
        held_out = read_preference_files("data.eval_files", data.eval_files)
        held_out = held_out[: data.eval_pairs or None]
    else:
        if len(found) <= data.eval_pairs:
            raise ValueError(
                f"data.eval_pairs ({data.eval_pairs}) must leave some of the {len(found)} pairs of "
                "data.files to train on; lower it, or name data.eval_files"
            )
        found, held_out = found[: -data.eval_pairs], found[-data.eval_pairs :]
    train, tested = (
        fitting_pairs(
            map(writer.write, pairs), max_tokens=data.max_tokens, drop=data.too_long == "drop"
        )
        for pairs in (found, held_out)
    )
    return train, tested, len(found) + len(held_out) - len(train) - len(tested)


def _mesh() -> Mesh:
    """All devices, weights and rows split over them."""
    devices = np.array(jax.devices()).reshape(1, -1, 1)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def _check_fit(settings: RewardTraining, config: ModelConfig, mesh: Mesh) -> None:
    check_divisible(config, mesh, section="devices")
    size, limit = settings.trainer.batch_pairs, settings.data.max_tokens
    if size % mesh.size:
        raise ValueError(
            f"trainer.batch_pairs ({size}) must be a multiple of the {mesh.size} devices; use "
            f"{-(-size // mesh.size) * mesh.size}"
        )
    if limit > config.max_positions:
        raise ValueError(
            f"data.max_tokens ({limit}) is more than the model's context of "
            f"{config.max_positions}; lower it"
        )


def _problems(settings: RewardTraining) -> Iterator[str]:
    data, trainer = settings.data, settings.trainer
    if not settings.model.source:
        yield "model.source is empty; give a Hugging Face directory, a hub id, or smollm2-135m"
    if not data.files:
        yield "data.files is empty; name .jsonl, .json or .parquet files with preference pairs"
    if not data.eval_files and data.eval_pairs < 1:
        yield f"data.eval_pairs ({data.eval_pairs}) must be 1 or more when data.eval_files is empty"
    elif data.eval_pairs < 0:
        yield f"data.eval_pairs ({data.eval_pairs}) must be 0 or more"
    at_least_one = {
        "data.max_tokens": data.max_tokens,
        "trainer.num_steps": trainer.num_steps,
        "trainer.batch_pairs": trainer.batch_pairs,
        "model.attention_block_tokens": settings.model.attention_block_tokens,
    }
    for path, value in at_least_one.items():
        if value < 1:
            yield f"{path} ({value}) must be 1 or more"
    not_negative = {
        "trainer.warmup_steps": trainer.warmup_steps,
        "trainer.weight_decay": trainer.weight_decay,
    }
    for path, value in not_negative.items():
        if not 0 <= value < math.inf:
            yield f"{path} ({value}) must be 0 or more, and finite"
    for name in ("learning_rate", "max_gradient_norm"):
        value = getattr(trainer, name)
        if not 0 < value < math.inf:
            yield f"trainer.{name} ({value}) must be above 0, and finite"
