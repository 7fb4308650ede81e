import pytest

from tests.fakes.stages import FakeGeneration, FakeTraining, World, make_plan, run_schedule


def test_each_round_is_of_the_weights_before_the_training_on_the_round_before():
    world = World()
    run_schedule("one_step_off", world, make_plan(num_steps=5))
    versions = [
        {int(v) for v in batch.weight_versions[batch.loss_mask]} for batch in world.training.batches
    ]
    assert versions == [{0}, {0}, {1}, {2}, {3}]
    assert world.training.lags == [0, 1, 1, 1, 1]


def test_rounds_of_several_steps():
    world = World()
    run_schedule("one_step_off", world, make_plan(num_steps=8, steps_per_round=2))
    assert world.training.lags == [0, 1, 2, 3, 2, 3, 2, 3]


@pytest.mark.parametrize(("chunk_seconds", "step_seconds"), [(5.0, 2.0), (0.5, 30.0)])
def test_the_longer_side_sets_the_pace_and_the_other_is_said_to_wait(chunk_seconds, step_seconds):
    def run(overlap: bool):
        world = World(
            generation=FakeGeneration(seconds=lambda chunk: chunk_seconds),
            training=FakeTraining(seconds=lambda version: step_seconds),
        )
        return run_schedule("one_step_off", world, make_plan(num_steps=20, overlap=overlap))

    (report, seconds), (_, in_turns) = run(overlap=True), run(overlap=False)
    generation_seconds = 2 * chunk_seconds + 0.5
    assert seconds == pytest.approx(
        20 * max(generation_seconds, step_seconds) + min(generation_seconds, step_seconds), rel=0.05
    )
    assert in_turns == pytest.approx(20 * (generation_seconds + step_seconds), rel=0.05)
    difference = abs(generation_seconds - step_seconds)
    waiting = (
        ("trainer", "rollouts") if generation_seconds > step_seconds else ("generation", "trainer")
    )
    assert report.waited_seconds[waiting] == pytest.approx(20 * difference, rel=0.15)


def test_without_overlap_lag_is_that_of_the_conventional_schedule():
    world = World()
    run_schedule("one_step_off", world, make_plan(num_steps=6, steps_per_round=3, overlap=False))
    assert world.training.lags == [0, 1, 2, 0, 1, 2]


def test_the_whole_next_round_may_be_generated_from_the_first_step_on():
    """A round takes 6.5 s to generate, all at once, and 9.1 s to train on."""
    world = World(generation=FakeGeneration(slots=16, seconds=lambda chunk: 3.0))
    _, seconds = run_schedule("one_step_off", world, make_plan(num_steps=40, steps_per_round=4))
    assert seconds == pytest.approx(6.5 + 10 * 9.1, rel=0.02)
