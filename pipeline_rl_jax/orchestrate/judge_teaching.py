"""Teaches the reward model that goes with `worked-sums`: a start for comparisons on two cores.

Owns the model `worked-sums-judge`: it begins as `worked-sums` and learns from pairs (Bradley-Terry)
to prefer a solution that counts down to its end to one of the same problem that stops before. It
does not see whether the sum is right: that is left to a rule beside it. How it reads and trains is
that of `launch/train_reward.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from pipeline_rl_jax.data.arithmetic import draw_number
from pipeline_rl_jax.data.preferences import TokenPair
from pipeline_rl_jax.data.tokenizer import Tokenizer, load_tokenizer
from pipeline_rl_jax.data.worked_sums import worked_sum
from pipeline_rl_jax.models.hf_export import WeightFormat
from pipeline_rl_jax.models.hf_reward import (
    load_reward_params,
    read_reward_config,
    save_reward_params,
)
from pipeline_rl_jax.models.reward_model import build_reward_model, reward_shardings
from pipeline_rl_jax.orchestrate.teaching import LESSONS, SLIP_SHARE
from pipeline_rl_jax.trainer.reward_trainer import (
    PairMetrics,
    RewardTrainer,
    build_reward_optimizer,
    shuffled_batches,
)

NUM_STEPS = 40
_NUM_PAIRS, _BATCH_PAIRS = 640, 16
_MAX_TOKENS = 128  # longer solutions are left out
_LEARNING_RATE, _WARMUP_STEPS = 6e-4, 10


def write_taught_judge(directory: Path, *, start: Path, num_steps: int = NUM_STEPS) -> None:
    """Teaches the model from `start`, the taught actor, and writes it to the empty `directory`."""
    trainer, _ = teach_judge(start, num_steps=num_steps)
    save_reward_params(
        trainer.params,
        read_reward_config(start),
        directory=directory,
        source=start,
        weight_format=WeightFormat(dtype="float32"),
    )


def teach_judge(start: Path, *, num_steps: int) -> tuple[RewardTrainer, list[PairMetrics]]:
    """The trainer after its steps, and what each of them measured."""
    config, tokenizer = read_reward_config(start), load_tokenizer(start)
    device = np.array(jax.devices()[:1]).reshape(1, 1, 1)
    mesh = Mesh(device, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    params = load_reward_params(
        start, config, shardings=reward_shardings(config, mesh), dtype="float32", seed=0
    )
    optimizer = build_reward_optimizer(
        learning_rate=_LEARNING_RATE,
        warmup_steps=_WARMUP_STEPS,
        weight_decay=0.0,
        max_gradient_norm=1.0,
    )
    graph = build_reward_model(config, compute_dtype="float32", remat="none")
    trainer = RewardTrainer(graph, params, optimizer=optimizer, mesh=mesh)
    pairs = list(itertools.islice(judged_pairs(tokenizer), _NUM_PAIRS))
    batches = shuffled_batches(pairs, num_pairs=_BATCH_PAIRS, seed=0)
    return trainer, [trainer.step(next(batches)) for _ in range(num_steps)]


def judged_pairs(tokenizer: Tokenizer, *, label: str = "pair") -> Iterator[TokenPair]:
    """Endless pairs: a solution with its slips, and its first lines as if they were all of it."""
    for number in itertools.count():
        key = f"{label}/{number}"
        text = worked_sum(LESSONS, key, slip_share=SLIP_SHARE)
        lines = text.completion.split("\n")
        kept = 1 + draw_number(f"{key}/kept", len(lines) - 1)
        whole, short = (
            _tokens(tokenizer, text.prompt, "\n".join(each)) for each in (lines, lines[:kept])
        )
        if whole.size <= _MAX_TOKENS:
            yield TokenPair(chosen=whole, rejected=short)


def _tokens(tokenizer: Tokenizer, prompt: str, completion: str) -> np.ndarray:
    """As the actor writes it, with the end of sequence."""
    end = np.asarray(tokenizer.eos_token_ids[:1], np.int32)
    return np.concatenate([tokenizer.encode(prompt), tokenizer.encode(completion), end])
