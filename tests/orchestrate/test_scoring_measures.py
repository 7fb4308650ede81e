"""Figures of scoring by hand."""

import types

from pipeline_rl_jax.orchestrate.scoring_measures import ScoringMeasures
from pipeline_rl_jax.rewards.streaming import StreamCounts
from pipeline_rl_jax.telemetry.schema import check_names

OWN = types.SimpleNamespace(trainer="a", scoring="b")
SHARED = types.SimpleNamespace(trainer="a", scoring="a")


class Models:
    def __init__(self, counts, whole_texts=None):
        self.readers = types.SimpleNamespace(counts=counts)
        self.whole_texts = whole_texts


def measures(models, meshes):
    times = iter([0.0, 10.0, 30.0])
    return ScoringMeasures(models, meshes, clock=lambda: next(times))


def test_differences_of_two_looks_by_model():
    counts = {
        "reward_model": StreamCounts(streamed_tokens=90, final_tokens=10, busy_seconds=2.0),
        "reference": StreamCounts(streamed_tokens=40, busy_seconds=1.0),
    }
    taken = measures(Models(counts), OWN)
    first = taken.take_metrics()
    check_names(first)
    assert first["scoring/idle_share"] == 0.8
    assert first["scoring/seconds_per_token"] == 0.02
    assert first["scoring/reference_streamed_tokens"] == 40
    counts["reward_model"] = StreamCounts(streamed_tokens=100, final_tokens=20, busy_seconds=7.0)
    second = taken.take_metrics()
    assert second["scoring/streamed_tokens"] == 10
    assert second["scoring/final_tokens"] == 10
    assert second["scoring/busy_seconds"] == 5.0
    assert second["scoring/idle_share"] == 0.75
    assert second["scoring/seconds_per_token"] == 0.25
    assert second["scoring/reference_busy_seconds"] == 0
    assert "scoring/reference_seconds_per_token" not in second


def test_whole_texts_are_measured_alike_and_a_shared_mesh_has_no_idle_share():
    scorer = types.SimpleNamespace(counts=StreamCounts(final_tokens=50, busy_seconds=1.0))
    found = measures(Models({}, scorer), SHARED).take_metrics()
    assert found["scoring/final_tokens"] == 50
    assert found["scoring/seconds_per_token"] == 0.02
    assert "scoring/idle_share" not in found
    assert measures(Models({}), OWN).take_metrics() == {}
