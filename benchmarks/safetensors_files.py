"""Reading and writing safetensors files against the tools that it is done with today.

    python benchmarks/safetensors_files.py save           # 400 MB, no cast, against a plain write() of the same bytes
    python benchmarks/safetensors_files.py open           # one tensor of 2000 in a file of 2 GB, against safe_open
    python benchmarks/safetensors_files.py load           # a LoRA file of 800 tensors, against safetensors.torch.load_file
    python benchmarks/safetensors_files.py kohya --sd-scripts CHECKOUT     # against its save_weights, float32 to float16

`kohya` needs an interpreter with the packages that sd-scripts requires. Medians of interleaved rounds; ratios are medians
of the ratio within a round: rival time / ours, above 1 ours is faster. Memory is the peak of a call above what was there
before it (Linux's VmHWM). Files go to --folder, which needs 3 GB and should be a disk. Results: README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from loraaccel import safetensors as ours
from loraaccel.timing import interleave, ratio

METADATA = {"ss_network_module": "networks.lora", "ss_network_dim": "16", "ss_network_alpha": "8"}


def extra_memory(call: Callable[[], object]) -> float:
    """Peak of the call above what was there before it, in MB."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    call()  # what is only needed once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmHWM")
    call()
    return (status("VmHWM") - before) / 1024


@contextlib.contextmanager
def rested_disk(_: str) -> Iterator[None]:
    """What the call before left to be written is not this call's to wait for."""
    os.sync()
    yield


def report(title: str, ways: dict[str, Callable[[], object]], rounds: int, memory: bool = True) -> None:
    results = interleave(ways, rounds=rounds, warmup=1, around=rested_disk)
    print(title)
    for name, way in ways.items():
        r = ratio(results[name], results["ours"])
        extra = f", {extra_memory(way):6.1f} MB" if memory else ""
        print(
            f"  {name:24} {results[name].median * 1e3:8.2f} ms (least {min(results[name].seconds) * 1e3:.2f}), "
            f"/ ours {r.median:5.2f} [{r.first_quartile:.2f}, {r.third_quartile:.2f}]{extra}"
        )


def lora_tensors(count: int, megabytes: float) -> dict[str, torch.Tensor]:
    """Pairs of factors and alphas, as many bytes of float32 as asked for."""
    generator = torch.Generator().manual_seed(0)
    columns = int(megabytes * 1e6 / 4 / (count * 16))
    return {
        f"lora_unet_blocks_{i // 2}_attn_to_q.lora_{'down' if i % 2 else 'up'}.weight": torch.randn(
            (16, columns) if i % 2 else (columns, 16), generator=generator
        )
        for i in range(count)
    }


def save(folder: Path, rounds: int) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(512, 512) for i in range(400)}
    content = memoryview(safetensors.torch.save(tensors))
    path = str(folder / "save.safetensors")

    def plain(sync: bool) -> Callable[[], None]:
        def call() -> None:
            fd = os.open(path + ".plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            rest = content
            while rest:
                rest = rest[os.write(fd, rest) :]
            if sync:
                os.fsync(fd)
            os.close(fd)

        return call

    for sync in (False, True):
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda sync=sync: ours.save_file(tensors, path, sync=sync),
            "write()" + (" and fsync()" if sync else ""): plain(sync),
        }
        if not sync:
            ways["safetensors.torch"] = lambda: safetensors.torch.save_file(tensors, path + ".theirs")
        report(f"save 400 MB, {'sync' if sync else 'no sync'}", ways, rounds)
    assert Path(path).read_bytes() == content


def open_one(folder: Path, rounds: int) -> None:
    path = str(folder / "open.safetensors")
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(512, 512) for i in range(2000)}
    ours.save_file(tensors, path, sync=False)
    name = "model.layers.1234.self_attn.q_proj.weight"
    expected = float(tensors[name].sum())
    del tensors

    def read(way: Callable[[], safetensors.safe_open]) -> Callable[[], None]:
        def call() -> None:
            with way() as file:
                assert float(file.get_tensor(name).sum()) == expected

        return call

    def only_open(way: Callable[[], object]) -> Callable[[], object]:
        return way

    for title, use in (("open 2 GB, read 1 of 2000 tensors", read), ("open 2 GB", only_open)):
        ways: dict[str, Callable[[], object]] = {
            "ours": use(lambda: ours.safe_open(path, "pt")),
            "ours, mmap": use(lambda: ours.safe_open(path, "pt", backend="mmap")),
            "safe_open": use(lambda: safetensors.safe_open(path, "pt")),
        }
        report(title, ways, rounds, memory=False)


def load(folder: Path, rounds: int) -> None:
    path = str(folder / "load.safetensors")
    ours.save_file(lora_tensors(800, 130), path, sync=False)

    def touched(way: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], float]:
        return lambda: sum(float(t.sum()) for t in way().values())

    ways: dict[str, Callable[[], object]] = {
        "ours": touched(lambda: ours.load_file(path)),
        "ours, mmap": touched(lambda: ours.load_file(path, backend="mmap")),
        "safetensors.torch": touched(lambda: safetensors.torch.load_file(path)),
    }
    report("load 130 MB, 800 tensors, and add them up", ways, rounds)


def kohya(folder: Path, rounds: int, checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    from networks.lora import LoRANetwork

    tensors = lora_tensors(800, 130)

    class Network:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return dict(tensors)

    theirs, path = str(folder / "theirs.safetensors"), str(folder / "ours.safetensors")

    def save_ours(sync: bool) -> Callable[[], object]:
        return lambda: ours.save_file(
            tensors, path, METADATA, dtype=torch.float16, write_hashes=True, sync=sync
        )

    ways = {
        "ours": save_ours(False),
        "ours, sync": save_ours(True),
        "save_weights": lambda: LoRANetwork.save_weights(Network(), theirs, torch.float16, dict(METADATA)),
    }
    report(f"LoRA of 130 MB to float16, both hashes (safetensors {safetensors.__version__})", ways, rounds)
    with ours.safe_open(theirs, "pt") as a, ours.safe_open(path, "pt") as b:
        assert a.metadata() == b.metadata(), (a.metadata(), b.metadata())
        assert a.offset_keys() == b.offset_keys()
        assert all(torch.equal(a.get_tensor(k), b.get_tensor(k)) for k in a.keys())  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=["save", "open", "load", "kohya"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--sd-scripts", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for case in arguments.cases:
            if case == "kohya":
                if arguments.sd_scripts is None:
                    parser.error("kohya needs --sd-scripts")
                kohya(Path(name), arguments.rounds, arguments.sd_scripts)
            else:
                {"save": save, "open": open_one, "load": load}[case](Path(name), arguments.rounds)


if __name__ == "__main__":
    main()
