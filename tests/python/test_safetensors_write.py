"""Writing safetensors files: the fault cases VW1 and VW3 to VW7, and agreement with the reference library."""

from __future__ import annotations

import hashlib
import os
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
from safetensors_files import data_of, header_of

from loraaccel import safetensors as ours
from loraaccel.safetensors import numpy as ours_numpy
from loraaccel.safetensors._torch_tensors import DTYPES

GENERATOR = torch.Generator().manual_seed(0)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, but for truth values."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=GENERATOR).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=int)) * size
    bits = torch.randint(0, 256, (count,), generator=GENERATOR, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def known_to_the_reference(tensors: dict[str, torch.Tensor]) -> bool:
    try:
        safetensors.torch.save(tensors)
    except (KeyError, safetensors.SafetensorError):
        return False
    return True


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_both_ways(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    tensors = {
        "w": tensor_of(dtype, (3, 4)),
        "none": tensor_of(dtype, (0, 2)),
        "one": tensor_of(dtype, (1, 1, 2)),
    }
    if name != "F4":
        tensors["alpha"] = tensor_of(dtype, ())
    path = tmp_path / "x.safetensors"
    ours.save_file(tensors, path)
    assert header_of(path.read_bytes())["w"]["dtype"] == name
    read = [ours.load_file(path), ours.load_file(path, backend="mmap"), ours.load(path.read_bytes())]
    if known_to_the_reference(tensors):
        assert path.read_bytes() == safetensors.torch.save(tensors)
        read.append(safetensors.torch.load_file(path))
        read.append(ours.load(safetensors.torch.save(tensors)))
    for found in read:
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert same_bits(found[key], tensor), key


@pytest.mark.parametrize(
    "dtype",
    ["bool", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "c8", "f8", "i8", "u8"],
)
def test_every_numpy_dtype_both_ways(dtype: str) -> None:
    arrays = {
        "w": np.arange(12).reshape(3, 4).astype(dtype),
        "s": np.array(1, dtype),
        "e": np.empty((0, 2), dtype),
    }
    content = ours_numpy.save(arrays)
    assert content == safetensors.numpy.save(arrays)
    for found in (ours_numpy.load(content), safetensors.numpy.load(content)):
        for key, array in arrays.items():
            assert found[key].dtype == array.dtype
            assert found[key].shape == array.shape
            assert found[key].tobytes() == array.tobytes()


NAMES = st.text(st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool]),
                  st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.none() | st.dictionaries(NAMES, NAMES, max_size=3),
)  # fmt: skip
def test_files_are_the_reference_librarys(specs: dict[str, Any], metadata: dict[str, str] | None) -> None:
    tensors = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in specs.items()}
    mine = ours.save(tensors, metadata)
    if not tensors and metadata == {}:  # 0.8.0 writes two objects there
        assert header_of(mine) == {"__metadata__": {}}
        return
    theirs = safetensors.torch.save(tensors, metadata)
    assert header_of(mine) == header_of(theirs)
    assert data_of(mine) == data_of(theirs)
    if not metadata or len(metadata) == 1:  # (the order of theirs is another one at each call)
        assert mine == theirs
    with ours.safe_open.over(theirs, "pt") as file:
        assert file.metadata() == metadata
    found = safetensors.torch.load(mine)
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_vw1_over_the_file_it_was_loaded_from(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    first = {"w": torch.randn(300, 300), "v": torch.randn(7)}
    ours.save_file(first, path, {"version": "1"})
    for backend in ("mmap", "pread"):
        held = ours.load_file(path, backend=backend)
        ours.save_file(held, path, {"version": "2"})
        ours.save_file({**held, "more": torch.ones(3)}, path, {"version": "3"})
        for found in (held, ours.load_file(path), safetensors.torch.load_file(path)):
            assert torch.equal(found["w"], first["w"])
            assert torch.equal(found["v"], first["v"])
        with ours.safe_open(path, "pt") as file:
            assert file.metadata() == {"version": "3"}
        ours.save_file(first, path)
    theirs = safetensors.torch.load_file(path)  # (mapped, in some releases)
    ours.save_file(theirs, path)
    assert torch.equal(theirs["w"], first["w"])
    assert torch.equal(ours.load_file(path)["w"], first["w"])


def test_vw3_tensors_of_any_strides_are_written_as_what_they_mean(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6).reshape(2, 3).T,
        "every_other": torch.arange(8)[::2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "imaginary": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 2).T),
    }
    path = tmp_path / "x.safetensors"
    ours.save_file(tensors, path)
    for found in (ours.load_file(path), safetensors.torch.load_file(path)):
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), name
    assert ours.load_file(path)["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    # Cast on the way.
    ours.save_file({"t": torch.randn(300, 200).T}, path, dtype=torch.bfloat16)
    assert ours.load_file(path)["t"].shape == (200, 300)


def test_vw3_numpy_arrays_of_any_strides_and_byte_order(tmp_path: Path) -> None:
    arrays = {
        "transposed": np.arange(6).reshape(2, 3).T,
        "every_other": np.arange(8)[::2],
        "backwards": np.arange(5.0)[::-1],
        "broadcast": np.broadcast_to(np.arange(3, dtype="f4"), (2, 3)),
        "big_endian": np.arange(4, dtype=">f4"),
        "fortran": np.asfortranarray(np.arange(12, dtype="i2").reshape(3, 4)),
        "scalar": np.float32(2.5),
    }
    path = tmp_path / "x.safetensors"
    ours_numpy.save_file(arrays, path)
    for found in (ours_numpy.load_file(path), safetensors.numpy.load_file(path)):
        for name, array in arrays.items():
            assert np.array_equal(found[name], array), name


def test_vw4_shared_storage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    whole = torch.arange(4.0)
    for tensors in ({"first": whole, "second": whole}, {"first": whole, "second": whole[:1]}):
        with pytest.raises(RuntimeError, match="first, second"):
            ours.save_file(tensors, path)
        with pytest.raises(RuntimeError):
            safetensors.torch.save_file(tensors, path)
    disjoint = {"a": whole[:2], "b": whole[2:], "c": torch.empty(0), "d": torch.empty(0)}
    ours.save_file(disjoint, path)
    found = safetensors.torch.load_file(path)
    assert found["a"].tolist() == [0, 1]
    assert found["b"].tolist() == [2, 3]
    columns = torch.arange(6.0).reshape(3, 2)
    ours.save_file({"a": columns[:, 0], "b": columns[:, 1]}, path)  # they interleave, and share nothing
    assert ours.load_file(path)["b"].tolist() == [1, 3, 5]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight


def test_vw4_models_with_tied_weights(tmp_path: Path) -> None:
    path, theirs = tmp_path / "x.safetensors", tmp_path / "theirs.safetensors"
    model = Tied()
    ours.save_model(model, path, {"k": "v"})
    safetensors.torch.save_model(model, theirs, {"k": "v"})
    assert header_of(path.read_bytes()) == header_of(theirs.read_bytes())
    for file in (path, theirs):
        for load in (ours.load_model, safetensors.torch.load_model):
            other = Tied()
            assert load(other, file) == (set(), [])
            assert torch.equal(other.b.weight, model.a.weight)
            assert torch.equal(other.b.bias, model.b.bias)
    with pytest.raises(RuntimeError, match="missing"):
        ours.load_model(torch.nn.Linear(4, 4), path)
    missing, unexpected = ours.load_model(torch.nn.Linear(4, 4), path, strict=False)
    assert missing == {"weight", "bias"}
    assert sorted(unexpected) == ["a.bias", "a.weight", "b.bias"]


def test_vw5_paths(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    deep = tmp_path
    for _ in range(3):
        deep /= "d" * 120
    deep.mkdir(parents=True)
    for path in (tmp_path / "模型 é😀.safetensors", tmp_path / "a b", deep / "x"):
        ours.save_file(tensors, path)
        assert ours.load_file(path)["w"].tolist() == [1, 1]
        ours.save_file(tensors, str(path))
    for path, kind in (
        (tmp_path / "no folder" / "模型", FileNotFoundError),
        (tmp_path, IsADirectoryError),
    ):
        with pytest.raises(kind) as error:
            ours.save_file(tensors, path)
        assert error.value.filename == str(path)
        assert error.value.errno


def test_vw5_mode_is_what_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        ours.save_file({"w": torch.ones(2)}, tmp_path / "x")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o7777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_vw6_metadata_survives(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    metadata = {
        "format": "pt",
        "ss_network_dim": "8",
        "ss_tag_frequency": '{"a": {"b\\n": 1}}',
        "é\n\x01": "模型",
    }
    ours.save_file({}, path, metadata)
    for read in (ours.safe_open, safetensors.safe_open):
        with read(path, "pt") as file:
            assert file.metadata() == metadata
            assert list(file.keys()) == []
    with ours.safe_open(path, "pt") as file:
        ours.save_file({"w": torch.ones(1)}, path, file.metadata())
    content = path.read_bytes()
    assert header_of(content)["__metadata__"] == metadata
    assert (len(content) - len(data_of(content))) % 8 == 0
    for wrong in ({"k": 1}, {1: "v"}, {"k": None}, "text"):
        with pytest.raises(TypeError, match=r"expected (str|a dict)"):
            ours.save_file({}, path, wrong)
    assert path.read_bytes() == content


ODD = [
    1e5,
    65519.99,
    65520.0,
    1e-40,
    1e-8,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1.00390625,
    1.01171875,
]


@pytest.mark.parametrize(
    "to", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
@pytest.mark.filterwarnings("ignore:loraaccel.*do not fit:RuntimeWarning")
def test_vw7_casts_are_torchs(to: torch.dtype) -> None:
    """All upper halves of float32 with some lower ones, and all numbers of 16 bits."""
    high = (torch.arange(2**16) << 16).to(torch.int64)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    words = (high[:, None] | low).reshape(-1)
    floats = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.float32)
    half = torch.arange(2**16).to(torch.int32).to(torch.int16)
    sources = [floats, half.view(torch.float16), half.view(torch.bfloat16), torch.tensor(ODD)]
    for source in sources:
        found = ours.load(ours.save({"w": source}, dtype=to))["w"]
        expected = source.to(to)
        if (
            to == torch.float8_e4m3fn
        ):  # what is too large is NaN here, and in torch before 2.13; since then 448
            expected = torch.where(source.double().abs() > 464, float("nan"), source).to(to)
        nan = expected.to(torch.float32).isnan()
        assert torch.equal(found.to(torch.float32).isnan(), nan)
        mine, theirs = found[~nan], expected[~nan]
        assert same_bits(mine, theirs), (source.dtype, to)


def test_vw7_new_infinities_are_reported(tmp_path: Path) -> None:
    tensors = {"bad": torch.tensor([1e5, 65519.99, 65520.0, float("inf")]), "good": torch.ones(3)}
    path = tmp_path / "x.safetensors"
    with pytest.warns(RuntimeWarning, match=r"2 finite numbers of 1 tensors .*F16 \(2 of 'bad'\)"):
        report = ours.save_file(tensors, path, dtype=torch.float16)
    assert report.losses == {"bad": ours.CastLoss(0, 2)}
    assert ours.load_file(path)["bad"].tolist() == [float("inf"), 65504.0, float("inf"), float("inf")]


def test_vn4_values_lost_to_zero_are_counted(tmp_path: Path) -> None:
    values = torch.tensor([1e-8, 2.98e-8, 3.0e-8, 5.9e-8, 6.1e-5])
    report = ours.save_file({"w": values}, tmp_path / "x", dtype=torch.float16)
    assert report.losses == {"w": ours.CastLoss(2, 0)}
    assert ours.save_file({"w": values}, tmp_path / "x", dtype=torch.bfloat16).losses == {}
    assert ours.load_file(tmp_path / "x")["w"].dtype == torch.bfloat16


def test_hashes_are_kohyas(tmp_path: Path) -> None:
    """SHA-256 of the data, and of a window of the file with the keys "ss_..." alone, written by the reference."""
    path = tmp_path / "x.safetensors"
    tensors = {"b": torch.randn(700, 400), "a": torch.randn(500, 300), "alpha": torch.tensor(4.0)}
    metadata = {"ss_a": "1", "modelspec.title": "t"}
    report = ours.save_file(tensors, path, metadata, dtype="F16", write_hashes=True)
    cast = {name: tensor.half() for name, tensor in tensors.items()}
    theirs = safetensors.torch.save(cast, {"ss_a": "1"})
    assert report.model_hash == hashlib.sha256(data_of(theirs)).hexdigest()
    assert report.legacy_hash == hashlib.sha256(theirs[0x100000:0x110000]).hexdigest()[:8]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {
            **metadata, "sshs_model_hash": report.model_hash, "sshs_legacy_hash": report.legacy_hash,
        }  # fmt: skip
    assert report.file_size == path.stat().st_size
    assert data_of(path.read_bytes()) == data_of(theirs)
    plain = ours.save_file(tensors, path, metadata)
    assert (plain.model_hash, plain.legacy_hash) == ("", "")


def test_the_same_tensors_give_the_same_bytes() -> None:
    tensors = {f"t{i}": torch.full((i,), float(i)) for i in range(20)}
    metadata = {f"k{i}": str(i) for i in range(20)}
    again = dict(reversed(tensors.items())), dict(reversed(metadata.items()))
    assert ours.save(tensors, metadata) == ours.save(*again)


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ([torch.ones(1)], ValueError),
        ({"w": [1.0]}, ValueError),
        ({1: torch.ones(1)}, ValueError),
        ({"w": torch.ones(2, 2).to_sparse()}, ValueError),
        ({"w": torch.empty(2, device="meta")}, ValueError),
        ({"w": torch.ones(2, dtype=torch.complex128)}, ValueError),
        ({"__metadata__": torch.ones(1)}, ValueError),
        ({"\ud800": torch.ones(1)}, ValueError),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_name(
    tmp_path: Path, tensors: Any, kind: type[Exception]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(kind) as error:
        ours.save_file(tensors, path)
    if isinstance(tensors, dict) and "\ud800" not in tensors:
        assert repr(next(iter(tensors))) in str(error.value)
    assert path.read_bytes() == b"old"
    with pytest.raises(ValueError, match="dtype"):
        ours.save_file({"w": torch.ones(1)}, path, dtype=torch.complex128)
    with pytest.raises(Exception, match="I8"):
        ours.save_file({"w": torch.ones(1)}, path, dtype="I8")


def test_tensors_of_another_device_come_in_pieces(tmp_path: Path) -> None:
    """The two buffers, with memory of this machine in the place of the device's."""
    from loraaccel.safetensors import _torch_sources
    from loraaccel.safetensors._save import Options, Sources, save_to_file

    tensors = {
        "large": torch.randn(2_500_003), "small": torch.randn(3), "half": torch.randn(5_000_001).half(),
        "wide": torch.randn(1, 1_048_576),
    }  # fmt: skip
    for options in (Options(), Options(float_dtype="BF16", hashes=True)):
        made: list[torch.Tensor] = []

        def buffer(made: list[torch.Tensor] = made) -> torch.Tensor:
            made.append(torch.empty(_torch_sources.CHUNK_BYTES, dtype=torch.uint8))
            return made[-1]

        stager = _torch_sources.Stager(buffer)
        sources = Sources()
        for name, tensor in tensors.items():
            file_dtype = _torch_sources.FILE_DTYPES[tensor.dtype]
            sources.add_fetched(name, file_dtype, tuple(tensor.shape), stager.source(tensor))
        save_to_file(sources, tmp_path / "staged", None, options, False)
        ours.save_file(tensors, tmp_path / "plain", dtype=options.float_dtype, sync=False)
        assert (tmp_path / "staged").read_bytes() == (tmp_path / "plain").read_bytes()
        assert len(made) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA")
def test_cuda_tensors(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3_000_001), "v": torch.randn(5).half(), "t": torch.randn(30, 20).T}
    on_device = {name: tensor.cuda() for name, tensor in tensors.items()}
    ours.save_file(on_device, tmp_path / "x")
    found = ours.load_file(tmp_path / "x")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(t.is_cuda for t in ours.load_file(tmp_path / "x", device="cuda").values())


def test_an_error_of_a_tensor_on_the_way_keeps_the_old_file(tmp_path: Path) -> None:
    """VW2, a lazy tensor that raises: its own exception arrives."""
    from loraaccel.safetensors._save import Options, Sources, save_to_file

    path = tmp_path / "x"
    path.write_bytes(b"old")
    sources = Sources()

    def fetch(offset: int, size: int) -> int:
        raise LookupError(f"gone at {offset} of {size}")

    sources.add_fetched("w", "F32", (10,), fetch)
    with pytest.raises(LookupError, match="gone at 0"):
        save_to_file(sources, path, None, Options(), True)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
