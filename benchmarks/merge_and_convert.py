"""Merging into a base model of some GB against sd-scripts; converting a 300 MB adapter. Time and peak memory.

    python benchmarks/merge_and_convert.py --sd-scripts CHECKOUT --sd-python PYTHON [--gigabytes 5] [--rounds 3]

Base: the first blocks of Flux in bfloat16, random numbers; adapter: rank 16 on all their linear layers, bfloat16.
Rivals: networks/flux_merge_lora.py, with and without --mem_eff_load_save, float32 arithmetic like ours; diffusers'
loader. Runs are interleaved (A B A B ...), each a process of its own, start of Python included but for "work of".
Memory is the peak of the resident set. --folder says where the files go, which need 12 GB; they are deleted at the end.
Results: README.md."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

OURS = "from loraaccel.adapters import merge; import sys; merge(*sys.argv[1:])"
# The work without Python's start and the imports, which take diffusers longer than the work.
TIMED = """
import sys, time
{imports}
start = time.perf_counter()
{work}
print("seconds", time.perf_counter() - start)
"""
OUR_CONVERT = TIMED.format(
    imports="from loraaccel import adapters",
    work="adapters.convert(sys.argv[1], sys.argv[2], 'diffusers')",
)
THEIR_CONVERT = TIMED.format(
    imports="""from types import SimpleNamespace
import torch
from safetensors.torch import save_file
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin as Mixin""",
    work="""tensors, alphas = Mixin.lora_state_dict(sys.argv[1], unet_config=SimpleNamespace(layers_per_block=2))
save_file(tensors, sys.argv[2])""",
)
HIDDEN = 3072
DOUBLE = {
    "img_attn.qkv": (3, 1),
    "txt_attn.qkv": (3, 1),
    "img_attn.proj": (1, 1),
    "txt_attn.proj": (1, 1),
    "img_mlp.0": (4, 1),
    "img_mlp.2": (1, 4),
    "txt_mlp.0": (4, 1),
    "txt_mlp.2": (1, 4),
    "img_mod.lin": (6, 1),
    "txt_mod.lin": (6, 1),
}


def make_files(folder: Path, gigabytes: float) -> None:
    import torch
    from safetensors.torch import save_file

    base, adapter = {}, {}
    size, block = 0, 0
    noise = torch.randn(6 * HIDDEN * HIDDEN // 4).to(torch.bfloat16) * 0.02
    while size < gigabytes * 1e9 and block < 19:
        for layer, (out, width) in DOUBLE.items():
            shape = (out * HIDDEN, width * HIDDEN)
            weight = torch.empty(shape, dtype=torch.bfloat16)
            flat = weight.view(-1)
            for begin in range(0, flat.numel(), noise.numel()):
                piece = flat[begin : begin + noise.numel()]
                piece.copy_(noise[: piece.numel()])
            base[f"double_blocks.{block}.{layer}.weight"] = weight
            size += 2 * weight.numel()
            name = f"lora_unet_double_blocks_{block}_{layer.replace('.', '_')}"
            adapter[f"{name}.lora_down.weight"] = torch.randn(16, shape[1]).to(torch.bfloat16)
            adapter[f"{name}.lora_up.weight"] = (torch.randn(shape[0], 16) * 0.01).to(torch.bfloat16)
            adapter[f"{name}.alpha"] = torch.tensor(8.0, dtype=torch.bfloat16)
        block += 1
    save_file(base, folder / "base.safetensors")
    save_file(adapter, folder / "adapter.safetensors")


def make_adapter(path: Path, megabytes: int) -> None:
    """Kohya names of SDXL's attention, ranks as they come out of that size."""
    import torch
    from safetensors.torch import save_file

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
    import true_names

    layers = [x for x in true_names.golden("sdxl")["kohya"] if len(x[1]) == 2]
    rank = megabytes * 1_000_000 // (2 * sum(d[1] + u[0] for _, d, u in layers))
    tensors = {}
    for name, down, up in layers:
        tensors[f"{name}.lora_down.weight"] = torch.randn(rank, down[1]).half()
        tensors[f"{name}.lora_up.weight"] = torch.randn(up[0], rank).half()
        tensors[f"{name}.alpha"] = torch.tensor(float(rank)).half()
    save_file(tensors, path)


def apart(function: Callable[..., None], *arguments: object) -> None:
    """In a process of its own: a child's peak memory begins with its parent's."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{function.__name__} failed")


def run(command: list[str], cwd: str | None = None) -> tuple[float, float]:
    """Seconds, of the process or as it says itself, and peak MB."""
    environment = dict(os.environ)
    if cwd is not None:
        environment["PYTHONPATH"] = os.pathsep.join([cwd, *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"{command[:3]} failed: {log.read().decode()[-2000:]}")
        seconds = time.perf_counter() - start
        log.seek(0)
        said = [line for line in log.read().decode().splitlines() if line.startswith("seconds ")]
    return float(said[-1].split()[1]) if said else seconds, usage.ru_maxrss / 1000


def merges(arguments: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float]]]:
    base, adapter, target = (str(folder / f"{n}.safetensors") for n in ("base", "adapter", "merged"))
    files = ["--flux_model", base, "--models", adapter, "--ratios", "1", "--save_to", target]
    theirs = [
        arguments.sd_python,
        "networks/flux_merge_lora.py",
        *files,
        "--precision",
        "float",
        "--no_metadata",
    ]
    theirs += ["--save_precision", "bf16"]
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        for name, command, cwd in (
            ("loraaccel", [sys.executable, "-c", OURS, base, adapter, target], None),
            ("flux_merge_lora", theirs, arguments.sd_scripts),
            ("flux_merge_lora --mem_eff_load_save", [*theirs, "--mem_eff_load_save"], arguments.sd_scripts),
        ):
            if cwd is None or arguments.sd_scripts:
                found.setdefault(name, []).append(run(command, cwd))
                print(name, found[name][-1], flush=True)
            Path(target).unlink(missing_ok=True)
    return found


def converts(arguments: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float]]]:
    kohya, diffusers, back = (str(folder / f"{n}.safetensors") for n in ("kohya", "diffusers", "back"))
    apart(make_adapter, Path(kohya), 300)
    cli = [sys.executable, "-m", "loraaccel", "convert"]
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        found.setdefault("kohya to diffusers", []).append(run([*cli, kohya, diffusers, "--to", "diffusers"]))
        found.setdefault("diffusers to kohya", []).append(run([*cli, diffusers, back, "--to", "kohya"]))
        for name, code in (("loraaccel", OUR_CONVERT), ("diffusers", THEIR_CONVERT)):
            runs = found.setdefault(f"{name}, work of kohya to diffusers", [])
            runs.append(run([sys.executable, "-c", code, kohya, diffusers]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sd-scripts", default=None)
    parser.add_argument("--sd-python", default=sys.executable)
    parser.add_argument("--gigabytes", type=float, default=5, help="of the base model; 0: only conversions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        rows = converts(arguments, folder)
        if arguments.gigabytes:
            apart(make_files, folder, arguments.gigabytes)
            rows |= merges(arguments, folder)
    finally:
        shutil.rmtree(folder)
    for name, runs in rows.items():
        seconds = [s for s, _ in runs]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(
            f"{name:40} {statistics.median(seconds):7.2f} s ({spread})  peak {max(mb for _, mb in runs):7.0f} MB"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
