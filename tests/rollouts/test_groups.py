import pytest

from pipeline_rl_jax.records import Rollout
from pipeline_rl_jax.rollouts.groups import GroupCollector
from tests.fakes.rollouts import make_completion, make_prompt


def rollout(prompt_id: int, sample_index: int) -> Rollout:
    completion = make_completion(make_prompt(prompt_id), [1, 2], sample_index=sample_index)
    return Rollout(completion=completion, reward=0.0)


def collector(*sizes: int) -> GroupCollector:
    """Groups of prompts 0, 1, … of these sizes, admitted at versions 10, 11, …"""
    groups = GroupCollector()
    for prompt_id, size in enumerate(sizes):
        groups.open(make_prompt(prompt_id), size, version=10 + prompt_id)
    return groups


def test_a_group_leaves_with_its_last_member_in_order_of_samples():
    groups = collector(3)
    assert groups.add(rollout(0, 2)) is None
    assert groups.add(rollout(0, 0)) is None
    item = groups.add(rollout(0, 1))
    assert [r.completion.sample_index for r in item.group.rollouts] == [0, 1, 2]
    assert item.group.prompt.prompt_id == 0
    assert groups.num_open == 0


def test_order_and_version_are_those_of_admission_not_of_the_finish():
    groups = collector(1, 1)
    second, first = groups.add(rollout(1, 0)), groups.add(rollout(0, 0))
    assert (first.order, first.admitted_version) == (0, 10)
    assert (second.order, second.admitted_version) == (1, 11)


def test_a_lost_member_shrinks_its_group():
    groups = collector(3)
    groups.add(rollout(0, 0))
    groups.lose(0, 1)
    item = groups.add(rollout(0, 2))
    assert [r.completion.sample_index for r in item.group.rollouts] == [0, 2]


def test_the_last_member_may_be_the_lost_one_and_all_may_be_lost():
    groups = collector(2, 2)
    groups.add(rollout(0, 1))
    assert groups.lose(0, 0).num_rollouts == 1
    groups.lose(1, 0)
    assert groups.lose(1, 1).num_rollouts == 0


def test_a_stranger_and_a_repetition_are_errors():
    groups = collector(2)
    groups.add(rollout(0, 0))
    with pytest.raises(ValueError, match=r"sample_index \(0\) of prompt_id \(0\) came back twice"):
        groups.add(rollout(0, 0))
    with pytest.raises(ValueError, match="came back twice"):
        groups.lose(0, 0)
    with pytest.raises(ValueError, match=r"sample_index \(2\) must be below the size"):
        groups.add(rollout(0, 2))
    with pytest.raises(ValueError, match=r"prompt_id \(5\) is of no open group"):
        groups.add(rollout(5, 0))
    with pytest.raises(ValueError, match=r"prompt_id \(0\) is already being generated"):
        groups.open(make_prompt(0), 2, version=0)


def test_abandon_tells_what_had_come_back_from_what_was_still_out():
    groups = collector(4, 2, 1)
    groups.add(rollout(0, 0))
    groups.add(rollout(0, 1))
    groups.lose(0, 2)
    groups.add(rollout(2, 0))
    assert groups.abandon() == (2, 3)  # of group 0: 2 and 1, of group 1: 0 and 2
    assert groups.num_open == 0
