"""Problems to prompts: the template, tokenization and the length limit.

Owns the text a model sees. The order in which prompts come is `stream.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_rl_jax.data.problems import Problem
from pipeline_rl_jax.data.tokenizer import Tokenizer
from pipeline_rl_jax.records import Prompt
from pipeline_rl_jax.settings import Settings

_EXAMPLE_SEPARATOR = "|||"


class PromptWriter:
    """Writes problems as prompts by `data.template`.

    plain: `data.prompt_format` around the problem. few_shot: the examples in the same format, each
    with its answer, then the problem. chat: the model's chat template around the system prompt,
    the examples as earlier turns, and the problem.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self._data = settings.data
        self._tokenizer = tokenizer
        self.max_tokens = settings.generation.max_prompt_tokens
        self._examples = [parse_example(text) for text in settings.data.few_shot_examples]

    def write(self, problem: Problem, *, prompt_id: int) -> Prompt:
        """The prompt of a problem, whatever its length."""
        text = self.text(problem.problem)
        return Prompt(
            prompt_id=prompt_id,
            token_ids=self._tokenizer.encode(text),
            text=text,
            answer=problem.answer,
            task=problem.task,
            metadata=problem.metadata,
        )

    def text(self, problem: str) -> str:
        """What the model sees, special tokens written out."""
        if self._data.template == "chat":
            # The template writes the beginning-of-sequence token itself.
            return self._tokenizer.render_chat(self._messages(problem))
        parts = [self._data.prompt_format.format(problem=problem)]
        if self._data.template == "few_shot":
            parts = [self._answered(*example) for example in self._examples] + parts
        text = "\n\n".join(parts)
        prefix = self._tokenizer.prefix_text
        return text if text.startswith(prefix) else prefix + text

    def fits(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) <= self.max_tokens

    def surely_fits(self, problem: Problem) -> bool:
        """True when no tokenizer could make the prompt too long: a token is at least one byte.

        Far cheaper than `fits`. (Unicode normalisation may lengthen a text a little; what it
        misjudges is found when the prompt is drawn.)
        """
        return len(self.text(problem.problem).encode()) <= self.max_tokens

    def too_long(self, prompt: Prompt) -> ValueError:
        """The error for a prompt that does not fit."""
        return ValueError(
            f"generation.max_prompt_tokens ({self.max_tokens}) is less than the "
            f"{len(prompt.token_ids)} tokens of the prompt {_shorten(prompt.text)!r}; raise it "
            "(and the last of generation.prefill_buckets), or set data.too_long=drop"
        )

    def none_fits(self, num_seen: int) -> ValueError:
        """The error when not one of the prompts seen fits."""
        return ValueError(
            f"generation.max_prompt_tokens ({self.max_tokens}) is less than every one of "
            f"{num_seen} prompts needs; raise it (and the last of generation.prefill_buckets)"
        )

    def _messages(self, problem: str) -> list[dict[str, str]]:
        messages = []
        if self._data.system_prompt:
            messages.append({"role": "system", "content": self._data.system_prompt})
        for asked, answered in self._examples:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": problem}]

    def _answered(self, problem: str, answer: str) -> str:
        asked = self._data.prompt_format.format(problem=problem)
        return f"{asked}{answer}" if asked[-1:].isspace() else f"{asked} {answer}"


def parse_example(text: str) -> tuple[str, str]:
    """(problem, answer) of `"problem ||| answer"`."""
    problem, separator, answer = text.partition(_EXAMPLE_SEPARATOR)
    if not separator:
        raise ValueError(
            f"data.few_shot_examples ({text!r}) must separate problem and answer; write "
            f'"problem {_EXAMPLE_SEPARATOR} answer"'
        )
    return problem.strip(), answer.strip()


def fitting_prompts(
    writer: PromptWriter, problems: Sequence[Problem], *, first_id: int, drop: bool
) -> list[Prompt]:
    """The prompts that fit, numbered from `first_id` by place in `problems`.

    ValueError for one that does not, or with `drop` when none does.
    """
    prompts = [
        writer.write(problem, prompt_id=first_id + place) for place, problem in enumerate(problems)
    ]
    kept = [prompt for prompt in prompts if writer.fits(prompt)]
    if len(kept) < len(prompts) and not drop:
        raise writer.too_long(next(prompt for prompt in prompts if not writer.fits(prompt)))
    if prompts and not kept:
        raise writer.none_fits(len(prompts))
    return kept


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
