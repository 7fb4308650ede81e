"""Pure functions of arrays: masked statistics, advantages, importance ratios, losses, packing.

Owns the mathematics of learning. Knows no model, no device placement and no I/O, keeps no state.
"""
