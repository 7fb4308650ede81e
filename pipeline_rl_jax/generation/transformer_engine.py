"""The engine for our transformers: slots on the generation mesh, one jitted call per verb.

Owns compilation and placement. Everything that must be remembered from call to call is in
`DecodeState`; the engine object itself holds no state, so several decode states (training and
evaluation, say) share its compiled functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline_rl_jax.generation.decode_model import (
    EngineParams,
    decode_forward,
    engine_params,
    engine_shardings,
    prefill_forward,
)
from pipeline_rl_jax.generation.decode_state import (
    Cache,
    DecodeState,
    cache_sharding,
    empty_state,
    insert_requests,
    request_arrays,
    state_sharding,
    take_slots,
    taken,
)
from pipeline_rl_jax.generation.engine import ResultTokens, SlotRequest
from pipeline_rl_jax.generation.sampling import sample, uniforms
from pipeline_rl_jax.models.cache_storage import resized
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.transformer import abstract_params
from pipeline_rl_jax.settings import GenerationSettings


class TransformerEngine:
    """Implements `generation.engine.Engine`.

    Args:
      config: the model.
      settings: the `generation` section.
      mesh: generation mesh with axes `data` (splits slots) and `tensor` (splits heads).
      stop_token_ids: tokens that end a completion (end-of-sequence and single-token stop strings).
      seed: of sampling.
    """

    samples_per_slot = 1

    def __init__(
        self,
        config: ModelConfig,
        settings: GenerationSettings,
        *,
        mesh: Mesh,
        stop_token_ids: Sequence[int],
        seed: int,
    ):
        if settings.slots % mesh.shape["data"]:
            raise ValueError(
                f"generation.slots ({settings.slots}) must be a multiple of the generation mesh's "
                f"data axis ({mesh.shape['data']}); use {mesh.shape['data']} or a multiple of it"
            )
        self.config = config
        self.settings = settings
        self.mesh = mesh
        self._seed = seed
        self._fused = mesh.shape["tensor"] == 1
        is_stop = np.zeros(config.vocabulary_size, bool)
        is_stop[list(stop_token_ids)] = True
        replicated = NamedSharding(mesh, PartitionSpec())
        self._is_stop = jax.device_put(is_stop, replicated)
        self._replicated = replicated
        shardings = state_sharding(mesh, config)
        self._state_sharding = shardings
        self._prepare = functools.partial(
            engine_params,
            config=config,
            fused=self._fused,
            matrix_dtype=_matrix_dtype(settings.compute_dtype, mesh),
        )
        self.param_shardings = engine_shardings(
            jax.eval_shape(self._prepare, abstract_params(config)), config, mesh
        )
        dtypes = {"compute_dtype": settings.compute_dtype, "cache_dtype": settings.cache_dtype}
        self._model = functools.partial(decode_forward, config=config, **dtypes)
        prefill = functools.partial(prefill_forward, config=config, **dtypes)
        self._prefill = jax.jit(prefill, out_shardings=self._prefix_sharding())
        self._insert = jax.jit(insert_requests, donate_argnums=0, out_shardings=shardings)
        self._generate = jax.jit(
            self._decode_chunk, donate_argnums=1, out_shardings=(shardings, replicated)
        )
        self._free = jax.jit(_free, donate_argnums=0, out_shardings=shardings)
        cache = cache_sharding(mesh, config, slot_axis="data")
        self._resize = jax.jit(resized, static_argnums=1, out_shardings=cache)
        self._take_cache = jax.jit(take_slots, out_shardings=cache)
        without_cache = dataclasses.replace(shardings, cache=None)
        self._take_fields = jax.jit(taken, out_shardings=without_cache)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.settings.slots

    @property
    def max_prefill_length(self) -> int:
        return self.settings.prefill_buckets[-1]

    def load_params(self, params) -> EngineParams:
        """Casts, moves and re-lays trainer-layout weights; the input is left untouched."""
        convert = jax.jit(self.convert_params, out_shardings=self.param_shardings)
        return convert(jax.device_put(params, self._replicated))

    def convert_params(self, params) -> EngineParams:
        """The pure part of `load_params`: generation dtype and engine layout, for use under jit."""
        dtype = self.settings.compute_dtype
        return self._prepare(jax.tree.map(lambda x: x.astype(dtype), params))

    def init_decode_state(self) -> DecodeState:
        settings = self.settings
        build = functools.partial(
            empty_state,
            self.config,
            slots=settings.slots,
            cache_tokens=settings.min_cache_tokens,
            cache_dtype=settings.cache_dtype,
        )
        return jax.jit(build, out_shardings=self._state_sharding)()

    def prefill(
        self, *, params: EngineParams, padded_tokens: np.ndarray, true_lengths: np.ndarray
    ) -> Cache:
        tokens, lengths = jax.device_put((padded_tokens, true_lengths), self._replicated)
        return self._prefill(params, tokens, lengths)

    def insert(self, prefix: Cache, decode_state: DecodeState, slot: SlotRequest) -> DecodeState:
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(
        self, prefix: Cache, decode_state: DecodeState, slots: Sequence[SlotRequest]
    ) -> DecodeState:
        arrays = request_arrays(slots, self.max_concurrent_decodes)
        return self._insert(decode_state, prefix, jax.device_put(arrays, self._replicated))

    def generate(
        self, params: EngineParams, decode_state: DecodeState, *, max_steps: int | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Caches must have room for K further positions of every live slot: see `resize`."""
        longest = self.settings.longest_chunk
        steps = np.int32(longest if max_steps is None else min(max_steps, longest))
        num_steps = jax.device_put(steps, self._replicated)
        return self._generate(params, decode_state, self._is_stop, num_steps)

    def free_resource(self, decode_state: DecodeState, slot: int) -> DecodeState:
        return self._free(decode_state, jax.device_put(np.int32(slot), self._replicated))

    def take_slots(self, decode_state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Array by array, so that at most one cache is there twice."""
        rows = jax.device_put(np.asarray(slots, np.int32), self._replicated)
        fields = self._take_fields(dataclasses.replace(decode_state, cache=None), rows)
        cache = jax.tree.map(lambda x: self._take_cache(x, rows), decode_state.cache)
        return dataclasses.replace(fields, cache=cache)

    def resize(self, decode_state: DecodeState, *, cache_tokens: int) -> DecodeState:
        """Array by array, so that at most one is there twice."""
        if cache_tokens == decode_state.cache.num_positions:
            return decode_state
        cache = jax.tree.map(lambda x: self._resize(x, cache_tokens), decode_state.cache)
        return dataclasses.replace(decode_state, cache=cache)

    def _decode_chunk(
        self, params: EngineParams, state: DecodeState, is_stop: jax.Array, num_steps: jax.Array
    ) -> tuple[DecodeState, ResultTokens]:
        slots, longest = state.tokens.shape[0], self.settings.longest_chunk
        written = ResultTokens(
            token_ids=jnp.zeros((longest, slots), jnp.int32),
            logprobs=jnp.zeros((longest, slots), jnp.float32),
            counts=jnp.zeros((slots,), jnp.int32),
            stopped=jnp.zeros((slots,), jnp.bool_),
        )

        def unfinished(carry) -> jax.Array:
            step, state, _ = carry
            return (step < num_steps) & jnp.any(state.active)

        def body(carry):
            step, state, written = carry
            state, written = self._decode_step(params, state, written, step, is_stop)
            return step + 1, state, written

        start = (jnp.int32(0), state, written)
        _, state, written = jax.lax.while_loop(unfinished, body, start)
        by_slot = ResultTokens(
            token_ids=written.token_ids.T,
            logprobs=written.logprobs.T,
            counts=written.counts,
            stopped=written.stopped,
        )
        return state, by_slot

    def _decode_step(
        self,
        params: EngineParams,
        state: DecodeState,
        written: ResultTokens,
        step: jax.Array,
        is_stop: jax.Array,
    ) -> tuple[DecodeState, ResultTokens]:
        """One token for every active slot; the others compute along and are ignored."""
        logits, cache = self._model(params, state.cache, state.tokens, state.lengths)
        uniform = uniforms(self._seed, state.prompt_ids, state.sample_indices, state.num_generated)
        settings = self.settings
        tokens, logprobs = sample(
            logits, uniform, state.temperatures, top_k=settings.top_k, top_p=settings.top_p
        )
        active = state.active
        one = active.astype(jnp.int32)
        num_generated = state.num_generated + one
        stopped = active & is_stop[tokens]
        state = DecodeState(
            cache=cache,
            tokens=jnp.where(active, tokens, state.tokens),
            lengths=state.lengths + one,
            active=active & ~stopped & (num_generated < state.max_new_tokens),
            prompt_ids=state.prompt_ids,
            sample_indices=state.sample_indices,
            num_generated=num_generated,
            max_new_tokens=state.max_new_tokens,
            temperatures=state.temperatures,
        )
        written = ResultTokens(
            token_ids=jax.lax.dynamic_update_index_in_dim(written.token_ids, tokens, step, 0),
            logprobs=jax.lax.dynamic_update_index_in_dim(written.logprobs, logprobs, step, 0),
            counts=written.counts + one,
            stopped=written.stopped | stopped,
        )
        return state, written

    def _prefix_sharding(self) -> Any:
        """A `Cache` of shardings: prefix rows are few and split over heads only."""
        sharding = cache_sharding(self.mesh, self.config, slot_axis=None)
        layers = (sharding,) * self.config.num_layers
        return Cache(keys=layers, values=layers)  # type: ignore[arg-type]


def _matrix_dtype(compute_dtype: str, mesh: Mesh) -> str:
    """The dtype that matrices are held in. Values are those of `compute_dtype` either way.

    A CPU has no bfloat16 arithmetic: it would widen every weight again at every step.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return "float32" if on_cpu else compute_dtype


def _free(state: DecodeState, slot: jax.Array) -> DecodeState:
    return dataclasses.replace(state, active=state.active.at[slot].set(False))
