r"""Finds the answer inside a text: the last `\boxed{...}`, what follows `####`, and plain cleaning.

Owns text only, of data sets and of models alike: nothing here knows what an answer means. One pass
over the text whatever a model wrote, so ten thousand unclosed boxes cost no more than ten thousand
letters.
"""

from __future__ import annotations

import re

# A box command with or without its brace, an escaped character, or a brace. One or two backslashes
# before the command: models that saw LaTeX inside JSON escape it twice.
_TOKEN = re.compile(
    r"(?s)\\{1,2}(?P<box>boxed|fbox|framebox)(?![A-Za-z])\s*(?P<brace>\{)?|\\.|[{}]"
)
# Content of a box without braces: to the end of the formula or line, or to the next word.
_GROUP = r"\{(?:[^{}$\n]|\{[^{}$\n]{0,99}\}){0,99}\}"
_BARE_CONTENT = re.compile(rf"(?:(?!\\[)\]]|\s[A-Za-z]{{2,}})[^$\n{{}}]|{_GROUP}){{1,200}}")
_THIN_SPACE = re.compile(r"(?<!\\)\\[,;:!]")
_DIGIT_GROUPS = re.compile(r"(?<=[0-9])\\[,;:!](?=[0-9]{3})")
_DELIMITED = re.compile(r"(?s)\$\$(.*[^\\])\$\$|\$(.*[^\\])\$|\\\((.*)\\\)|\\\[(.*)\\\]")


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}`, `\fbox` or `\framebox`; None without one.

    The last to open, so of nested boxes the inner one. Also `\boxed 5`, up to the end of its
    formula. A box that never closes (a completion cut by a limit) is passed over.

    >>> last_box(r"\boxed{1}, no: $\boxed{\frac{1}{3}}$.")
    '\\frac{1}{3}'
    """
    content: str | None = None
    content_start = -1
    open_braces: list[int | None] = []  # where a box's content starts, None for any other brace
    for token in _TOKEN.finditer(text):
        if token["brace"]:
            open_braces.append(token.end())
        elif token["box"]:
            bare = _BARE_CONTENT.match(text, token.end())
            if bare:
                content, content_start = bare.group(), token.end()
        elif token.group() == "{":
            open_braces.append(None)
        elif token.group() == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and start > content_start:
                content, content_start = text[start : token.start()], start
    return content.strip() if content is not None else None


def after_marker(text: str) -> str | None:
    """The line after the last `####` (GSM8K's mark of the final answer), or None without one."""
    _, marker, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if marker else None


def gold_answer(answer: str) -> str:
    r"""The bare answer in a data set's answer field: unboxed, after `####`, without delimiters.

    >>> gold_answer("6 * 12 = 72\n#### 72"), gold_answer(r"so $\boxed{x^2}$."), gold_answer("$7$")
    ('72', 'x^2', '7')
    """
    bare = last_box(answer)
    if bare is None:
        bare = after_marker(answer)
    return clean_answer(answer if bare is None else bare)


def clean_answer(text: str) -> str:
    r"""The text without LaTeX spacing, closing full stop and `$...$`, `\(...\)`, `\[...\]`."""
    text = _THIN_SPACE.sub(" ", _DIGIT_GROUPS.sub("", text))
    while True:
        text = text.strip().rstrip(".,; \n")
        delimited = _DELIMITED.fullmatch(text)
        if delimited is None:
            return text
        text = next(inside for inside in delimited.groups() if inside is not None)
