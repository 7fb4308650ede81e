"""Teaches a small transformer from nothing by imitation: a start for comparisons on two cores.

Owns the model `worked-sums`: its shape, its lessons, and how long it is taught. The lessons hold
slips (`data/worked_sums.py`), and the model learns how often a line slips as it learns the rest: at
temperature 1 it answers about a third of the problems right. Unlearning the slips is left for
reinforcement learning.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pipeline_rl_jax.data.character_tokenizer import num_tokens, write_character_tokenizer
from pipeline_rl_jax.data.tokenizer import Tokenizer, load_tokenizer
from pipeline_rl_jax.data.worked_sums import ALPHABET, worked_sum
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from pipeline_rl_jax.models.transformer import Transformer
from pipeline_rl_jax.settings import ArithmeticSettings

CONFIG = ModelConfig(
    family="llama",
    vocabulary_size=num_tokens(ALPHABET),
    width=96,
    mlp_width=256,
    num_layers=3,
    num_query_heads=3,
    num_kv_heads=3,
    head_width=32,
    max_positions=512,
    rope_theta=10_000.0,
    tied_embeddings=True,
)
LESSONS = ArithmeticSettings(
    operations="+",
    min_operand=2,
    max_operand=48,
    num_operands=2,
    first_operand_tail=1.5,
    num_records=1,
)
SLIP_SHARE = 0.3  # of the lines of a lesson
NUM_STEPS = 350
_ROWS, _TOKENS_PER_ROW = 4, 320  # the longest lesson has 298 tokens
_LEARNING_RATE, _WARMUP_STEPS = 4e-3, 20


class LessonRows(NamedTuple):
    """Lessons laid end to end in rows, as in `PackedBatch`."""

    token_ids: np.ndarray  # [B, T] int32
    segment_ids: np.ndarray  # [B, T] int32, 1.. within a row, 0 is padding
    positions: np.ndarray  # [B, T] int32
    mask: np.ndarray  # [B, T] bool, True at completion tokens


def write_taught_model(directory: Path, *, num_steps: int = NUM_STEPS) -> None:
    """Teaches the model and writes it to `directory`, which is empty, in Hugging Face's layout.

    Lessons and weights begin the same each time.
    """
    with tempfile.TemporaryDirectory() as files:
        write_character_tokenizer(Path(files), ALPHABET)
        lessons = lesson_rows(load_tokenizer(Path(files)))
    params, _ = teach(CONFIG, itertools.islice(lessons, num_steps), num_steps=num_steps)
    save_params(params, CONFIG, directory=directory, weight_format=WeightFormat(dtype="float32"))
    write_character_tokenizer(directory, ALPHABET)


def teach(
    config: ModelConfig, lessons: Iterator[LessonRows], *, num_steps: int
) -> tuple[dict[str, Any], list[float]]:
    """Weights after one step on each of the `num_steps` lessons, and the loss of every step.

    The loss is minus the mean logprob of the completion tokens, in nats.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, _LEARNING_RATE, min(_WARMUP_STEPS, num_steps - 1), num_steps, 0.1 * _LEARNING_RATE
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    params = random_params(config, seed=0, dtype="float32")
    state = optimizer.init(params)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def loss(params: dict[str, Any], rows: LessonRows) -> jax.Array:
        model = nnx.merge(graph, params)
        ids, segment_ids, positions, mask = map(jnp.asarray, rows)
        hidden = model(ids, positions=positions, segment_ids=segment_ids)
        logprobs, _ = token_logprobs(
            hidden, model.output_embedding, ids, mask, chunk_tokens=ids.size
        )
        return -jnp.sum(logprobs) / jnp.sum(mask)

    @jax.jit
    def step(params, state, rows):
        value, gradient = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for rows in lessons:
        params, state, value = step(params, state, rows)
        losses.append(float(value))
    return params, losses


def lesson_rows(tokenizer: Tokenizer) -> Iterator[LessonRows]:
    """Endless rows of lessons, filled in order."""
    drawn = (_lesson(tokenizer, number) for number in itertools.count())
    lesson = next(drawn)
    while True:
        shape = (_ROWS, _TOKENS_PER_ROW)
        rows = LessonRows(*(np.zeros(shape, dtype) for dtype in (*3 * [np.int32], np.bool_)))
        for row in range(_ROWS):
            start = 0
            for segment in itertools.count(1):
                token_ids, num_prompt = lesson
                end = start + len(token_ids)
                if end > _TOKENS_PER_ROW:
                    break
                rows.token_ids[row, start:end] = token_ids
                rows.segment_ids[row, start:end] = segment
                rows.positions[row, start:end] = np.arange(len(token_ids))
                rows.mask[row, start + num_prompt : end] = True
                start, lesson = end, next(drawn)
        yield rows


def _lesson(tokenizer: Tokenizer, number: int) -> tuple[np.ndarray, int]:
    """Tokens of a prompt and its completion with the end of sequence, and how many are prompt."""
    text = worked_sum(LESSONS, f"lesson/{number}", slip_share=SLIP_SHARE)
    prompt, completion = tokenizer.encode(text.prompt), tokenizer.encode(text.completion)
    end = np.asarray(tokenizer.eos_token_ids[:1], np.int32)
    return np.concatenate([prompt, completion, end]), len(prompt)
