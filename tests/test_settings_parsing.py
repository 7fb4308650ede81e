"""Reading a config: unknown and missing keys, types, choices, and the way back."""

import json
import math

import pytest
from ml_collections import ConfigDict

from configs import base
from pipeline_rl_jax.settings import SettingsError
from pipeline_rl_jax.settings_parsing import (
    format_settings,
    parse_settings,
    setting_paths,
    settings_to_dict,
    unknown_key_problem,
)


@pytest.fixture
def config() -> ConfigDict:
    config = base.get_config()
    config.model.source = "smollm2-135m"
    return config


def problems_of(config) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(config)
    return caught.value.problems


def test_base_config_has_exactly_the_settings(config):
    settings = parse_settings(config)
    assert settings.trainer.batch_rollouts == 1024
    assert settings.meshes.trainer.fsdp == -1
    assert settings.data.arithmetic.operations == "+"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("trainer.learnin_rate", "trainer.learning_rate"),
        ("trainer.learning_rte", "trainer.learning_rate"),
        ("trainer.max_lag", "schedule.max_lag"),  # right name, wrong section
        ("learning_rate", "trainer.learning_rate"),  # right name, no section
        ("generation.max_new_token", "generation.max_new_tokens"),
        ("meshes.trainer_device", "meshes.trainer_devices"),
        ("traner.learning_rate", "trainer.learning_rate"),
    ],
)
def test_unknown_key_says_what_was_meant(path, meant):
    assert unknown_key_problem(path) == f"{path} is not a setting; did you mean {meant}?"


def test_unlike_any_key_lists_the_section():
    problem = unknown_key_problem("publication.zzz")
    assert problem == "publication.zzz is not a setting; publication has every_steps"
    assert "the top level has seed, model" in unknown_key_problem("qqq")


def test_other_settings_have_other_keys():
    known = ("base.trainer.learning_rate", "base.seed", "seeds")
    meant = "base.trainer.learning_rate"
    problem = unknown_key_problem("base.trainer.learnin_rate", known)
    assert problem.endswith(f"did you mean {meant}?")
    assert unknown_key_problem("zzz", known).endswith("the top level has base, seeds")


def test_unknown_key_in_the_config(config):
    config.trainer.learnin_rate = 1.0
    assert problems_of(config) == (
        "trainer.learnin_rate is not a setting; did you mean trainer.learning_rate?",
    )


def test_missing_key_and_missing_section(config):
    del config.generation["slots"]
    del config["profile"]
    assert [problem.split(";")[0] for problem in problems_of(config)] == [
        "generation.slots is missing",
        "profile is missing",
    ]


def test_all_problems_are_told_at_once(config):
    config.trainer.nonsense_key = 1
    config.schedule.name = "pipelin"
    with config.ignore_type():
        config.generation.slots = "many"
    assert len(problems_of(config)) == 3


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("trainer", "batch_rollouts", 1e3, "must be a whole number, not float; use 1000"),
        ("trainer", "batch_rollouts", True, "must be a whole number, not bool"),
        ("trainer", "batch_rollouts", "8", "must be a whole number, not str"),
        ("trainer", "batch_rollouts", None, "must be a whole number, not NoneType"),
        ("trainer", "learning_rate", "1e-5", "must be a number, not str"),
        ("trainer", "learning_rate", True, "must be a number, not bool"),
        ("trainer", "learning_rate", math.nan, "trainer.learning_rate (nan) must be a number"),
        ("algorithm", "normalise_std", 1, "must be True or False, not int"),
        ("data", "path", 3, "must be a string, not int"),
        ("meshes", "trainer_devices", 0, "must be a list of whole numbers, for example (0,)"),
        ("meshes", "trainer_devices", (0, "1"), "meshes.trainer_devices[1] ('1') must be a whole"),
        ("generation", "stop_strings", "abc", "must be a list of strings, for example ('abc',)"),
        ("model", "remat", "ful", "must be one of none, full, dots; did you mean full?"),
        ("model", "remat", 7, "(7) must be one of none, full, dots"),
        ("data", "arithmetic", 3, "data.arithmetic (3) must be a section with operations, min"),
    ],
)
def test_wrong_type(config, section, key, value, words):
    values = config.to_dict()  # a ConfigDict itself refuses or converts some of these
    values[section][key] = value
    (problem,) = problems_of(values)
    assert words in problem
    assert problem.startswith(f"{section}.{key}")


def test_whole_number_for_a_float_and_list_for_a_tuple(config):
    with config.ignore_type():
        config.trainer.learning_rate = 1
        config.generation.prefill_buckets = [512, 1024]
    settings = parse_settings(config)
    assert settings.trainer.learning_rate == 1.0
    assert isinstance(settings.trainer.learning_rate, float)
    assert settings.generation.prefill_buckets == (512, 1024)


def test_values_go_to_json_and_back(config):
    config.algorithm.importance_clamp = math.inf
    config.data.template = "few_shot"
    config.data.few_shot_examples = ("1 + 1 ||| 2",)
    settings = parse_settings(config)
    text = json.dumps(settings_to_dict(settings), allow_nan=False)
    assert parse_settings(json.loads(text)) == settings


def test_settings_as_lines(config):
    lines = format_settings(parse_settings(config)).splitlines()
    assert len(lines) == len(setting_paths())
    assert lines[0] == "seed = 42"
    assert "trainer.learning_rate = 1e-06" in lines
    assert "meshes.trainer.fsdp = -1" in lines


def test_a_broken_constraint_is_told_once_types_are_right(config):
    config.trainer.batch_rollouts = 12
    assert problems_of(config) == (
        "trainer.batch_rollouts (12) must be a multiple of algorithm.group_size (8); use 8 or 16",
    )
