"""Numbers per token that came with the rollouts, laid out like the batch.

Owns the layout. Reference logprobs and the critic's values may have been read while the completions
were written: see `rewards/stream_readers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipeline_rl_jax.records import PackedBatch, Rollout


def streamed_reference(
    rollouts: Sequence[Rollout],
) -> Callable[[PackedBatch], np.ndarray] | None:
    """What gives the [R, T] logprobs of the batch packed from these rollouts, in their order.

    None when one of them came without: then all are to be scored by the reference itself.
    """
    return _carried([rollout.reference_logprobs for rollout in rollouts])


def streamed_values(rollouts: Sequence[Rollout]) -> Callable[[PackedBatch], np.ndarray] | None:
    """The same for the critic's values."""
    return _carried([rollout.values for rollout in rollouts])


def _carried(
    carried: Sequence[np.ndarray | None],
) -> Callable[[PackedBatch], np.ndarray] | None:
    known = [logprobs for logprobs in carried if logprobs is not None]
    if not known or len(known) < len(carried):
        return None
    values = np.concatenate(known)

    def lay_out(batch: PackedBatch) -> np.ndarray:
        mask = np.asarray(batch.loss_mask)
        places = np.flatnonzero(mask)
        # A rollout lies in one row, so its tokens are in order; rows hold rollouts in any.
        by_rollout = np.argsort(np.asarray(batch.sequence_index)[mask], kind="stable")
        logprobs = np.zeros(mask.shape, np.float32)
        logprobs.flat[places[by_rollout]] = values
        return logprobs

    return lay_out
