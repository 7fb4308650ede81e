"""What a decoder-only transformer of our families is: sizes and switches, nothing else.

Owns `ModelConfig`. Reading it from `config.json` is in `hf_config.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent rope scaling (`rope_type: llama3`)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and switches of one model.

    D width, N query heads, K key/value heads, H head width, F MLP width, L layers, V vocabulary.
    """

    family: Literal["llama", "qwen2", "qwen3"]
    vocabulary_size: int  # V
    width: int  # D
    mlp_width: int  # F
    num_layers: int  # L
    num_query_heads: int  # N
    num_kv_heads: int  # K
    head_width: int  # H
    max_positions: int  # context limit of the checkpoint
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    tied_embeddings: bool = False

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        d, h = self.width, self.head_width
        attention = 2 * d * self.num_query_heads * h + 2 * d * self.num_kv_heads * h
        if self.qkv_bias:
            attention += (self.num_query_heads + 2 * self.num_kv_heads) * h
        if self.qk_norm:
            attention += 2 * h
        layer = attention + 3 * d * self.mlp_width + 2 * d
        embeddings = self.vocabulary_size * d * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + d
