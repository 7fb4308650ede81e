import json

import pytest

from pipeline_rl_jax.evaluation import comparison_plots
from pipeline_rl_jax.orchestrate.comparison import Comparison, Run
from pipeline_rl_jax.orchestrate.comparison_report import write_report
from pipeline_rl_jax.orchestrate.comparison_runs import prepare_directory
from tests.fakes.settings import make_settings

SETTINGS = make_settings()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They are drawn in a test of their own; here is what is written without matplotlib."""
    monkeypatch.setattr(comparison_plots.importlib.util, "find_spec", lambda name: None)


def make_comparison(*names: str, seeds=(1,)) -> Comparison:
    runs = [Run(row=name, seed=seed, settings=SETTINGS) for name in names for seed in seeds]
    return Comparison(runs=runs, max_seconds=0.0, warmup_steps=1)


def finish(run: Run, workdir, *, step_seconds: float, exit_code: int = 0, last_lines=()):
    """A run of four steps of 10 rollouts, rewards 0.1 to 0.4."""
    directory = workdir / run.name
    prepare_directory(run, directory)
    rows = [
        {
            "step": step,
            "run/samples": 10 * step,
            "run/train_seconds": step_seconds * step,
            "trainer/step_seconds": step_seconds,
            "batch/rollouts": 10,
            "reward/mean": step / 10,
        }
        for step in range(1, 5)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = {"exit_code": exit_code, "over_budget": False, "last_lines": list(last_lines)}
    (directory / "outcome.json").write_text(json.dumps(outcome))


def test_the_table_has_a_row_for_every_complete_row(tmp_path):
    comparison = make_comparison("slow", "fast")
    slow, fast = comparison.runs
    finish(slow, tmp_path, step_seconds=2.0)
    finish(fast, tmp_path, step_seconds=0.5)
    text = write_report(comparison, tmp_path)
    assert text == (tmp_path / "table.txt").read_text()
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["name"] for row in table] == ["slow", "fast"]
    assert [row["samples_per_second"] for row in table] == [5.0, 20.0]
    assert [row["seconds"] for row in table] == [8.0, 2.0]
    # The fast one has 1.5 s after warm-up: by then the slow one has trained on its first batch.
    assert [row["reward_at_seconds"] for row in table] == [pytest.approx(0.1), pytest.approx(0.4)]
    assert [row["reward_at_samples"] for row in table] == [pytest.approx(0.4)] * 2
    assert text.endswith(comparison_plots.NO_MATPLOTLIB + "\n")


def test_seeds_of_a_row_are_averaged_and_kept(tmp_path):
    comparison = make_comparison("row", seeds=(1, 2))
    finish(comparison.runs[0], tmp_path, step_seconds=1.0)
    finish(comparison.runs[1], tmp_path, step_seconds=2.0)
    write_report(comparison, tmp_path)
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert (row["seeds"], row["seconds"]) == (2, 6.0)
    assert [each["seconds"] for each in row["per_seed"]] == [4.0, 8.0]


def test_what_failed_or_is_missing_is_named_beneath(tmp_path):
    comparison = make_comparison("good", "broken", "missing")
    good, broken, _ = comparison.runs
    finish(good, tmp_path, step_seconds=1.0)
    finish(broken, tmp_path, step_seconds=1.0, exit_code=3, last_lines=("first", "no such model"))
    text = write_report(comparison, tmp_path)
    assert "broken/seed_1: failed with exit code 3" in text
    assert "  first\n  no such model\n" in text
    assert "missing/seed_1: not run to its end" in text
    assert [row["name"] for row in json.loads((tmp_path / "table.json").read_text())] == ["good"]


def test_without_a_complete_run_there_is_no_table(tmp_path):
    text = write_report(make_comparison("missing"), tmp_path)
    assert text == "No run is complete.\n\nmissing/seed_1: not run to its end\n"
    assert not (tmp_path / "table.json").exists()
