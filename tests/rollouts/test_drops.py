from pipeline_rl_jax.rollouts.drops import DropCounter, DropReason


def test_counts_add_up_by_reason_and_zero_leaves_no_trace():
    drops = DropCounter()
    drops.count(DropReason.CANCELLED, 2)
    drops.count("zero_variance", 4)
    drops.count("cancelled", 1)
    drops.count(DropReason.BEYOND_MAX_LAG, 0)
    assert drops.counts == {"cancelled": 3, "zero_variance": 4}
    assert drops.total == 7
