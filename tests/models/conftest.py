"""The tiny models of `golden/` and small configs of our own, for all tests of `models/`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.hf_import import load_params
from pipeline_rl_jax.models.transformer import Transformer, abstract_params, logits

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = ("qwen2", "qwen3", "llama3_rope", "smollm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """A model directory, its config and params, and what transformers computes from it."""

    directory: Path
    config: ModelConfig
    params: dict[str, Any]
    token_ids: np.ndarray  # [B, T]
    logits: np.ndarray  # [B, T, V]


@functools.cache
def load_golden(name: str) -> Golden:
    directory = GOLDEN / name
    config = read_config(directory)
    with np.load(directory / "logits.npz") as stored:
        token_ids, expected = stored["token_ids"].astype(np.int32), stored["logits"]
    params = load_params(directory, config, shardings=on_one_device(config), dtype="float32")
    return Golden(
        directory=directory, config=config, params=params, token_ids=token_ids, logits=expected
    )


def on_one_device(config: ModelConfig) -> dict:
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: sharding, abstract_params(config))


@functools.cache
def _compiled_forward(config: ModelConfig, options: tuple[tuple[str, object], ...]):
    build = lambda: Transformer(config, rngs=nnx.Rngs(0), **dict(options))  # noqa: E731
    graph, _ = nnx.split(nnx.eval_shape(build))

    @jax.jit
    def run(params, token_ids, positions, segment_ids):
        model = nnx.merge(graph, params)
        return logits(model, model(token_ids, positions=positions, segment_ids=segment_ids))

    return run


def forward_logits(
    params, config: ModelConfig, token_ids, *, positions=None, segment_ids=None, **options
) -> np.ndarray:
    """Logits [B, T, V]; by default every row is one segment from position 0."""
    token_ids = jnp.asarray(token_ids, jnp.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(token_ids.shape[1]), token_ids.shape)
    if segment_ids is None:
        segment_ids = np.ones(token_ids.shape)
    run = _compiled_forward(config, tuple(sorted(options.items())))
    as_int = functools.partial(jnp.asarray, dtype=jnp.int32)
    return np.asarray(run(params, token_ids, as_int(positions), as_int(segment_ids)))


@pytest.fixture(scope="session", params=GOLDEN_NAMES)
def golden(request) -> Golden:
    return load_golden(request.param)


@pytest.fixture(scope="session")
def golden_qwen2() -> Golden:
    return load_golden("qwen2")


@pytest.fixture(scope="session")
def golden_smollm() -> Golden:
    return load_golden("smollm")


@pytest.fixture(scope="session")
def forward():
    return forward_logits


@pytest.fixture(scope="session")
def single_device():
    return on_one_device


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocabulary_size=40,
        width=16,
        mlp_width=24,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_width=4,
        max_positions=64,
        rope_theta=10_000.0,
        qkv_bias=True,
    )
