from __future__ import annotations

import dataclasses

import pytest

from pipeline_rl_jax.rewards.streamed_model import StreamedModel, StreamShape
from tests.fakes.tiny_reward_model import reward_params, scoring_mesh
from tests.fakes.tiny_training import TINY

SHAPE = StreamShape(rows=7, max_tokens=100, chunk_widths=(32, 128, 512), min_cache_tokens=16)


@pytest.fixture(scope="module")
def model():
    return StreamedModel(
        TINY, reward_params(), readout=lambda *_: None, shape=SHAPE, mesh=scoring_mesh()
    )


@pytest.mark.parametrize(
    ("pending", "shape"),
    [
        ([1] * 8, (8, 32)),
        ([128] * 8, (8, 128)),
        ([512] * 8, (8, 512)),
        ([128] * 7 + [328], (8, 128)),  # one long prompt does not widen all rows
        ([200], (2, 128)),
        ([600, 500], (2, 512)),
        ([128] * 3, (8, 128)),  # more than a quarter of the rows
    ],
)
def test_a_call_is_as_wide_as_pays(model, pending, shape):
    assert model._call_shape(pending) == shape


def test_caches_double_up_to_the_longest_text(model):
    assert [model._cache_tokens(n) for n in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, r"reward_model\.rows \(0\) must be 1 or more"),
        ({"chunk_widths": (128, 32)}, r"chunk_widths \(128, 32\) must be ascending"),
        ({"chunk_widths": ()}, r"chunk_widths \(\) must be ascending"),
        ({"min_cache_tokens": 0}, r"min_cache_tokens \(0\)"),
        ({"max_tokens": 129}, "texts of 129 tokens do not fit the model's context of 128"),
    ],
)
def test_shapes_of_no_use_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **change).check(TINY, section="reward_model")
    SHAPE.check(TINY, section="reward_model")
