"""From the data settings to training problems and a held-out evaluation set.

Owns which problems are held out. The split does not depend on `seed`, so runs with several seeds
are evaluated on the same problems.

What is held out:
* `evaluation.path` names a file: its problems; a data file's training problems lose the same ones.
* otherwise `evaluation.num_prompts` distinct problems of `data.source`, removed from training.
* where that is more than a tenth of all distinct problems (one-digit sums are only 100), removing
  them would leave too little: they are evaluated on AND trained on, and the log says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable

from pipeline_rl_jax.data.arithmetic import (
    ArithmeticProblems,
    draw_number,
    draw_problem_number,
    num_distinct,
    problem_of_number,
)
from pipeline_rl_jax.data.files import read_problem_files
from pipeline_rl_jax.data.formats import RecordMapping
from pipeline_rl_jax.data.problems import Problem, ProblemSource
from pipeline_rl_jax.data.reasoning_tasks import ReasoningProblems
from pipeline_rl_jax.settings import Settings

_MAX_HELD_OUT_SHARE = 0.1  # of the distinct problems
# A reasoning-gym entry is seeded with its data set's seed plus its index, below 2**32: evaluation
# entries take the last 2**24 of these numbers, out of reach of every run's.
_EVALUATION_SEED = 2**32 - 2**24
_MAX_TRAINING_SEED = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Training and evaluation problems of a run."""

    training: ProblemSource
    evaluation: tuple[Problem, ...]
    held_out: bool  # False when training sees the evaluation problems too
    note: str  # one sentence on how the evaluation set was chosen, for the log
    fingerprint: str  # equal for equal training problems; a saved position is only good for these


def split_problems(settings: Settings) -> Split:
    """The training and evaluation problems that the settings describe.

    ValueError for files that cannot be read, unknown tasks, and data without a training problem.
    """
    given = _evaluation_file_problems(settings)
    if settings.data.source == "arithmetic":
        return _split_arithmetic(settings, given)
    if settings.data.source == "reasoning_gym":
        return _split_reasoning(settings, given)
    return _split_files(settings, given)


def _evaluation_file_problems(settings: Settings) -> tuple[Problem, ...] | None:
    """The problems of `evaluation.path`, None when it is not set."""
    evaluation = settings.evaluation
    if not evaluation.path:
        return None
    # Usually a benchmark in another layout than the training file, so recognised by itself.
    mapping = dataclasses.replace(_record_mapping(settings), format="auto")
    problems = read_problem_files("evaluation.path", evaluation.path, mapping)
    return _choose(problems, evaluation.num_prompts)


def _split_arithmetic(settings: Settings, given: tuple[Problem, ...] | None) -> Split:
    task, count = settings.data.arithmetic, settings.evaluation.num_prompts
    size = num_distinct(task)
    held_out: frozenset[int] = frozenset()
    if given is not None:
        evaluation, note = given, _note_file(given)
    elif count > _MAX_HELD_OUT_SHARE * size:
        ranked = sorted(range(size), key=lambda number: draw_number(f"rank/{number}", 2**64))
        numbers = sorted(ranked[:count])
        evaluation, note = tuple(problem_of_number(task, n) for n in numbers), _note_shared(size)
    else:
        draws = (draw_problem_number(task, f"evaluation/{n}") for n in itertools.count())
        held_out = frozenset(_first_distinct(draws, count))
        evaluation = tuple(problem_of_number(task, number) for number in sorted(held_out))
        note = _note_held_out(count)
    return Split(
        training=ArithmeticProblems(task, seed=settings.seed, held_out=held_out),
        evaluation=evaluation,
        held_out=given is not None or bool(held_out),
        note=note,
        fingerprint=_digest([repr(task), *map(str, sorted(held_out))]),
    )


def _split_reasoning(settings: Settings, given: tuple[Problem, ...] | None) -> Split:
    task, count = settings.data.reasoning_gym, settings.evaluation.num_prompts
    if given is not None:
        evaluation, note = given, _note_file(given)
    else:
        drawn = ReasoningProblems(task, seed=_EVALUATION_SEED, num_records=count)
        distinct = {problem.key: problem for problem in map(drawn.__getitem__, range(count))}
        evaluation, note = tuple(distinct.values()), _note_held_out(len(distinct))
    held_out = frozenset(problem.key for problem in evaluation)
    seed = settings.seed % _MAX_TRAINING_SEED
    training = ReasoningProblems(task, seed=seed, num_records=task.num_records, held_out=held_out)
    if given is None and training.share_held_out(count) > _MAX_HELD_OUT_SHARE:
        training = ReasoningProblems(task, seed=seed, num_records=task.num_records)
        held_out, note = frozenset(), _note_shared(None)
    _require_gold_answers(settings, (*evaluation, training[0]))
    return Split(
        training=training,
        evaluation=evaluation,
        held_out=bool(held_out),
        note=note,
        fingerprint=_digest([repr(task), *sorted(held_out)]),
    )


def _split_files(settings: Settings, given: tuple[Problem, ...] | None) -> Split:
    data, count = settings.data, settings.evaluation.num_prompts
    problems = read_problem_files("data.path", data.path, _record_mapping(settings))
    size = len({problem.key for problem in problems})
    evaluation = _choose(problems, count) if given is None else given
    held_out = {problem.key for problem in evaluation}
    shared = given is None and count > _MAX_HELD_OUT_SHARE * size
    training = problems
    if not shared:
        training = [problem for problem in problems if problem.key not in held_out]
    if given is not None:
        note = f"{_note_file(given)}, {len(problems) - len(training)} records of data.path removed"
    else:
        note = _note_shared(size) if shared else _note_held_out(len(evaluation))
    if not training:
        raise ValueError(
            f"evaluation.path ({settings.evaluation.path}) holds every problem of data.path; leave "
            "it empty to hold some out, or name another file"
        )
    texts = (text for problem in training for text in (problem.problem, problem.answer))
    return Split(
        training=training,
        evaluation=evaluation,
        held_out=not shared,
        note=note,
        fingerprint=_digest(texts),
    )


def _record_mapping(settings: Settings) -> RecordMapping:
    data = settings.data
    return RecordMapping(
        format=data.format,
        problem_field=data.problem_field,
        answer_field=data.answer_field,
        drop_incomplete=data.incomplete == "drop",
        needs_answer=settings.rewards.correctness != "none",
    )


def _choose(problems: Iterable[Problem], count: int) -> tuple[Problem, ...]:
    """`count` distinct problems, by the hash of their texts, in the order of the file."""
    distinct = {problem.key: problem for problem in reversed(list(problems))}
    ranked = sorted(distinct, key=lambda key: draw_number(f"rank/{key}", 2**64))
    chosen = set(ranked[:count])
    return tuple(problem for key, problem in reversed(distinct.items()) if key in chosen)


def _first_distinct(numbers: Iterable[int], count: int) -> set[int]:
    chosen: set[int] = set()
    for number in numbers:
        chosen.add(number)
        if len(chosen) == count:
            break
    return chosen


def _require_gold_answers(settings: Settings, problems: Iterable[Problem]) -> None:
    """Some tasks have no single right answer; the built-in scorers need one."""
    correctness, task = settings.rewards.correctness, settings.data.reasoning_gym.task
    if correctness not in ("user", "none") and not all(problem.answer for problem in problems):
        raise ValueError(
            f"data.reasoning_gym.task ({task}) gives problems without a gold answer, which "
            f"rewards.correctness ({correctness}) needs; set rewards.correctness=user and score "
            'with reasoning_gym.get_score_answer_fn and prompt.metadata["reasoning_gym"]'
        )


def _note_held_out(count: int) -> str:
    return f"evaluation: {count} problems, held out from training"


def _note_file(problems: tuple[Problem, ...]) -> str:
    return f"evaluation: {len(problems)} problems of evaluation.path"


def _note_shared(size: int | None) -> str:
    few = "few" if size is None else f"only {size}"
    return f"evaluation: there are {few} distinct problems, so training sees these too"


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
