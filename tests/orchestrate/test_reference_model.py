"""Which weights the reference has, and what it must have in common with the policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline_rl_jax.meshes import Meshes, build_meshes
from pipeline_rl_jax.models.hf_export import WeightFormat, save_params
from pipeline_rl_jax.models.loading import initial_params, random_params
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.orchestrate.reference_model import find_reference
from pipeline_rl_jax.settings import Settings
from tests.fakes.settings import make_settings
from tests.fakes.tiny_engine import TINY


def settings_of(*, model=None, meshes=None, generation=None, **algorithm) -> Settings:
    return make_settings(
        algorithm={"kl_coefficient": 0.1, **algorithm},
        model={"compute_dtype": "float32", **(model or {})},
        meshes=meshes or {},
        generation={"max_prompt_tokens": 40, "max_new_tokens": 8, **(generation or {})},
    )


def meshes_of(settings: Settings) -> Meshes:
    return build_meshes(settings.meshes, jax.devices())


def write_model(directory, config=TINY, *, seed=0):
    params = random_params(config, seed=seed, dtype="float32")
    weights = WeightFormat(dtype="float32")
    save_params(params, config, directory=directory, weight_format=weights)
    return directory, params


def find(settings: Settings, start, **rest):
    return find_reference(settings, start, policy=TINY, meshes=meshes_of(settings), **rest)


def test_without_a_coefficient_nothing_is_looked_for(tmp_path):
    assert find(settings_of(kl_coefficient=0.0), tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("model", "reference_dtype"),
    [
        ({"init": "random"}, "compute"),
        ({"init": "random"}, "bfloat16"),
        ({"init": "random", "param_dtype": "bfloat16"}, "float32"),
        ({}, "compute"),
        ({"param_dtype": "bfloat16"}, "float32"),
    ],
)
def test_it_begins_as_the_policy_does(tmp_path, model, reference_dtype):
    """The very weights of step 0, in the dtype asked for."""
    start, _ = write_model(tmp_path / "model")
    settings = settings_of(model=model, reference_dtype=reference_dtype)
    meshes = meshes_of(settings)
    reference = find(settings, start).load(settings, mesh=meshes.reference)
    policy = initial_params(
        start,
        TINY,
        settings.model,
        shardings=param_shardings(TINY, meshes.trainer),
        seed=settings.seed,
    )
    asked = settings.model.compute_dtype if reference_dtype == "compute" else reference_dtype
    for mine, theirs in zip(jax.tree.leaves(reference), jax.tree.leaves(policy), strict=True):
        assert mine.dtype == jnp.dtype(asked)
        np.testing.assert_array_equal(mine, theirs.astype(asked))


def test_another_checkpoint_on_devices_of_its_own(tmp_path):
    other, params = write_model(tmp_path / "other", seed=5)
    settings = settings_of(reference=str(other), meshes={"reference_devices": (2, 3)})
    reference = find(settings, tmp_path / "unused")
    assert (reference.directory, reference.is_start) == (other, False)
    loaded = reference.load(settings, mesh=meshes_of(settings).reference)
    gate = loaded["layers"]["gate"]
    np.testing.assert_array_equal(gate, params["layers"]["gate"])
    assert {device.id for device in gate.devices()} == {2, 3}
    assert gate.addressable_shards[0].data.shape[1] == TINY.width // 2


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"vocabulary_size": 260}, {}, r"algorithm.reference \(.*\) knows 260 tokens, the policy"),
        ({"max_positions": 32}, {}, r"has a context of 32 tokens, the longest rollout is of 48"),
        ({}, {"meshes": {"reference_devices": (1, 2, 3)}}, r"meshes.reference_devices lists 3"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, config, changes, message):
    other, _ = write_model(tmp_path / "other", dataclasses.replace(TINY, **config))
    with pytest.raises(ValueError, match=message) as error:
        find(settings_of(reference=str(other), **changes), tmp_path)
    assert "\n" not in str(error.value)
