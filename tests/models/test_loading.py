from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from configs.base import get_config
from pipeline_rl_jax.models.loading import build_model, initial_params, resolve_source
from pipeline_rl_jax.models.partition import param_shardings
from pipeline_rl_jax.models.transformer import abstract_params, logits
from pipeline_rl_jax.settings import ModelSettings


@pytest.fixture
def settings() -> ModelSettings:
    defaults = ModelSettings(**get_config().model.to_dict())
    return dataclasses.replace(defaults, compute_dtype="float32", remat="none")


def test_graph_and_params_make_the_model(golden_qwen2, settings):
    graph = build_model(golden_qwen2.config, settings)
    token_ids = jnp.asarray(golden_qwen2.token_ids)

    @jax.jit
    def run(params):
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        hidden = model(token_ids, positions=positions, segment_ids=jnp.ones_like(token_ids))
        return logits(model, hidden)

    np.testing.assert_allclose(run(golden_qwen2.params), golden_qwen2.logits, atol=1e-4)


def test_settings_reach_the_model(golden_qwen2, settings):
    chosen = dataclasses.replace(
        settings, compute_dtype="bfloat16", remat="dots", attention_block_tokens=7
    )
    model = nnx.merge(build_model(golden_qwen2.config, chosen), golden_qwen2.params)
    assert (model.compute_dtype, model.remat) == (jnp.bfloat16, "dots")
    assert model.attention_block_tokens == 7


def test_pretrained_params_are_read(golden_qwen2, settings, single_device):
    chosen = dataclasses.replace(settings, param_dtype="bfloat16")
    params = initial_params(
        golden_qwen2.directory,
        golden_qwen2.config,
        chosen,
        shardings=single_device(golden_qwen2.config),
        seed=0,
    )
    expected = golden_qwen2.params["embedding"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["embedding"], expected)


def test_random_params_are_drawn_on_the_shardings_and_do_not_depend_on_them(golden_qwen2, settings):
    config = golden_qwen2.config
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"))
    shardings = param_shardings(config, mesh)
    params = initial_params(
        golden_qwen2.directory,
        config,
        dataclasses.replace(settings, init="random"),
        shardings=shardings,
        seed=5,
    )
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert described == abstract_params(config)
    first_draw = jax.random.normal(nnx.Rngs(5).params(), (64, 32))  # on one device
    np.testing.assert_allclose(params["embedding"], 0.02 * first_draw, rtol=1e-6)
    assert np.std(params["layers"]["up"]) == pytest.approx(32**-0.5, rel=0.1)  # 1/sqrt(fan in)


def test_a_directory_is_itself(tmp_path):
    assert resolve_source(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "source", ["/nowhere/model", "./model", "~/model", "runs/a/b", "a/", "", "tests/model"]
)
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(source):
    with pytest.raises(ValueError, match="is no such directory"):
        resolve_source(source)


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; give the directory that holds it"):
        resolve_source(str(tmp_path / "model.safetensors"))


def test_hub_failures_are_one_line():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ValueError, match=r"\(Qwen/Qwen2\.5-7B\) is no directory, and the hub"):
        resolve_source("Qwen/Qwen2.5-7B")
    with pytest.raises(ValueError, match=r"\(two words\) is neither a directory nor a model"):
        resolve_source("two words")
