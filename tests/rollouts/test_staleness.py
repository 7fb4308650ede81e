import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_rl_jax.records import Group, Rollout
from pipeline_rl_jax.rollouts.groups import CollectedGroup
from pipeline_rl_jax.rollouts.staleness import LagAccount, LagBound
from tests.fakes.rollouts import make_completion, make_prompt
from tests.fakes.stages import rows


def rollout(versions: list[int], sample_index: int = 0) -> Rollout:
    completion = make_completion(
        make_prompt(sample_index), [5] * len(versions), sample_index=sample_index, versions=versions
    )
    return Rollout(completion=completion, reward=1.0)


def item(order: int, admitted_version: int, *versions: list[int]) -> CollectedGroup:
    """A finished group; without `versions`, of one rollout from the weights of its admission."""
    rollouts = [rollout(v, index) for index, v in enumerate(versions or ([admitted_version],))]
    return CollectedGroup(
        group=Group(prompt=make_prompt(order), rollouts=tuple(rollouts)),
        order=order,
        admitted_version=admitted_version,
    )


def account(
    max_lag: int, beyond: str = "wait", *, batch_groups: int = 2, last_version: int = 100
) -> LagAccount:
    bound = LagBound(max_lag=max_lag, beyond=beyond)
    return LagAccount(bound, batch_groups=batch_groups, next_version=0, last_version=last_version)


def admit(lag_account: LagAccount, version: int, count: int) -> None:
    for _ in range(count):
        lag_account.admit(version)


class TestAdmission:
    def test_admitted_groups_reach_the_batches_that_may_still_train_on_them(self):
        lag_account = account(max_lag=2)
        assert lag_account.room(0 + 2 + 1) == 6  # batches of versions 0, 1, 2
        admit(lag_account, 0, 6)
        assert lag_account.room(3) == 0
        assert lag_account.room(4) == 2  # one step later

    def test_a_dropped_group_makes_room_for_another(self):
        lag_account = account(max_lag=0)
        admit(lag_account, 0, 2)
        assert lag_account.room(1) == 0
        lag_account.release(item(0, 0))
        assert lag_account.room(1) == 1

    def test_a_closed_batch_makes_no_room_by_itself(self):
        lag_account = account(max_lag=1)
        admit(lag_account, 0, 4)
        assert lag_account.close_batch([item(0, 0), item(1, 0)]) == 0
        assert lag_account.room(2) == 0
        assert lag_account.room(3) == 2  # the weights of that step do

    def test_a_batch_that_came_to_nothing_is_made_up_for(self):
        lag_account = account(max_lag=0)
        admit(lag_account, 0, 2)
        lag_account.close_batch([item(0, 0), item(1, 0)])
        lag_account.reopen_batch()
        assert lag_account.next_version == 0
        assert lag_account.room(1) == 2

    def test_nothing_is_admitted_for_steps_after_the_last(self):
        lag_account = account(max_lag=8, last_version=3)
        assert lag_account.room(9) == 6
        for first in (0, 2, 4):
            admit(lag_account, 0, 2)
            lag_account.close_batch([item(first, 0), item(first + 1, 0)])
        assert lag_account.complete
        assert lag_account.room(12) == 0

    def test_a_group_that_is_not_out_cannot_leave(self):
        lag_account = account(max_lag=1)
        lag_account.admit(0)
        lag_account.release(item(0, 0))
        with pytest.raises(ValueError, match=r"prompt_id \(0\) is not out: .* version 0"):
            lag_account.release(item(0, 0))
        assert lag_account.num_out == 0


class TestClosingABatch:
    def test_it_takes_the_oldest(self):
        lag_account = account(max_lag=5)
        admit(lag_account, 0, 3)
        waiting = [item(0, 0), item(1, 0), item(2, 0)]
        assert lag_account.choose(waiting) == waiting[:2]

    def test_too_few(self):
        lag_account = account(max_lag=5)
        admit(lag_account, 0, 3)
        assert lag_account.choose([item(0, 0)]) == "rollouts"

    def test_it_waits_for_a_straggler_that_is_due(self):
        lag_account = account(max_lag=0)
        admit(lag_account, 0, 3)
        assert lag_account.choose([item(1, 0), item(2, 0)]) == "stragglers (max_lag)"

    def test_it_waits_while_the_rest_could_not_all_be_trained_in_time(self):
        """Six of version 0 and max_lag 2 are due at versions 0, 1, 2, two a batch. Trained on at
        version 1, the young pair would leave four for version 2, of which two would come too
        late; though none of the four is due yet."""
        lag_account = account(max_lag=2)
        admit(lag_account, 0, 6)
        lag_account.close_batch([item(0, 0), item(1, 0)])
        admit(lag_account, 1, 2)
        young = [item(6, 1), item(7, 1)]
        assert lag_account.choose(young) == "stragglers (max_lag)"
        assert lag_account.choose([item(2, 0), *young]) == "stragglers (max_lag)"
        old = [item(2, 0), item(3, 0)]
        assert lag_account.choose([*old, *young]) == old

    def test_masking_waits_for_nobody(self):
        lag_account = account(0, "mask")
        admit(lag_account, 0, 3)
        waiting = [item(1, 0), item(2, 0)]
        assert lag_account.choose(waiting) == waiting

    def test_dropping_hands_out_what_is_too_old_at_once_and_alone(self):
        lag_account = account(1, "drop")
        admit(lag_account, 0, 4)
        lag_account.close_batch([item(0, 0), item(1, 0)])
        assert lag_account.choose([item(2, 0)]) == "rollouts"  # lag 1 at version 1
        admit(lag_account, 1, 2)
        lag_account.close_batch([item(4, 1), item(5, 1)])
        stale, mixed = item(2, 0), item(3, 0, [0, 1], [1, 1])
        assert lag_account.choose([stale, mixed]) == [stale]
        assert lag_account.choose([mixed]) == "rollouts"  # one of its two is still good


@settings(deadline=None, max_examples=150)
@given(
    batch_groups=st.integers(1, 3),
    max_lag=st.integers(0, 4),
    publish_every=st.integers(1, 5),
    choices=st.randoms(use_true_random=False),
)
def test_in_any_order_of_events_the_bound_is_strict_and_nothing_gets_stuck(
    batch_groups, max_lag, publish_every, choices
):
    """Admissions, finishes and steps in any order; weights reach generation late or not at all."""
    publish_every = min(publish_every, max_lag + 1)
    last = 8
    lag_account = account(max_lag, batch_groups=batch_groups, last_version=last)
    out: list[CollectedGroup] = []
    waiting: list[CollectedGroup] = []
    weights = order = trained = 0
    while not lag_account.complete:
        can_admit = lag_account.room(weights + max_lag + 1) > 0
        chosen = lag_account.choose(waiting)
        newest = lag_account.next_version // publish_every * publish_every
        moves = ["admit"] * can_admit + ["finish"] * bool(out) + ["publish"] * (newest > weights)
        moves += ["drop"] * (len(out) > 1 and order < 60) + ["train"] * (
            not isinstance(chosen, str)
        )
        assert moves, f"stuck at {lag_account.next_version} with {len(waiting)} waiting: {chosen}"
        move = choices.choice(moves)
        if move == "admit":
            lag_account.admit(weights)
            out.append(item(order, weights))
            order += 1
        elif move == "finish":
            waiting.append(out.pop(choices.randrange(len(out))))
            waiting.sort(key=lambda group: group.order)
        elif move == "drop":
            lag_account.release(out.pop(choices.randrange(len(out))))
        elif move == "publish":
            weights = newest
        else:
            version = lag_account.close_batch(chosen)
            waiting = [group for group in waiting if group not in chosen]
            trained += len(chosen)
            assert all(version - group.admitted_version <= max_lag for group in chosen)
    assert trained == last * batch_groups
    assert lag_account.num_out == len(out) + len(waiting) == 0


class TestTokensBeyondTheBound:
    def test_lag_is_counted_from_the_oldest_token(self):
        bound = LagBound(max_lag=2, beyond="drop")
        assert bound.within(rollout([3, 4, 5]), 5)
        assert not bound.within(rollout([3, 4, 5]), 6)
        assert bound.within(rollout([]), 6)

    def test_drop_keeps_the_rollouts_within(self):
        group = item(0, 3, [3, 4], [4, 4], [2, 5]).group
        kept = LagBound(max_lag=1, beyond="drop").keep(group, 4)
        assert [r.completion.sample_index for r in kept.rollouts] == [0, 1]
        assert LagBound(max_lag=1, beyond="mask").keep(group, 4) is group

    @pytest.mark.parametrize("on_device", [False, True])
    def test_mask_takes_the_loss_from_old_tokens_and_leaves_the_rest(self, on_device):
        batch = rows([rollout([1, 2, 3]), rollout([3, 4])])
        if on_device:
            batch = jax.tree.map(jax.numpy.asarray, batch)
        masked, num_masked = LagBound(max_lag=1, beyond="mask").mask(batch, 4)
        assert num_masked == 2
        np.testing.assert_array_equal(masked.loss_mask, [[False, False, True], [True, True, False]])
        np.testing.assert_array_equal(masked.token_ids, batch.token_ids)

    def test_other_policies_mask_nothing(self):
        batch = rows([rollout([1, 2, 3])])
        masked, num_masked = LagBound(max_lag=1, beyond="wait").mask(batch, 40)
        assert (masked is batch, num_masked) == (True, 0)

    def test_check_finds_a_decode_loop_that_used_older_weights(self):
        groups = [item(4, 5, [5, 6], [4, 6]).group]
        LagBound(max_lag=2, beyond="wait").check(groups, 6)
        with pytest.raises(RuntimeError, match="prompt_id 4 holds a token more than 2 steps older"):
            LagBound(max_lag=2, beyond="wait").check(groups, 7)
        LagBound(max_lag=2, beyond="mask").check(groups, 7)
