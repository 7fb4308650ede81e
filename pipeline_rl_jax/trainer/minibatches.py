"""The updates that one batch is good for: epochs over it, and minibatches of each epoch.

Owns which rollouts an update is made of. A rollout is never split, so that losses over whole
rollouts keep their meaning; rows are packed anew. Host only, numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline_rl_jax.algorithms.packing import take_sequences
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import TrainerSettings


def split_updates(
    batch: PackedBatch, settings: TrainerSettings, *, seed: int, version: int
) -> Iterator[PackedBatch]:
    """The batches of the updates, in order: `epochs` passes, each in `minibatches` parts.

    Parts of a pass are of equal size, give or take one rollout, and every rollout is in one of
    them, drawn anew for each pass from seed and version. With fewer rollouts than parts, there are
    fewer parts. One part is the batch itself.
    """
    num_sequences = int(batch.num_sequences)
    num_parts = min(settings.minibatches, num_sequences)
    generator = np.random.default_rng([seed, version])
    for _ in range(settings.epochs):
        if num_parts == 1:
            yield batch
            continue
        order = generator.permutation(num_sequences)
        for part in np.array_split(order, num_parts):
            yield take_sequences(
                batch, np.sort(part), rows_per_micro_batch=settings.rows_per_micro_batch
            )
