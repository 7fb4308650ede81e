"""What the settings of `algorithm` demand of each other.

Owns the combinations that would mean nothing, or count something twice. The range of a number by
itself is in `settings_ranges.py`, what `algorithm` demands of other sections in
`settings_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_rl_jax.settings import AlgorithmSettings


def find_algorithm_problems(
    algorithm: AlgorithmSettings, *, max_new_tokens: int, updates_per_step: int = 1
) -> Iterator[str]:
    """One line for every broken constraint; `max_new_tokens` serves as an example in one."""
    yield from _check_baseline(algorithm)
    yield from _check_critic(algorithm)
    yield from _check_kl_control(algorithm)
    yield from _check_updates(algorithm, updates_per_step)
    if algorithm.loss == "dpo":
        yield from _check_dpo(algorithm)
    yield from _check_aggregation(algorithm, max_new_tokens)
    yield from _check_correction(algorithm)
    if algorithm.reference and not algorithm.needs_reference:
        yield (
            f"algorithm.reference ({algorithm.reference}) is only read when "
            "algorithm.kl_coefficient (0.0) is more than 0, or with algorithm.loss=dpo; set one of "
            "them, or empty this"
        )


def _check_baseline(algorithm: AlgorithmSettings) -> Iterator[str]:
    if algorithm.group_size == 1 and algorithm.baseline in ("group_mean", "leave_one_out"):
        yield (
            f"algorithm.baseline ({algorithm.baseline}) compares the rollouts of one prompt, but "
            "algorithm.group_size is 1; use a group_size of 2 or more, or baseline=batch_mean, "
            "value or gae"
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
    names = {"value": ("normalise_std", "batch_normalise"), "gae": ("normalise_std",)}
    for name in names.get(algorithm.baseline, ()):
        if getattr(algorithm, name):
            yield (
                f"algorithm.{name} (True) scales advantages before the step, but with "
                f"algorithm.baseline ({algorithm.baseline}) they are made inside it, token by "
                "token; use False"
            )


def _check_critic(algorithm: AlgorithmSettings) -> Iterator[str]:
    if algorithm.baseline != "gae":
        only_gae = {
            "value_clip": algorithm.value_clip > 0,
            "critic": algorithm.critic == "model",
            "truncated": algorithm.truncated == "bootstrap",
            "value_streaming": algorithm.value_streaming,
        }
        for name, is_set in only_gae.items():
            if is_set:
                yield (
                    f"algorithm.{name} ({getattr(algorithm, name)}) needs values per token, which "
                    f"algorithm.baseline ({algorithm.baseline}) does not make; use baseline=gae"
                )
    if algorithm.value_streaming and algorithm.truncated == "bootstrap":
        yield (
            "algorithm.value_streaming (True) reads the value before each token, but "
            "algorithm.truncated (bootstrap) needs the one after the last; use one of them"
        )
    if algorithm.critic == "head":
        for name in ("critic_source", "critic_learning_rate"):
            if getattr(algorithm, name):
                yield (
                    f"algorithm.{name} ({getattr(algorithm, name)}) is of a critic with weights of "
                    "its own; set algorithm.critic=model, or leave it at its default"
                )


def _check_kl_control(algorithm: AlgorithmSettings) -> Iterator[str]:
    if algorithm.kl_control == "fixed":
        return
    if algorithm.baseline != "gae" or algorithm.kl_in != "reward" or not algorithm.kl_coefficient:
        yield (
            "algorithm.kl_control (adaptive) steers the KL in the reward of each token; it needs "
            "baseline=gae, kl_in=reward and a kl_coefficient above 0 to start from"
        )


def _check_updates(algorithm: AlgorithmSettings, updates_per_step: int) -> Iterator[str]:
    if updates_per_step == 1:
        return
    subject = f"trainer.epochs * trainer.minibatches ({updates_per_step})"
    if algorithm.ratio_anchor == "current":
        yield (
            f"{subject} update the weights more than once on one batch, but "
            "algorithm.ratio_anchor (current) holds the ratio at 1 each time, so that no loss "
            "would bound how far they go; use ratio_anchor=behaviour"
        )
    if algorithm.baseline == "value":
        yield (
            f"{subject} must be 1 with algorithm.baseline (value), which makes advantages anew in "
            "each update; use baseline=gae with gae_lambda=1.0 for the same from fixed values"
        )
    if algorithm.loss == "dpo":
        yield (
            f"{subject} must be 1 with algorithm.loss (dpo), whose pairs are weighed once, by the "
            "weights before the update"
        )


def _check_dpo(algorithm: AlgorithmSettings) -> Iterator[str]:
    wanted = {
        "baseline": "none",
        "aggregation": "sequence_sum",
        "is_correction": "none",
        "kl_in": "loss",
        "ratio_anchor": "behaviour",
        "batch_normalise": False,
        "normalise_std": False,
    }
    for name, value in wanted.items():
        if getattr(algorithm, name) != value:
            yield (
                f"algorithm.{name} ({getattr(algorithm, name)}) has no meaning with algorithm.loss "
                f"(dpo), which is a loss of pairs; use {name}={value}"
            )
    if algorithm.group_size == 1:
        yield (
            "algorithm.group_size (1) must be 2 or more with algorithm.loss (dpo): a pair is the "
            "best and the worst rollout of a group"
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
