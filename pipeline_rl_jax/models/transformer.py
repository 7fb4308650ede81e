"""The decoder-only transformer of the Llama and Qwen families, as a Flax NNX module.

Owns the parameter tree and the whole-sequence forward pass. Layers are stacked on a leading axis L
and scanned, so that compile time does not grow with depth. Weights are stored `[in, out]`; a token
embedding and its output matrix are `[V, D]`. The logits matrix is applied by `token_logprobs.py`
in chunks, so the module returns hidden states.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pipeline_rl_jax.models.attention import segment_attention
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.layers import (
    gated_mlp,
    project_qkv,
    rms_norm,
    rope_frequencies,
    rope_tables,
)

Remat = Literal["none", "dots", "full"]


class LayerStack(nnx.Module):
    """The weights of all layers, each with a leading axis L."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        num_layers, width, mlp_width = config.num_layers, config.width, config.mlp_width
        query_width = config.num_query_heads * config.head_width
        kv_width = config.num_kv_heads * config.head_width

        def matrix(fan_in: int, fan_out: int) -> nnx.Param:
            value = jax.random.normal(rngs.params(), (num_layers, fan_in, fan_out), dtype)
            return nnx.Param(value * fan_in**-0.5)

        def constant(value: float, size: int) -> nnx.Param:
            return nnx.Param(jnp.full((num_layers, size), value, dtype))

        self.attention_norm = constant(1.0, width)
        self.query = matrix(width, query_width)
        self.key = matrix(width, kv_width)
        self.value = matrix(width, kv_width)
        self.output = matrix(query_width, width)
        if config.qkv_bias:
            self.query_bias = constant(0.0, query_width)
            self.key_bias = constant(0.0, kv_width)
            self.value_bias = constant(0.0, kv_width)
        if config.qk_norm:
            self.query_norm = constant(1.0, config.head_width)
            self.key_norm = constant(1.0, config.head_width)
        self.mlp_norm = constant(1.0, width)
        self.gate = matrix(width, mlp_width)
        self.up = matrix(width, mlp_width)
        self.down = matrix(mlp_width, width)


class Transformer(nnx.Module):
    """A decoder-only language model without its last matrix product.

    Args:
      config: sizes and switches.
      rngs: `params` stream for random initialisation (normal, variance 1/fan_in).
      param_dtype: dtype the weights are held in.
      compute_dtype: dtype of activations; norms, rotary angles and softmax are float32.
      remat: what the backward pass recomputes of a layer: nothing, all but matrix products, all.
      attention_block_tokens: queries whose scores exist at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        remat: Remat = "none",
        attention_block_tokens: int = 1024,
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat: Remat = remat
        self.attention_block_tokens = attention_block_tokens
        table = (config.vocabulary_size, config.width)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), table, param_dtype))
        self.layers = LayerStack(config, rngs=rngs, dtype=param_dtype)
        self.final_norm = nnx.Param(jnp.ones((config.width,), param_dtype))
        if not config.tied_embeddings:
            self.unembedding = nnx.Param(
                0.02 * jax.random.normal(rngs.params(), table, param_dtype)
            )

    @property
    def output_embedding(self) -> Float[Array, "V D"]:
        """The matrix that turns hidden states into logits."""
        tied = self.config.tied_embeddings
        return self.embedding[...] if tied else self.unembedding[...]

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Final hidden states (after the last norm). Tokens see their own segment's past only."""
        config = self.config
        hidden = self.embedding[...].at[token_ids].get(mode="clip").astype(self.compute_dtype)
        rope = rope_tables(positions, jnp.asarray(rope_frequencies(config)))

        def layer(hidden: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            x = rms_norm(hidden, weights["attention_norm"], epsilon=config.norm_epsilon)
            query, key, value = project_qkv(x, weights, config, rope=rope)
            attended = segment_attention(
                query, key, value, segment_ids, block_tokens=self.attention_block_tokens
            )
            flat = attended.reshape(*attended.shape[:2], -1)
            hidden = hidden + flat @ weights["output"].astype(flat.dtype)
            x = rms_norm(hidden, weights["mlp_norm"], epsilon=config.norm_epsilon)
            return hidden + gated_mlp(x, weights), None

        stacked = nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))
        hidden, _ = jax.lax.scan(_rematerialised(layer, self.remat), hidden, stacked)
        return rms_norm(hidden, self.final_norm[...], epsilon=config.norm_epsilon)


def _rematerialised(layer, remat: Remat):
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def logits(model: Transformer, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Next-token logits in float32. For evaluation of few positions; training uses chunks."""
    table = model.output_embedding.astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


@functools.cache
def abstract_params(config: ModelConfig, dtype: str = "float32"):
    """The parameter tree as a nested dict of `jax.ShapeDtypeStruct`, nothing allocated."""

    def build():
        model = Transformer(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    return jax.eval_shape(build)
