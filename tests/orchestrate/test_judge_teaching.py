import itertools

import numpy as np
import pytest

from pipeline_rl_jax.data.character_tokenizer import write_character_tokenizer
from pipeline_rl_jax.data.tokenizer import load_tokenizer
from pipeline_rl_jax.data.worked_sums import ALPHABET
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.models.hf_reward import has_score_head, read_reward_config
from pipeline_rl_jax.models.loading import random_params
from pipeline_rl_jax.orchestrate.judge_teaching import judged_pairs, write_taught_judge
from pipeline_rl_jax.orchestrate.teaching import CONFIG


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A `worked-sums` that was taught nothing."""
    directory = tmp_path_factory.mktemp("start")
    params = random_params(CONFIG, seed=0, dtype="float32")
    save_params(params, CONFIG, directory=directory, weight_format=WeightFormat(dtype="float32"))
    write_character_tokenizer(directory, ALPHABET)
    return directory


def test_the_chosen_text_goes_to_the_end_and_the_other_one_stops_before(start):
    tokenizer = load_tokenizer(start)
    pairs = list(itertools.islice(judged_pairs(tokenizer), 50))
    for pair in pairs:
        chosen, rejected = (tokenizer.decode(text[:-1].tolist()) for text in pair)
        assert chosen.split("\n")[-1].startswith("0+")
        assert not rejected.split("\n")[-1].startswith("0+")
        assert chosen.startswith(rejected)
        assert {int(text[-1]) for text in pair} <= set(tokenizer.eos_token_ids)
        assert pair.num_tokens <= 128
    again = itertools.islice(judged_pairs(tokenizer), 50)
    for pair, other in zip(pairs, again, strict=True):
        np.testing.assert_array_equal(pair.chosen, other.chosen)
    (other,) = itertools.islice(judged_pairs(tokenizer, label="held out"), 1)
    assert not np.array_equal(other.chosen, pairs[0].chosen)


def test_it_is_a_reward_model_with_the_actors_tokenizer(start, tmp_path):
    write_taught_judge(tmp_path / "judge", start=start, num_steps=1)
    assert has_score_head(tmp_path / "judge")
    assert read_reward_config(tmp_path / "judge") == read_reward_config(start)
    ours, actors = (
        load_tokenizer(path).encode("What is 3 + 12?") for path in (tmp_path / "judge", start)
    )
    np.testing.assert_array_equal(ours, actors)
