"""The endless (or counted) stream of training prompts, with a position that can be saved.

Owns order, epochs, prompt ids and dropping what is too long. Built on a Grain dataset, whose
iterator state is the position; problems come from `sources.py`, their text from `prompts.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np

from pipeline_rl_jax.data.problems import ProblemSource
from pipeline_rl_jax.data.prompts import PromptWriter, fitting_prompts
from pipeline_rl_jax.data.sources import split_problems
from pipeline_rl_jax.data.tokenizer import Tokenizer
from pipeline_rl_jax.records import Prompt
from pipeline_rl_jax.settings import DataSettings, Settings

# Ids of evaluation prompts start here, those of training prompts end here. Both stay below 2**31.
EVALUATION_ID_OFFSET = 2**30
_NUM_PROBES = 256  # generated problems whose length is checked before the run

_LOGGER = logging.getLogger(__name__)


class PromptStream(Iterator[Prompt]):
    """Training prompts in an order that depends on (seed, epoch) only.

    A prompt's id is epoch * num_records + record index. Ends after `data.num_epochs` epochs, or
    never. One thread may draw while another takes the state.
    """

    def __init__(
        self,
        problems: ProblemSource,
        writer: PromptWriter,
        *,
        data: DataSettings,
        seed: int,
        fingerprint: str = "",
    ) -> None:
        self._problems = problems
        self._writer = writer
        self._drop = data.too_long == "drop"
        self._identity = {
            "num_records": len(problems),
            "seed": seed,
            "shuffle": data.shuffle,
            "fingerprint": fingerprint,
        }
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._positions = iter(_order(len(problems), seed=seed, data=data))

    @property
    def num_records(self) -> int:
        """Prompts of one epoch, those too long included."""
        return len(self._problems)

    @property
    def num_dropped(self) -> int:
        """Prompts left out so far because they are too long."""
        return self._num_dropped

    def __next__(self) -> Prompt:
        """The next prompt that fits.

        ValueError when one is too long and `data.too_long` is error, or when none fits at all.
        """
        # The longest run of too long ones beside one that fits: all but the first of an epoch,
        # then all but the last of the next.
        max_misses = 2 * (self.num_records - 1)
        with self._lock:
            for _ in range(max_misses + 1):
                epoch, index = next(self._positions)
                prompt = self._write(epoch, index)
                if self._writer.fits(prompt):
                    return prompt
                if not self._drop:
                    raise self._writer.too_long(prompt)
                self._num_dropped += 1
        raise self._writer.none_fits(self.num_records)

    def get_state(self) -> dict[str, Any]:
        """The position after the last prompt drawn, as values that JSON can hold."""
        with self._lock:
            return {
                "iterator": self._positions.get_state(),
                "num_dropped": self._num_dropped,
                **self._identity,
            }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after the last prompt drawn when `state` was taken.

        ValueError when it belongs to other data or another order: the position would then skip
        some problems and repeat others without a word.
        """
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved data position is of other data: {name} was {state[name]}, now "
                    f"{value}; resume with the data, evaluation and seed settings and the files "
                    "of the first run, or start a new workdir"
                )
        with self._lock:
            self._positions.set_state(dict(state["iterator"]))
            self._num_dropped = int(state["num_dropped"])

    def _write(self, epoch: int, index: int) -> Prompt:
        prompt_id = epoch * self.num_records + index
        if prompt_id >= EVALUATION_ID_OFFSET:
            raise ValueError(
                f"data.num_epochs: epoch {epoch} of {self.num_records} records goes beyond prompt "
                f"id {EVALUATION_ID_OFFSET}, the last of a run; start a new one"
            )
        return self._writer.write(self._problems[index], prompt_id=prompt_id)


@dataclasses.dataclass
class _Shuffle:
    """Random order of one epoch's records, kept until another epoch is asked for.

    Grain's own shuffle takes epoch e of seed s for epoch e - 1 of seed s + 1, and up to 40 ms a
    record for small data sets.
    """

    num_records: int
    seed: int
    epoch: int = -1
    records: np.ndarray | None = None  # [num_records]

    def __call__(self, epoch: int, place: int) -> int:
        if self.records is None or epoch != self.epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self.epoch, self.records = epoch, generator.permutation(self.num_records)
        return int(self.records[place])


def _order(num_records: int, *, seed: int, data: DataSettings) -> grain.IterDataset:
    """Dataset of (epoch, record index), one of each per epoch."""
    shuffle = _Shuffle(num_records, seed)

    def record_at(position: int, place: int) -> tuple[int, int]:
        epoch = position // num_records
        return epoch, shuffle(epoch, int(place)) if data.shuffle else int(place)

    dataset = grain.MapDataset.range(num_records).repeat(data.num_epochs or None)
    # No read-ahead: the state would be the same, but threads would outlive the stream.
    return dataset.map_with_index(record_at).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )


def build_prompt_stream(settings: Settings, tokenizer: Tokenizer) -> PromptStream:
    """The stream of training prompts.

    ValueError for data that cannot be read and, before any prompt is drawn, for prompts longer
    than `generation.max_prompt_tokens` (with `data.too_long` = drop only when none fits).
    """
    split = split_problems(settings)
    writer = PromptWriter(settings, tokenizer)
    _check_lengths(settings.data, split.training, writer)
    return PromptStream(
        split.training,
        writer,
        data=settings.data,
        seed=settings.seed,
        fingerprint=split.fingerprint,
    )


def build_evaluation_prompts(settings: Settings, tokenizer: Tokenizer) -> list[Prompt]:
    """The fixed evaluation prompts, numbered from `EVALUATION_ID_OFFSET`.

    At most `evaluation.num_prompts`; fewer when there are not so many, or when some are too long
    and `data.too_long` is drop.
    """
    split = split_problems(settings)
    prompts = fitting_prompts(
        PromptWriter(settings, tokenizer),
        split.evaluation,
        first_id=EVALUATION_ID_OFFSET,
        drop=settings.data.too_long == "drop",
    )
    _LOGGER.log(logging.INFO if split.held_out else logging.WARNING, "%s", split.note)
    if len(prompts) < len(split.evaluation):
        _LOGGER.warning("%d evaluation prompts are too long", len(split.evaluation) - len(prompts))
    return prompts


def _check_lengths(data: DataSettings, problems: ProblemSource, writer: PromptWriter) -> None:
    """Fails before the run on what would fail during it. All of a file; of generated problems,
    which may be slow to make, the first ones."""
    num_checked = len(problems)
    if data.source != "files":
        num_checked = min(num_checked, _NUM_PROBES)
    num_too_long = 0
    for index in range(num_checked):
        problem = problems[index]
        if writer.surely_fits(problem):
            continue
        prompt = writer.write(problem, prompt_id=index)
        if not writer.fits(prompt):
            if data.too_long == "error":
                raise writer.too_long(prompt)
            num_too_long += 1
    if num_too_long == num_checked:
        raise writer.none_fits(num_checked)
    if num_too_long:
        _LOGGER.warning("%d of %d prompts are too long", num_too_long, num_checked)
