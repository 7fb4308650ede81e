"""What a checkpoint consists of, and whether it belongs to this run's model.

Owns the split of a `TrainState` into items and their description by name. A further item, such as
rollouts in flight, is one more entry beside these; reading and writing is in `store.py`.

    <directory>/<version>/params      the weights alone, so that export reads no moments
                         /optimizer   moments, step counters
                         /record      JSON: what the run wants back, tensors by name with their
                                      sums (`checksums.py`), settings
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from pipeline_rl_jax.trainer.state import TrainState

ITEM_NAMES = ("params", "optimizer", "record")
_MAX_NAMED = 3


def split_state(state: TrainState) -> dict[str, Any]:
    """The tree items of a state: params as they are, everything else flat, by name.

    Flat names do not depend on the classes in which an optimizer nests its moments.
    """
    rest = {
        "opt_state": state.opt_state,
        "step": state.step,
        "skipped_steps": state.skipped_steps,
    }
    if state.critic is not None:
        rest["critic"] = state.critic
    return {"params": state.params, "optimizer": _by_name(rest)}


def join_state(items: Mapping[str, Any], like: TrainState) -> TrainState:
    """The inverse of `split_state`, with the structure of `like`."""
    flat = items["optimizer"]

    def pick(tree: Any, prefix: str) -> Any:
        names = _by_name(tree, prefix=prefix)
        return jax.tree.unflatten(jax.tree.structure(tree), [flat[name] for name in names])

    return TrainState(
        params=items["params"],
        opt_state=pick(like.opt_state, "opt_state"),
        step=flat["step"],
        skipped_steps=flat["skipped_steps"],
        critic=pick(like.critic, "critic"),
    )


def describe_tensors(state: TrainState) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every tensor, as JSON holds it; names begin with the item's."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for name, leaf in tensors_by_name(state).items()
    }


def tensors_by_name(state: TrainState) -> dict[str, Any]:
    """Every tensor; names begin with the item's."""
    return _by_name(split_state(state))


def params_by_name(params: Mapping[str, Any]) -> dict[str, Any]:
    """The weights alone, named as `tensors_by_name` names them."""
    return _by_name(params, prefix="params")


def require_same_tensors(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]], *, origin: str
) -> None:
    """ValueError, in one line, when a checkpoint was written by another model or optimizer."""
    differences = [
        f"{name} is {_show(saved.get(name))} there and {_show(wanted.get(name))} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = len(differences) - _MAX_NAMED
        shown = "; ".join(differences[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"{origin} belongs to another model: {shown}. Use the model.source and "
            "model.param_dtype it was written with, or another --workdir"
        )


def changed_settings(saved: Any, current: Any, path: str = "") -> list[str]:
    """One `path: old -> new` for every setting that differs, in nested plain values."""
    if not (isinstance(saved, Mapping) and isinstance(current, Mapping)):
        return [] if saved == current else [f"{path}: {saved!r} -> {current!r}"]
    return [
        line
        for name in sorted(saved.keys() | current.keys())
        for line in changed_settings(
            saved.get(name), current.get(name), f"{path}.{name}" if path else name
        )
    ]


def _by_name(tree: Any, prefix: str = "") -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {
        f"{prefix}.{name}" if prefix else name: leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def _show(tensor: Mapping[str, Any] | None) -> str:
    return "missing" if tensor is None else f"{tensor['dtype']}{tensor['shape']}"
