import threading

import pytest

from pipeline_rl_jax.telemetry.spans import SpanRecorder, SpanTotals, span, take_span_totals
from pipeline_rl_jax.telemetry.timeline import Timeline


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_totals_of_one_window(clock):
    recorder = SpanRecorder(clock)
    for seconds in (1.0, 3.0):
        with recorder.record("train_step", track="trainer"):
            clock.seconds += seconds
        clock.seconds += 2.0
    totals = recorder.take_totals()
    assert totals.elapsed_seconds == 8.0
    assert totals.seconds == {"train_step": 4.0}
    assert totals.counts == {"train_step": 2}
    assert totals.share("train_step") == 0.5
    assert totals.share("never_seen") == 0.0
    assert totals.metrics() == {"spans/train_step_seconds": 4.0, "spans/train_step_share": 0.5}


def test_an_open_span_is_split_over_windows(clock):
    recorder = SpanRecorder(clock)
    with recorder.record("wait_for_rollouts", track="trainer"):
        clock.seconds += 10.0
        first = recorder.take_totals()
        clock.seconds += 5.0
    clock.seconds += 15.0
    second = recorder.take_totals()
    assert (first.share("wait_for_rollouts"), first.counts) == (1.0, {})
    assert second.seconds == {"wait_for_rollouts": 5.0}
    assert second.share("wait_for_rollouts") == 0.25
    assert second.counts == {"wait_for_rollouts": 1}


def test_an_empty_window_has_no_share():
    totals = SpanTotals(elapsed_seconds=0.0, seconds={"a": 0.0}, counts={})
    assert totals.share("a") == 0.0


def test_a_failing_span_counts_and_lets_the_error_pass(clock):
    recorder = SpanRecorder(clock)

    def fail():
        with recorder.record("reward", track="rewards"):
            clock.seconds += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert recorder.take_totals().seconds == {"reward": 2.0}


def test_threads_add_up():
    recorder = SpanRecorder(Clock())

    def work():
        for _ in range(200):
            with recorder.record("reward", track="rewards"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.take_totals().counts == {"reward": 800}


def test_timeline_gets_spans_that_end_while_attached(clock, tmp_path):
    recorder, timeline = SpanRecorder(clock), Timeline(tmp_path / "trace.json")
    recorder.attach(timeline)
    with recorder.record("train_step", track="trainer"):
        clock.seconds += 1.0
    recorder.attach(None)
    with recorder.record("publish", track="trainer"):
        clock.seconds += 1.0
    timeline.close()
    text = (tmp_path / "trace.json").read_text()
    assert "train_step" in text
    assert "publish" not in text


def test_the_spans_of_the_process():
    take_span_totals()
    with span("prefill"), span("train_step", step=3), span("reward", track="rewards"):
        pass
    totals = take_span_totals()
    assert totals.counts == {"prefill": 1, "train_step": 1, "reward": 1}
    assert totals.seconds["prefill"] >= totals.seconds["train_step"] > 0
