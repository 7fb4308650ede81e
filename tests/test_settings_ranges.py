"""Every number has a range, and the range is held."""

import dataclasses
import math
import operator

import pytest

from pipeline_rl_jax import settings_ranges
from pipeline_rl_jax.settings_parsing import setting_paths
from pipeline_rl_jax.settings_ranges import find_range_problems
from tests.fakes.settings import make_settings

# Numbers of any sign, and those whose range `settings_checks.py` or a rule of its own holds.
_FREE = {
    "meshes.trainer.data",
    "meshes.trainer.fsdp",
    "meshes.trainer.tensor",
    "meshes.generation.data",
    "meshes.generation.tensor",
    "data.arithmetic.min_operand",
    "data.arithmetic.max_operand",
    "rewards.correctness_weight",
    "rewards.format_weight",
    "rewards.overlong_weight",
    "algorithm.truncated_reward",
}
_OWN_RULE = {
    "schedule.overcommit.start_groups",
    "schedule.overcommit.max_groups",
    "generation.top_p",
    "trainer.beta1",
    "trainer.beta2",
    "algorithm.gae_gamma",
    "algorithm.gae_lambda",
    "algorithm.dual_clip",
}


def change(path: str, value: float):
    section, key = path.rsplit(".", 1)
    settings = make_settings()
    if "." not in section:
        return make_settings(**{section: {key: value}})
    outer, inner = section.split(".")
    nested = dataclasses.replace(operator.attrgetter(section)(settings), **{key: value})
    return make_settings(**{outer: {inner: nested}})


def test_defaults_are_in_range():
    assert list(find_range_problems(make_settings())) == []


def test_every_number_has_a_range():
    settings = make_settings()
    numbers = {
        path
        for path in setting_paths()
        if type(operator.attrgetter(path)(settings)) in (int, float)
    }
    ranged = {
        *settings_ranges._AT_LEAST_ONE,
        *settings_ranges._AT_LEAST_ZERO,
        *settings_ranges._ABOVE_ZERO,
    }
    assert numbers - ranged - _FREE - _OWN_RULE == set()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("generation.slots", 0, "generation.slots (0) must be at least 1"),
        ("trainer.batch_rollouts", -8, "trainer.batch_rollouts (-8) must be at least 1"),
        ("data.arithmetic.num_records", 0, "data.arithmetic.num_records (0) must be at least 1"),
        ("schedule.max_lag", -1, "schedule.max_lag (-1) must be 0 or more"),
        ("trainer.learning_rate", -1e-6, "trainer.learning_rate (-1e-06) must be 0 or more"),
        ("algorithm.importance_clamp", 0.0, "algorithm.importance_clamp (0.0) must be more than 0"),
        ("trainer.beta1", 1.0, "trainer.beta1 (1.0) must be at least 0 and below 1"),
        ("generation.top_p", 0.0, "generation.top_p (0.0) must be above 0 and at most 1 (off)"),
        ("generation.top_p", 1.1, "generation.top_p (1.1) must be above 0 and at most 1 (off)"),
        ("algorithm.dual_clip", 0.5, "algorithm.dual_clip (0.5) must be above 1, or 0 for off"),
    ],
)
def test_out_of_range(path, value, problem):
    assert list(find_range_problems(change(path, value))) == [problem]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schedule.max_lag", 0),
        ("algorithm.importance_clamp", math.inf),
        ("algorithm.dual_clip", 3.0),
        ("generation.top_p", 0.01),
        ("trainer.beta1", 0.0),
    ],
)
def test_edges_that_are_allowed(path, value):
    assert list(find_range_problems(change(path, value))) == []


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "path", ["trainer.learning_rate", "rewards.correctness_weight", "schedule.deadline_seconds"]
)
def test_numbers_are_finite(path, value):
    assert list(find_range_problems(change(path, value))) == [
        f"{path} ({value}) must be a finite number"
    ]


@pytest.mark.parametrize(
    ("path", "value", "most"),
    [
        ("meshes.virtual_devices", 513, 512),
        ("rewards.num_workers", 1025, 1024),
        ("generation.top_k", 2**31, 2**31 - 1),
        ("data.arithmetic.num_records", 10**11, 2**31 - 1),
        ("schedule.max_lag", 10**20, 2**31 - 1),
    ],
)
def test_too_large(path, value, most):
    assert list(find_range_problems(change(path, value))) == [
        f"{path} ({value}) must be at most {most}"
    ]


def test_seed_fits_every_generator():
    settings = dataclasses.replace(make_settings(), seed=2**32)
    assert list(find_range_problems(settings)) == ["seed (4294967296) must be at most 4294967295"]
