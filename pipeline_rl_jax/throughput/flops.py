"""Floating-point operations that a model's tokens need.

Owns counting by shapes; what a program really executes (padding, recomputation) is not in it.
Source of the counting: PaLM, arXiv 2204.02311, appendix B, with causal attention at half.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What counts of a model: weights that multiply, and the size of attention."""

    matrix_parameters: int  # without the embedding look-up and norms, with the unembedding
    attention_width: int  # query heads times head width, times layers

    def forward_flops(self, num_tokens: float, attended_tokens: float) -> float:
        """2 per weight and token, 4 per attention width and attended token.

        `attended_tokens` is Σ over tokens of the positions each looks at: n(n + 1)/2 for a causal
        sequence of n.
        """
        weights = 2.0 * self.matrix_parameters * num_tokens
        return weights + 4.0 * self.attention_width * attended_tokens

    def training_flops(self, num_tokens: float, attended_tokens: float) -> float:
        """Forward and backward pass: three forward passes. Recomputation (remat) is not counted."""
        return 3.0 * self.forward_flops(num_tokens, attended_tokens)


def causal_attended(length: float) -> float:
    """Positions that the tokens of a causal sequence look at, together."""
    return length * (length + 1) / 2
