"""Resizing and the last pass against Pillow, OpenCV and torch: the same bytes."""

from __future__ import annotations

import hashlib
import importlib

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import loraaccel
from loraaccel.data import prepare_batch, resize

KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "resize_image" and k["available"]]
PILLOW = {"box": Image.Resampling.BOX, "lanczos": Image.Resampling.LANCZOS}
OPENCV = {"area": cv2.INTER_AREA, "linear": cv2.INTER_LINEAR, "nearest": cv2.INTER_NEAREST_EXACT}


def reference(image: np.ndarray, width: int, height: int, method: str) -> np.ndarray:
    if method in PILLOW:
        return np.asarray(Image.fromarray(image).resize((width, height), PILLOW[method]))
    return cv2.resize(image, (width, height), interpolation=OPENCV[method]).reshape(
        height, width, *image.shape[2:]
    )


side = st.one_of(st.integers(1, 400), st.integers(1, 24))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("method", [*PILLOW, *OPENCV])
def test_same_bytes_as_the_library(kernel: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAACCEL_FORCE_KERNEL", kernel)

    @settings(max_examples=60, deadline=None)
    @given(side, side, side, side, st.sampled_from([1, 3, 4]), st.integers(0, 2**32 - 1))
    def check(w: int, h: int, width: int, height: int, channels: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        image = rng.integers(0, 256, (h, w) if channels == 1 else (h, w, channels), dtype=np.uint8)
        found = resize(image, width, height, method)
        assert found.shape == (height, width, *image.shape[2:])
        assert np.array_equal(found, reference(image, width, height, method))

    check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_pass_orders_of_pillow(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Height shrinks by more than twice what the width does: the case where Pillow 13 differs from those before."""
    monkeypatch.setenv("LORAACCEL_FORCE_KERNEL", kernel)
    image = np.random.default_rng(0).integers(0, 256, (300, 90, 3), dtype=np.uint8)
    across_first = np.asarray(
        Image.fromarray(image).resize((70, 300), PILLOW["lanczos"]).resize((70, 50), PILLOW["lanczos"])
    )
    down_first = np.asarray(
        Image.fromarray(image).resize((90, 50), PILLOW["lanczos"]).resize((70, 50), PILLOW["lanczos"])
    )
    assert not np.array_equal(across_first, down_first)
    assert np.array_equal(resize(image, 70, 50, "lanczos", pil_pass_order="h"), across_first)
    assert np.array_equal(resize(image, 70, 50, "lanczos", pil_pass_order="v13"), down_first)


def test_nearest_of_opencv_4() -> None:
    """ifx = ((src << 16) + dst / 2) / dst; min((ifx d + ifx / 2 - src % 2) >> 16, src - 1)"""
    row = np.arange(7, dtype=np.uint8).reshape(1, 7)
    step = ((7 << 16) + 5 // 2) // 5
    expected = [min((step * d + step // 2 - 7 % 2) >> 16, 6) for d in range(5)]
    assert resize(row, 5, 1, "nearest", cv2_major=4).tolist() == [expected]


def test_cubic_is_near_opencv() -> None:
    pytest.importorskip("loraaccel._opencv", reason="built without OpenCV")
    image = np.random.default_rng(1).integers(0, 256, (61, 47, 3), dtype=np.uint8)
    for width, height in ((30, 20), (100, 99), (47, 200)):
        expected = cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC).astype(int)
        assert np.abs(resize(image, width, height, "cubic").astype(int) - expected).max() <= 1
    row = np.array([[0, 100, 200, 50]], np.uint8)
    found = resize(row, 8, 1, "bicubic").astype(int)
    assert np.abs(found - [0, 19, 67, 138, 197, 177, 88, 34]).max() <= 1


def test_vi5_the_usual_method() -> None:
    image = np.random.default_rng(2).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    cases = {
        (30, 20, "main"): "area",
        (60, 20, "main"): "area",
        (60, 20, "0.9.1"): "lanczos",
        (30, 20, "0.9.1"): "area",
        (61, 20, "main"): "lanczos",
        (90, 20, "main"): "lanczos",
        (90, 90, "main"): "lanczos",
    }
    for (width, height, compat), method in cases.items():
        assert np.array_equal(
            resize(image, width, height, compat=compat), resize(image, width, height, method)
        )
    assert np.array_equal(resize(image, 60, 40), image)


def test_threads_give_the_same() -> None:
    image = np.random.default_rng(3).integers(0, 256, (301, 203, 4), dtype=np.uint8)
    for method in ("area", "lanczos", "linear"):
        for size in ((100, 150), (250, 400)):
            one = resize(image, *size, method, threads=1)
            assert np.array_equal(one, resize(image, *size, method, threads=5))


def test_errors() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(ValueError, match="method 'sinc'"):
        resize(image, 2, 2, "sinc")
    with pytest.raises(ValueError, match="4x4 to 0x2"):
        resize(image, 0, 2)
    with pytest.raises(ValueError, match="2 channels"):
        resize(image[:, :, :2].copy(), 2, 2)
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        resize(image[:, ::2], 2, 2)
    with pytest.raises(ValueError, match="float64"):
        resize(image.astype(float), 2, 2)
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        resize(np.zeros(5, np.uint8), 2, 2)
    with pytest.raises(ValueError, match=r"compat '0\.8'"):
        resize(image, 2, 2, compat="0.8")
    with pytest.raises(ValueError, match="1 or more"):
        resize(image, 2, 2, threads=0)
    with pytest.raises(ValueError, match="0x4 to 2x2"):
        resize(np.zeros((4, 0, 3), np.uint8), 2, 2)


def chain(
    image: np.ndarray, resized: tuple, crop: tuple, reso: tuple, flip: bool, dtype: torch.dtype
) -> torch.Tensor:
    """What sd-scripts does to one image, in its order."""
    image = resize(image, *resized)[crop[1] : crop[1] + reso[1], crop[0] : crop[0] + reso[0]]
    if flip:
        image = image[:, ::-1].copy()
    tensor = (
        torch.from_numpy(np.ascontiguousarray(image[:, :, :3])).permute(2, 0, 1).contiguous().float().div(255)
    )
    return tensor.sub(0.5).div(0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_batch_is_the_chain_of_sd_scripts(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    images = [
        rng.integers(0, 256, (h, w, c), dtype=np.uint8)
        for h, w, c in ((90, 130, 3), (64, 48, 4), (33, 70, 3))
    ]
    resized, crops, flips = [(80, 60), (48, 64), (70, 90)], [(7, 12), None, (0, 42)], [True, False, True]
    reso = (48, 48)
    batch = prepare_batch(images, reso, resized, crops, flips, alpha=True, dtype=dtype)
    assert batch.pixels.dtype == dtype
    assert batch.pixels.shape == (3, 3, 48, 48)
    for i, image in enumerate(images):
        expected = chain(image, resized[i], crops[i] or (0, 8), reso, flips[i], dtype)
        assert torch.equal(batch.pixels[i], expected)
    alpha = torch.from_numpy(resize(images[1], 48, 64)[8:56, :, 3].astype(np.float32) / 255)
    assert torch.equal(batch.masks[1], alpha)
    assert torch.equal(batch.masks[0], torch.ones(48, 48))


def test_tables_of_all_values() -> None:
    image = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 256, 1), 3, axis=2)
    halves = prepare_batch([image], (256, 1), [(256, 1)], out=np.empty((1, 3, 1, 256), np.float32)).pixels
    assert (
        hashlib.sha256(halves[0, 0].tobytes()).hexdigest()
        == "d15e8ce72284446496a6de66e8a4795818530b44cd2c3dd415077364535c3c1a"
    )
    unit = prepare_batch([image], (256, 1), [(256, 1)], mean=(0, 0, 0), std=(1, 1, 1)).pixels
    assert (
        hashlib.sha256(unit[0, 0].numpy().tobytes()).hexdigest()
        == "010413efe9fc4438fee48de66c4d09f377b28af6a9fe2522201e8c1dbb831fc8"
    )


def test_batch_writes_where_it_is_told() -> None:
    images = [np.full((8, 8, 3), v, np.uint8) for v in (0, 255)]
    whole = torch.full((4, 3, 8, 8), 9.0)
    batch = prepare_batch(images, (8, 8), [(8, 8)] * 2, out=whole[1:3])
    assert batch.pixels.data_ptr() == whole[1].data_ptr()
    assert batch.masks is None
    assert [float(whole[i].mean()) for i in range(4)] == [9.0, -1.0, 1.0, 9.0]
    assert prepare_batch([], (8, 8), []).pixels.shape == (0, 3, 8, 8)


def test_batch_errors() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    good = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ValueError, match="image 0: a crop of 4x4"):
        prepare_batch([image], (4, 4), [(8, 8)], [(5, 0)])
    with pytest.raises(ValueError, match="image 0: a crop of 9x4"):
        prepare_batch([image], (9, 4), [(8, 8)])
    with pytest.raises(ValueError, match="2 resized sizes"):
        prepare_batch([image], (4, 4), [(8, 8)] * 2)
    with pytest.raises(ValueError, match=r"out is .*float32 \(1, 3, 4, 4\), expected float32 \(1, 3, 5, 4\)"):
        prepare_batch([image], (4, 5), [(8, 8)], out=good)
    with pytest.raises(ValueError, match="expected float32, float16 or bfloat16"):
        prepare_batch([image], (4, 4), [(8, 8)], dtype=torch.float64)
    with pytest.raises(ValueError, match="not contiguous"):
        prepare_batch([image], (4, 4), [(8, 8)], out=torch.zeros(1, 4, 4, 3).permute(0, 3, 1, 2))
    with pytest.raises(ValueError, match="std 0"):
        prepare_batch([image], (4, 4), [(8, 8)], std=(1, 0, 1))
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        prepare_batch([image.astype(np.int16)], (4, 4), [(8, 8)])


def test_forced_kernel_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAACCEL_FORCE_KERNEL", "nonsense")
    with pytest.raises(RuntimeError, match="names no kernel, expected one of: avx2, ref"):
        resize(np.zeros((4, 4, 3), np.uint8), 2, 2)


def test_a_build_without_opencv_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> object:
        if name == "loraaccel._opencv":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(
        ImportError, match="'cubic' needs OpenCV, which was not there when this loraaccel was built"
    ):
        resize(image, 2, 2, "cubic")
    assert resize(image, 2, 2).shape == (2, 2, 3)
