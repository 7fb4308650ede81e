"""Evaluation: greedy accuracy with the engine and the scorers that training uses."""
