"""How old the tokens of a batch are, and where they grew old.

Owns the token lag by place: how it spreads, how it falls along a completion, and how much of it
came while the completion was being written (in flight) and how much while it waited (in queue).
The lag of the tokens that enter the loss is in `algorithms/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline_rl_jax.records import Completion, Group, StopReason

_QUARTERS = 4


def lag_statistics(groups: Sequence[Group], *, trained_version: int) -> dict[str, float]:
    """Metrics over all completion tokens of `groups`, trained on by weights `trained_version`.

    lag = trained_version − version of the token, in optimizer steps, is split at the version of
    the completion's last token: in_flight = last − own, in_queue = trained − last. A completion's
    quarters are of its own length; one of fewer than four tokens leaves some quarters empty. Empty
    when there is no token.
    """
    completions = [r.completion for group in groups for r in group.rollouts]
    completions = [c for c in completions if _counts(c)]
    if not completions:
        return {}
    versions = np.concatenate([c.weight_versions for c in completions])
    last = np.concatenate([np.full(c.num_tokens, c.weight_versions[-1]) for c in completions])
    quarter = np.concatenate(
        [np.arange(c.num_tokens) * _QUARTERS // c.num_tokens for c in completions]
    )
    lag = trained_version - versions
    steps, counts = np.unique(lag, return_counts=True)
    return {
        "lag/in_flight_mean_steps": float(np.mean(last - versions)),
        "lag/in_queue_mean_steps": float(np.mean(trained_version - last)),
        **{
            f"lag/quarter_{number + 1}_mean_steps": float(lag[quarter == number].mean())
            for number in np.unique(quarter)
        },
        **{
            f"lag/at_{step}_steps_share": float(count / lag.size)
            for step, count in zip(steps.tolist(), counts.tolist(), strict=True)
        },
    }


def _counts(completion: Completion) -> bool:
    return completion.num_tokens > 0 and completion.stop_reason is not StopReason.CANCELLED
