"""Every available kernel of lora_linear against torch's frozen layer, forward and backward, over shapes.

    python benchmarks/lora_linear_kernels.py [--rounds N] [--rank R] [--shapes 384x384,768x768] [--rows 1,4,1024]

Prints milliseconds (median of interleaved rounds) and the ratio frozen / kernel per round.
Results: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import os

import torch
from torch import Tensor

import loraaccel
from loraaccel.timing import Samples, interleave, ratio


def forced(kernel: str, backward: bool, operands: dict[str, Tensor]) -> None:
    """One call of the operator, below autograd, by the kernel of this name."""
    os.environ["LORAACCEL_FORCE_KERNEL"] = kernel
    o, ops = operands, torch.ops.loraaccel
    with torch._C._AutoDispatchBelowAutograd():
        if backward:
            mask = [True, False, False, True, True]
            ops.lora_linear_backward(
                o["dy"], o["x"], o["w"], [o["a"]], [o["b"]], o["h"], [2.0], [0.0], None, mask
            )
        else:
            ops.lora_linear(o["x"], o["w"], o["bias"], [o["a"]], [o["b"]], [2.0], [0.0], None)


def measure(rows: int, inputs: int, outputs: int, rank: int, rounds: int) -> dict[str, Samples]:
    shapes = {
        "x": (rows, inputs),
        "w": (outputs, inputs),
        "bias": (outputs,),
        "a": (rank, inputs),
        "b": (outputs, rank),
        "dy": (rows, outputs),
    }
    o = {name: torch.randn(shape) for name, shape in shapes.items()}
    o["h"] = o["x"] @ o["a"].T
    variants = {
        "frozen": lambda: torch.nn.functional.linear(o["x"], o["w"], o["bias"]),
        "frozen backward": lambda: o["dy"] @ o["w"],
    }
    for kernel in loraaccel.kernels():
        if kernel["available"] and kernel["name"] not in ("ref", "portable"):
            for suffix, backward in (("", False), (" backward", True)):
                variants[kernel["name"] + suffix] = functools.partial(forced, kernel["name"], backward, o)
    return interleave(variants, rounds, warmup=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--shapes", default="384x384,384x1536,1536x384,768x768,1280x1280", help="KxN, ...")
    parser.add_argument("--rows", default="1,4,16,64,256,1024", help="M, ...")
    args = parser.parse_args()
    _ = loraaccel.lora_linear  # loads the operators
    for shape in args.shapes.split(","):
        inputs, outputs = map(int, shape.split("x"))
        for rows in map(int, args.rows.split(",")):
            results = measure(rows, inputs, outputs, args.rank, args.rounds)
            cells = []
            for name, samples in results.items():
                base = results["frozen backward" if name.endswith("backward") else "frozen"]
                cells.append(f"{name} {samples.median * 1e3:.3f} ({ratio(base, samples).median:.2f}x)")
            print(f"M={rows} K={inputs} N={outputs}: " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
