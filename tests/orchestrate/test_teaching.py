import dataclasses
import itertools

import numpy as np
import pytest

from pipeline_rl_jax.data.character_tokenizer import write_character_tokenizer
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.data.worked_sums import ALPHABET
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.loading import resolve_source
from pipeline_rl_jax.orchestrate import teaching
from pipeline_rl_jax.orchestrate.teaching import CONFIG, lesson_rows, teach, write_taught_model

TINY = dataclasses.replace(
    CONFIG, width=16, mlp_width=32, num_layers=1, num_query_heads=1, num_kv_heads=1, head_width=16
)


@pytest.fixture
def tokenizer(tmp_path):
    write_character_tokenizer(tmp_path, ALPHABET)
    return load_tokenizer(tmp_path)


def test_rows_hold_whole_lessons_and_teach_their_completions(tokenizer):
    rows = next(lesson_rows(tokenizer))
    for ids, segments, positions, mask in zip(*rows, strict=True):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            text = tokenizer.decode(ids[here], skip_special_tokens=False)
            assert text.startswith("What is ")
            assert text.endswith("<eos>")
            assert positions[here].tolist() == list(range(here.sum()))
            taught = tokenizer.decode(ids[here & mask], skip_special_tokens=False)
            assert text.split("?\n")[1] == taught
        assert not mask[segments == 0].any()


def test_the_longest_lesson_fits_a_row(tokenizer):
    longest = dataclasses.replace(teaching.LESSONS, min_operand=32, first_operand_tail=0.0)
    text = teaching.worked_sum(longest, "0", slip_share=0.0)
    num_tokens = len(tokenizer.encode(text.prompt + text.completion)) + 1
    assert num_tokens <= teaching._TOKENS_PER_ROW


def test_teaching_lowers_the_loss_below_that_of_guessing(tokenizer):
    lessons = itertools.islice(lesson_rows(tokenizer), 40)
    _, losses = teach(TINY, lessons, num_steps=40)
    assert losses[0] == pytest.approx(np.log(TINY.vocabulary_size), abs=0.3)
    assert losses[-1] < 0.9 * losses[0]


def test_the_directory_is_one_that_training_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(teaching, "CONFIG", TINY)
    directory = tmp_path / "model"
    directory.mkdir()
    write_taught_model(directory, num_steps=2)
    assert resolve_source(str(directory)) == directory
    assert read_config(directory) == TINY
    assert load_tokenizer(directory).vocabulary_size == TINY.vocabulary_size
