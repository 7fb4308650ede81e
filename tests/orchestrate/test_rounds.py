from tests.fakes.stages import (
    FakeGeneration,
    FakePreprocess,
    FakeTraining,
    World,
    long_tailed,
    make_plan,
    run_schedule,
)


def versions_of(world: World) -> list[set[int]]:
    """The weight versions in each batch trained on."""
    return [
        {int(v) for v in batch.weight_versions[batch.loss_mask]} for batch in world.training.batches
    ]


def test_a_round_is_of_one_version_and_slots_are_empty_when_it_changes():
    live_at_first_admission: dict[int, int] = {}

    class Watching(FakeGeneration):
        def admit(self, prompt, group_size):
            version = world.publication.latest().version
            live_at_first_admission.setdefault(version, self.num_live)
            super().admit(prompt, group_size)

    world = World(generation=Watching(slots=4, length=long_tailed))
    run_schedule("conventional", world, make_plan(steps_per_round=3, num_steps=9))
    assert versions_of(world) == [{0}] * 3 + [{3}] * 3 + [{6}] * 3
    assert live_at_first_admission == {0: 0, 3: 0, 6: 0}
    assert world.publication.sent == [0, 3, 6, 9]


def test_the_last_round_is_only_as_long_as_there_are_steps():
    world = World(generation=FakeGeneration(slots=4))
    report, _ = run_schedule("conventional", world, make_plan(steps_per_round=4, num_steps=6))
    assert versions_of(world) == [{0}] * 4 + [{4}] * 2
    assert report.admitted_rollouts == 6 * 4


def test_a_resumed_run_begins_with_a_round():
    world = World(training=FakeTraining(version=2))
    run_schedule("conventional", world, make_plan(steps_per_round=3, num_steps=8))
    assert versions_of(world) == [{2}] * 3 + [{5}] * 3


def test_refused_groups_are_made_up_for_within_the_round():
    world = World(
        preprocess=FakePreprocess(
            refuses=lambda group: group.prompt.prompt_id % 2 == 0, max_refused=100
        )
    )
    run_schedule("conventional", world, make_plan(steps_per_round=2, num_steps=4))
    assert versions_of(world) == [{0}, {0}, {2}, {2}]
    trained = [i for batch in world.observer.trained_prompts for i in batch]
    assert sorted(trained[:4]) == [1, 3, 5, 7]


def test_a_batch_that_comes_to_nothing_shortens_its_round_and_ages_no_other():
    emptied = []

    def empty(version: int, groups) -> bool:
        if version == 2 and len(emptied) < 4:
            emptied.append(version)
            return True
        return False

    for overlap in (False, True):
        emptied.clear()
        world = World(preprocess=FakePreprocess(empty=empty))
        report, _ = run_schedule(
            "one_step_off", world, make_plan(steps_per_round=2, num_steps=8, overlap=overlap)
        )
        assert report.version == 8
        assert max(world.training.lags) <= (3 if overlap else 1)
