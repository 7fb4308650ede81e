import logging

import pytest

from pipeline_rl_jax.orchestrate.finite_steps import FiniteSteps, StepsLeftOut, is_finite_step

GOOD = {"trainer/loss": 0.5, "trainer/gradient_norm": 1.0, "kl/mean_nats": float("nan")}
BAD = GOOD | {"trainer/gradient_norm": float("inf")}


@pytest.mark.parametrize("name", ["trainer/loss", "trainer/gradient_norm", "value/gradient_norm"])
def test_what_makes_a_step_not_finite(name):
    assert is_finite_step(GOOD)
    assert not is_finite_step(GOOD | {name: float("nan")})


def test_five_in_a_row_end_the_run_with_a_warning_at_the_first(caplog):
    steps = FiniteSteps()
    for version, metrics in enumerate([BAD] * 4 + [GOOD] + [BAD] * 4, start=1):
        steps.add(version, metrics)
    with pytest.raises(StepsLeftOut, match="in steps 6 to 10, so no update was made") as caught:
        steps.add(10, BAD)
    assert caught.value.first_version == 6
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in warnings] == ["step 1", "step 6"]
    assert caplog.records[0].levelno == logging.WARNING
