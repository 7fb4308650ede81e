"""What a completion earns: correctness, format, length and a user's own function.

Nothing is imported here: the verifier's worker processes import from this package and must start
without JAX.
"""
