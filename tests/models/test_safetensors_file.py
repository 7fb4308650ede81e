from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from pipeline_rl_jax.models.safetensors_file import element_bytes, read_header, write_file

VALUES = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([1.0, -2.5])}
SHAPES = {name: value.shape for name, value in VALUES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_reads_the_same(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    write_file(path, SHAPES, dtype=dtype, tensors=iter(VALUES.values()))
    tensors = read_header(path)
    assert list(tensors) == ["a", "b"]
    for name, value in VALUES.items():
        stored = tensors[name].open()
        assert stored.dtype.name == dtype
        np.testing.assert_array_equal(stored, value)


def test_bytes_of_a_file_made_by_hand(tmp_path):
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    data = bytes([0x80, 0x3F, 0x20, 0xC0])  # bfloat16 1.0 and -2.5, little endian
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + data)
    stored = read_header(tmp_path / "x")["x"].open()
    assert stored.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(stored.astype(np.float32), [1.0, -2.5])


def test_the_safetensors_package_reads_our_files(tmp_path):
    numpy_loader = pytest.importorskip("safetensors.numpy")
    write_file(tmp_path / "x", SHAPES, dtype="float32", tensors=iter(VALUES.values()))
    loaded = numpy_loader.load_file(tmp_path / "x")
    assert loaded.keys() == VALUES.keys()
    np.testing.assert_array_equal(loaded["a"], VALUES["a"])


def test_transposed_views_are_written_row_by_row(tmp_path):
    write_file(tmp_path / "x", {"a": (3, 2)}, dtype="float32", tensors=[VALUES["a"].T])
    np.testing.assert_array_equal(read_header(tmp_path / "x")["a"].open(), VALUES["a"].T)


def test_empty_tensors_scalars_and_other_dtypes(tmp_path):
    header = {"i": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert not read_header(tmp_path / "x")["i"].readable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header claims 0 bytes of 0"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs pointer"),
        ((4).to_bytes(8, "little") + b"{{}}", "not the expected JSON"),
        ((12).to_bytes(8, "little") + b'{"x": [1,2]}', "not the expected JSON"),
    ],
)
def test_malformed_files_are_named(tmp_path, content, message):
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(tmp_path / "weights")
    assert str(tmp_path / "weights") in str(caught.value)


def test_a_download_cut_short(tmp_path):
    write_file(tmp_path / "x", SHAPES, dtype="float32", tensors=iter(VALUES.values()))
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"cut short: {len(whole) - 1} of {len(whole)} bytes"):
        read_header(tmp_path / "x")


def test_wrong_announcements(tmp_path):
    with pytest.raises(ValueError, match=r"a has shape \(2, 3\), announced was \(3, 2\)"):
        write_file(tmp_path / "x", {"a": (3, 2)}, dtype="float32", tensors=[VALUES["a"]])
    with pytest.raises(ValueError, match=r"dtype \(int8\) cannot be stored; use one of float64"):
        write_file(tmp_path / "x", {}, dtype="int8", tensors=[])
    assert (element_bytes("float32"), element_bytes("bfloat16")) == (4, 2)
