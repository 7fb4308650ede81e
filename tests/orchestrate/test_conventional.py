import pytest

from tests.fakes.stages import FakeTraining, World, make_plan, run_schedule


@pytest.mark.parametrize("steps_per_round", [1, 2, 4])
def test_lag_counts_the_steps_of_the_round(steps_per_round):
    world = World()
    run_schedule("conventional", world, make_plan(steps_per_round=steps_per_round, num_steps=8))
    assert world.training.lags == [step % steps_per_round for step in range(8)]


def test_the_two_sides_take_turns():
    """4 s of decoding, 0.5 s of scoring, 0.25 s of assembly, 2 s of training, 0.1 s of transfer."""
    world = World(training=FakeTraining(seconds=lambda version: 2.0))
    report, seconds = run_schedule("conventional", world, make_plan(num_steps=10))
    assert seconds == pytest.approx(10 * (2 + 0.5 + 0.25 + 2 + 0.1), rel=0.02)
    assert report.waited_seconds["trainer", "rollouts"] == pytest.approx(25.0)
    assert report.waited_seconds["generation", "trainer"] == pytest.approx(23.5, rel=0.02)
