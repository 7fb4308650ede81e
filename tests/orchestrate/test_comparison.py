import math

import pytest
from ml_collections import ConfigDict

from configs import base, compare_schedules
from pipeline_rl_jax.orchestrate.comparison import (
    changed_settings,
    parse_comparison,
    select_rows,
)
from pipeline_rl_jax.settings import SettingsError


def make_config(**changes) -> ConfigDict:
    config = base.get_config()
    config.model.source = "smollm2-135m"
    config.trainer.batch_rollouts = 16
    values = {
        "base": config,
        "rows": {"plain": {}, "eager": {"schedule": {"max_lag": 3}}},
        "seeds": (1, 2),
        "budget": {"samples": 160, "seconds": 0.0},
        "warmup_steps": 2,
    }
    return ConfigDict({**values, **changes})


def problems_of(**changes) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        parse_comparison(make_config(**changes))
    return error.value.problems


def test_every_row_runs_with_every_seed_and_the_same_samples():
    comparison = parse_comparison(make_config())
    assert [run.name for run in comparison.runs] == [
        "eager/seed_1",
        "eager/seed_2",
        "plain/seed_1",
        "plain/seed_2",
    ]
    assert [run.settings.seed for run in comparison.runs] == [1, 2, 1, 2]
    assert [run.settings.schedule.max_lag for run in comparison.runs] == [3, 3, 8, 8]
    assert {run.settings.schedule.num_steps for run in comparison.runs} == {10}


def test_what_sets_rows_apart():
    eager, plain = parse_comparison(make_config(seeds=(1,))).runs
    assert changed_settings(plain, [eager]) == {"schedule.max_lag": 8}
    assert changed_settings(eager, [plain]) == {"schedule.max_lag": 3}


def test_rows_are_chosen_by_name():
    comparison = parse_comparison(make_config())
    assert [run.row for run in select_rows(comparison, ["eager"])] == ["eager", "eager"]
    assert len(select_rows(comparison, [])) == 4
    with pytest.raises(SettingsError, match=r"--rows \(eagre\) .* did you mean eager\?"):
        select_rows(comparison, ["eagre"])


def test_a_mistake_of_a_row_names_it():
    (problem,) = problems_of(rows={"plain": {}, "odd": {"schedule": {"max_lagg": 3}}})
    assert problem.startswith("rows.odd: schedule.max_lagg is not a setting; did you mean")


def test_a_mistake_of_the_base_is_told_once():
    config = make_config()
    config.base.trainer.batch_rollouts = 12
    with pytest.raises(SettingsError) as error:
        parse_comparison(config)
    (problem,) = error.value.problems
    assert problem.startswith("rows.eager: trainer.batch_rollouts (12) must be a multiple")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"budget": {"samples": 100, "seconds": 0.0}}, "budget.samples (100) must be a multiple"),
        ({"budget": {"samples": 32, "seconds": 0.0}}, "budget.samples (32) are 2 steps"),
        ({"budget": {"samples": 0, "seconds": 0.0}}, "budget.samples (0) must be a whole number"),
        ({"budget": {"samples": 160, "seconds": -1.0}}, "budget.seconds (-1.0) must be"),
        ({"budget": {"samples": 160, "seconds": math.nan}}, "budget.seconds (nan) must be"),
        ({"budget": {"samples": 160}}, "budget ({'samples': 160}) must have the keys"),
        ({"rows": {}}, "rows must name at least one row"),
        ({"rows": {"a b": {}}}, "rows.a b must be named with letters"),
        ({"rows": {"a": 1}}, "rows.a (1) must be a section of settings"),
        ({"seeds": ()}, "seeds (()) must hold distinct whole numbers"),
        ({"seeds": (1, 1)}, "seeds ((1, 1)) must hold distinct whole numbers"),
        ({"warmup_steps": -1}, "warmup_steps (-1) must be a whole number"),
        ({"extra": 1}, "a comparison's config has the keys"),
    ],
)
def test_mistakes_are_one_line(changes, problem):
    (found,) = problems_of(**changes)
    assert found.removeprefix("rows.eager: ").startswith(problem)
    assert "\n" not in found


def test_the_shipped_comparison_fits_its_rows():
    comparison = parse_comparison(compare_schedules.get_config())
    assert len(comparison.rows) == 6
    for run in comparison.runs:
        schedule = run.settings.schedule
        assert schedule.num_steps % schedule.optimizer_steps_per_round == 0
        assert comparison.warmup_steps % schedule.optimizer_steps_per_round == 0
