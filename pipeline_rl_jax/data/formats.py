"""Recognises the records of well-known data sets and maps them to problems.

Owns which fields hold problem and answer. Reading files is `files.py`; comparing answers is
`rewards/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pipeline_rl_jax.data.answer_text import last_box
from pipeline_rl_jax.data.problems import Problem

_KEPT_FIELDS = ("id", "idx", "unique_id", "level", "subject", "type", "data_source")
_MAX_EXACT_FLOAT = 2**53
_WAY_OUT = "; mend the record, or leave all such out with data.incomplete=drop"


class IncompleteRecordError(ValueError):
    """A record of the right layout whose problem or answer is empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordMapping:
    """How a file's records are to be read: `data.format`, its two fields, `data.incomplete`."""

    format: str  # auto, or a name of FORMATS, or mapped
    problem_field: str = ""
    answer_field: str = ""
    drop_incomplete: bool = False
    needs_answer: bool = True  # False: a mapped record without answer_field is a prompt only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One layout of records. `read` gives (problem, answer) and raises ValueError on other ones."""

    name: str
    recognises: Callable[[Any], bool]
    read: Callable[[Any], tuple[Any, Any]]
    has_answer: bool = True


def choose_format(record: object, mapping: RecordMapping) -> Format:
    """The layout to read a file with, from its first record.

    auto takes the first known layout that fits, else the two mapped fields where they are set.
    ValueError naming the fields seen and the settings when nothing fits.
    """
    if mapping.format not in ("auto", "mapped"):
        return next(known for known in FORMATS if known.name == mapping.format)
    if mapping.format == "auto":
        for known in FORMATS:
            if known.recognises(record):
                return known
    if mapping.problem_field and (mapping.answer_field or not mapping.needs_answer):
        return _mapped_format(mapping)
    raise ValueError(
        f"{describe_fields(record)} fit none of {', '.join(known.name for known in FORMATS)}; set "
        "data.format=mapped with data.problem_field and data.answer_field (dots descend, for "
        'example "prompt.0.content")'
    )


def read_problem(record: object, record_format: Format, *, task: str) -> Problem:
    """The problem in a record.

    ValueError when a field is missing or of another kind, `IncompleteRecordError` when it is empty.
    """
    problem, answer = record_format.read(record)
    metadata = {}
    if isinstance(record, dict):
        metadata = {name: record[name] for name in _KEPT_FIELDS if name in record}
    return Problem(
        problem=_as_text(problem, "problem"),
        answer=_as_text(answer, "answer") if record_format.has_answer else "",
        task=task,
        metadata=metadata,
    )


def describe_fields(record: object) -> str:
    """What a person needs to see of a record that does not fit."""
    if isinstance(record, dict):
        return f"the fields {', '.join(map(repr, record))}"
    return f"records of kind {type(record).__name__}"


def field_at(record: object, path: str) -> Any:
    """The value at a dotted path; numbers index lists. ValueError naming what is there instead."""
    value: Any = record
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, list):
            raise ValueError(f"field {path!r}: no {part!r} in a list of {len(value)}")
        else:
            raise ValueError(f"field {path!r}: no {part!r} among {describe_fields(value)}")
    return value


def _as_text(value: object, name: str) -> str:
    """Stripped text of a string or number, whole floats without their `.0`."""
    if value is None:
        raise IncompleteRecordError(f"the {name} is null{_WAY_OUT}")
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT_FLOAT:
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"the {name} must be text or a number, not {type(value).__name__}")
    text = value.strip()
    if not text:
        raise IncompleteRecordError(f"the {name} is empty{_WAY_OUT}")
    if not _is_unicode(text):
        raise ValueError(f"the {name} holds half of a surrogate pair, which is no text")
    return text


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _has(record: object, *fields: str) -> bool:
    return isinstance(record, dict) and all(field in record for field in fields)


def _is_gsm8k(record: Any) -> bool:
    return _has(record, "question", "answer") and "####" in str(record["answer"])


def _read_gsm8k(record: Any) -> tuple[Any, Any]:
    solution = field_at(record, "answer")
    _, marker, answer = str(solution).rpartition("####")
    if not marker:
        raise ValueError("the answer lacks '####' before the number")
    return field_at(record, "question"), answer


def _is_math(record: Any) -> bool:
    return _has(record, "problem") and (_has(record, "answer") or _has(record, "solution"))


def _read_math(record: Any) -> tuple[Any, Any]:
    problem = field_at(record, "problem")
    if _has(record, "answer"):
        return problem, record["answer"]
    box = last_box(str(field_at(record, "solution")))
    if box is None:
        raise IncompleteRecordError(
            rf"there is no answer field, and the solution has no \boxed{{...}}{_WAY_OUT}"
        )
    return problem, box


def _orz_turns(record: Any) -> Any:
    # Converted to parquet, the two turns are columns named 0 and 1.
    return [record["0"], record["1"]] if _has(record, "0", "1") else record


def _is_orz(record: Any) -> bool:
    turns = _orz_turns(record)
    return isinstance(turns, list) and len(turns) > 1 and _has(turns[1], "ground_truth")


def _read_orz(record: Any) -> tuple[Any, Any]:
    turns = _orz_turns(record)
    return field_at(turns, "0.value"), field_at(turns, "1.ground_truth.value")


def _is_dapo(record: Any) -> bool:
    return _has(record, "prompt", "reward_model") and _has(record["reward_model"], "ground_truth")


def _read_dapo(record: Any) -> tuple[Any, Any]:
    messages = field_at(record, "prompt")
    if not isinstance(messages, list):
        raise ValueError(
            f"the prompt is not a list of messages but of kind {type(messages).__name__}; set "
            "data.format=mapped with data.problem_field and data.answer_field"
        )
    roles = [field_at(message, "role") for message in messages]
    if roles != ["user"]:
        raise ValueError(
            f"the prompt has the roles {roles}, not one user message; set data.format=mapped, "
            'data.problem_field="prompt.<n>.content", '
            'data.answer_field="reward_model.ground_truth" and data.system_prompt'
        )
    return field_at(messages, "0.content"), field_at(record, "reward_model.ground_truth")


def _is_svamp(record: Any) -> bool:
    return _has(record, "Body", "Question", "Answer")


def _read_svamp(record: Any) -> tuple[Any, Any]:
    body, question = (str(field_at(record, name)).strip() for name in ("Body", "Question"))
    separator = " " if body.endswith((".", "?", "!")) else ". "
    return body + separator + question, field_at(record, "Answer")


def _mapped_format(mapping: RecordMapping) -> Format:
    return Format(
        name="mapped",
        recognises=lambda record: True,
        read=lambda record: (
            field_at(record, mapping.problem_field),
            field_at(record, mapping.answer_field) if mapping.answer_field else "",
        ),
        has_answer=bool(mapping.answer_field),
    )


FORMATS = (
    Format(name="gsm8k", recognises=_is_gsm8k, read=_read_gsm8k),
    Format(name="math", recognises=_is_math, read=_read_math),
    Format(name="orz", recognises=_is_orz, read=_read_orz),
    Format(name="dapo", recognises=_is_dapo, read=_read_dapo),
    Format(name="svamp", recognises=_is_svamp, read=_read_svamp),
)
