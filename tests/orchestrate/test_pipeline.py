import numpy as np
import pytest

from tests.fakes.stages import (
    FakeGeneration,
    FakeObserver,
    FakeTraining,
    World,
    long_tailed,
    make_plan,
    run_schedule,
)


def mixes(world: World) -> list[bool]:
    return [
        rollout.completion.mixes_versions
        for report in world.observer.reports
        for group in report.groups
        for rollout in group.rollouts
    ]


def test_weights_change_while_slots_are_live():
    world = World(generation=FakeGeneration(slots=4, length=lambda prompt, sample: 12))
    report, _ = run_schedule("pipeline", world, make_plan(max_lag=4, num_steps=20))
    assert (report.ended, report.version) == ("num_steps", 20)
    assert sum(mixes(world)) > 20
    assert max(world.training.lags) > 0
    for training_batch in world.training.batches:
        for versions, mask in zip(
            training_batch.weight_versions, training_batch.loss_mask, strict=True
        ):
            assert (np.diff(versions[mask]) >= 0).all()  # never back to older weights


def test_generation_goes_on_during_a_step_and_after_it():
    """A batch takes 10 s to generate and 20 s to train on."""
    world = World(
        generation=FakeGeneration(slots=4, length=lambda prompt, sample: 20),
        training=FakeTraining(seconds=lambda version: 20.0),
    )
    plan = make_plan(max_lag=4, num_steps=10, stream_groups=6)
    _, seconds = run_schedule("pipeline", world, plan)
    alone = World(
        generation=FakeGeneration(slots=4, length=lambda prompt, sample: 20),
        training=FakeTraining(seconds=lambda version: 20.0),
    )
    _, seconds_in_turns = run_schedule("conventional", alone, plan)
    assert seconds_in_turns > 10 * (20 + 10)
    assert seconds < 10 * 20 + 2 * 10 + 5


def test_wait_holds_the_trainer_for_a_straggler():
    """Prompt 0 takes 100 chunks; with max_lag 2 it must be in the batch of version 2."""
    world = World(
        generation=FakeGeneration(slots=8, length=lambda prompt, sample: 2 if prompt else 200)
    )
    report, seconds = run_schedule("pipeline", world, make_plan(max_lag=2, num_steps=6))
    assert [0 in batch for batch in world.observer.trained_prompts].index(True) == 2
    assert max(world.training.lags) == 2
    assert seconds > 100
    assert report.waited_seconds["preprocess", "stragglers (max_lag)"] > 80


def test_drop_leaves_the_straggler_behind_and_counts_it():
    world = World(
        generation=FakeGeneration(slots=8, length=lambda prompt, sample: 2 if prompt else 60)
    )
    plan = make_plan(max_lag=2, num_steps=20, beyond_max_lag="drop")
    report, _ = run_schedule("pipeline", world, plan)
    assert report.version == 20
    assert not any(0 in batch for batch in world.observer.trained_prompts)
    assert report.dropped["beyond_max_lag"] == 2
    assert max(world.training.lags) <= 2


def test_mask_trains_on_the_young_tokens_of_an_old_rollout():
    world = World(
        generation=FakeGeneration(slots=8, length=lambda prompt, sample: 2 if prompt else 60)
    )
    plan = make_plan(max_lag=1, num_steps=30, beyond_max_lag="mask")
    report, _ = run_schedule("pipeline", world, plan)
    step = next(r for r in world.observer.reports if r.masked_tokens)
    assert 0 in [group.prompt.prompt_id for group in step.groups]
    batch = world.training.batches[step.version - 1]
    trained_versions = batch.weight_versions[batch.loss_mask]
    assert trained_versions.min() == step.version - 1 - 1
    old = (batch.weight_versions >= 0) & (batch.weight_versions < step.version - 2)
    assert step.masked_tokens == old.sum() > 0
    assert max(world.training.lags) <= 1
    assert report.dropped == {}


def test_a_slow_trainer_stops_admission_and_never_decoding():
    """Generation could make 40 groups a step; no more than stream and slots hold are out."""
    most_out = []
    world = World(
        generation=FakeGeneration(slots=6),
        training=FakeTraining(seconds=lambda version: 80.0),
        observer=FakeObserver(at_step=lambda step: most_out.append(step.groups_out)),
    )
    plan = make_plan(max_lag=50, num_steps=12, stream_groups=4)
    report, seconds = run_schedule("pipeline", world, plan)
    assert report.dropped == {}
    assert max(most_out) <= 4 + 3  # waiting, and what 6 slots hold of groups of 2
    assert report.waited_seconds["generation", "trainer (stream full)"] > seconds / 2


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_max_lag_is_reached_and_never_passed(max_lag):
    world = World(
        generation=FakeGeneration(slots=16, length=long_tailed),
        training=FakeTraining(seconds=lambda version: 1.0),
    )
    run_schedule("pipeline", world, make_plan(max_lag=max_lag, num_steps=60, stream_groups=30))
    assert max(world.training.lags) == max_lag


def test_publication_may_be_rarer_than_steps():
    world = World(generation=FakeGeneration(slots=8))
    plan = make_plan(publish_every_steps=3, max_lag=2, num_steps=10)
    report, _ = run_schedule("pipeline", world, plan)
    assert report.version == 10
    assert world.publication.sent == [0, 3, 6, 9, 10]
    assert max(world.training.lags) <= 2
    used = {int(v) for b in world.training.batches for v in b.weight_versions[b.loss_mask]}
    assert used <= {0, 3, 6, 9}


def test_slow_transfers_only_make_weights_older():
    world = World(generation=FakeGeneration(slots=8), publication_seconds=15.0)
    report, _ = run_schedule("pipeline", world, make_plan(max_lag=3, num_steps=30))
    assert report.version == 30
    assert max(world.training.lags) <= 3


def test_scoring_is_bounded_and_off_the_decode_path():
    world = World(generation=FakeGeneration(slots=16))
    world.scoring.seconds = lambda completion: 10.0
    plan = make_plan(scores_in_flight=5, max_lag=8, batch_groups=4, num_steps=10, stream_groups=8)
    report, seconds = run_schedule("pipeline", world, plan)
    assert world.scoring.max_at_once == 5
    assert seconds < 10 * 8 / 5 * 10 + 30  # as long as 80 scores, five at once, and little more
    assert report.waited_seconds["generation", "scoring"] > 100
