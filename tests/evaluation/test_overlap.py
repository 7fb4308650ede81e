import json

import pytest

from pipeline_rl_jax.evaluation.overlap import (
    Interval,
    Overlap,
    after_step,
    format_overlaps,
    merged,
    overlap,
    read_timeline,
)
from pipeline_rl_jax.telemetry.timeline import Timeline


def test_shares_of_hand_made_spans():
    spans = [
        Interval("decode_chunk", 0.0, 4.0),
        Interval("prefill", 3.0, 5.0),  # counts once where two of a side overlap
        Interval("train_step", 4.0, 8.0),
        Interval("reward", 0.0, 20.0),  # of neither side
        Interval("decode_chunk", 9.0, 10.0),
    ]
    assert overlap(spans) == Overlap(
        both=pytest.approx(0.1),
        generation_only=pytest.approx(0.5),
        trainer_only=pytest.approx(0.3),
        neither=pytest.approx(0.1),
    )
    with pytest.raises(ValueError, match="no span"):
        overlap([Interval("reward", 0.0, 1.0)])


def test_several_intervals_of_each_side_meet():
    generation = [Interval("decode_chunk", start, start + 1.0) for start in (0.0, 2.0, 4.0)]
    trainer = [Interval("train_step", 0.5, 2.5), Interval("train_step", 4.25, 5.0)]
    assert overlap([*trainer, *generation]).both == pytest.approx((0.5 + 0.5 + 0.75) / 5)
    assert merged(generation) == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]


def test_steps_that_compile_are_left_out():
    spans = [
        Interval("train_step", 0.0, 9.0),
        Interval("decode_chunk", 8.0, 9.5),
        Interval("decode_chunk", 9.5, 10.0),
        Interval("train_step", 10.0, 11.0),
        Interval("decode_chunk", 11.5, 12.0),
    ]
    assert [span.start_seconds for span in after_step(spans, 1)] == [9.5, 10.0]
    assert [span.start_seconds for span in after_step(spans, 0)] == [0.0, 8.0, 9.5, 10.0]
    assert after_step(spans, 2) == []


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_timeline_is_read_also_when_it_was_cut_short(tmp_path, cut):
    timeline = Timeline(tmp_path / "trace.json")
    start = timeline._start_seconds
    timeline.add("decode_chunk", track="a", start_seconds=start, end_seconds=start + 1)
    timeline.add("train_step", track="b", start_seconds=start + 1, end_seconds=start + 3)
    timeline.close()
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text)) == 4
    if cut:
        (tmp_path / "trace.json").write_text(text.rstrip().removesuffix("]").rstrip()[:-cut])
    spans = read_timeline(tmp_path / "trace.json")
    assert spans[0] == Interval("decode_chunk", 0.0, 1.0)
    assert spans[1:] == ([] if cut else [Interval("train_step", 1.0, 3.0)])


def test_a_line_per_run():
    shares = Overlap(both=0.5, generation_only=0.25, trainer_only=0.125, neither=0.125)
    heading, line = format_overlaps({"pipeline": shares}).splitlines()
    assert heading.split() == ["both", "generation", "only", "trainer", "only", "neither"]
    assert line.split() == ["pipeline", "50.0%", "25.0%", "12.5%", "12.5%"]
