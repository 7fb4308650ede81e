"""The program as a person starts it."""

import functools
import json

import pytest

from tests.fakes.launching import launch, lines_of_mistake
from tests.fakes.tiny_run import tiny_config, write_tiny_model

compare = functools.partial(launch, "compare")

CONFIG = '''
import json

from ml_collections import ConfigDict

def get_config():
    return ConfigDict(json.loads(r"""{values}"""))
'''


@pytest.fixture
def config(tmp_path):
    """Two rows of two steps on a tiny random model; one of them cannot start."""
    model = tmp_path / "model"
    model.mkdir()
    base = tiny_config(
        write_tiny_model(model),
        meshes__virtual_devices=2,
        evaluation__at_start=False,
        evaluation__at_end=False,
        checkpointing__at_end=False,
        telemetry__flops_utilisation=False,
    )
    values = {
        "base": base.to_dict(),
        "rows": {
            "broken": {"model": {"tokenizer": "nowhere"}},
            "good": {"schedule": {"name": "conventional"}},
        },
        "seeds": [5],
        "budget": {"samples": 32, "seconds": 0.0},
        "warmup_steps": 1,
    }
    path = tmp_path / "mine.py"
    path.write_text(CONFIG.replace("{values}", json.dumps(values)))
    return path


def test_a_dry_run_prints_what_sets_rows_apart(tmp_path):
    result = compare(
        "--config=configs/compare_schedules.py", "--dry_run", "--rows=one_step_off,pipeline_keep"
    )
    assert result.returncode == 0, result.stderr
    assert "one_step_off/seed_42: " in result.stdout
    assert "  schedule.name = 'pipeline'" in result.stdout
    assert "conventional" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("--rows=pipelin_keep",), "error: --rows (pipelin_keep) is no row of the config; did you"),
        ((), "error: --workdir is missing"),
        (
            ("--config.budget.samples=100", "--workdir=unused"),
            "error: rows.conventional_g1: budget.",
        ),
        (("--config.base.trainer.learning_rate=fast",), "error: base.trainer.learning_rate (fast)"),
    ],
)
def test_a_mistake_is_one_line(arguments, start):
    (line,) = lines_of_mistake(compare("--config=configs/compare_schedules.py", *arguments))
    assert line.startswith(start)


@pytest.mark.slow
def test_a_failing_row_is_named_the_others_go_on_and_none_is_run_twice(config, tmp_path):
    workdir = tmp_path / "runs"
    arguments = (f"--config={config}", f"--workdir={workdir}")
    result = compare(*arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert (
        "broken/seed_5: failed with exit code 2; the end of its output:\n  error: " in result.stdout
    )
    assert "good/seed_5 | optimizer steps    2 in" in result.stdout
    (row,) = json.loads((workdir / "table.json").read_text())
    assert (row["name"], row["samples"], row["lag_max_steps"]) == ("good", 32, 0)

    result = compare(*arguments, "--rows=good")
    assert result.returncode == 0
    assert "good/seed_5 (1 of" not in result.stdout
    assert (workdir / "table.txt").read_text() in result.stdout

    (line,) = lines_of_mistake(compare(*arguments, "--config.base.trainer.learning_rate=0.5"))
    assert "holds a run of other settings" in line
