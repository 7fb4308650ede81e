import json
import logging
import math

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from pipeline_rl_jax.telemetry.workdir import open_workdir
from pipeline_rl_jax.telemetry.writer import CheckedWriter, JsonlWriter, open_writer
from tests.fakes.settings import make_settings


class MemoryWriter:
    def __init__(self):
        self.lines = []

    def write(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def close(self): ...


def open_jsonl(directory, first_step=0):
    return JsonlWriter(
        directory / "metrics.jsonl",
        superseded_path=directory / "superseded.jsonl",
        first_step=first_step,
    )


def read_lines(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()]


def write_steps(directory, steps, *, first_step=0):
    writer = open_jsonl(directory, first_step)
    for step in steps:
        writer.write(step, {"trainer/loss": float(step)})
    writer.close()


def test_line_holds_step_attempt_time_and_metrics(tmp_path):
    writer = open_jsonl(tmp_path)
    writer.write(3, {"trainer/loss": 0.5, "lag/max_steps": np.float32(2)})
    (line,) = read_lines(tmp_path / "metrics.jsonl")  # before close: every line is flushed
    assert line.pop("unix_seconds") > 1e9
    assert line == {"step": 3, "run_attempt": 1, "trainer/loss": 0.5, "lag/max_steps": 2.0}


def test_what_is_not_finite_is_null(tmp_path):
    writer = open_jsonl(tmp_path)
    writer.write(1, {"trainer/loss": math.nan, "trainer/gradient_norm": np.float32(np.inf)})
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line["trainer/loss"] is None
    assert line["trainer/gradient_norm"] is None


def test_resume_leaves_every_step_once(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4])
    write_steps(tmp_path, [3, 4, 5], first_step=3)  # the checkpoint was of step 2
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["run_attempt"]) for line in lines] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    superseded = read_lines(tmp_path / "superseded.jsonl")
    assert [(line["step"], line["run_attempt"]) for line in superseded] == [(3, 1), (4, 1)]


def test_a_fresh_start_supersedes_everything_and_counts_attempts(tmp_path):
    for _ in range(3):
        write_steps(tmp_path, [0, 1])
    assert [line["run_attempt"] for line in read_lines(tmp_path / "metrics.jsonl")] == [3, 3]
    assert len(read_lines(tmp_path / "superseded.jsonl")) == 4


def test_a_line_cut_by_a_kill_is_moved_away(tmp_path):
    write_steps(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "run_att')
    write_steps(tmp_path, [3], first_step=3)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "superseded.jsonl").read_text() == '{"step": 3, "run_att\n'


def test_a_whole_line_without_line_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "run_attempt": 1}')
    write_steps(tmp_path, [2], first_step=2)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_strict_refuses_an_undeclared_metric():
    memory = MemoryWriter()
    writer = CheckedWriter([memory], strict=True)
    with pytest.raises(ValueError, match="metric trainer/los is not declared; did you mean"):
        writer.write(1, {"trainer/los": 1.0})
    assert memory.lines == []


def test_otherwise_it_is_written_and_warned_about_once(caplog):
    memory = MemoryWriter()
    writer = CheckedWriter([memory], strict=False)
    with caplog.at_level(logging.WARNING):
        writer.write(1, {"my/metric": 1.0})
        writer.write(2, {"my/metric": 2.0})
    assert memory.lines == [(1, {"my/metric": 1.0}), (2, {"my/metric": 2.0})]
    assert len(caplog.records) == 1
    assert "my/metric" in caplog.text


def read_events(path):
    """Events of a TensorBoard file: length (8 bytes), its checksum (4), record, checksum (4)."""
    data, position = path.read_bytes(), 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        yield Event.FromString(data[position + 12 : position + 12 + length])
        position += 16 + length


def test_tensorboard_has_the_scalars_and_hides_superseded_steps(tmp_path):
    workdir, telemetry = open_workdir(tmp_path), make_settings().telemetry
    for first_step in (0, 2):
        writer = open_writer(workdir, telemetry, first_step=first_step, strict=True)
        writer.write(2, {"trainer/loss": 0.25, "trainer/gradient_norm": math.nan})
        writer.close()
    first, second = sorted(workdir.tensorboard.iterdir())
    assert first.name.endswith(".attempt1")
    events = list(read_events(second))
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(2, "trainer/loss", 0.25)]
    assert [e.step for e in events if e.HasField("session_log")] == [2]  # purge from step 2 on


def test_tensorboard_can_be_off(tmp_path):
    workdir = open_workdir(tmp_path)
    telemetry = make_settings(telemetry={"tensorboard": False}).telemetry
    writer = open_writer(workdir, telemetry, first_step=0)
    writer.write(1, {"trainer/loss": 1.0})
    writer.close()
    assert not workdir.tensorboard.exists()
    assert workdir.metrics.exists()
