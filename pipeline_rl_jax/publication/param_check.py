"""Params are what the receiver expects, or nothing is published.

Owns the comparison of parameter trees by name, shape and dtype.
"""

from __future__ import annotations

from typing import Any

import jax

_MAX_NAMED = 5


def check_params(params: Any, expected: Any) -> None:
    """Raises ValueError naming the tensors that are missing, unknown or of another shape or dtype.

    `expected` is a tree of `jax.ShapeDtypeStruct`, or of arrays.
    """
    have, want = _by_name(params), _by_name(expected)
    problems = [
        *(f"{name} is missing" for name in want if name not in have),
        *(f"{name} is unknown" for name in have if name not in want),
        *(
            f"{name} is {_describe(have[name])}, not {_describe(leaf)}"
            for name, leaf in want.items()
            if name in have and _describe(have[name]) != _describe(leaf)
        ),
    ]
    if problems:
        shown = "; ".join(problems[:_MAX_NAMED])
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ValueError(f"these weights do not fit the model, none was published: {shown}{more}")


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
