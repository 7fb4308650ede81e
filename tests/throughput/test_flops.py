import pytest

from pipeline_rl_jax.throughput.flops import ModelShape, causal_attended

SHAPE = ModelShape(matrix_parameters=100, attention_width=10)


def test_by_hand():
    # A sequence of 3 tokens: 2·100·3 for the weights, 4·10·(1 + 2 + 3) for attention.
    assert causal_attended(3) == 6
    assert SHAPE.forward_flops(3, 6) == 600 + 240
    assert SHAPE.training_flops(3, 6) == pytest.approx(3 * 840)


def test_splitting_a_batch_counts_the_same():
    parts = SHAPE.forward_flops(3, 6) + SHAPE.forward_flops(2, 3)
    assert SHAPE.forward_flops(5, 9) == parts
