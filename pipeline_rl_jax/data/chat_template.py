"""Renders a checkpoint's chat template.

Owns finding the template in a Hugging Face directory and running it in a sandbox. Turning the text
into ids is `tokenizer.py`; choosing the messages is `prompts.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A Jinja chat template and the special tokens it may write.

    `strftime_now` is left undefined on purpose: templates that would print today's date (Llama 3.2)
    fall back to the date they were trained with, so a resumed run sees the same prompts.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: Path) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._origin = origin

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of {self._origin} does not parse: {error}"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation of `{"role", "content"}` messages, special tokens written out.

        ValueError when the template does not parse or refuses the messages.
        """
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template of {self._origin} refuses the roles {roles}: {error}; change "
                "data.system_prompt, or use data.template=plain"
            ) from error


def find_template_source(directory: Path, configs: Iterable[Mapping[str, object]]) -> str | None:
    """The template's text, or None when there is none.

    A file `chat_template.jinja` wins, as in transformers; then the first of the JSON objects in
    `configs` that holds a `chat_template`. Of several named templates, the one called `default`.
    """
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    for config in configs:
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if isinstance(source, str) and source:
            return source
    return None


def _tojson(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which the model never saw in training.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
