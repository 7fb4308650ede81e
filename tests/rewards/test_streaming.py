from __future__ import annotations

import dataclasses
import functools
import threading

import numpy as np
import pytest

from pipeline_rl_jax.models.chunk_readouts import logprobs_readout, score_so_far
from pipeline_rl_jax.models.reward_model import body_config
from pipeline_rl_jax.records import StopReason
from pipeline_rl_jax.rewards.reward_model_scorer import RewardModelOnDevice
from pipeline_rl_jax.rewards.streamed_model import StreamedModel, StreamShape
from pipeline_rl_jax.rewards.streaming import IncrementalScorer, StreamedTexts
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


@functools.cache
def _model() -> StreamedModel:
    """One for all tests: each leaves its rows full of its own tokens."""
    return StreamedModel(
        TINY, reward_params(), readout=score_so_far, shape=SHAPE, mesh=scoring_mesh()
    )


@functools.cache
def _whole_model() -> RewardModelOnDevice:
    return RewardModelOnDevice(
        TINY, reward_params(), mesh=scoring_mesh(), rows=4, compute_dtype="float32"
    )


def _whole(completion) -> float:
    text = np.concatenate([completion.prompt.token_ids, completion.token_ids])
    return float(_whole_model().scores([text])[0])


@pytest.fixture
def scorer() -> IncrementalScorer:
    return IncrementalScorer(_model())


@pytest.mark.parametrize("sizes", [[1] * 9, [4, 4, 1], [9], [7, 2], [8, 1]])
def test_a_streamed_score_is_that_of_the_whole_text(scorer, sizes):
    completion = make_completion(0, prompt_tokens=6, num_tokens=9)
    for chunk in cut(completion, sizes):
        scorer.extend([chunk])
    score = scorer.finish((0, 0))
    assert score.value == pytest.approx(_whole(completion), abs=1e-5)
    assert not score.error
    assert abs(score.value - _whole(make_completion(1, prompt_tokens=6, num_tokens=9))) > 1e-2


def test_only_the_last_chunk_is_left_at_the_end(scorer):
    first, second = cut(make_completion(0, prompt_tokens=6, num_tokens=9), [7, 2])
    scorer.extend([first])
    counts = scorer.counts
    assert (counts.streamed_tokens, counts.final_tokens) == (13, 0)
    scorer.extend([second])
    scorer.finish((0, 0))
    counts = scorer.counts
    assert (counts.streamed_tokens, counts.final_tokens) == (13, 2)
    assert (counts.finished, counts.cancelled, counts.waited) == (1, 0, 0)
    assert counts.device_calls == 2
    assert counts.computed_tokens == 1 * 16 + 1 * 4  # one row, the widths that fit
    assert counts.busy_seconds > 0
    assert scorer.num_live == 0


def test_chunks_of_one_call_are_read_together(scorer):
    completions = [make_completion(i, prompt_tokens=4, num_tokens=12) for i in range(2)]
    scorer.extend([cut(each, [12])[0] for each in completions])
    assert scorer.counts.device_calls == 1
    scores = scorer.finish_all([(0, 0), (1, 0)])
    assert [s.value for s in scores] == pytest.approx([_whole(c) for c in completions], abs=1e-5)
    assert scorer.counts.device_calls == 1


def test_more_completions_than_rows_wait_and_catch_up(scorer):
    completions = [make_completion(i, prompt_tokens=3 + i, num_tokens=20) for i in range(5)]
    pieces = [cut(each, [6, 6, 8]) for each in completions]
    scorer.extend([chunks[0] for chunks in pieces])
    scorer.extend([chunks[1] for chunks in pieces])
    assert scorer.counts.waited == 3
    assert scorer.counts.streamed_tokens == 3 + 4 + 4 * 6  # of the two that have a row
    assert scorer.finish((0, 0)).value == pytest.approx(_partial(completions[0], 12), abs=1e-5)
    scorer.extend([chunks[2] for chunks in pieces[1:]])  # number 2 has the free row now
    for number in (4, 2, 1, 3):  # 3 and 4 have ended without ever having had a row
        score = scorer.finish((number, 0))
        assert score.value == pytest.approx(_whole(completions[number]), abs=1e-5)
    assert scorer.num_live == 0


def _partial(completion, num_tokens) -> float:
    return _whole(dataclasses.replace(completion, token_ids=completion.token_ids[:num_tokens]))


def test_a_cancelled_completion_frees_its_row(scorer):
    completions = [make_completion(i, prompt_tokens=4, num_tokens=4) for i in range(4)]
    chunks = [cut(each, [2, 2]) for each in completions]
    scorer.extend([pair[0] for pair in chunks])
    scorer.cancel((0, 0))
    scorer.cancel((9, 9))  # never heard of
    scorer.extend([dataclasses.replace(chunks[3][1], stop_reason=StopReason.CANCELLED)])
    assert scorer.counts.streamed_tokens == 3 * 6  # number 2 came into the row of number 0
    scorer.extend([chunks[1][1], chunks[2][1]])
    assert scorer.counts.cancelled == 2
    with pytest.raises(ValueError, match=r"completion \(0, 0\) is not being read"):
        scorer.finish((0, 0))
    scores = scorer.finish_all([(1, 0), (2, 0)])
    assert [s.value for s in scores] == pytest.approx(
        [_whole(c) for c in completions[1:3]], abs=1e-5
    )


def test_chunks_must_join_on(scorer):
    first, second, third = cut(make_completion(0, prompt_tokens=4, num_tokens=6), [2, 2, 2])
    with pytest.raises(ValueError, match="first chunk never came"):
        scorer.extend([second])
    scorer.extend([first])
    with pytest.raises(ValueError, match="starts at token 4, but 2 tokens are known"):
        scorer.extend([third])
    with pytest.raises(ValueError, match="starts at token 0, but 2 tokens"):
        scorer.extend([first])


def test_a_text_too_long_for_its_row_is_refused(scorer):
    completion = make_completion(0, prompt_tokens=21, num_tokens=20)
    with pytest.raises(ValueError, match=r"41 tokens with its prompt, a row of .* holds 40"):
        scorer.extend(cut(completion, [20]))


def test_the_cache_grows_with_the_texts_and_shrinks_again(scorer):
    model = _model()
    for first, second, size in ((10, 28, 40), (3, 2, 16)):
        completion = make_completion(0, prompt_tokens=2, num_tokens=first + second)
        for chunk in cut(completion, [first, second]):
            scorer.extend([chunk])
        assert model.num_cache_tokens == size
        assert scorer.finish((0, 0)).value == pytest.approx(_whole(completion), abs=1e-5)


def test_quantities_per_token_cover_the_completion(scorer):
    config = body_config(TINY)
    readout = logprobs_readout(config, temperature=0.8, logprob_chunk_tokens=64)
    model = StreamedModel(
        config, reward_params(), readout=readout, shape=SHAPE, mesh=scoring_mesh()
    )
    completion = make_completion(0, prompt_tokens=5, num_tokens=23)
    results = []
    for sizes in ([23], [4, 10, 9]):
        texts = StreamedTexts(model, per_token=True)
        for chunk in cut(completion, sizes):
            texts.extend([chunk])
        results.append(texts.finish((0, 0)))
    assert results[0].shape == (23,)
    assert (results[0] < 0).all()
    np.testing.assert_allclose(*results, atol=1e-5)


def test_threads_take_turns(scorer):
    completions = [make_completion(i, prompt_tokens=4, num_tokens=8) for i in range(4)]
    scores = {}

    def stream(completion):
        for chunk in cut(completion, [3, 3, 2]):
            scorer.extend([chunk])
        key = (completion.prompt.prompt_id, 0)
        scores[key] = scorer.finish(key).value

    threads = [threading.Thread(target=stream, args=(each,)) for each in completions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, completion in enumerate(completions):
        assert scores[number, 0] == pytest.approx(_whole(completion), abs=1e-5)


def test_many_that_ended_without_a_row_share_what_the_first_give_up(scorer):
    completions = [make_completion(i, prompt_tokens=4, num_tokens=8) for i in range(6)]
    scorer.extend([cut(each, [8])[0] for each in completions])
    calls = scorer.counts.device_calls
    scores = scorer.finish_all([(i, 0) for i in range(6)])
    assert [s.value for s in scores] == pytest.approx([_whole(c) for c in completions], abs=1e-5)
    assert scorer.counts.device_calls == calls + 2  # two rows: two at a time
    assert scorer.num_live == 0
