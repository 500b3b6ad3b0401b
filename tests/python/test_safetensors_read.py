"""Reading safetensors files: the fault cases VR1 to VR7, and agreement with the reference library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_files import entry, file_of

from loraaccel import safetensors as ours
from loraaccel.safetensors import SafetensorError
from loraaccel.safetensors import numpy as ours_numpy

GOLDEN = Path(__file__).parents[1] / "golden" / "safetensors"
KNOWS_ALL_TYPES = tuple(map(int, safetensors.__version__.split(".")[:2])) >= (0, 6)
ONE = {"a": entry("U8", [16], 0, 16)}


def refused(tmp_path: Path, content: bytes, *said: str) -> None:
    """By path and from bytes, before a tensor is read, with the file's name."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError) as error:
        ours.safe_open(path, "pt")
    for text in (str(path), *said):
        assert text in str(error.value)
    with pytest.raises(SafetensorError):
        ours.load(content)
    with pytest.raises(SafetensorError):
        ours.load_file(path, backend="mmap")


def test_vr1_truncated_short_and_over_long(tmp_path: Path) -> None:
    refused(tmp_path, b"", "0 bytes", "download")
    refused(tmp_path, bytes(7), "7 bytes", "download")
    refused(tmp_path, file_of(ONE, b"", length=100), "100", "download")
    whole = file_of(ONE, bytes(16))
    refused(tmp_path, whole[:-1], f"= {len(whole)} bytes", f"found {len(whole) - 1}", "download")
    refused(
        tmp_path, whole + b"x", f"= {len(whole)} bytes", f"found {len(whole) + 1}", "after the last tensor"
    )


def test_vr2_hostile_length_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    code = f"""
import resource
from loraaccel._core import SafetensorError, SafetensorsReader
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
before = peak()
for n in (2**63, 2**64 - 1, 2**64 - 8, 10**8, 10**8 + 1, 94):
    open({str(path)!r}, "wb").write(n.to_bytes(8, "little") + b" " * 93)
    try:
        SafetensorsReader({str(path)!r})
    except SafetensorError as error:
        assert str(n) in str(error), error
    else:
        raise AssertionError(n)
assert peak() - before < 1024, peak() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vr3_overlaps_and_holes(tmp_path: Path) -> None:
    a = entry("F32", [3], 0, 12)
    refused(tmp_path, file_of({"a": a, "b": entry("F32", [2], 8, 16)}, bytes(16)), "'a'", "'b'", "overlap")
    both = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}
    refused(tmp_path, file_of(both, bytes(16)), "'a'", "'b'", "overlap")
    refused(tmp_path, file_of({"a": entry("F32", [3], 4, 16)}, bytes(16)), "'a'", "hole")
    refused(tmp_path, file_of({"a": a, "b": entry("F32", [1], 16, 20)}, bytes(20)), "'a'", "'b'", "hole")
    reversed_ = {"b": entry("U8", [8], 8, 16), "a": entry("U8", [8], 0, 8)}
    found = ours.load(file_of(reversed_, bytes(range(16))))
    assert found["a"].tolist() == list(range(8))
    assert found["b"].tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("dtype", "shape", "offsets"),
    [
        ("F32", [5], [0, 16]),
        ("F32", [1000, 1000], [0, 16]),
        ("F32", [4], [16, 0]),
        ("F32", [4], [-16, 0]),
        ("F32", [4], [0, 16.0]),
        ("F32", [4], [0, 8, 16]),
        ("F32", [4], ["0", "16"]),
        ("F32", [-4], [0, 16]),
        ("F32", [4.0], [0, 16]),
        ("F32", [2**64], [0, 16]),
        ("f32", [4], [0, 16]),
        ("F33", [4], [0, 16]),
        ("F4", [33], [0, 16]),
    ],
)
def test_vr4_bytes_must_match_shape_and_dtype(
    tmp_path: Path, dtype: str, shape: list[Any], offsets: list[Any]
) -> None:
    header = {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    refused(tmp_path, file_of(header, bytes(16)), "'w'")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(file_of(header, bytes(16)))


def test_vr4_both_byte_counts_are_said(tmp_path: Path) -> None:
    refused(tmp_path, file_of({"w": entry("F32", [5], 0, 16)}, bytes(16)), "'w'", "16 bytes", "20 bytes")


def test_vr5_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {
        "alpha": torch.tensor(8.0),
        "none": torch.empty(0),
        "rows": torch.empty(2, 0),
        "columns": torch.empty(0, 3, dtype=torch.float16),
    }
    path = tmp_path / "x.safetensors"
    ours.save_file(tensors, path)
    read = (
        ours.load_file(path), ours.load_file(path, backend="mmap"), ours.load(path.read_bytes()),
        safetensors.torch.load_file(path),
    )  # fmt: skip
    for found in read:
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].shape == tensor.shape
            assert found[name].dtype == tensor.dtype
        assert found["alpha"].item() == 8.0
    theirs = safetensors.torch.save(tensors)
    assert ours.load(theirs)["alpha"].item() == 8.0
    with ours.safe_open(path, "pt") as file:
        assert file.get_slice("rows")[1:].shape == (1, 0)
        assert file.get_slice("alpha")[...].item() == 8.0


def test_vr6_metadata_forms(tmp_path: Path) -> None:
    data = b"x"
    tensor = {"t": entry("U8", [1], 0, 1)}
    for header, metadata in (
        (tensor, None),
        ({"__metadata__": {}, **tensor}, {}),
        ({"__metadata__": None, **tensor}, None),
        ({"__metadata__": {"k": "v"}, **tensor}, {"k": "v"}),
        ({**tensor, "__metadata__": {"k": "v"}}, {"k": "v"}),
    ):
        path = tmp_path / "x.safetensors"
        path.write_bytes(file_of(header, data))
        with ours.safe_open(path, "np") as file:
            assert file.metadata() == metadata
            assert file.keys() == ["t"]
    path.write_bytes(file_of({"__metadata__": {"only": "this"}}))
    with ours.safe_open(path, "np") as file:
        assert file.metadata() == {"only": "this"}
        assert file.keys() == []
    refused(tmp_path, file_of({"__metadata__": {"k": 1}, **tensor}, data), "'k'", "a string")
    refused(tmp_path, file_of({"__metadata__": {"k": {"nested": "v"}}, **tensor}, data), "'k'", "a string")


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"PK\x03\x04", "zip archive"),
        (b"\x80\x02}q", "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"<html><head>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    ],
)
def test_vr7_other_formats(tmp_path: Path, start: bytes, what: str) -> None:
    refused(tmp_path, start + b"x" * 200, what)
    path = tmp_path / "y"
    path.write_bytes(start)  # nothing else in it
    with pytest.raises(SafetensorError, match=what):
        ours.load_file(path)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_files_are_judged_as_by_the_reference_library(path: Path) -> None:
    content = path.read_bytes()
    verdict = path.name.split("_")[0]
    assert verdict in ("ok", "bad", "strict")
    if verdict == "ok":
        with ours.safe_open(path, "np") as mine:
            if "F6_E2M3" in content.decode("latin-1") and not KNOWS_ALL_TYPES:
                return
            with safetensors.safe_open(path, "np") as theirs:
                assert mine.keys() == sorted(theirs.keys())
                assert mine.metadata() == theirs.metadata()
        return
    with pytest.raises(SafetensorError):
        ours.load(content)
    if verdict == "bad":
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load(content)
    else:  # stricter than they are
        safetensors.torch.load(content)


NUMBERS = st.one_of(
    st.integers(0, 12), st.sampled_from([-1, 1.5, 2**32, 2**63, 2**64, "4", None, True, 1e300])
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F16", "F32", "I64", "BOOL", "F4", "u8", ""]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    },
    optional={"more": st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists)},
)
HEADERS = st.dictionaries(
    st.text(max_size=4) | st.sampled_from(["__metadata__", "a", "b"]), ENTRIES | NUMBERS, max_size=3
)


@settings(max_examples=100, deadline=None)
@given(HEADERS, st.integers(0, 24))
def test_random_headers_are_judged_as_by_the_reference_library(header: dict[str, Any], size: int) -> None:
    agree(file_of(json.dumps(header), bytes(size)))


@st.composite
def nearly_right(draw: st.DrawFn) -> bytes:
    """Tensors that follow each other, and often one number that is not right."""
    bits = {"U8": 8, "F16": 16, "F32": 32, "I64": 64, "F8_E4M3": 8, "F4": 4}
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.text(max_size=3), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(bits)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = int(np.prod(shape, dtype=int)) * bits[dtype] // 8
        header[name] = entry(dtype, shape, at, at + size)
        at += size
    names = list(header)
    if names and draw(st.booleans()):
        wrong = header[draw(st.sampled_from(names))]
        numbers = wrong[draw(st.sampled_from(["shape", "data_offsets"]))]
        if numbers:
            numbers[draw(st.integers(0, len(numbers) - 1))] += draw(st.sampled_from([1, -1, 8, 2**40]))
    order = draw(st.permutations(names))
    return file_of({name: header[name] for name in order}, bytes(at + draw(st.sampled_from([0, 0, 0, 1]))))


@settings(max_examples=100, deadline=None)
@given(nearly_right())
def test_nearly_right_files_are_judged_as_by_the_reference_library(content: bytes) -> None:
    agree(content)


def agree(content: bytes) -> None:
    try:
        theirs: dict[str, Any] | None = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError:
        theirs = None
    if theirs is None:
        with pytest.raises(SafetensorError):
            ours.safe_open.over(content, "np")
        return
    with ours.safe_open.over(content, "np") as file:
        assert file.keys() == sorted(theirs)
        for name, value in theirs.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (value["dtype"], list(value["shape"]))


def test_slices_are_those_of_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    whole = torch.arange(5 * 4 * 3).reshape(5, 4, 3)
    ours.save_file({"w": whole}, path)
    keys: list[Any] = [
        slice(None), slice(1, 3), slice(1, None, 2), slice(-2, None), slice(3, 1), 2, -1, (slice(1, 3), 2),
        (slice(None), slice(1, 2), -1), (0, slice(None), slice(2)), ..., (..., 1), (),
    ]  # fmt: skip
    for name, framework in (("pt", torch), ("np", np)):
        with ours.safe_open(path, name) as file:
            part = file.get_slice("w")
            assert part.get_shape() == [5, 4, 3]
            assert part.get_dtype() == "I64"
            for key in keys:
                assert part[key].tolist() == whole[key].tolist(), (framework.__name__, key)
            with pytest.raises(IndexError):
                part[5]


def test_names_and_missing_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ours.save_file({"b": torch.zeros(1), "a": torch.zeros(1, dtype=torch.float64)}, path)
    with ours.safe_open(path, "pt") as file:
        assert file.keys() == ["a", "b"]
        assert file.offset_keys() == ["a", "b"]
        with pytest.raises(SafetensorError, match="'c'"):
            file.get_tensor("c")
    with pytest.raises(SafetensorError, match="closed"):
        file.keys()
    with pytest.raises(ValueError, match="framework"):
        ours.safe_open(path, "jax")
    with pytest.raises(ValueError, match="backend"):
        ours.safe_open(path, "pt", backend="disk")


def test_vw5_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        ours.load_file(tmp_path / "none 模型")
    assert error.value.filename == str(tmp_path / "none 模型")
    with pytest.raises(IsADirectoryError):
        ours.load_file(tmp_path)


def test_mapped_tensors_are_private_and_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ours.save_file({"w": torch.arange(1000.0)}, path)
    before = path.read_bytes()
    tensor = ours.load_file(path, backend="mmap")["w"]
    path.unlink()
    assert tensor.sum().item() == 499500.0
    tensor += 1
    assert tensor[0].item() == 1.0
    path.write_bytes(before)
    assert ours.load_file(path)["w"][0].item() == 0.0


def test_unaligned_tensors_are_read_by_every_way(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = np.array([1.5, -2.25], dtype="<f4")
    header = {"a": entry("U8", [3], 0, 3), "b": entry("F32", [2], 3, 11)}
    path.write_bytes(file_of(header, b"abc" + values.tobytes()))
    for backend in ("pread", "mmap"):
        assert ours.load_file(path, backend=backend)["b"].tolist() == [1.5, -2.25]
        assert ours_numpy.load_file(path, backend=backend)["b"].tolist() == [1.5, -2.25]
