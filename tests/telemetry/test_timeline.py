import json

from pipeline_rl_jax.telemetry.spans import span, timeline_file
from pipeline_rl_jax.telemetry.timeline import Timeline


def test_one_row_per_track_and_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    start = timeline._start_seconds
    timeline.add("decode_chunk", track="generation", start_seconds=start + 1, end_seconds=start + 3)
    timeline.add("train_step", track="trainer", start_seconds=start + 2, end_seconds=start + 2.5)
    timeline.add("decode_chunk", track="generation", start_seconds=start + 3, end_seconds=start + 4)
    timeline.close()
    events = json.loads(path.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    bars = [(e["name"], rows[e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert bars == [
        ("decode_chunk", "generation", 1_000_000.0, 2_000_000.0),
        ("train_step", "trainer", 2_000_000.0, 500_000.0),
        ("decode_chunk", "generation", 3_000_000.0, 1_000_000.0),
    ]


def test_after_a_kill_only_the_bracket_is_missing(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    late = timeline._start_seconds + 5  # long enough after the last flush for another
    timeline.add("reward", track="rewards", start_seconds=late, end_seconds=late)
    events = json.loads(path.read_text() + "]")
    assert [event["name"] for event in events] == ["thread_name", "reward"]


def test_a_resumed_run_keeps_the_earlier_timeline(tmp_path):
    path = tmp_path / "trace.json"
    for name in ("publish", "evaluate"):
        with timeline_file(path), span(name):
            pass
    assert "publish" in (tmp_path / "trace_1.json").read_text()
    assert "evaluate" in path.read_text()
    assert "publish" not in path.read_text()
