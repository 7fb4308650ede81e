"""Reward model, streaming and devices: what does nothing, or is missing, is told in one line."""

import dataclasses

import pytest

from pipeline_rl_jax.settings_checks import find_problems
from tests.fakes.settings import make_settings

SOURCE = {"source": "a/reward/model"}
CASES = {
    "nothing to learn from": (
        {"rewards": {"correctness": "none"}},
        "rewards.correctness (none) leaves nothing to learn from without a reward model",
    ),
    "a weight of nothing": (
        {"rewards": {"correctness": "none"}, "reward_model": {**SOURCE, "weight": 0.0}},
        "reward_model.weight (0.0) leaves nothing to learn from when rewards.correctness is none",
    ),
    "devices without a model": (
        {"meshes": {"scoring_devices": (1,)}},
        "meshes.scoring_devices (1,) are only used by a reward model; set reward_model.source",
    ),
    "devices of the trainer": (
        {"meshes": {"scoring_devices": (1, 0)}, "reward_model": SOURCE},
        "meshes.scoring_devices (1, 0) shares [0] with the trainer or with generation",
    ),
    "a device twice": (
        {"meshes": {"scoring_devices": (1, 1)}, "reward_model": SOURCE},
        "meshes.scoring_devices (1, 1) must name each device once; use (1,)",
    ),
    "widths": (
        {"reward_model": {"chunk_widths": (128, 32, 0)}},
        "reward_model.chunk_widths (128, 32, 0) must ascend from 1 or more; use (32, 128)",
    ),
    "no width": (
        {"reward_model": {"chunk_widths": ()}},
        "reward_model.chunk_widths () must ascend from 1 or more; use (32, 128, 512)",
    ),
    "rows": ({"reward_model": {"rows": 0}}, "reward_model.rows (0) must be at least 1"),
    "a reference that nothing asks for": (
        {"algorithm": {"reference_streaming": True}},
        "algorithm.reference_streaming (True) streams a reference that nothing asks for",
    ),
    "offloaded nobody": (
        {"meshes": {"offloaded": ("referee",)}},
        "meshes.offloaded ('referee') must be some of reference, reward_model",
    ),
    "offloaded without use": (
        {"meshes": {"offloaded": ("reference",)}},
        "meshes.offloaded ('reference') names a model that this run does not have",
    ),
    "offloaded while it reads": (
        {"meshes": {"offloaded": ("reward_model",)}, "reward_model": SOURCE},
        "meshes.offloaded ('reward_model') cannot leave its devices while it reads along; set "
        "reward_model.streaming=False",
    ),
    "a prompt needs an answer": (
        {"data": {"source": "files", "path": "x", "format": "mapped", "problem_field": "prompt"}},
        "data.answer_field ('') must name a field when data.format is mapped",
    ),
}


@pytest.mark.parametrize(("changes", "line"), CASES.values(), ids=CASES)
def test_a_problem_is_one_line_and_alone(changes, line):
    (problem,) = find_problems(make_settings(**changes))
    assert problem.startswith(line)


def test_what_makes_sense_passes():
    settings = make_settings(
        reward_model=SOURCE,
        rewards={"correctness": "none"},
        meshes={"scoring_devices": (1, 2), "reference_devices": (2,)},
        algorithm={"kl_coefficient": 0.1, "reference_streaming": True},
        data={"source": "files", "path": "x", "format": "mapped", "problem_field": "prompt"},
    )
    assert find_problems(settings) == []
    unused = dataclasses.replace(settings.reward_model, streaming=False)
    assert find_problems(dataclasses.replace(settings, reward_model=unused)) == []
