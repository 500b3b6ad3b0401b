"""Changing an adapter's rank against the ways that it is done with today.

    python benchmarks/resize.py                    # SDXL, rank 128 to 32: each shape of its U-Net's layers
    python benchmarks/resize.py --smallest 3000000 --full-rounds 1    # large shapes, whose full SVD takes a minute
    python benchmarks/resize.py --file             # a file of all layers, from reading to the written result, ours only

Rivals, in torch on all cores: the product B A and its full SVD (`torch.linalg.svd`, full matrices), which is what
sd-scripts' resize_lora.py up to 0.10 calls for every layer; and `torch.svd_lowrank` of the product with q the new
rank and two iterations, which is approximate. Ours is exact. Medians of interleaved rounds for each shape; ratios are
medians of the ratio within a round: rival time / ours, above 1 ours is faster. The last line weights shapes by how
often the U-Net has them. Ours works on several layers of a shape at once, as it does on a file, and its time is
divided by their number. Results: README.md."""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from loraaccel import _core, adapters
from loraaccel.adapters._models import USUAL
from loraaccel.adapters._svd import product_svd
from loraaccel.adapters._workers import each
from loraaccel.safetensors.torch import save_file
from loraaccel.timing import interleave, ratio

TOGETHER = 8  # layers of one shape that ours works on at once
Pair = tuple[np.ndarray, np.ndarray]


def shapes() -> Counter[tuple[int, int]]:
    """(out, in) of the layers of SDXL's U-Net that sd-scripts trains, and how many there are."""
    names = _core.adapter_names("sdxl")
    usual = {(n[1], n[3], n[4]) for n in names if n[0] == "unet" and n[5] == "native" and USUAL.search(n[1])}
    kinds = {n[1]: n[2] for n in names}
    return Counter((out, width) for path, out, width in usual if kinds[path] in ("linear", "conv1"))


def make(out: int, width: int, rank: int, count: int) -> list[Pair]:
    rng = np.random.default_rng(out * width)
    fall = np.geomspace(1, 0.01, rank).astype(np.float32)
    return [
        (
            rng.standard_normal((out, rank), dtype=np.float32) * fall,
            rng.standard_normal((rank, width), dtype=np.float32),
        )
        for _ in range(count)
    ]


def ours(pairs: list[Pair], keep: int) -> None:
    each(functools.partial(_one, keep=keep), pairs, len(pairs))


def _one(pair: Pair, keep: int) -> Pair:
    return product_svd(*pair, lambda _: keep)[1]


def full_svd(up: torch.Tensor, down: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, v = torch.linalg.svd(up @ down)
    return u[:, :keep] @ torch.diag(s[:keep]), v[:keep]


def svd_lowrank(up: torch.Tensor, down: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, v = torch.svd_lowrank(up @ down, q=keep, niter=2)
    return u @ torch.diag(s), v.T


def measure(out: int, width: int, rank: int, keep: int, rounds: int, full_rounds: int) -> dict[str, float]:
    """Seconds for a layer."""
    pairs = make(out, width, rank, TOGETHER)
    up, down = (torch.from_numpy(x) for x in pairs[0])
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(pairs, keep),
        "svd_lowrank": lambda: svd_lowrank(up, down, keep),
    }
    seconds = {}
    text = f"{out:6} x {width:5}"
    for rival, repeats, call in (
        ("svd_lowrank", rounds, calls["svd_lowrank"]),
        ("full SVD", full_rounds, lambda: full_svd(up, down, keep)),
    ):
        results = interleave(
            {"ours": calls["ours"], rival: call}, rounds=repeats, warmup=1 if repeats > 1 else 0
        )
        r = ratio(results[rival], results["ours"])
        seconds.setdefault("ours", results["ours"].median / TOGETHER)
        seconds[rival] = results[rival].median
        text += (
            f"   {rival} {seconds[rival] * 1e3:9.2f} ms, / ours {r.median * TOGETHER:7.1f} "
            f"[{r.first_quartile * TOGETHER:.1f}, {r.third_quartile * TOGETHER:.1f}]"
        )
    print(f"{text}   ours {seconds['ours'] * 1e3:.2f} ms", flush=True)
    return seconds


def whole_file(counts: Counter[tuple[int, int]], rank: int, keep: int) -> None:
    """A float16 file of the U-Net's layers."""
    names = [
        n for n in _core.adapter_names("sdxl") if n[0] == "unet" and n[5] == "native" and USUAL.search(n[1])
    ]
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for _, path, kind, out, width, *_ in names:
        if kind in ("linear", "conv1"):
            stem = "lora_unet_" + path.replace(".", "_")
            tensors[f"{stem}.lora_down.weight"] = torch.randn((rank, width), generator=generator).half()
            tensors[f"{stem}.lora_up.weight"] = torch.randn((out, rank), generator=generator).half()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.safetensors"
        save_file(tensors, source)
        del tensors
        start = time.perf_counter()
        report = adapters.resize(source, Path(folder) / "b.safetensors", keep)
        taken = time.perf_counter() - start
        print(
            f"{len(report.layers)} of {counts.total()} layers, {source.stat().st_size / 1e6:.0f} MB: {taken:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--keep", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--full-rounds", type=int, default=3)
    parser.add_argument(
        "--largest", type=int, default=10**9, help="Leave out shapes with more numbers than this."
    )
    parser.add_argument("--smallest", type=int, default=0, help="Leave out shapes with fewer.")
    parser.add_argument("--file", action="store_true")
    options = parser.parse_args()
    counts = shapes()
    print(
        f"{counts.total()} layers of SDXL, rank {options.rank} to {options.keep}, {torch.get_num_threads()} threads"
    )
    if options.file:
        whole_file(counts, options.rank, options.keep)
        return
    totals: Counter[str] = Counter()
    done = 0
    for (out, width), count in sorted(counts.items(), key=lambda x: x[0][0] * x[0][1]):
        if not options.smallest <= out * width <= options.largest:
            continue
        seconds = measure(out, width, options.rank, options.keep, options.rounds, options.full_rounds)
        done += count
        for name, value in seconds.items():
            totals[name] += value * count  # type: ignore[assignment]
    text = ", ".join(f"{name} {value:.1f} s ({value / totals['ours']:.1f})" for name, value in totals.items())
    print(f"{done} layers: {text}")


if __name__ == "__main__":
    main()
