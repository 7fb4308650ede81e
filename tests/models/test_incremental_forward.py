"""Streamed in chunks and computed at once are the same numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline_rl_jax.models.chunk_readouts import (
    logprobs_readout,
    score_so_far,
    values_of_tokens,
)
from pipeline_rl_jax.models.incremental_forward import (
    RowChunks,
    empty_rows,
    extend_rows,
    resized_rows,
    unstack_layers,
)
from pipeline_rl_jax.models.reward_model import RewardModel
from pipeline_rl_jax.models.token_logprobs import token_logprobs
from pipeline_rl_jax.models.value_head import VALUE_HEAD, token_values

PROMPT_TOKENS = 5
TEMPERATURE = 0.7
CACHE_TOKENS = 144


@functools.cache
def _model(config):
    model = RewardModel(config, rngs=nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    weight = np.random.default_rng(4).normal(size=config.width).astype(np.float32)
    params[VALUE_HEAD] = {"head_weight": jnp.asarray(weight), "head_bias": jnp.float32(0.3)}
    return model, params


@functools.cache
def _extend(config):
    readout = logprobs_readout(
        model_config(config), temperature=TEMPERATURE, logprob_chunk_tokens=64
    )

    @jax.jit
    def extend(params, cache, chunks):
        states, cache = extend_rows(
            params, cache, chunks, config=config, cache_dtype="float32", block_tokens=32
        )
        read = (score_so_far, readout, values_of_tokens)
        return [each(params, states, chunks) for each in read], states.hidden, cache

    return extend


def model_config(config):
    return _model(config)[0].config


@functools.cache
def _whole_forward(config):
    graph, _ = nnx.split(_model(config)[0])

    @jax.jit
    def run(params, ids, length):
        head = params.pop(VALUE_HEAD)
        model = nnx.merge(graph, params)
        positions = jnp.arange(CACHE_TOKENS)[None]
        inside = positions < length
        hidden = model(ids, positions=positions, segment_ids=inside.astype(jnp.int32))
        mask = inside & (positions >= PROMPT_TOKENS)
        logprobs, _ = token_logprobs(
            hidden, model.output_embedding, ids, mask, temperature=TEMPERATURE
        )
        score = model.sequence_scores(ids, length[None])
        return score[0], logprobs[0], token_values(hidden, head, mask)[0], hidden[0]

    return run


def _whole(config, token_ids):
    """Score, logprobs, values and hidden states of one sequence at once."""
    length = len(token_ids)
    ids = np.zeros((1, CACHE_TOKENS), np.int32)
    ids[0, :length] = token_ids
    score, *per_token = _whole_forward(config)(dict(_model(config)[1]), ids, jnp.int32(length))
    return [np.asarray(score), *(np.asarray(x[:length]) for x in per_token)]


def _chunks(entries, *, width, num_rows, size):
    """Of (row, tokens, start) with junk as padding, and rows that are none up to `size`."""
    token_ids = np.full((size, width), 39, np.int32)
    fields = np.zeros((4, size), np.int32)
    fields[0] = num_rows
    for i, (row, tokens, start) in enumerate(entries):
        token_ids[i, : len(tokens)] = tokens
        fields[:, i] = row, len(tokens), start, PROMPT_TOKENS
    rows, lengths, starts, prompts = map(jnp.asarray, fields)
    return RowChunks(rows, jnp.asarray(token_ids), lengths, starts, prompts)


@pytest.mark.parametrize("width", [1, 7, 64])
def test_streamed_equals_whole_around_a_chunk_border(tiny_config, width):
    border = {1: 12, 7: 21, 64: 128}[width]
    texts = [
        np.random.default_rng(length).integers(0, 40, length)
        for length in (border - 1, border, border + 1)
    ]
    params = unstack_layers(_model(tiny_config)[1], tiny_config)
    cache = empty_rows(
        tiny_config,
        rows=4,
        cache_tokens=CACHE_TOKENS,
        cache_dtype="float32",
        compute_dtype="float32",
    )
    cache = jax.tree.map(lambda x: x + 7.0, cache)  # what an earlier owner left
    streamed = [[] for _ in texts]
    rows = [2, 0, 3]
    for start in range(0, border + 1, width):
        live = [i for i, text in enumerate(texts) if start < len(text)]
        entries = [(rows[i], texts[i][start : start + width], start) for i in live]
        chunks = _chunks(entries, width=width, num_rows=4, size=4)
        (score, *per_token), hidden, cache = _extend(tiny_config)(params, cache, chunks)
        for place, i in enumerate(live):
            size = len(entries[place][1])
            pieces = [np.asarray(x[place, :size]) for x in (*per_token, hidden)]
            streamed[i].append((np.asarray(score[place]), *pieces))
    for text, pieces in zip(texts, streamed, strict=True):
        expected = _whole(tiny_config, text)
        scores, *per_token = zip(*pieces, strict=True)
        np.testing.assert_allclose(scores[-1], expected[0], atol=1e-5, rtol=0)
        for found, wanted in zip(per_token, expected[1:], strict=True):
            np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-5, rtol=0)
    assert np.abs(_whole(tiny_config, texts[0])[1][PROMPT_TOKENS:]).min() > 0


def test_growing_the_cache_between_chunks_changes_nothing(tiny_config):
    text = np.random.default_rng(0).integers(0, 40, 21)
    params = unstack_layers(_model(tiny_config)[1], tiny_config)
    cache = empty_rows(
        tiny_config, rows=1, cache_tokens=8, cache_dtype="float32", compute_dtype="float32"
    )
    for start in (0, 7, 14):
        cache = resized_rows(cache, {0: 8, 7: 16, 14: 32}[start])
        chunks = _chunks([(0, text[start : start + 7], start)], width=7, num_rows=1, size=1)
        (score, *_), _, cache = _extend(tiny_config)(params, cache, chunks)
    np.testing.assert_allclose(score[0], _whole(tiny_config, text)[0], atol=1e-5, rtol=0)


def test_rows_that_are_not_extended_stay_as_they_are(tiny_config):
    params = unstack_layers(_model(tiny_config)[1], tiny_config)
    empty = empty_rows(
        tiny_config, rows=3, cache_tokens=16, cache_dtype="float32", compute_dtype="float32"
    )
    before = jax.tree.map(lambda x: x + 1.0, empty)
    chunks = _chunks([(1, [3, 4], 0), (0, [], 0)], width=4, num_rows=3, size=3)
    _, _, after = _extend(tiny_config)(params, before, chunks)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[np.array([0, 2])], new[np.array([0, 2])])
        assert not np.array_equal(old[1], new[1])
    np.testing.assert_array_equal(after.keys[0][1, :, 2:], before.keys[0][1, :, 2:])


def test_a_bfloat16_cache_is_close(tiny_config):
    text = np.random.default_rng(0).integers(0, 40, 12)
    params = unstack_layers(_model(tiny_config)[1], tiny_config)
    cache = empty_rows(
        tiny_config, rows=1, cache_tokens=16, cache_dtype="bfloat16", compute_dtype="float32"
    )
    for start in (0, 6):
        chunks = _chunks([(0, text[start : start + 6], start)], width=6, num_rows=1, size=1)
        step = functools.partial(extend_rows, config=tiny_config, cache_dtype="bfloat16")
        states, cache = jax.jit(step)(params, cache, chunks)
    np.testing.assert_allclose(states.hidden[0], _whole(tiny_config, text)[3][6:], atol=0.1, rtol=0)
