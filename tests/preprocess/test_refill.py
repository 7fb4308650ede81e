import pytest

from pipeline_rl_jax.preprocess.refill import RefillRule
from tests.fakes.rollouts import make_group
from tests.fakes.settings import make_settings

USELESS, USEFUL = make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0])


def make_rule(share: float, *, batch_groups: int = 2, zero_variance: str = "refill") -> RefillRule:
    return RefillRule(
        make_settings(
            algorithm={
                "zero_variance": zero_variance,
                "max_refill_share": share,
                "group_size": 2,
            },
            trainer={"batch_rollouts": 2 * batch_groups},
        )
    )


def refusals(rule: RefillRule, groups) -> list[bool]:
    return [rule.refuse(group) is not None for group in groups]


def test_what_teaches_is_kept_what_does_not_is_turned_away():
    rule = make_rule(3.0)
    assert refusals(rule, [USEFUL, USELESS, USEFUL, USELESS]) == [False, True, False, True]
    assert rule.take_num_kept_unwillingly() == 0


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
def test_without_refill_every_group_is_kept(zero_variance):
    assert not any(refusals(make_rule(3.0, zero_variance=zero_variance), [USELESS] * 9))


def test_data_that_teaches_nothing_is_kept_in_the_proportion_of_the_cap():
    rule = make_rule(2.0, batch_groups=3)
    # A batch's worth in a row, then two for each one kept.
    kept_then_two = [False, True, True]
    assert refusals(rule, [USELESS] * 12) == [True] * 6 + kept_then_two * 2
    assert rule.take_num_kept_unwillingly() == 2
    assert rule.take_num_kept_unwillingly() == 0


def test_useful_groups_earn_no_more_than_a_batch_of_refusals():
    rule = make_rule(1.0, batch_groups=2)
    assert not any(refusals(rule, [USEFUL] * 50))
    assert refusals(rule, [USELESS] * 3) == [True, True, False]


def test_a_share_below_one_adds_up():
    rule = make_rule(0.5, batch_groups=1)
    assert refusals(rule, [USELESS] * 7) == [True, False, False, True, False, False, True]
    assert not any(refusals(make_rule(0.0), [USELESS] * 5))
