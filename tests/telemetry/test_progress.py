import io
import math
import os

import rich.console

from pipeline_rl_jax.telemetry.progress import (
    LineProgress,
    PanelProgress,
    ProgressReport,
    SilentProgress,
    StepTimes,
    open_progress,
    print_line,
)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def report(step, **changes):
    values = {
        "step": step,
        "num_steps": 100,
        "reward_mean": 0.53,
        "accuracy": None,
        "lag_mean_steps": 1.25,
        "lag_max_steps": 3.0,
        "decode_tokens_per_second": 1234.0,
        "train_tokens_per_second": 567.8,
        "trainer_wait_share": 0.34,
        "generation_wait_share": 0.021,
    }
    return ProgressReport(**{**values, **changes})


def make_console(*, terminal: bool, width: int = 100) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=width)


def test_a_line_says_it_all_without_control_characters():
    console = make_console(terminal=False)
    progress = open_progress("auto", console=console)
    progress.update(report(1))
    progress.close()
    assert console.file.getvalue() == (
        "step 1/100 | reward 0.53 | lag 1.25 (max 3) | decode 1,234 tok/s | train 568 tok/s | "
        "trainer waits 34% | generation waits 2% | time left –\n"
    )


def test_at_most_one_line_in_ten_seconds_but_the_last_step_always():
    clock, lines = Clock(), []
    progress = LineProgress(lines.append, clock)
    for step in range(1, 101):
        clock.seconds += 1.0
        progress.update(report(step))
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert lines[-1].endswith("time left 0 s")


def test_time_left_is_the_median_step_and_leaves_out_the_first():
    clock = Clock()
    times = StepTimes(clock)
    clock.seconds = 60.0  # the first step compiles
    times.add()
    assert times.left_seconds(report(1)) is None
    for seconds in (2.0, 2.0, 50.0):  # an evaluation in between
        clock.seconds += seconds
        times.add()
    assert times.left_seconds(report(4)) == 2.0 * 96


def test_figures_that_are_not_known_are_dashes():
    lines = []
    progress = LineProgress(lines.append, Clock())
    progress.update(report(1, lag_mean_steps=math.nan, accuracy=0.9))
    assert "lag – (max 3)" in lines[0]
    assert "reward 0.53 (accuracy 90%)" in lines[0]


def test_the_panel_shows_the_report_and_leaves_printed_lines_whole():
    console = make_console(terminal=True)
    progress = PanelProgress(console)
    try:
        progress.note("loading weights")
        progress.update(report(7, accuracy=0.43))
        console.print("a line from elsewhere")
        progress.note("evaluating 100 prompts")
    finally:
        progress.close()
    text = console.file.getvalue()
    for words in ("loading weights", "7/100", "accuracy 43%", "1.25 steps", "evaluating 100"):
        assert words in text
    assert "a line from elsewhere\n" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_modes():
    assert isinstance(open_progress("off"), SilentProgress)
    console = make_console(terminal=False)
    assert isinstance(open_progress("auto", console=console), LineProgress)
    panel = open_progress("on", console=console)
    panel.close()
    assert isinstance(panel, PanelProgress)


def test_a_reader_that_went_away_does_not_end_the_run():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        print_line("nobody reads this", file=file)
        print_line("nor this", file=file)
