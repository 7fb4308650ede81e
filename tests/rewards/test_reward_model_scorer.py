from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline_rl_jax.data.vocabulary import own_tokens
from pipeline_rl_jax.rewards.reward_model_scorer import RewardModelOnDevice, RewardModelScorer
from tests.fakes.tiny_reward_model import make_completion, reward_params, scoring_mesh
from tests.fakes.tiny_training import TINY


@pytest.fixture(scope="module")
def model():
    return RewardModelOnDevice(
        TINY, reward_params(), mesh=scoring_mesh(), rows=3, compute_dtype="float32"
    )


def _score_all(scorer, completions):
    async def run():
        scores = await asyncio.gather(*(scorer.score(each) for each in completions))
        await scorer.close()
        await scorer.close()
        return scores

    return asyncio.run(run())


def test_everybody_gets_the_score_of_their_own_text(model, monkeypatch):
    completions = [make_completion(i, prompt_tokens=3, num_tokens=5 + 7 * i) for i in range(5)]
    alone = [float(model.scores([own_tokens(each)])[0]) for each in completions]
    sizes, real = [], model.scores
    monkeypatch.setattr(model, "scores", lambda texts: sizes.append(len(texts)) or real(texts))
    scorer = RewardModelScorer(model, tokens_of=own_tokens)
    scores = _score_all(scorer, completions)
    counts = scorer.counts
    assert (counts.streamed_tokens, counts.final_tokens) == (0, sum(8 + 7 * i for i in range(5)))
    assert (counts.finished, counts.device_calls) == (5, len(sizes))
    assert counts.busy_seconds > 0
    assert [score.value for score in scores] == pytest.approx(alone, abs=1e-5)
    assert np.ptp(alone) > 1e-2
    assert sum(sizes) == 5
    assert max(sizes) <= 3


def test_few_texts_compute_few_rows():
    model = RewardModelOnDevice(
        TINY, reward_params(), mesh=scoring_mesh(), rows=32, compute_dtype="float32"
    )
    shapes, real = [], model._score
    model._score = lambda params, ids, lengths: (
        shapes.append(ids.shape) or real(params, ids, lengths)
    )
    texts = [own_tokens(make_completion(i, prompt_tokens=3, num_tokens=9)) for i in range(9)]
    for number in (1, 2, 3, 8, 9):
        model.scores(texts[:number])
    assert shapes == [(2, 32), (2, 32), (8, 32), (8, 32), (32, 32)]


def test_a_text_beyond_the_context_has_no_score(model):
    completion = make_completion(0, prompt_tokens=100, num_tokens=29)
    (score,) = _score_all(RewardModelScorer(model, tokens_of=own_tokens), [completion])
    assert score.error == "reward_model_context"
    assert score.detail == "129 tokens, the reward model reads 1 to 128"


def test_an_error_of_the_device_reaches_who_waits(model, monkeypatch):
    def fail(texts):
        raise RuntimeError("device lost")

    monkeypatch.setattr(model, "scores", fail)
    scorer = RewardModelScorer(model, tokens_of=own_tokens)
    with pytest.raises(RuntimeError, match="device lost"):
        _score_all(scorer, [make_completion(0, prompt_tokens=3, num_tokens=5)])
    asyncio.run(scorer.close())
