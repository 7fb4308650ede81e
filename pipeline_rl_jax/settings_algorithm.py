"""What the settings of `algorithm` demand of each other.

Owns the combinations that would mean nothing, or count something twice. The range of a number by
itself is in `settings_ranges.py`, what `algorithm` demands of other sections in
`settings_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_rl_jax.settings import AlgorithmSettings


def find_algorithm_problems(algorithm: AlgorithmSettings, *, max_new_tokens: int) -> Iterator[str]:
    """One line for every broken constraint; `max_new_tokens` serves as an example in one."""
    yield from _check_baseline(algorithm)
    yield from _check_aggregation(algorithm, max_new_tokens)
    yield from _check_correction(algorithm)
    if algorithm.reference and not algorithm.needs_reference:
        yield (
            f"algorithm.reference ({algorithm.reference}) is only read when "
            "algorithm.kl_coefficient (0.0) is more than 0; set that, or empty this"
        )


def _check_baseline(algorithm: AlgorithmSettings) -> Iterator[str]:
    if algorithm.group_size == 1 and algorithm.baseline in ("group_mean", "leave_one_out"):
        yield (
            f"algorithm.baseline ({algorithm.baseline}) compares the rollouts of one prompt, but "
            "algorithm.group_size is 1; use a group_size of 2 or more, or baseline=batch_mean or "
            "value"
        )
    if algorithm.group_size == 1 and algorithm.normalise_std:
        yield (
            "algorithm.normalise_std (True) needs more than one rollout in a group; use a "
            "group_size of 2 or more, or False"
        )
    if algorithm.group_size == 1 and algorithm.zero_variance != "keep":
        yield (
            f"algorithm.zero_variance ({algorithm.zero_variance}) looks for groups of equal "
            "rewards, and a group of algorithm.group_size 1 has no others to be equal to; use a "
            "group_size of 2 or more, or keep"
        )
    for name in ("normalise_std", "batch_normalise"):
        if algorithm.learns_values and getattr(algorithm, name):
            yield (
                f"algorithm.{name} (True) scales advantages before the step, but with "
                "algorithm.baseline (value) they are made inside it, token by token; use False"
            )


def _check_aggregation(algorithm: AlgorithmSettings, max_new_tokens: int) -> Iterator[str]:
    constant = algorithm.aggregation_constant
    if algorithm.aggregation == "constant" and constant == 0:
        yield (
            "algorithm.aggregation_constant (0.0) must be more than 0 when algorithm.aggregation "
            f"is constant; for example generation.max_new_tokens ({max_new_tokens})"
        )
    if algorithm.aggregation != "constant" and constant:
        yield (
            f"algorithm.aggregation_constant ({constant}) is only used when algorithm.aggregation "
            f"({algorithm.aggregation}) is constant; set that, or this to 0.0"
        )


def _check_correction(algorithm: AlgorithmSettings) -> Iterator[str]:
    if algorithm.is_correction == "none":
        return
    if algorithm.is_correction == "truncated" and algorithm.ratio_anchor == "behaviour":
        yield (
            "algorithm.is_correction (truncated) weighs tokens by current / behaviour, which "
            f"algorithm.loss ({algorithm.loss}) already holds with algorithm.ratio_anchor "
            "(behaviour): the ratio would count twice; use ratio_anchor=current, or "
            "is_correction=masked or none"
        )
    if algorithm.is_highest < 1:
        yield (
            f"algorithm.is_highest ({algorithm.is_highest}) must be 1 or more: 1 is the ratio of a "
            "token sampled by the weights in training"
        )
    if algorithm.is_correction == "masked" and algorithm.is_lowest > 1:
        yield (
            f"algorithm.is_lowest ({algorithm.is_lowest}) must be at most 1: 1 is the ratio of a "
            "token sampled by the weights in training"
        )
