import pytest

from pipeline_rl_jax.telemetry.schema import METRICS, SPANS, check_names, find_metric


def test_exact_names_come_before_patterns():
    assert find_metric("reward/mean") is METRICS["reward/mean"]
    assert find_metric("reward/correct_mean") is METRICS["reward/*_mean"]
    assert find_metric("drops/stale_rollouts") is METRICS["drops/*_rollouts"]


def test_a_pattern_is_no_name():
    assert find_metric("trainer/losses") is None
    assert find_metric("reward/") is None


def test_spans_are_declared_as_metrics():
    for name in SPANS:
        assert find_metric(f"spans/{name}_seconds") is not None
        assert find_metric(f"spans/{name}_share") is not None
    assert find_metric("spans/unheard_of_share") is None


def test_undeclared_names_are_all_told():
    with pytest.raises(ValueError) as caught:
        check_names(["trainer/loss", "lag/mean_step", "zzz"])
    assert str(caught.value).splitlines() == [
        "metric lag/mean_step is not declared; did you mean lag/mean_steps?",
        "metric zzz is not declared; declare it in telemetry/schema.py",
    ]


def test_names_carry_their_unit():
    words = {"seconds": "seconds", "share": "share", "nats": "nats", "tokens/s": "per_second"}
    for name, metric in METRICS.items():
        if metric.unit in words:
            assert name.endswith(words[metric.unit]), name
