import pytest

from pipeline_rl_jax.orchestrate.utilisation import Utilisation, model_shape
from tests.fakes.rollouts import make_group
from tests.fakes.tiny_engine import TINY


def test_the_shape_counts_matrices_and_the_unembedding_once():
    shape = model_shape(TINY)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + (4 + 4) * 8 + 3 * 32 * 64 + 2 * 32
    assert shape.matrix_parameters == 2 * layer + 32 + 264 * 32
    assert shape.attention_width == 2 * 4 * 8


def test_shares_are_flops_over_time_and_peak():
    shape = model_shape(TINY)
    group = make_group(0, [0.0, 1.0])
    lengths = [r.completion.prompt.token_ids.size + r.completion.num_tokens for r in group.rollouts]
    attended = sum(n * (n + 1) / 2 for n in lengths)
    flops = 6 * shape.matrix_parameters * sum(lengths) + 12 * 64 * attended
    utilisation = Utilisation(TINY, trainer_peak=1e9, generation_peak=2e9)
    assert utilisation.trainer([group], 0.5) == pytest.approx(flops / 0.5 / 1e9)
    decoded = 2 * shape.matrix_parameters * 100
    assert utilisation.generation(100, 0.25) == pytest.approx(decoded / 0.25 / 2e9)
    assert utilisation.generation(0, 0.0) == 0
