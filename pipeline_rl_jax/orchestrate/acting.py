"""The generating half of every schedule: prompts in, finished and scored groups out.

Owns one turn of the decode loop: admission, a chunk, and the scoring of what finished, which goes
on beside the next turns. With which weights a turn is taken is the schedule's to say.
"""

from __future__ import annotations

import asyncio
import collections
import functools

from pipeline_rl_jax.orchestrate.failures import HopelessRun, StageFailure, call, naming
from pipeline_rl_jax.orchestrate.flow import Flow
from pipeline_rl_jax.orchestrate.stages import Weights
from pipeline_rl_jax.records import Completion, StopReason
from pipeline_rl_jax.rewards.score import ScoringFailure
from pipeline_rl_jax.rollouts.drops import DropReason
from pipeline_rl_jax.rollouts.groups import CollectedGroup

# Completions in a row without a score, before a run is called hopeless: the larger of the two.
_MAX_UNSCORED = 256
_MAX_UNSCORED_BATCHES = 4


class Actor:
    """Takes turns of the decode loop."""

    def __init__(self, flow: Flow, *, horizon_name: str, max_waiting_groups: int = 0) -> None:
        """`horizon_name` says what limits admission, in the account of waits.

        With `max_waiting_groups`, no prompt is admitted while the rollouts of as many groups wait
        or are being scored. That stops admission only: what is live is decoded to its end whoever
        waits, and its group always finds a place, so none that the trainer waits for is held up.
        """
        self._flow = flow
        self._horizon_name = horizon_name
        self._max_waiting_groups = max_waiting_groups
        self._scoring_limit = asyncio.Semaphore(flow.plan.scores_in_flight)
        self._num_scoring = 0
        self._unscored: collections.Counter[str] = collections.Counter()  # reasons, in a row
        self._held_up_by = ""  # why the last admission ended, when slots were open

    async def turn(self, weights: Weights, *, horizon: int) -> bool:
        """Admits for batches of versions before `horizon`, then decodes one chunk.

        False when there was nothing to do: no sample is live, none is being scored, and no prompt
        may be admitted.
        """
        flow = self._flow
        flow.changed.clear()  # before admission looks at anything that a change is about
        self._admit(weights.version, horizon)
        if flow.stages.generation.num_live:
            await self._decode(weights)
        elif self._num_scoring:
            await flow.waits.within(flow.changed.wait(), who="generation", whom="scoring")
        else:
            return False
        return True

    async def wait_for_change(self) -> None:
        """After a turn with nothing to do, and no await in between: until there may be."""
        await self._flow.waits.within(
            self._flow.changed.wait(), who="generation", whom=self._held_up_by or "slots"
        )

    def _admit(self, version: int, horizon: int) -> None:
        flow, generation = self._flow, self._flow.stages.generation
        self._held_up_by = ""
        while generation.num_open_samples > 0 and not flow.data_ended:
            self._held_up_by = self._find_limit(horizon)
            if self._held_up_by:
                return
            with naming("data"):
                prompt = flow.stages.prompts.next()
            if prompt is None:
                flow.data_ended = True
                return
            flow.collector.open(prompt, flow.plan.group_size, version=version)
            flow.account.admit(version)
            flow.admitted_rollouts += flow.plan.group_size
            with naming("generation"):
                generation.admit(prompt, flow.plan.group_size)

    def _find_limit(self, horizon: int) -> str:
        """Whom the next admission has to wait for, or nothing."""
        flow = self._flow
        if flow.account.room(horizon) <= 0:
            is_end = horizon >= flow.plan.num_steps
            return f"trainer ({'last steps' if is_end else self._horizon_name})"
        if self._max_waiting_groups:
            groups_to_spare = self._max_waiting_groups - len(flow.groups)
            if groups_to_spare <= 0:
                return "trainer (stream full)"
            if self._num_scoring >= groups_to_spare * flow.plan.group_size:
                return "scoring (stream full)"
        return ""

    async def _decode(self, weights: Weights) -> None:
        flow, generation = self._flow, self._flow.stages.generation
        num_open, num_live = generation.num_open_samples, generation.num_live
        started = asyncio.get_running_loop().time()
        completions = await call(flow.waits, "generation", generation.advance(weights))
        if num_open and self._held_up_by:
            # Slots that had to stay empty waited; a decode loop without a live one does so whole.
            seconds = asyncio.get_running_loop().time() - started
            flow.waits.add(
                "generation", self._held_up_by, seconds * num_open / (num_open + num_live)
            )
        with naming("scoring"):  # they begin to be read while the next chunk is decoded
            flow.stages.scoring.read(generation.take_chunks())
        if flow.ended:
            return  # nothing will be made of them; they are counted as cancelled
        for completion in completions:
            if completion.stop_reason is StopReason.CANCELLED:
                flow.stages.scoring.forget(completion)
                self._lose(completion, DropReason.CANCELLED)
                continue
            self._num_scoring += 1
            flow.start("scoring", functools.partial(self._score, completion), until_end=True)

    async def _score(self, completion: Completion) -> None:
        flow = self._flow
        async with self._scoring_limit:
            scored = await call(flow.waits, "scoring", flow.stages.scoring.score(completion))
        # Counted by hand: the task itself is still running when a waiting turn looks again.
        self._num_scoring -= 1
        if isinstance(scored, ScoringFailure):
            self._lose(completion, scored.reason)
            self._count_unscored(scored)
        else:
            self._unscored.clear()
            self._deliver(flow.collector.add(scored))

    def _count_unscored(self, failure: ScoringFailure) -> None:
        """Others are generated in place of what is lost: without any score, for ever."""
        self._unscored[failure.reason] += 1
        plan, num_unscored = self._flow.plan, self._unscored.total()
        if num_unscored < max(
            _MAX_UNSCORED, _MAX_UNSCORED_BATCHES * plan.batch_groups * plan.group_size
        ):
            return
        ((reason, count),) = self._unscored.most_common(1)
        last = f" (the last one: {failure.detail})" if failure.detail else ""
        raise StageFailure(
            "scoring",
            HopelessRun(
                f"{num_unscored} completions in a row could not be scored, {count} of them for "
                f"{reason}{last}; mend the reward (rewards.*) or the answers in the data, then "
                "run the same command again"
            ),
        )

    def _lose(self, completion: Completion, reason: str) -> None:
        self._flow.drops.count(reason, 1)
        self._deliver(
            self._flow.collector.lose(completion.prompt.prompt_id, completion.sample_index)
        )

    def _deliver(self, item: CollectedGroup | None) -> None:
        """A finished group goes to the preprocessor, unless nothing is left of it or it refuses."""
        flow = self._flow
        if item is not None:
            reason = self._find_refusal(item)
            if reason:
                flow.drop(item, reason)
            else:
                flow.groups.put(item)
        flow.notify()

    def _find_refusal(self, item: CollectedGroup) -> str | None:
        if not item.num_rollouts:
            return "empty_group"  # its rollouts have been counted one by one
        with naming("preprocess"):
            return self._flow.stages.preprocess.refuse(item.group)
