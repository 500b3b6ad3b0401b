"""Preparing images for training, against the chain of sd-scripts: Pillow, OpenCV's Python package, torchvision's sums.

    python benchmarks/images.py                 # all rows; a few minutes
    python benchmarks/images.py --images 40     # fewer files

Rows: files to batches (photo-like JPEGs of 3 MP, area, centre crop to 832 x 1216, -1 ... 1), ours with two threads
against the chain in a DataLoader with two workers; the same without decoding, one thread each; resizes alone, one
thread each. Rounds are interleaved; a ratio is the rival's time / ours in a round, above 1 ours is faster: median, and
least to most. Results are compared first: they are equal. Needs pillow, opencv-python-headless, torch. README.md."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image

from loraaccel.data import load_batch, prepare_batch, resize

RESO, RESIZED = (832, 1216), (912, 1216)  # of 1536 x 2048
BATCH = 4


def photo(width: int, height: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((8, 90), (64, 60), (400, 25)):
        coarse = rng.standard_normal((cells, cells, 3)).astype(np.float32)
        image += weight * cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(image / 2 + 128, 0, 255).astype(np.uint8)


def to_tensor(image: np.ndarray) -> torch.Tensor:
    """What ToTensor and Normalize([0.5], [0.5]) do."""
    tensor = (
        torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    )
    return tensor.sub_(0.5).div_(0.5)


def chain(image: np.ndarray) -> torch.Tensor:
    image = cv2.resize(image, RESIZED, interpolation=cv2.INTER_AREA)
    x, y = (RESIZED[0] - RESO[0]) // 2, (RESIZED[1] - RESO[1]) // 2
    return to_tensor(image[y : y + RESO[1], x : x + RESO[0]])


class Chain(torch.utils.data.Dataset):
    """A batch for each index, as sd-scripts' dataset makes it."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths) // BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        images = []
        for path in self.paths[index * BATCH : (index + 1) * BATCH]:
            with Image.open(path) as image:
                images.append(
                    chain(np.array(image if image.mode == "RGB" else image.convert("RGB"), np.uint8))
                )
        return torch.stack(images)


def one_thread_each(_: int) -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def theirs_from_files(paths: list[Path]) -> torch.Tensor:
    loader = torch.utils.data.DataLoader(
        Chain(paths), batch_size=None, num_workers=2, worker_init_fn=one_thread_each, persistent_workers=False
    )
    batch = torch.empty(0)
    for batch in loader:  # noqa: B007  (the last one is compared)
        pass
    return batch


def ours_from_files(paths: list[Path]) -> torch.Tensor:
    pixels = torch.empty(0)
    for i in range(0, len(paths) // BATCH * BATCH, BATCH):
        pixels = load_batch(paths[i : i + BATCH], RESO, [RESIZED] * BATCH, threads=2).pixels
    return pixels


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> None:
    a, b = ours(), theirs()
    equal = torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    mine, ratios = [], []
    for i in range(rounds):
        times = {}
        for function in (ours, theirs) if i % 2 else (theirs, ours):
            start = time.perf_counter()
            function()
            times[function] = time.perf_counter() - start
        mine.append(times[ours])
        ratios.append(times[theirs] / times[ours])
    print(
        f"{name:58s} {statistics.median(mine) * 1e3:9.1f} ms  {statistics.median(ratios):5.2f}x "
        f"({min(ratios):.2f} to {max(ratios):.2f})  {'equal' if equal else 'DIFFERENT'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    one_thread_each(0)
    image = photo(1536, 2048, 0)
    large = np.ascontiguousarray(image.swapaxes(0, 1))
    small = np.ascontiguousarray(large[:576, :768])

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i in range(arguments.images):
            paths.append(Path(folder) / f"{i}.jpg")
            if i < 8:
                Image.fromarray(photo(1536, 2048, i)).save(paths[i], quality=90)
            else:
                paths[i].write_bytes(paths[i % 8].read_bytes())
        name = f"{arguments.images} JPEGs to batches of {BATCH}, 2 threads : 2 workers"
        compare(
            name,
            lambda: ours_from_files(paths),
            lambda: theirs_from_files(paths),
            max(3, arguments.rounds // 2),
        )

    batch = torch.empty(1, 3, RESO[1], RESO[0])
    compare(
        "decoded 3 MP to a normalised batch (area), 1 thread",
        lambda: prepare_batch([image], RESO, [RESIZED], out=batch, threads=1).pixels,
        lambda: torch.stack([chain(image)]),
        3 * arguments.rounds,
    )
    for name, source, size in (("3 MP to 1 MP", large, (1168, 876)), ("0.4 to 1 MP", small, (1152, 864))):
        for method, flag in (("lanczos", Image.Resampling.LANCZOS), ("box", Image.Resampling.BOX)):
            compare(
                f"{method} {name}, 1 thread : Pillow",
                lambda source=source, size=size, method=method: resize(source, *size, method, threads=1),
                lambda source=source, size=size, flag=flag: np.array(
                    Image.fromarray(source).resize(size, flag)
                ),
                3 * arguments.rounds,
            )
    for method, flag in (("area", cv2.INTER_AREA), ("linear", cv2.INTER_LINEAR)):
        compare(
            f"{method} 3 MP to 1 MP, 1 thread : cv2",
            lambda method=method: resize(large, 1168, 876, method, threads=1),
            lambda flag=flag: cv2.resize(large, (1168, 876), interpolation=flag),
            3 * arguments.rounds,
        )


if __name__ == "__main__":
    main()
