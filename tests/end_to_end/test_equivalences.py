"""Rule 10: schedules that leave no room for overlap are one algorithm, token for token."""

import jax
import numpy as np
import pytest

from pipeline_rl_jax.checkpointing.store import restore_params
from pipeline_rl_jax.orchestrate import build
from pipeline_rl_jax.settings_parsing import parse_settings
from pipeline_rl_jax.telemetry.workdir import open_workdir
from tests.fakes.tiny_run import read_metrics, tiny_config, write_tiny_model

SCHEDULES = {
    "conventional": {"schedule__name": "conventional"},
    "one_step_off": {"schedule__name": "one_step_off", "schedule__overlap": False},
    "pipeline": {"schedule__name": "pipeline", "schedule__max_lag": 0},
    "pipeline_recompute": {
        "schedule__name": "pipeline",
        "schedule__max_lag": 0,
        "generation__kv_policy": "recompute",
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three steps of each, on a reward that varies: name → (samples, metrics, params)."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    results = {}
    for name, changes in SCHEDULES.items():
        workdir = tmp_path_factory.mktemp(name)
        config = tiny_config(
            model,
            evaluation__at_start=False,
            evaluation__at_end=False,
            rewards__correctness="user",
            rewards__user_function="tests.fakes.reward_functions:share_of_vowels",
            telemetry__sample_completions=16,
            telemetry__sample_every_steps=1,
            trainer__learning_rate=1e-3,
            **changes,
        )
        assert build.run(parse_settings(config), workdir=open_workdir(workdir)) == 0
        samples = {p.name: p.read_text() for p in sorted((workdir / "samples").iterdir())}
        results[name] = (samples, read_metrics(workdir), restore_params(workdir / "checkpoints"))
    return results


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "conventional"])
def test_without_overlap_every_schedule_is_conventional(runs, name):
    expected_samples, expected_metrics, expected_params = runs["conventional"]
    samples, metrics, params = runs[name]
    assert len(expected_samples) == 3
    assert len(set(expected_samples.values())) == 3
    assert samples == expected_samples
    for line, expected in zip(metrics, expected_metrics, strict=True):
        for key in ("trainer/loss", "trainer/gradient_norm", "reward/mean", "lag/max_steps"):
            np.testing.assert_allclose(line[key], expected[key], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected_params)


def test_the_three_steps_moved_the_weights_and_were_on_policy(runs):
    _, metrics, params = runs["pipeline"]
    assert all(line["trainer/gradient_norm"] > 0 for line in metrics)
    assert all(line["lag/max_steps"] == 0 for line in metrics)
    assert all(line["policy/logprob_gap_at_lag_zero_nats"] < 1e-4 for line in metrics)
    assert np.isfinite(params["embedding"]).all()
