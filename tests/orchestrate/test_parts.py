"""What settings and model demand of each other."""

import types

import jax
import pytest

from pipeline_rl_jax.meshes import build_meshes
from pipeline_rl_jax.orchestrate.parts import check_fit
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY


def tokenizer_of(num_tokens: int, *ends: int):
    return types.SimpleNamespace(vocabulary_size=num_tokens, eos_token_ids=ends or (1,))


FITTING = tokenizer_of(TINY.vocabulary_size)


def fit(tokenizer=FITTING, **generation):
    settings = make_settings(generation={"max_prompt_tokens": 32, **generation})
    check_fit(settings, TINY, build_meshes(settings.meshes, jax.devices()), tokenizer=tokenizer)


def test_what_fits_passes():
    fit()


def test_prompts_must_leave_room_in_the_context():
    with pytest.raises(ValueError, match=r"generation.max_prompt_tokens \(256\).*context of 256"):
        fit(max_prompt_tokens=256)


def test_a_foreign_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"model.tokenizer knows 265 tokens, the model 264"):
        fit(tokenizer_of(265))


def test_an_end_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"eos_token_id \(264\) .* beyond the model's 264 tokens"):
        fit(tokenizer_of(264, 1, 264))
