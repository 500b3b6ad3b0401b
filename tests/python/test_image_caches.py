"""Caches of latents: what sd-scripts writes is read, what we write has its bytes."""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

from loraaccel import data

torch = pytest.importorskip("torch")


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """As sd-scripts' save_latents_to_disk() has them."""
    draw = np.random.default_rng(seed)
    return {
        "latents": draw.standard_normal((4, 8, 12), dtype=np.float32),
        "original_size": np.array([101, 67]),
        "crop_ltrb": np.array([0.0, 1.5, 96, 64]),
        "latents_flipped": draw.standard_normal((4, 8, 12), dtype=np.float32),
        "alpha_mask": draw.random((64, 96), dtype=np.float32),
    }


def savez(**more: np.ndarray) -> bytes:
    memory = io.BytesIO()
    np.savez(memory, **more)
    return memory.getvalue()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for key, array in expected.items():
        assert found[key].dtype == array.dtype, key
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_written_bytes_are_numpy_s(tmp_path: Path) -> None:
    np.savez(tmp_path / "theirs.npz", **arrays())
    data.npz_write(tmp_path / "ours.npz", arrays())
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "theirs.npz").read_bytes()
    assert_same(data.npz_read(tmp_path / "ours.npz"), arrays())
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "ours.npz").stat().st_mode) == 0o666 & ~mask


def test_an_update_keeps_the_other_resolutions(tmp_path: Path) -> None:
    """sd-scripts adds another resolution's arrays to a file: it reads all, and writes all."""
    path = tmp_path / "x_flux.npz"
    first = {f"{key}_8x12": array for key, array in arrays().items()}
    second = {f"{key}_16x16": array for key, array in arrays(1).items()}
    data.npz_write(path, first, update=True)
    data.npz_write(path, second, update=True)
    assert path.read_bytes() == savez(**first, **second)
    data.npz_write(path, {"latents_8x12": np.zeros(3)}, update=True)
    assert path.read_bytes() == savez(**(first | second | {"latents_8x12": np.zeros(3)}))
    data.npz_write(path, second)
    assert_same(data.npz_read(path), second)


def test_tensors_are_stored_as_sd_scripts_stores_them(tmp_path: Path) -> None:
    x = torch.randn(3, 5)
    tensors = {"a": x.bfloat16(), "b": x.half(), "c": x.T, "d": torch.tensor(3), "e": x.requires_grad_()}
    data.npz_write(tmp_path / "x.npz", tensors)
    expected = {
        "a": x.detach().bfloat16().float().numpy(),
        "b": x.detach().half().numpy(),
        "c": x.detach().T.numpy(),
        "d": np.array(3),
        "e": x.detach().numpy(),
    }
    assert_same(data.npz_read(tmp_path / "x.npz"), expected)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A damaged array does no harm to the others."""
    path = tmp_path / "x.npz"
    content = bytearray(savez(**arrays()))
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        begin = file.getinfo("alpha_mask.npy").header_offset
    content[begin + 2000] ^= 255
    path.write_bytes(content)
    kept = ["crop_ltrb", "latents"]
    assert_same(data.npz_read(path, kept), {key: arrays()[key] for key in kept})
    with pytest.raises(ValueError, match=r"x\.npz: alpha_mask is damaged: .*CRC"):
        data.npz_read(path)


def test_compressed_fortran_order_and_other_types_are_read(tmp_path: Path) -> None:
    other = {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "i": np.arange(3, dtype=np.int32),
        "b": np.array([True, False]),
        "u": np.arange(4, dtype=np.uint8),
        "n": np.array(7),
        "empty": np.zeros((0, 4), np.float16),
    }
    np.savez_compressed(tmp_path / "x.npz", **other)
    assert_same(data.npz_read(tmp_path / "x.npz"), other)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"no zip at all", pickle.dumps([1]), savez(a=np.arange(9))[:-40]]
)
def test_a_file_that_is_none_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.npz is no \.npz file, or a damaged one: "):
        data.npz_read(path)


def test_errors_name_what_is_there_and_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match=r"x\.npz"):
        data.npz_read(path)
    data.npz_write(path, {"a": np.zeros(2), "b": np.ones(1)})
    with pytest.raises(ValueError, match=r"x\.npz has no 'latents', expected one of a, b"):
        data.npz_read(path, ["a", "latents"])
    np.save(tmp_path / "one.npy", np.zeros(2))
    with pytest.raises(ValueError, match=r"holds one array, expected a \.npz file"):
        data.npz_read(tmp_path / "one.npy")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="c is an array of Python objects, expected numbers"):
        data.npz_write(path, {"c": np.array([{}])}, update=True)
    with pytest.raises(OSError, match="no_such"):
        data.npz_write(tmp_path / "no_such" / "x.npz", {"a": np.zeros(2)})
    np.savez(tmp_path / "object.npz", c=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"object\.npz: c is damaged: .*pickle"):
        data.npz_read(tmp_path / "object.npz")
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npz"
    data.npz_write(path, arrays())
    before = path.read_bytes()
    real = np.savez

    def fails(file, **more):
        real(file, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(KeyboardInterrupt):
        data.npz_write(path, arrays(1))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_is_the_files_stacked(threads: int, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.npz" for i in range(5)]
    for i, path in enumerate(paths):
        np.savez(path, **arrays(i))
    keys = ["latents", "original_size"]
    expected = {key: np.stack([arrays(i)[key] for i in range(5)]) for key in keys}
    assert_same(data.npz_read_batch(paths, keys, threads=threads), expected)
    for out in (np.zeros((5, 4, 8, 12), np.float16), torch.zeros(5, 4, 8, 12, dtype=torch.float16)):
        result = data.npz_read_batch(paths, ["latents"], {"latents": out}, threads=threads)
        assert result["latents"] is out
        np.testing.assert_array_equal(np.asarray(out), expected["latents"].astype(np.float16))
    out = torch.zeros(5, 4, 8, 12, dtype=torch.bfloat16)
    data.npz_read_batch(paths, ["latents"], {"latents": out}, threads=threads)
    assert torch.equal(out, torch.from_numpy(expected["latents"]).bfloat16())


def test_a_batch_tells_of_every_file_that_failed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.npz" for i in range(5)]
    for path in paths:
        np.savez(path, **arrays())
    paths[1].write_bytes(b"x")
    paths[2].unlink()
    np.savez(paths[4], latents=np.zeros((4, 8, 11), np.float32))
    with pytest.raises(
        OSError, match=r"3 of 5 files cannot be read: .*1\.npz.*2\.npz.*4\.npz: latents has shape"
    ) as error:
        data.npz_read_batch(paths, ["latents"])
    assert error.value.failed == [1, 2, 4]
    paths[0].write_bytes(b"")  # the first says no shapes then
    with pytest.raises(OSError, match=r"4 of 5 files cannot be read: .*0\.npz") as error:
        data.npz_read_batch(paths, ["latents"])
    assert error.value.failed == [0, 1, 2, 4]
    with pytest.raises(OSError, match="2 of 2 files cannot be read") as error:
        data.npz_read_batch(paths[:2], ["latents"], {"latents": np.zeros((2, 4, 8, 12))})
    assert error.value.failed == [0, 1]


def test_a_batch_s_memory_must_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays())
    paths = [tmp_path / "x.npz"] * 2
    for out, text in (
        ({}, r"out\['latents'\] is missing, expected \(2, 4, 8, 12\)"),
        ({"latents": np.zeros((2, 4, 8, 11))}, r"is of shape \(2, 4, 8, 11\), expected \(2, 4, 8, 12\)"),
    ):
        with pytest.raises(ValueError, match=text):
            data.npz_read_batch(paths, ["latents"], out)
    for out in (np.zeros((2, 4, 8, 12), np.int32), torch.zeros(2, 4, 8, 12, dtype=torch.int32)):
        with pytest.raises(
            OSError, match=r"latents is of type float32, expected one that (torch\.)?int32 may hold"
        ):
            data.npz_read_batch(paths, ["latents"], {"latents": out})
    with pytest.raises(ValueError, match="paths is empty"):
        data.npz_read_batch([], ["latents"])


def test_names_are_sd_scripts(tmp_path: Path) -> None:
    image = tmp_path / "a.b.jpg"
    stem = str(tmp_path / "a.b")
    assert data.latents_path(image, (640, 48), "sdxl") == f"{stem}_0640x0048_sdxl.npz"
    assert data.latents_path(image, (10240, 8), "hi") == f"{stem}_10240x0008_hi.npz"
    (tmp_path / "a.b.npz").touch()
    assert data.latents_path(image, (640, 48), "sd") == f"{stem}.npz"
    assert data.latents_path(image, (640, 48), "flux") == f"{stem}_0640x0048_flux.npz"
    with pytest.raises(ValueError, match="kind is 'pixart', expected one of sd, sdxl"):
        data.latents_path(image, (1, 1), "pixart")
    with pytest.raises(ValueError, match="expected a width and a height"):
        data.latents_path(image, (0, 1), "sd")
