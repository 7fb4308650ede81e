import json
import math

from pipeline_rl_jax.telemetry.summary import RunSummary, format_summary, write_summary
from pipeline_rl_jax.telemetry.workdir import open_workdir


def summary(**changes):
    values = {
        "accuracy_before": 0.43,
        "accuracy_after": 0.96,
        "reward_before": None,
        "reward_after": None,
        "evaluation_prompts": 100,
        "finished": True,
        "optimizer_steps": 200,
        "inflight_updates": 187,
        "mixed_version_share": 0.625,
        "lag_mean_steps": 1.25,
        "lag_max_steps": 3.0,
        "samples": 12800,
        "samples_per_second": 32.123,
        "decode_tokens_per_second": 412.3,
        "train_tokens_per_second": 1234.5,
        "train_seconds": 398.46,
    }
    return RunSummary(**{**values, **changes})


def test_every_run_reports_these_keys(tmp_path):
    workdir = open_workdir(tmp_path)
    write_summary(workdir, summary())
    written = json.loads(workdir.summary.read_text())
    assert {
        "accuracy_before",
        "accuracy_after",
        "optimizer_steps",
        "inflight_updates",
        "mixed_version_share",
        "lag_mean_steps",
        "lag_max_steps",
        "samples_per_second",
        "decode_tokens_per_second",
        "train_tokens_per_second",
        "train_seconds",
    } <= set(written)
    assert written["accuracy_after"] == 0.96
    assert written["optimizer_steps"] == 200


def test_nothing_measured_is_null(tmp_path):
    workdir = open_workdir(tmp_path)
    write_summary(workdir, summary(accuracy_before=None, samples_per_second=math.nan))
    written = json.loads(workdir.summary.read_text())
    assert written["accuracy_before"] is None
    assert written["samples_per_second"] is None


def test_the_text_a_person_reads():
    assert format_summary(summary()).splitlines() == [
        "greedy accuracy    43/100 before, 96/100 after",
        "optimizer steps    200 in 398.5 s",
        "samples            12800 (32.1/s)",
        "decode             412 tokens/s",
        "train              1,234 tokens/s",
        "in-flight updates  187",
        "token lag          mean 1.25, max 3 steps",
        "mixed versions     62% of completions",
    ]


def test_an_interrupted_run_says_so():
    text = format_summary(summary(finished=False, accuracy_after=None, lag_mean_steps=None))
    assert "200 (interrupted) in" in text
    assert "43/100 before, not measured after" in text
    assert "mean –, max 3 steps" in text


def test_where_nothing_is_right_or_wrong_the_reward_is_shown():
    preference = summary(accuracy_before=None, accuracy_after=None, reward_after=1.23456)
    first = format_summary(preference).splitlines()[0]
    assert first == "greedy reward      not measured before, 1.235 after"
