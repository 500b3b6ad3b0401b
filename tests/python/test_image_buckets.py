"""Buckets: the tables of sd-scripts, and random sizes against a port of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import select_bucket

from loraaccel.data import BucketManager, crop_ltrb, make_buckets, select_bucket_batch

B512 = make_buckets((512, 512), 256, 1024, 64)
B1024 = make_buckets((1024, 1024), 256, 2048, 64)


def test_bucket_tables() -> None:
    assert len(B512) == 17
    assert B512[:5] == [(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704)]
    assert len(B1024) == 41
    assert (B1024[0], B1024[20], B1024[40]) == ((256, 2048), (1024, 1024), (2048, 512))
    portrait = make_buckets((512, 768), 256, 1024, 64)
    assert len(portrait) == 19
    assert {(576, 576), (576, 640), (640, 576), (512, 704), (512, 768)} <= set(portrait)


TABLE = [
    # image, bucket, resized and error up to 512²; without enlarging; up to 1024²
    ((1920, 1080), (640, 384), (683, 384), -0.111111, (640, 384), (683, 384), (1344, 768), (1365, 768)),
    ((1080, 1920), (384, 640), (384, 683), +0.0375, (384, 640), (384, 683), (768, 1344), (768, 1365)),
    ((640, 480), (576, 448), (597, 448), -0.047619, (512, 384), (512, 384), (1152, 896), (1195, 896)),
    ((300, 200), (640, 384), (640, 427), +0.166667, (256, 192), (300, 200), (1216, 832), (1248, 832)),
    ((3000, 500), (1024, 256), (1536, 256), -2.0, (1152, 192), (1152, 192), (2048, 320), (2048, 341)),
    ((1023, 767), (576, 448), (598, 448), -0.048054, (512, 384), (512, 384), (1152, 896), (1195, 896)),
    ((832, 1216), (384, 640), (438, 640), -0.084211, (384, 576), (394, 576), (832, 1216), (832, 1216)),
    ((100, 100), (512, 512), (512, 512), 0.0, (64, 64), (100, 100), (1024, 1024), (1024, 1024)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "x".join(map(str, row[0])))
def test_bucket_of_known_sizes(row: tuple) -> None:
    size, reso, resized, error, reso_no, resized_no, reso_big, resized_big = row
    manager = BucketManager(False, (512, 512), 256, 1024, 64)
    manager.make_buckets()
    found = manager.select_bucket(*size)
    assert found[:2] == (reso, resized)
    assert found[2] == pytest.approx(error, abs=1e-6)
    assert manager.resos == [found[0]]
    assert BucketManager(True, (512, 512), 256, 1024, 64).select_bucket(*size)[:2] == (reso_no, resized_no)
    big = BucketManager(False, (1024, 1024), 256, 2048, 64)
    big.make_buckets()
    assert big.select_bucket(*size)[:2] == (reso_big, resized_big)


def test_vi6_table() -> None:
    up = {
        (512, 768): ((832, 1216), (832, 1248)),
        (1920, 1080): ((1344, 768), (1365, 768)),
        (4032, 3024): ((1152, 896), (1195, 896)),
        (1280, 880): ((1216, 832), (1216, 836)),
        (640, 1536): ((640, 1536), (640, 1536)),
        (3000, 200): ((2048, 256), (3840, 256)),
    }
    keep = {
        (512, 768): ((512, 768), (512, 768)),
        (4032, 3024): ((1088, 832), (1109, 832)),
        (333, 777): ((320, 768), (333, 777)),
        (3072, 3000): ((960, 960), (983, 960)),
    }
    for sizes, no_upscale in ((up, False), (keep, True)):
        buckets, resized, _ = select_bucket_batch(
            list(sizes), buckets=B1024, max_reso=(1024, 1024), no_upscale=no_upscale
        )
        for (size, (bucket, size_then)), b, r in zip(sizes.items(), buckets, resized, strict=True):
            assert tuple(b) == bucket, size
            assert tuple(r) == size_then, size


def test_vi6_random_sizes_against_a_port() -> None:
    rng = np.random.default_rng(6)
    sizes = np.exp(rng.uniform(np.log(64), np.log(8000), (20_000, 2))).astype(np.int64)
    sizes = sizes[(sizes[:, 0] / sizes[:, 1] < 8) & (sizes[:, 1] / sizes[:, 0] < 8)]
    for no_upscale in (False, True):
        buckets, resized, errors = select_bucket_batch(
            sizes, buckets=B1024, max_reso=(1024, 1024), step=64, no_upscale=no_upscale
        )
        assert (resized >= buckets).all()
        for i, (w, h) in enumerate(sizes.tolist()):
            expected = select_bucket((w, h), B1024, 1024 * 1024, 64, no_upscale)
            assert (tuple(buckets[i]), tuple(resized[i]), errors[i]) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(64, 1500), st.integers(64, 1500)),
    st.integers(1, 400),
    st.integers(1, 1500),
    st.integers(1, 64),
)
def test_bucket_lists_against_the_formula(max_reso: tuple, low: int, more: int, step: int) -> None:
    area = max_reso[0] * max_reso[1]
    square = int((area**0.5) // step) * step
    expected = {(square, square)}
    for width in range(low, low + more + 1, step):
        height = min(low + more, area // width // step * step)
        if height >= low:
            expected |= {(width, height), (height, width)}
    assert make_buckets(max_reso, low, low + more, step) == sorted(expected)


def test_crop_box_is_of_a_fit_into_the_bucket() -> None:
    assert crop_ltrb((640, 384), (1920, 1080)) == (0, 12.0, 640, 372.0)
    assert crop_ltrb((384, 640), (832, 1216)) == (0, 39.0, 384, 600.2307692307692)
    assert BucketManager.get_crop_ltrb((384, 640), (832, 1216)) == crop_ltrb((384, 640), (832, 1216))


def test_manager_collects_sorts_and_shuffles() -> None:
    manager = BucketManager(True, (512, 512), 256, 1024, 64)
    for i, size in enumerate([(640, 480), (300, 200), (640, 480)]):
        manager.add_image(manager.select_bucket(*size)[0], i)
    assert manager.resos == [(512, 384), (256, 192)]
    manager.sort()
    assert manager.resos == [(256, 192), (512, 384)]
    assert manager.buckets == [[1], [0, 2]]
    assert manager.reso_to_id == {(256, 192): 0, (512, 384): 1}
    manager.shuffle()
    assert sorted(manager.buckets[1]) == [0, 2]
    assert manager.round_to_steps(100.5) == 64


def test_errors_name_the_sizes() -> None:
    with pytest.raises(ValueError, match="an image of 0x5"):
        select_bucket_batch([[0, 5]], buckets=B512)
    with pytest.raises(ValueError, match="100000x3"):
        select_bucket_batch([[100000, 3]], max_reso=(512, 512), no_upscale=True)
    with pytest.raises(ValueError, match="max_size 400"):
        BucketManager(False, (512, 512), 256, 400, 64)
    with pytest.raises(ValueError, match="step 0"):
        make_buckets((512, 512), 256, 1024, 0)
    with pytest.raises(ValueError, match="no_upscale without max_reso"):
        select_bucket_batch([[5, 5]], no_upscale=True)
