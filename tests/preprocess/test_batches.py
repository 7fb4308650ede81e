import dataclasses

import numpy as np
import pytest

from pipeline_rl_jax.preprocess.batches import DropReason, assemble, find_refusal
from pipeline_rl_jax.records import Group, StopReason
from tests.fakes.rollouts import make_group, make_prompt
from tests.fakes.settings import make_settings

ROWS = {"tokens_per_row": 12, "rows_per_micro_batch": 2}


def with_stop_reasons(group, *stop_reasons):
    rollouts = [
        dataclasses.replace(r, completion=dataclasses.replace(r.completion, stop_reason=reason))
        for r, reason in zip(group.rollouts, stop_reasons, strict=True)
    ]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def advantages_by_sequence(batch):
    """The one advantage each rollout of the batch has at its completion tokens."""
    values = []
    for index in range(int(batch.num_sequences)):
        (value,) = np.unique(batch.advantages[batch.loss_mask & (batch.sequence_index == index)])
        values.append(float(value))
    return values


def test_groups_of_unequal_size_become_one_batch():
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 1.0, 0.0, 0.0]), make_group(2, [1.0])]
    result = assemble(groups, make_settings(trainer=ROWS))
    np.testing.assert_allclose(
        advantages_by_sequence(result.batch), [0.5, -0.5, 0.5, 0.5, -0.5, -0.5, 0.0]
    )
    assert result.num_kept == result.batch.num_sequences == 7
    assert not any(result.num_dropped.values())
    # Seven rollouts of 2 + 3 tokens, two to a row of 12.
    assert int(result.batch.num_rows) == 4
    assert result.batch.token_ids.shape == (4, 12)
    np.testing.assert_array_equal(
        result.batch.returns[result.batch.sequence_index == 0], [0, 0, 1, 1, 1]
    )


def test_every_reason_is_counted_once_and_enters_no_baseline():
    stop = StopReason
    groups = [
        # 0.25 and 0.75 alone make the baseline: a NaN, a cancelled and a masked member do not.
        with_stop_reasons(
            make_group(0, [0.25, np.nan, 50.0, 0.75, -9.0, np.inf]),
            *(stop.EOS, stop.EOS, stop.CANCELLED, stop.STOP_STRING),
            *(stop.MAX_NEW_TOKENS, stop.CONTEXT_LIMIT),
        ),
        make_group(1, [1.0, 1.0, 1.0 + 1e-9]),
    ]
    settings = make_settings(trainer=ROWS, algorithm={"truncated": "mask", "zero_variance": "drop"})
    result = assemble(groups, settings)
    np.testing.assert_allclose(advantages_by_sequence(result.batch), [-0.25, 0.25])
    assert result.num_dropped == {
        DropReason.CANCELLED: 1,
        DropReason.NON_FINITE_REWARD: 2,
        DropReason.TRUNCATED: 1,
        DropReason.ZERO_VARIANCE: 3,
    }
    assert result.num_kept == 2
    assert result.statistics["drops/non_finite_reward_rollouts"] == 2
    assert result.statistics["drops/zero_variance_rollouts"] == 3
    assert result.statistics["drops/completion_tokens"] == 7 * 3
    assert result.statistics["batch/rollouts"] == 2
    assert np.isfinite(result.batch.advantages).all()
    assert np.isfinite(result.batch.returns).all()


def test_truncated_and_zero_variance_rollouts_are_kept_by_default():
    groups = [
        with_stop_reasons(make_group(0, [1.0, 0.0]), StopReason.EOS, StopReason.MAX_NEW_TOKENS),
        make_group(1, [1.0, 1.0]),
    ]
    result = assemble(groups, make_settings(trainer=ROWS))
    np.testing.assert_allclose(advantages_by_sequence(result.batch), [0.5, -0.5, 0, 0])
    # A cut completion counts as ended: its target is the reward it got, nothing is bootstrapped.
    for index, reward in enumerate([1.0, 0.0, 1.0, 1.0]):
        tokens = result.batch.loss_mask & (result.batch.sequence_index == index)
        np.testing.assert_array_equal(result.batch.returns[tokens], np.full(3, reward))
    assert result.statistics["group/zero_variance_share"] == 0.5
    assert result.statistics["drops/zero_variance_rollouts"] == 0


def test_masked_members_can_leave_a_group_without_variance():
    group = with_stop_reasons(
        make_group(0, [1.0, 1.0, 0.0]), StopReason.EOS, StopReason.EOS, StopReason.MAX_NEW_TOKENS
    )
    settings = make_settings(trainer=ROWS, algorithm={"truncated": "mask", "normalise_std": True})
    result = assemble([group], settings)
    assert advantages_by_sequence(result.batch) == [0.0, 0.0]
    assert result.statistics["group/zero_variance_share"] == 1.0


def test_dropped_groups_are_no_part_of_the_batch_baseline():
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 1.0])]
    algorithm = {"baseline": "batch_mean", "zero_variance": "drop"}
    dropped = assemble(groups, make_settings(trainer=ROWS, algorithm=algorithm))
    np.testing.assert_allclose(advantages_by_sequence(dropped.batch), [0.5, -0.5])
    algorithm["zero_variance"] = "keep"
    kept = assemble(groups, make_settings(trainer=ROWS, algorithm=algorithm))
    np.testing.assert_allclose(advantages_by_sequence(kept.batch), [0.25, -0.75, 0.25, 0.25])


def test_nothing_left_gives_no_batch_but_an_account():
    settings = make_settings(trainer=ROWS, algorithm={"zero_variance": "drop"})
    result = assemble([make_group(0, [1.0, 1.0])], settings)
    assert (result.batch, result.num_kept) == (None, 0)
    assert result.num_dropped[DropReason.ZERO_VARIANCE] == 2
    assert result.statistics["batch/rollouts"] == 0
    assert result.statistics["reward/mean"] == 1.0
    empty = assemble([Group(prompt=make_prompt(), rollouts=())], settings)
    assert empty.batch is None
    assert empty.statistics["group/empty_groups"] == 1


def test_a_rollout_that_fits_no_row_names_the_setting():
    with pytest.raises(ValueError, match=r"trainer\.tokens_per_row \(12\)"):
        assemble([make_group(0, [1.0, 0.0], num_tokens=[3, 11])], make_settings(trainer=ROWS))


def test_an_empty_completion_counts_without_being_trained_on():
    result = assemble([make_group(0, [1.0, 0.0], num_tokens=[0, 3])], make_settings(trainer=ROWS))
    assert result.num_kept == 2
    np.testing.assert_array_equal(np.unique(result.batch.advantages), [-0.5, 0.0])
    assert result.batch.loss_mask.sum() == 3


def test_a_penalised_truncation_has_the_reward_of_the_setting():
    group = with_stop_reasons(
        make_group(0, [1.0, 1.0, 0.0]), StopReason.EOS, StopReason.MAX_NEW_TOKENS, StopReason.EOS
    )
    algorithm = {"truncated": "penalise", "truncated_reward": -2.0}
    result = assemble([group], make_settings(trainer=ROWS, algorithm=algorithm))
    np.testing.assert_allclose(
        advantages_by_sequence(result.batch), [4 / 3, -5 / 3, 1 / 3], rtol=1e-6
    )
    returns = result.batch.returns[result.batch.sequence_index == 1]
    np.testing.assert_array_equal(returns, [0, 0, -2, -2, -2])
    assert result.statistics["reward/mean"] == pytest.approx(2 / 3)  # what the task gave
    # It also tells groups apart that the task alone does not.
    equal = with_stop_reasons(make_group(0, [1.0, 1.0]), StopReason.EOS, StopReason.CONTEXT_LIMIT)
    for truncated, refusal in (("train", DropReason.ZERO_VARIANCE), ("penalise", None)):
        algorithm = make_settings(algorithm={"truncated": truncated}).algorithm
        assert find_refusal(equal, algorithm) is refusal
    # By default it is as wrong as a wrong answer, whatever it said.
    wrong = with_stop_reasons(make_group(0, [0.0, 1.0]), StopReason.EOS, StopReason.MAX_NEW_TOKENS)
    default = make_settings(algorithm={"truncated": "penalise"}).algorithm
    assert find_refusal(wrong, default) is DropReason.ZERO_VARIANCE


def with_reference(gap):
    """Logprobs of a reference that finds the t-th token of a rollout `gap[t]` nats likelier."""

    def score(batch):
        logprobs = np.zeros(batch.token_ids.shape, np.float32)
        logprobs[batch.loss_mask] = batch.behaviour_logprobs[batch.loss_mask]
        for t, nats in enumerate(gap):
            logprobs[batch.loss_mask & (batch.positions == 2 + t)] += nats
        return logprobs

    return score


def test_kl_in_the_reward_is_summed_over_a_rollout_and_comes_before_the_baseline():
    groups = [make_group(0, [1.0, 0.0], num_tokens=[3, 1]), make_group(1, [0.5, 0.5])]
    algorithm = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    settings = make_settings(trainer=ROWS, algorithm=algorithm)
    result = assemble(groups, settings, reference_logprobs=with_reference([1.0, -3.0, 0.0]))
    # k1 = behaviour - reference: -1, +3, 0; sums 2 (three tokens) and -1 (one token).
    rewards = [1.0 - 0.2, 0.0 + 0.1, 0.5 - 0.2, 0.5 - 0.2]
    np.testing.assert_allclose(
        advantages_by_sequence(result.batch), [0.35, -0.35, 0.0, 0.0], atol=1e-6
    )
    for index, reward in enumerate(rewards):
        tokens = result.batch.loss_mask & (result.batch.sequence_index == index)
        np.testing.assert_allclose(result.batch.returns[tokens], reward, rtol=1e-6)
    assert result.statistics["reward/kl_penalty_mean"] == pytest.approx((0.2 - 0.1 + 0.2 + 0.2) / 4)
    assert result.statistics["reward/mean"] == 0.5
    assert result.batch.reference_logprobs[result.batch.loss_mask].any()


def test_which_rewards_are_equal_is_decided_by_the_task_not_by_the_kl():
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 1.0], num_tokens=[3, 1])]
    algorithm = {"kl_coefficient": 0.1, "kl_in": "reward", "zero_variance": "drop"}
    settings = make_settings(trainer=ROWS, algorithm=algorithm)
    result = assemble(groups, settings, reference_logprobs=with_reference([1.0, -1.0, 2.0]))
    assert result.num_dropped[DropReason.ZERO_VARIANCE] == 2
    assert result.num_kept == 2


def test_kl_in_the_loss_leaves_rewards_alone_and_needs_the_reference():
    settings = make_settings(trainer=ROWS, algorithm={"kl_coefficient": 0.1})
    groups = [make_group(0, [1.0, 0.0])]
    result = assemble(groups, settings, reference_logprobs=with_reference([5.0]))
    assert advantages_by_sequence(result.batch) == [0.5, -0.5]
    np.testing.assert_allclose(
        result.batch.reference_logprobs[result.batch.positions == 2][:2], [4.0, 4.0]
    )
    with pytest.raises(ValueError, match="kl_coefficient"):
        assemble(groups, settings)


def test_a_learned_baseline_leaves_the_reward_for_the_step():
    settings = make_settings(trainer=ROWS, algorithm={"baseline": "value"})
    result = assemble([make_group(0, [1.0, 0.25])], settings)
    assert advantages_by_sequence(result.batch) == [1.0, 0.25]


def test_what_is_refused():
    algorithm = make_settings(algorithm={"truncated": "mask"}).algorithm
    limit, stop = StopReason.MAX_NEW_TOKENS, StopReason.EOS
    for group, expected in [
        (make_group(0, [1.0, 0.0]), None),
        (make_group(0, [1.0, 1.0]), DropReason.ZERO_VARIANCE),
        (make_group(0, [1.0, 1.0 + 1e-9, np.nan]), DropReason.ZERO_VARIANCE),
        (make_group(0, [1.0]), None),  # one rollout has no variance to speak of
        (make_group(0, [np.nan, np.inf]), DropReason.NON_FINITE_REWARD),
        (with_stop_reasons(make_group(0, [1.0, 0.0]), limit, limit), DropReason.TRUNCATED),
        (with_stop_reasons(make_group(0, [1.0, 0.0]), stop, limit), None),
        (Group(prompt=make_prompt(), rollouts=()), None),
    ]:
        assert find_refusal(group, algorithm) is expected


def test_gae_leaves_the_reward_and_the_kl_of_each_token_for_the_trainer():
    algorithm = {"baseline": "gae", "kl_coefficient": 0.1, "kl_in": "reward"}
    settings = make_settings(trainer=ROWS, algorithm=algorithm)
    result = assemble(
        [make_group(0, [1.0, 0.25])], settings, reference_logprobs=with_reference([5.0])
    )
    mask, index = result.batch.loss_mask, result.batch.sequence_index
    np.testing.assert_array_equal(result.batch.returns[mask & (index == 0)], 1.0)
    np.testing.assert_array_equal(result.batch.returns[mask & (index == 1)], 0.25)
    assert np.abs(result.batch.reference_logprobs[mask]).min() > 0
    assert result.batch.truncated is None


def test_bootstrapping_marks_the_tokens_of_cut_completions():
    settings = make_settings(trainer=ROWS, algorithm={"baseline": "gae", "truncated": "bootstrap"})
    group = with_stop_reasons(
        make_group(0, [1.0, 0.0, 0.0]),
        StopReason.EOS,
        StopReason.MAX_NEW_TOKENS,
        StopReason.CONTEXT_LIMIT,
    )
    batch = assemble([group], settings).batch
    np.testing.assert_array_equal(batch.truncated, batch.loss_mask & (batch.sequence_index > 0))


def test_dpo_numbers_the_best_and_the_worst_of_each_group():
    algorithm = {"loss": "dpo", "baseline": "none", "truncated": "mask"}
    settings = make_settings(trainer=ROWS, algorithm=algorithm)
    groups = [
        make_group(0, [0.5, 1.0, 0.0]),
        make_group(1, [1.0, 1.0]),  # a tie
        with_stop_reasons(  # the best of all is masked
            make_group(2, [9.0, 0.0, 1.0]),
            StopReason.MAX_NEW_TOKENS,
            StopReason.EOS,
            StopReason.EOS,
        ),
        make_group(3, [2.0]),  # nobody to be compared with
    ]
    result = assemble(groups, settings, reference_logprobs=with_reference([0.0]))
    assert advantages_by_sequence(result.batch) == [0, 1, -1, 0, 0, -2, 2, 0]
