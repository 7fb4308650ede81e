import pytest

from pipeline_rl_jax.settings_algorithm import find_algorithm_problems
from tests.fakes.settings import make_algorithm_settings


def problems_of(updates_per_step=1, **changes) -> list[str]:
    return list(
        find_algorithm_problems(
            make_algorithm_settings(**changes),
            max_new_tokens=64,
            updates_per_step=updates_per_step,
        )
    )


DPO = {"loss": "dpo", "baseline": "none", "aggregation": "sequence_sum"}


# Each entry: changes, then the words that the only problem must hold.
PROBLEMS = {
    "group mean of one": (
        {"group_size": 1},
        "algorithm.baseline (group_mean) compares the rollouts of one prompt",
    ),
    "std of one": (
        {"group_size": 1, "baseline": "none", "normalise_std": True},
        "algorithm.normalise_std (True) needs more than one rollout",
    ),
    "equal rewards of one": (
        {"group_size": 1, "baseline": "value", "zero_variance": "refill"},
        "algorithm.zero_variance (refill) looks for groups of equal rewards",
    ),
    "scaled values": (
        {"baseline": "value", "batch_normalise": True},
        "algorithm.batch_normalise (True) scales advantages before the step, but with "
        "algorithm.baseline (value)",
    ),
    "constant missing": ({"aggregation": "constant"}, "for example generation.max_new_tokens (64)"),
    "constant unused": ({"aggregation_constant": 3.0}, "is only used when algorithm.aggregation"),
    "ratio twice": (
        {"loss": "ppo", "is_correction": "truncated"},
        "algorithm.is_correction (truncated) weighs tokens by current / behaviour, which "
        "algorithm.loss (ppo) already holds with algorithm.ratio_anchor (behaviour): the ratio "
        "would count twice; use ratio_anchor=current",
    ),
    "ceiling below one": (
        {"ratio_anchor": "current", "is_correction": "truncated", "is_highest": 0.9},
        "algorithm.is_highest (0.9) must be 1 or more",
    ),
    "range above one": (
        {"is_correction": "masked", "is_lowest": 1.5},
        "algorithm.is_lowest (1.5) must be at most 1",
    ),
    "clip without values per token": (
        {"value_clip": 0.2},
        "algorithm.value_clip (0.2) needs values per token, which algorithm.baseline (group_mean)",
    ),
    "bootstrap without a critic": (
        {"truncated": "bootstrap"},
        "algorithm.truncated (bootstrap) needs values per token",
    ),
    "critic without gae": (
        {"critic": "model", "baseline": "value"},
        "algorithm.critic (model) needs values per token, which algorithm.baseline (value)",
    ),
    "source of a head": (
        {"baseline": "gae", "critic_source": "some/model"},
        "algorithm.critic_source (some/model) is of a critic with weights of its own; set "
        "algorithm.critic=model",
    ),
    "scaled gae": (
        {"baseline": "gae", "normalise_std": True},
        "algorithm.normalise_std (True) scales advantages before the step, but with "
        "algorithm.baseline (gae)",
    ),
    "control of nothing": (
        {"baseline": "gae", "kl_control": "adaptive", "kl_coefficient": 0.1},
        "algorithm.kl_control (adaptive) steers the KL in the reward of each token",
    ),
    "ratio held at one": (
        {"updates_per_step": 4, "ratio_anchor": "current"},
        "trainer.epochs * trainer.minibatches (4) update the weights more than once",
    ),
    "baseline made anew": (
        {"updates_per_step": 2, "baseline": "value"},
        "must be 1 with algorithm.baseline (value)",
    ),
    "pairs weighed once": (
        {"updates_per_step": 2, **DPO},
        "must be 1 with algorithm.loss (dpo)",
    ),
    "baseline of pairs": (
        DPO | {"baseline": "group_mean"},
        "algorithm.baseline (group_mean) has no meaning with algorithm.loss (dpo)",
    ),
    "pair of one": (
        DPO | {"group_size": 1},
        "algorithm.group_size (1) must be 2 or more with algorithm.loss (dpo)",
    ),
    "reference without use": (
        {"reference": "some/model"},
        "algorithm.reference (some/model) is only read when algorithm.kl_coefficient",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem_is_told_alone_and_whole(name):
    changes, words = PROBLEMS[name]
    (problem,) = problems_of(**changes)
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"baseline": "value", "group_size": 1},
        {"is_correction": "masked"},
        {"ratio_anchor": "current", "is_correction": "masked"},
        {"ratio_anchor": "current", "is_lowest": 2.0, "is_correction": "truncated"},
        {"kl_coefficient": 0.1, "reference": "some/model", "kl_in": "reward"},
    ],
)
def test_what_goes_together(changes):
    assert problems_of(**changes) == []


@pytest.mark.parametrize(
    "changes",
    [
        DPO | {"reference": "some/model"},
        {"baseline": "gae", "critic": "model", "critic_source": "some/model", "loss": "ppo"},
        {"baseline": "gae", "batch_normalise": True, "truncated": "bootstrap", "group_size": 1},
        {
            "baseline": "gae",
            "kl_control": "adaptive",
            "kl_in": "reward",
            "kl_coefficient": 0.1,
            "updates_per_step": 8,
        },
    ],
)
def test_what_belongs_together_is_accepted(changes):
    assert problems_of(**changes) == []
