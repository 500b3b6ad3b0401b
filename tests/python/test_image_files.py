"""Decoding: what Pillow makes of a file, whoever decodes it; damaged files; batches of files."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import by_pillow, encode, photo
from PIL import Image

import loraaccel.data
from loraaccel.data import image_size, load_batch, load_rgb, prepare_batch

native = pytest.importorskip("loraaccel._opencv", reason="built without OpenCV")

P1, P3, P4 = (photo(53, 37, channels) for channels in (1, 3, 4))
FILES = {
    **{
        f"jpeg {q} {sub} {'progressive' if progressive else 'baseline'}": encode(
            P3, "JPEG", quality=q, subsampling=sub, progressive=progressive
        )
        for q in (60, 95)
        for sub in (0, 1, 2)
        for progressive in (False, True)
    },
    "jpeg grey": encode(P1, "JPEG"),
    **{f"png {mode}": encode(P3, "PNG", mode) for mode in ("1", "L", "RGB")},
    "png LA": encode(P4, "PNG", "LA"),
    "png RGBA": encode(P4, "PNG"),
    "png P of 4 bits": encode(P3, "PNG", "P", bits=4),
    "webp": encode(P3, "WEBP"),
    "webp lossless": encode(P3, "WEBP", lossless=True),
    "webp alpha": encode(P4, "WEBP"),
    "webp lossless alpha": encode(P4, "WEBP", lossless=True, exact=True),
}
BY_PILLOW = {
    "jpeg CMYK": encode(P3, "JPEG", "CMYK"),
    "png short palette": encode(P3, "PNG", "P"),
    "bmp": encode(P3, "BMP"),
    "gif": encode(P3, "GIF"),
    "tiff": encode(P3, "TIFF"),
    "webp animated": encode(P3, "WEBP", save_all=True, append_images=[Image.fromarray(P3[::-1])]),
    "png animated": encode(P3, "PNG", save_all=True, append_images=[Image.fromarray(P3[::-1])]),
}


@pytest.mark.parametrize("name", [*FILES, *BY_PILLOW])
def test_same_pixels_as_pillow(name: str, tmp_path: Path) -> None:
    data = {**FILES, **BY_PILLOW}[name]
    for alpha, mode in ((False, "RGB"), (True, "RGBA")):
        decoded = native.decode(data, alpha, 0)
        assert isinstance(decoded, str) == (name in BY_PILLOW), decoded
        assert np.array_equal(load_rgb(data, alpha), by_pillow(data, mode))
    path = tmp_path / "no extension that says so"
    path.write_bytes(data)
    assert np.array_equal(load_rgb(path), by_pillow(data))
    assert image_size(path) == image_size(data) == (53, 37)


def png(width: int, height: int, depth: int, color: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


GREY16 = [0, 1, 255, 256, 257, 32768, 65535]


def test_vi3_grey_of_16_bits(tmp_path: Path) -> None:
    data = png(7, 1, 16, 0, b"\0" + struct.pack(">7H", *GREY16))
    tiff = tmp_path / "grey.tif"
    Image.fromarray(np.array([GREY16], np.uint16)).save(tiff)
    path = tmp_path / "grey.png"
    path.write_bytes(data)
    for source in (data, path, tiff, tiff.read_bytes()):
        assert load_rgb(source)[0, :, 1].tolist() == [0, 0, 0, 1, 1, 128, 255]
        assert load_rgb(source, True)[0, :, 3].tolist() == [255] * 7
        assert load_rgb(source, gray16="clip")[0, :, 1].tolist() == [0, 1, 255, 255, 255, 255, 255]


def test_vi3_rgb_of_16_bits_keeps_the_high_byte() -> None:
    data = png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 257, 32768, 65535))
    assert load_rgb(data).tolist() == [[[1, 128, 255]]]
    assert load_rgb(data, True).tolist() == [[[1, 128, 255, 255]]]


def test_vi2_transparency() -> None:
    data = encode(np.array([[[200, 10, 30, 0], [0, 0, 255, 128]]], np.uint8), "PNG")
    assert load_rgb(data).tolist() == [[[200, 10, 30], [0, 0, 255]]]
    assert load_rgb(data, alpha="white").tolist() == [[[255, 255, 255], [127, 127, 255]]]
    batch = load_batch([data], (2, 1), [(2, 1)], alpha=True)
    assert batch.masks.tolist() == [[[0.0, float(np.float32(128) / np.float32(255))]]]
    assert torch.equal(batch.pixels, prepare_batch([load_rgb(data)], (2, 1), [(2, 1)]).pixels)


def test_transparent_colours_of_png() -> None:
    data = png(2, 1, 8, 2, b"\0" + bytes([1, 2, 3, 4, 5, 6]), (b"tRNS", struct.pack(">3H", 4, 5, 6)))
    assert load_rgb(data).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert load_rgb(data, True).tolist() == [[[1, 2, 3, 255], [4, 5, 6, 0]]]
    palette = (b"PLTE", bytes([9, 8, 7, 6, 5, 4])), (b"tRNS", bytes([0, 77]))
    data = png(2, 1, 1, 3, b"\0\x40", *palette)
    assert load_rgb(data).tolist() == [[[9, 8, 7], [6, 5, 4]]]
    assert load_rgb(data, True).tolist() == [[[9, 8, 7, 0], [6, 5, 4, 77]]]


RED = {1: (0, 0), 2: (0, 2), 3: (1, 2), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (2, 1), 8: (2, 0)}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_vi1_orientation(kind: str, orientation: int) -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, 0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = (
        {"lossless": True} if kind == "WEBP" else {"subsampling": 0, "quality": 100} if kind == "JPEG" else {}
    )
    data = encode(pixels, kind, exif=exif, **options)
    valid = orientation if orientation in RED else 1
    shown = load_rgb(data, orientation="apply")
    size = (2, 3) if valid >= 5 else (3, 2)
    assert shown.shape[1::-1] == size == image_size(data, orientation="apply")
    assert np.unravel_index(shown[..., 0].argmax(), shown.shape[:2]) == RED[valid]
    batch = load_batch([data], size, [size], orientation="apply")
    assert torch.equal(batch.pixels, prepare_batch([shown], size, [size]).pixels)
    assert image_size(data) == (size if kind == "TIFF" else (3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stored = load_rgb(data)
    assert np.array_equal(stored, by_pillow(data))
    if kind != "TIFF":
        assert len(caught) == (valid != 1)
        assert all(f"EXIF orientation {valid}" in str(w.message) for w in caught)


def broken(name: str) -> bytes:
    jpeg, whole = FILES["jpeg 95 0 baseline"], FILES["png RGB"]
    return {
        "half": jpeg[: len(jpeg) // 2],
        "100 bytes less": jpeg[:-100],
        "header's CRC": whole[:29] + bytes([whole[29] ^ 255]) + whole[30:],
        "empty": b"",
        "text": b"this is no image",
    }[name]


@pytest.mark.parametrize("threads", [1, 8])
def test_vi4_damaged_files_in_a_batch(threads: int, tmp_path: Path) -> None:
    names = ["half", "header's CRC", "empty", "text"]
    paths = []
    for i in range(10):
        path = tmp_path / f"{i}.png"
        path.write_bytes(broken(names[i // 2]) if i % 2 and i < 8 else FILES["jpeg 95 0 baseline"])
        paths.append(path)
    bad = [1, 3, 5, 7]
    arguments = (paths, (48, 32), [(53, 37)] * 10)
    batch = load_batch(*arguments, on_error="skip", threads=threads)
    assert sorted(batch.failed) == bad
    good = prepare_batch([by_pillow(FILES["jpeg 95 0 baseline"])], (48, 32), [(53, 37)]).pixels[0]
    for i in range(10):
        assert torch.equal(batch.pixels[i], torch.zeros_like(good) if i in bad else good)
        if i in bad:
            assert str(paths[i]) in str(batch.failed[i])
    before = {"out": torch.full((10, 3, 32, 48), 7.0), "masks": torch.full((10, 32, 48), 7.0)}
    batch = load_batch(*arguments, alpha=True, on_error="skip", threads=threads, **before)
    assert batch.pixels is before["out"]
    assert not batch.pixels[bad].any()
    assert not batch.masks[bad].any()
    assert (batch.masks[::2] == 1).all()
    with pytest.raises(OSError, match="4 of 10 images cannot be loaded") as error:
        load_batch(*arguments, threads=threads)
    assert error.value.failed == bad
    assert all((str(paths[i]) in str(error.value)) == (i in bad) for i in range(10))


@pytest.mark.parametrize("name", ["half", "100 bytes less", "header's CRC", "empty", "text"])
def test_vi4_errors_name_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(broken(name))
    with pytest.raises(OSError, match=r"picture\.jpg: cannot be decoded"):
        load_rgb(path)
    missing = tmp_path / "missing.jpg"
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg"):
        load_rgb(missing)
    batch = load_batch([missing, tmp_path], (2, 2), [(2, 2)] * 2, on_error="skip")
    assert isinstance(batch.failed[0], FileNotFoundError)
    assert str(missing) in str(batch.failed[0])
    assert isinstance(batch.failed[1], IsADirectoryError)


@pytest.mark.parametrize("name", [n for n in FILES if n.split()[0] != "jpeg" or "95" in n or "grey" in n])
def test_files_cut_anywhere_do_what_they_do_in_pillow(name: str) -> None:
    data = FILES[name]
    for count in [*range(0, len(data), max(1, len(data) // 16)), len(data) - 2, len(data) - 1]:
        part = data[:count]
        try:
            expected = by_pillow(part)
        except Exception:  # noqa: BLE001  (Pillow's decoders raise all kinds)
            with pytest.raises(OSError, match=f"{count} bytes: cannot be decoded"):
                load_rgb(part)
        else:
            assert np.array_equal(load_rgb(part), expected)


HOSTILE = """
import random, sys, warnings
import loraaccel.data
warnings.simplefilter("ignore")
rng = random.Random(int(sys.argv[1]))
for path in sys.argv[2:]:
    data = open(path, "rb").read()
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        for alpha in (False, True):
            try:
                loraaccel.data.load_rgb(bytes(changed), alpha)
            except OSError:
                pass
print("alive")
"""


def test_hostile_bytes_end_in_an_oserror_and_nothing_else(tmp_path: Path) -> None:
    paths = []
    for name in (
        "jpeg 95 0 baseline",
        "jpeg 60 2 progressive",
        "png RGB",
        "png P of 4 bits",
        "webp",
        "webp lossless",
    ):
        paths.append(tmp_path / name.replace(" ", "-"))
        paths[-1].write_bytes(FILES[name])
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, "1", *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-2000:]


def test_bombs_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png(20_000, 20_000, 8, 2, b""))
    with pytest.raises(
        OSError, match=r"bomb\.png: .*20000x20000 is 400000000 pixels, expected at most 178956970"
    ):
        load_rgb(bomb)
    assert "400000000 pixels" in str(load_batch([bomb], (1, 1), [(1, 1)], on_error="skip").failed[0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 53 * 37 - 1)
    with pytest.warns(UserWarning, match="1961 pixels, more than 1960"):
        load_rgb(FILES["png RGB"])
    with pytest.warns(UserWarning, match="1961 pixels, more than 1960"):
        load_batch([FILES["png RGB"]], (1, 1), [(1, 1)])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    for data in (FILES["png RGB"], BY_PILLOW["bmp"]):
        with pytest.raises(OSError, match="bomb"):
            load_rgb(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert load_rgb(FILES["png RGB"]).shape == (37, 53, 3)


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("method", [None, "lanczos", "cubic"])
def test_files_of_all_kinds_in_one_batch(alpha: bool, method: str | None) -> None:
    files = [*FILES.values(), *BY_PILLOW.values()]
    resized = [(40 + i, 30 + i) for i in range(len(files))]
    flips = [i % 2 == 0 for i in range(len(files))]
    options = {"method": method, "alpha": alpha, "dtype": torch.bfloat16}
    batch = load_batch(files, (40, 30), resized, flip=flips, **options)
    images = [by_pillow(data, "RGBA" if alpha else "RGB") for data in files]
    expected = prepare_batch(images, (40, 30), resized, flip=flips, **options)
    assert torch.equal(batch.pixels, expected.pixels)
    assert batch.failed == {}
    if alpha:
        assert torch.equal(batch.masks, expected.masks)


def test_options_that_are_none() -> None:
    with pytest.raises(ValueError, match="orientation is 'rotate'"):
        load_rgb(FILES["png RGB"], orientation="rotate")
    with pytest.raises(ValueError, match="gray16 is 'white'"):
        load_rgb(FILES["png RGB"], gray16="white")
    with pytest.raises(ValueError, match="alpha is 'black'"):
        load_rgb(FILES["png RGB"], alpha="black")
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        load_batch([], (1, 1), [], on_error="ignore")
    with pytest.raises(OSError, match="8 bytes: no image size: no image of a kind that Pillow knows"):
        image_size(b"no image")
    with pytest.raises(OSError, match="8 bytes: cannot be decoded: no image of a kind that Pillow knows"):
        load_rgb(b"no image")


def test_workers_of_a_dataloader() -> None:
    """Native threads in processes that were forked: one each, and the same pixels."""
    load_batch([FILES["png RGB"]] * 2, (8, 8), [(53, 37)] * 2, threads=2)

    class Files(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> torch.Tensor:
            assert loraaccel.data._native_images.threads(None) == 1
            return load_batch([FILES["png RGB"]], (48, 32), [(53, 37)]).pixels[0]

    expected = prepare_batch([P3], (48, 32), [(53, 37)]).pixels[0]
    for pixels in torch.utils.data.DataLoader(Files(), num_workers=2):
        assert torch.equal(pixels[0], expected)
