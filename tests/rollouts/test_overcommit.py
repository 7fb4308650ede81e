import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_rl_jax.records import Group, Rollout
from pipeline_rl_jax.rollouts.overcommit import OvercommitAccount, OvercommitQueue
from tests.fakes.rollouts import make_completion, make_prompt


def rollout(prompt_id: int, sample_index: int = 0) -> Rollout:
    completion = make_completion(make_prompt(prompt_id), [5], sample_index=sample_index)
    return Rollout(completion=completion, reward=1.0)


def make_queue(*, batch_groups=2, overcommit=1, max_deferrals=2, **arguments) -> OvercommitQueue:
    return OvercommitQueue(
        batch_groups=batch_groups, overcommit=overcommit, max_deferrals=max_deferrals, **arguments
    )


def admit(queue: OvercommitQueue, *prompt_ids: int, size: int = 1) -> None:
    for prompt_id in prompt_ids:
        queue.admit(make_prompt(prompt_id), size=size)


def finish(queue: OvercommitQueue, *prompt_ids: int) -> None:
    for prompt_id in prompt_ids:
        queue.add(rollout(prompt_id))


def ids(groups: list[Group]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


def test_the_first_b_to_finish_train_and_the_rest_is_deferred():
    queue = make_queue(batch_groups=2, overcommit=1)
    assert queue.room == 3
    admit(queue, 10, 11, 12)
    assert queue.room == 0
    finish(queue, 12)
    assert queue.missing == "rollouts"
    finish(queue, 11)
    assert queue.missing == ""
    assert ids(queue.take()) == [11, 12]  # in order of admission
    assert queue.room == 2  # 10 is still in flight
    admit(queue, 13, 14)
    finish(queue, 13, 10)
    assert ids(queue.take()) == [10, 13]
    assert dict(queue.account.deferrals) == {0: 3, 1: 1}


def test_of_the_finished_groups_the_oldest_train_first_and_the_others_wait():
    queue = make_queue(batch_groups=1, overcommit=2, max_deferrals=3)
    admit(queue, 0, 1, 2)
    finish(queue, 2, 1)
    assert ids(queue.take()) == [1]
    assert ids(queue.take()) == [2]


def test_a_group_deferred_often_enough_is_waited_for():
    queue = make_queue(batch_groups=1, overcommit=1, max_deferrals=2)
    admit(queue, 0, 1)
    for prompt_id in (1, 2):
        finish(queue, prompt_id)
        assert ids(queue.take()) == [prompt_id]
        admit(queue, prompt_id + 1)
    finish(queue, 3)
    assert queue.missing == "stragglers (max_deferrals)"
    with pytest.raises(RuntimeError, match="waits for stragglers"):
        queue.take()
    finish(queue, 0)
    assert ids(queue.take()) == [0]
    assert queue.account.metrics()["overcommit/deferrals_max_steps"] == 2.0


def test_more_groups_than_a_batch_holds_do_not_come_due_together():
    queue = make_queue(batch_groups=1, overcommit=2, max_deferrals=2)
    admit(queue, 0, 1, 2)
    finish(queue, 2)
    # 0 and 1 fit the two batches that are left to them, but not if 3 took one of these.
    assert ids(queue.take()) == [2]
    admit(queue, 3)
    finish(queue, 3)
    assert queue.missing == "stragglers (max_deferrals)"


def test_without_overcommit_it_is_the_plain_loop():
    queue = make_queue(batch_groups=2, overcommit=0, max_deferrals=5)
    for step in range(3):
        assert queue.room == 2
        admit(queue, 2 * step, 2 * step + 1)
        finish(queue, 2 * step + 1)
        assert queue.missing == "rollouts"
        finish(queue, 2 * step)
        assert ids(queue.take()) == [2 * step, 2 * step + 1]
    assert dict(queue.account.deferrals) == {0: 6}


def test_a_smaller_delta_admits_nothing_until_the_excess_is_gone():
    queue = make_queue(batch_groups=2, overcommit=3)
    admit(queue, 0, 1, 2, 3, 4)
    queue.account.overcommit = 0
    finish(queue, 0, 1)
    queue.take()
    assert queue.room == 0  # three out, two allowed
    finish(queue, 2, 3)
    queue.take()
    assert queue.room == 1


def test_delta_is_capped_by_what_the_bound_on_deferrals_can_carry():
    assert make_queue(batch_groups=2, overcommit=100, max_deferrals=1).room == 4
    assert make_queue(batch_groups=2, overcommit=100, max_deferrals=0).room == 2
    with pytest.raises(ValueError, match=r"overcommit \(-1\)"):
        make_queue(overcommit=-1)


def test_the_last_batches_leave_nothing_behind():
    queue = make_queue(batch_groups=2, overcommit=2, num_batches=2)
    admit(queue, 0, 1, 2, 3)
    finish(queue, 2, 3)
    queue.take()
    assert queue.room == 0
    finish(queue, 0, 1)
    assert ids(queue.take()) == [0, 1]
    assert queue.room == 0
    queue.abandon()
    assert queue.drops.total == 0


def test_a_group_that_lost_every_sample_makes_room():
    queue = make_queue(batch_groups=1, overcommit=0)
    admit(queue, 7, size=2)
    queue.lose(7, 0, reason="verifier_crash")
    queue.lose(7, 1, reason="verifier_crash")
    assert queue.missing == "rollouts"
    assert queue.room == 1
    assert queue.drops.counts == {"verifier_crash": 2}


def test_nothing_is_admitted_or_comes_back_twice():
    queue = make_queue(batch_groups=1, overcommit=1)
    admit(queue, 0)
    with pytest.raises(ValueError, match="already being generated"):
        admit(queue, 0)
    assert queue.room == 1  # the failed admission took no place
    finish(queue, 0)
    with pytest.raises(ValueError, match="of no open group"):
        finish(queue, 0)
    admit(queue, 1)
    with pytest.raises(ValueError, match="finds no room"):
        admit(queue, 2)


def test_the_end_of_the_run_counts_what_is_left():
    queue = make_queue(batch_groups=2, overcommit=2)
    admit(queue, 0, 1, 2, size=2)
    queue.add(rollout(0, 0))
    queue.add(rollout(0, 1))  # 0 is finished
    queue.add(rollout(1, 0))  # half of 1, nothing of 2
    queue.abandon()
    assert queue.drops.counts == {"left_at_end": 3, "cancelled": 3}


def test_a_drained_group_is_handed_out_instead_of_counted():
    queue = make_queue(batch_groups=2, overcommit=1)
    admit(queue, 0, 1)
    finish(queue, 1)
    assert ids(queue.drain()) == [1]
    queue.abandon()
    assert queue.drops.counts == {"cancelled": 1}


def test_a_batch_that_came_to_nothing_defers_nobody():
    account = OvercommitAccount(batch_groups=1, overcommit=1, max_deferrals=1)
    queue = make_queue(batch_groups=1, overcommit=1, max_deferrals=1)
    queue.account = account
    admit(queue, 0, 1)
    finish(queue, 1)
    queue.take()
    assert account.metrics()["overcommit/deferred_0_steps_groups"] == 1.0
    account.reopen_batch()
    assert dict(account.deferrals) == {}
    admit(queue, 2)
    finish(queue, 2)
    assert ids(queue.take()) == [2]  # 0 may still be deferred once
    admit(queue, 3)
    finish(queue, 3)
    assert queue.missing == "stragglers (max_deferrals)"


@dataclasses.dataclass
class World:
    """Samples that take random numbers of chunks, some of which are lost."""

    random: random.Random
    left: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)  # chunks to go

    def begin(self, prompt_id: int, size: int) -> None:
        for index in range(size):
            long_tail = self.random.random() < 0.1
            self.left[prompt_id, index] = self.random.randint(1, 60 if long_tail else 5)

    def decode_one_chunk(self) -> list[tuple[int, int]]:
        self.left = {sample: chunks - 1 for sample, chunks in self.left.items()}
        done = [sample for sample, chunks in self.left.items() if not chunks]
        self.random.shuffle(done)
        for sample in done:
            del self.left[sample]
        return done


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_groups=st.integers(1, 5),
    max_deferrals=st.integers(0, 4),
    num_batches=st.sampled_from([190, 200, 10**9]),
)
def test_each_group_is_trained_once_or_counted_over_200_steps(
    seed, batch_groups, max_deferrals, num_batches
):
    world = World(random.Random(seed))
    queue = make_queue(
        batch_groups=batch_groups, max_deferrals=max_deferrals, num_batches=num_batches
    )
    sizes: dict[int, int] = {}
    admitted_step: dict[int, int] = {}
    trained: collections.Counter[int] = collections.Counter()
    deferrals: collections.Counter[int] = collections.Counter()
    num_trained_rollouts = 0
    for step in range(min(200, num_batches)):
        queue.account.overcommit = world.random.randint(0, 6)
        chunks = 0
        while queue.missing:
            while queue.room:
                prompt_id = len(sizes)
                sizes[prompt_id] = world.random.randint(1, 3)
                admitted_step[prompt_id] = step
                queue.admit(make_prompt(prompt_id), size=sizes[prompt_id])
                world.begin(prompt_id, sizes[prompt_id])
            assert queue.account.num_out <= batch_groups * (max_deferrals + 1)
            for prompt_id, index in world.decode_one_chunk():
                if world.random.random() < 0.05:
                    queue.lose(prompt_id, index, reason="lost")
                else:
                    queue.add(rollout(prompt_id, index))
            chunks += 1
            assert chunks < 10_000  # never stuck
        batch = queue.take()
        assert len(batch) == batch_groups
        assert ids(batch) == sorted(ids(batch))
        trained.update(ids(batch))
        deferrals.update(step - admitted_step[prompt_id] for prompt_id in ids(batch))
        num_trained_rollouts += sum(len(group.rollouts) for group in batch)
        assert max(step - admitted_step[prompt_id] for prompt_id in ids(batch)) <= max_deferrals
    if num_batches <= 200:
        assert queue.account.num_out == 0
    queue.abandon()
    assert max(trained.values()) == 1
    assert dict(queue.account.deferrals) == dict(sorted(deferrals.items()))
    assert num_trained_rollouts + queue.drops.total == sum(sizes.values())
