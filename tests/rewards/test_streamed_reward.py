"""A completion that was not streamed has the same score, whoever has its id."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.models.chunk_readouts import score_so_far
from pipeline_rl_jax.rewards.reward_model_scorer import RewardModelOnDevice
from pipeline_rl_jax.rewards.stream_readers import REWARD_MODEL, StreamReaders
from pipeline_rl_jax.rewards.streamed_model import StreamedModel, StreamShape
from pipeline_rl_jax.rewards.streamed_reward import StreamedReward
from pipeline_rl_jax.rewards.streaming import StreamedTexts
from tests.fakes.tiny_reward_model import cut, make_completion, reward_params, scoring_mesh
from tests.fakes.tiny_training import TINY

SHAPE = StreamShape(
    rows=2,
    max_tokens=40,
    chunk_widths=(4, 16),
    min_cache_tokens=16,
    cache_dtype="float32",
    compute_dtype="float32",
)


def test_an_evaluation_and_live_training_samples_of_the_same_ids_do_not_mix():
    live = [make_completion(i, prompt_tokens=4, num_tokens=9) for i in range(2)]
    evaluated = [make_completion(i, prompt_tokens=5, num_tokens=6 + i) for i in range(5)]
    whole = RewardModelOnDevice(
        TINY, reward_params(), mesh=scoring_mesh(), rows=8, compute_dtype="float32"
    )
    model = StreamedModel(
        TINY, reward_params(), readout=score_so_far, shape=SHAPE, mesh=scoring_mesh()
    )

    async def scenario():
        readers = StreamReaders({REWARD_MODEL: StreamedTexts(model, per_token=False)})
        scorer = StreamedReward(readers)
        halves = [cut(each, [5, 4]) for each in live]
        readers.read([first for first, _ in halves])  # both rows are theirs
        scores = await asyncio.gather(*map(scorer.score, evaluated))
        readers.read([second for _, second in halves])
        streamed = [await readers.finish(each) for each in live]
        await scorer.close()
        await readers.close()
        return [s.value for s in scores], [float(s[REWARD_MODEL]) for s in streamed], readers

    scores, streamed, readers = asyncio.run(scenario())
    expected = whole.scores([own_tokens(each) for each in [*evaluated, *live]]).tolist()
    assert [*scores, *streamed] == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 1e-2
    assert readers.num_live == 0
    assert dataclasses.asdict(readers.counts[REWARD_MODEL])["finished"] == 7


def test_in_bfloat16_too_a_score_is_that_of_the_whole_text():
    """The defaults. Rounding is that of 8 bits, in another order."""
    completions = [make_completion(i, prompt_tokens=4, num_tokens=20 + i) for i in range(3)]
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), reward_params())
    whole = RewardModelOnDevice(TINY, params, mesh=scoring_mesh(), rows=4)
    shape = dataclasses.replace(SHAPE, cache_dtype="bfloat16", compute_dtype="bfloat16")
    model = StreamedModel(TINY, params, readout=score_so_far, shape=shape, mesh=scoring_mesh())
    texts = StreamedTexts(model, per_token=False)
    for each in completions:
        texts.extend(cut(each, [7, each.num_tokens - 7]))
    scores = texts.finish_all([(i, 0) for i in range(3)])
    expected = whole.scores([own_tokens(each) for each in completions])
    np.testing.assert_allclose(scores, expected, atol=0.05)
    assert np.ptp(expected) > 0.5
