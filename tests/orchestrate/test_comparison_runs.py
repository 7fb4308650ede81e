"""Children are small Python programs here: what matters is how they end and what they leave."""

import dataclasses
import json
import sys
import threading
import time

import pytest

from config_file import load_config
from pipeline_rl_jax.orchestrate.comparison import Run
from pipeline_rl_jax.orchestrate.comparison_runs import (
    ChildPlan,
    ChildRunner,
    Outcome,
    read_metrics,
    read_outcome,
)
from pipeline_rl_jax.settings import SettingsError
from tests.fakes.settings import make_settings

RUN = Run(row="a", seed=1, settings=dataclasses.replace(make_settings(), seed=1))

# Writes metrics until it is told to stop, then ends as training does after SIGTERM.
ENDLESS = """
import json, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
seconds = 0.0
while not stopped:
    seconds += 1.0
    with open(sys.argv[2] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 1, "run/train_seconds": seconds}) + "\\n")
    time.sleep(0.05)
print("in order")
sys.exit(143)
"""


class Children:
    def __init__(self, program, *, max_seconds=0.0):
        self.shown = []
        self.runner = ChildRunner(
            ChildPlan(
                command=lambda config, workdir: [
                    sys.executable,
                    "-c",
                    program,
                    str(config),
                    str(workdir),
                ],
                max_seconds=max_seconds,
                show=self.shown.append,
            )
        )


def test_a_child_gets_the_settings_and_is_shown_line_by_line(tmp_path):
    children = Children("import sys; print(sys.argv[1]); print('end', end='')")
    outcome = children.runner.run(RUN, tmp_path / "run")
    config = tmp_path / "run" / "row_config.py"
    assert children.shown == [f"a/seed_1 | {config}", "a/seed_1 | end"]
    assert outcome == Outcome(exit_code=0, over_budget=False, last_lines=(str(config), "end"))
    assert outcome.complete
    assert read_outcome(RUN, tmp_path / "run") == outcome
    assert load_config(str(config)).trainer.batch_rollouts == RUN.settings.trainer.batch_rollouts


def test_a_failure_keeps_exit_code_and_last_lines(tmp_path):
    children = Children("import sys; print('before'); print('why', file=sys.stderr); sys.exit(7)")
    outcome = children.runner.run(RUN, tmp_path / "run")
    assert (outcome.exit_code, outcome.complete) == (7, False)
    assert set(outcome.last_lines) == {"before", "why"}


def test_a_child_over_budget_is_stopped_and_complete(tmp_path):
    children = Children(ENDLESS, max_seconds=3.0)
    outcome = children.runner.run(RUN, tmp_path / "run")
    assert outcome.exit_code == 143
    assert outcome.over_budget
    assert outcome.complete
    assert children.shown[-1] == "a/seed_1 | in order"
    assert len(read_metrics(tmp_path / "run")) >= 3


@pytest.mark.parametrize("program", [ENDLESS, "import time; time.sleep(600)"])
def test_stop_ends_the_child_and_leaves_no_outcome(tmp_path, program):
    children = Children(program)
    timer = threading.Timer(1.0, children.runner.stop)
    timer.start()
    start = time.monotonic()
    assert children.runner.run(RUN, tmp_path / "run") is None
    assert time.monotonic() - start < 30
    assert children.runner.stopped
    assert read_outcome(RUN, tmp_path / "run") is None


def test_an_unfinished_attempt_is_kept_aside(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert read_metrics(tmp_path / "run") == [{"step": 1}]
    Children("").runner.run(RUN, tmp_path / "run")
    assert (tmp_path / "run_1" / "metrics.jsonl").exists()
    assert read_metrics(tmp_path / "run") == []


def test_a_run_of_other_settings_is_refused(tmp_path):
    Children("").runner.run(RUN, tmp_path / "run")
    other = Run(row="a", seed=1, settings=dataclasses.replace(make_settings(), seed=2))
    with pytest.raises(SettingsError, match="holds a run of other settings"):
        read_outcome(other, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["exit_code"] == 0
