"""Reinforcement learning of language models on JAX, with weights updated in flight."""
