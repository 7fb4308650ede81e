import dataclasses
import itertools
import json
import logging

import grain
import pytest

from pipeline_rl_jax.data import stream as stream_module
from pipeline_rl_jax.data.problems import Problem
from pipeline_rl_jax.data.prompts import PromptWriter
from pipeline_rl_jax.data.stream import (
    EVALUATION_ID_OFFSET,
    PromptStream,
    build_evaluation_prompts,
    build_prompt_stream,
)
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.settings import ArithmeticSettings
from tests.fakes.settings import make_settings
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

LIMIT = 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("model")))


def make_stream(tokenizer, texts, *, seed=0, fingerprint="", **data):
    data = {"prompt_format": "{problem}", "num_epochs": 3, **data}
    settings = make_settings(data=data, generation={"max_prompt_tokens": LIMIT})
    problems = [Problem(problem=text, answer="1") for text in texts]
    return PromptStream(
        problems,
        PromptWriter(settings, tokenizer),
        data=settings.data,
        seed=seed,
        fingerprint=fingerprint,
    )


def drain(stream):
    return [(prompt.prompt_id, prompt.text) for prompt in stream]


def test_every_epoch_holds_every_record_once_in_another_order(tokenizer):
    drawn = drain(make_stream(tokenizer, "abcdefgh"))
    epochs = [drawn[start : start + 8] for start in (0, 8, 16)]
    assert len(drawn) == 24
    for number, epoch in enumerate(epochs):
        assert sorted(text for _, text in epoch) == list("abcdefgh")
        assert all(prompt_id == number * 8 + "abcdefgh".index(text) for prompt_id, text in epoch)
    orders = ["".join(text for _, text in epoch) for epoch in epochs]
    assert len({*orders, "abcdefgh"}) == 4


def test_order_depends_on_the_seed_and_can_be_switched_off(tokenizer):
    first = drain(make_stream(tokenizer, "abcdefgh", seed=1))
    assert drain(make_stream(tokenizer, "abcdefgh", seed=1)) == first
    # An epoch of one seed is no epoch of the next seed either.
    second = drain(make_stream(tokenizer, "abcdefgh", seed=2))
    assert [text for _, text in first[8:16]] != [text for _, text in second[:8]]
    plain = drain(make_stream(tokenizer, "abc", shuffle=False, num_epochs=2))
    assert [text for _, text in plain] == list("abcabc")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "texts", [list("abcde"), ["a", "too long a text", "b", "another long text", "c", "d"]]
)
def test_from_every_position_exactly_the_unconsumed_prompts_follow(tokenizer, texts, shuffle):
    stream = make_stream(tokenizer, texts, shuffle=shuffle, too_long="drop")
    states, drawn = [stream.get_state()], []
    for prompt in stream:
        drawn.append((prompt.prompt_id, prompt.text))
        states.append(stream.get_state())
    dropped_at_end = stream.num_dropped
    assert len(drawn) == 3 * sum(len(text) <= LIMIT for text in texts)
    for position, state in enumerate(states):
        resumed = make_stream(tokenizer, texts, shuffle=shuffle, too_long="drop")
        resumed.set_state(json.loads(json.dumps(state)))
        assert drain(resumed) == drawn[position:]
        assert resumed.num_dropped == dropped_at_end


def test_a_used_stream_can_go_back(tokenizer):
    stream = make_stream(tokenizer, "abcde")
    next(stream)
    state = stream.get_state()
    rest = drain(stream)
    stream.set_state(state)
    assert drain(stream) == rest


def test_the_end_stays_the_end(tokenizer):
    stream = make_stream(tokenizer, "a", num_epochs=1)
    next(stream)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def test_zero_epochs_means_no_end(tokenizer):
    stream = make_stream(tokenizer, "ab", num_epochs=0)
    ids = [prompt.prompt_id for prompt in itertools.islice(stream, 100)]
    assert sorted(ids) == list(range(100))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"texts": "abcd"}, "num_records was 3, now 4"),
        ({"shuffle": False}, "shuffle was True, now False"),
        ({"fingerprint": "other"}, "fingerprint was"),
    ],
)
def test_a_position_in_other_data_is_refused(tokenizer, changes, name):
    state = make_stream(tokenizer, "abc").get_state()
    with pytest.raises(ValueError, match=f"saved data position is of other data: {name}"):
        make_stream(tokenizer, **{"texts": "abc", **changes}).set_state(state)


def test_too_long_is_an_error_or_a_counted_drop(tokenizer):
    texts = ["a", "much too long", "b"]
    with pytest.raises(ValueError, match=r"less than the 13 tokens of the prompt 'much too long'"):
        drain(make_stream(tokenizer, texts))
    stream = make_stream(tokenizer, texts, too_long="drop")
    drawn = drain(stream)
    assert sorted(prompt_id for prompt_id, _ in drawn) == [0, 2, 3, 5, 6, 8]
    assert stream.num_dropped == 3


@pytest.mark.parametrize("num_records", [1, 2, 7])
def test_when_none_fits_an_endless_stream_ends_with_an_error(tokenizer, num_records):
    stream = make_stream(tokenizer, ["much too long"] * num_records, num_epochs=0, too_long="drop")
    with pytest.raises(ValueError, match="less than every one of"):
        next(stream)


def test_one_that_fits_is_found_however_far_apart(tokenizer):
    texts = ["a", *["much too long"] * 3]
    for seed in range(20):
        stream = make_stream(tokenizer, texts, seed=seed, num_epochs=0, too_long="drop")
        assert [next(stream).prompt_id for _ in range(4)] == [0, 4, 8, 12]


def test_training_ids_end_before_evaluation_ids(tokenizer, monkeypatch):
    monkeypatch.setattr(stream_module, "EVALUATION_ID_OFFSET", 4)
    stream = make_stream(tokenizer, "ab", num_epochs=0)
    assert sorted(next(stream).prompt_id for _ in range(4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="beyond prompt id 4"):
        next(stream)


def test_the_position_is_a_grain_iterator_state(tokenizer):
    stream = make_stream(tokenizer, "abc")
    next(stream)
    assert stream.get_state()["iterator"] == {"next_index": 1}
    assert isinstance(stream._positions, grain.DatasetIterator)


def make_arithmetic_settings(max_prompt_tokens=1024, **data):
    task = ArithmeticSettings(
        operations="+",
        min_operand=0,
        max_operand=99,
        num_operands=2,
        first_operand_tail=0.0,
        num_records=200,
    )
    return make_settings(
        data={"arithmetic": task, **data},
        generation={"max_prompt_tokens": max_prompt_tokens},
        evaluation={"num_prompts": 20},
    )


def test_built_streams_and_evaluation_prompts_do_not_meet(tokenizer):
    settings = make_arithmetic_settings(num_epochs=1)
    training = list(build_prompt_stream(settings, tokenizer))
    evaluation = build_evaluation_prompts(settings, tokenizer)
    assert len(training) == 200
    assert [prompt.prompt_id for prompt in evaluation] == [
        EVALUATION_ID_OFFSET + place for place in range(20)
    ]
    assert not {prompt.text for prompt in training} & {prompt.text for prompt in evaluation}
    assert training[0].text.startswith("Question: What is ")
    assert EVALUATION_ID_OFFSET + 10**6 < 2**31


def test_evaluation_does_not_change_with_the_seed(tokenizer):
    settings = make_arithmetic_settings()
    other = dataclasses.replace(settings, seed=settings.seed + 1)
    first, second = (build_evaluation_prompts(each, tokenizer) for each in (settings, other))
    assert [prompt.text for prompt in first] == [prompt.text for prompt in second]


def test_building_fails_at_once_when_prompts_are_too_long(tokenizer):
    with pytest.raises(ValueError, match=r"generation\.max_prompt_tokens \(9\) is less than the"):
        build_prompt_stream(make_arithmetic_settings(9), tokenizer)
    with pytest.raises(ValueError, match="less than every one of 200 prompts"):
        build_prompt_stream(make_arithmetic_settings(9, too_long="drop"), tokenizer)
    with pytest.raises(ValueError, match="less than every one of 20 prompts"):
        build_evaluation_prompts(make_arithmetic_settings(9, too_long="drop"), tokenizer)


def test_the_last_record_of_a_file_is_checked_too(tokenizer, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    texts = [*(f"p{number}" for number in range(400)), "x" * 50]
    path.write_text("\n".join(json.dumps({"problem": t, "answer": "1"}) for t in texts))

    def build(too_long):
        settings = make_settings(
            data={
                "source": "files",
                "path": str(path),
                "prompt_format": "{problem}",
                "too_long": too_long,
            },
            generation={"max_prompt_tokens": 10},
            evaluation={"num_prompts": 1},
        )
        return build_prompt_stream(settings, tokenizer)

    with pytest.raises(ValueError, match="the 50 tokens of the prompt"):
        build("error")
    with caplog.at_level(logging.WARNING):
        build("drop")
    assert "1 of 400 prompts are too long" in caplog.text


def test_the_log_says_that_training_sees_the_evaluation_problems(tokenizer, caplog):
    task = ArithmeticSettings(
        operations="+",
        min_operand=0,
        max_operand=9,
        num_operands=2,
        first_operand_tail=0.0,
        num_records=10,
    )
    settings = make_settings(data={"arithmetic": task}, evaluation={"num_prompts": 100})
    with caplog.at_level(logging.WARNING):
        assert len(build_evaluation_prompts(settings, tokenizer)) == 100
    assert "only 100 distinct problems, so training sees these too" in caplog.text
