"""The safetensors file format: tensors by name, read without copying, written as a stream.

Owns headers, byte offsets and dtypes. The format is eight bytes of header length (little endian), a
JSON header, then raw row-major data. Read here rather than by the `safetensors` package so that a
slice of a bfloat16 tensor costs nothing but its own bytes, and a file is written without ever
holding more than one tensor. Knows nothing of models.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies. `dtype` is the format's name, e.g. "BF16"."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def readable(self) -> bool:
        """False for dtypes no weight of ours is stored in (integers, 8-bit floats)."""
        return self.dtype in _DTYPES

    def open(self) -> np.ndarray:
        """A read-only view on the file; its pages are given back when the view is dropped."""
        return np.memmap(
            self.path, dtype=_DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape
        )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. ValueError naming the file when it is malformed or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise _malformed(path, f"its header claims {header_bytes} bytes of {size}")
        text = file.read(header_bytes)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                path=path,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + header_bytes + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
        end = 8 + header_bytes + max((e["data_offsets"][1] for e in header.values()), default=0)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise _malformed(path, "its header is not the expected JSON") from error
    if end > size:
        raise _malformed(path, f"it is cut short: {size} of {end} bytes")
    return tensors


def write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str, tensors: Iterable[np.ndarray]
) -> None:
    """Writes `tensors`, which come in the order of `shapes`, as `dtype` ("float32", …) and syncs.

    ValueError when a tensor's shape is not the announced one.
    """
    stored = _stored_name(dtype)
    target = _DTYPES[stored]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * target.itemsize
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tensor.shape}, announced was {shape}")
            values = np.ascontiguousarray(tensor, dtype=target)
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def element_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` ("float32", "bfloat16", …)."""
    return _DTYPES[_stored_name(dtype)].itemsize


def _stored_name(dtype: str) -> str:
    for name, known in _DTYPES.items():
        if known.name == dtype:
            return name
    known_names = ", ".join(known.name for known in _DTYPES.values())
    raise ValueError(f"dtype ({dtype}) cannot be stored; use one of {known_names}")


def _malformed(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a whole safetensors file: {reason}; fetch it again (a small file may be a "
        "git-lfs pointer)"
    )
