"""LoRA linear layers of real models against torch's frozen layer, PEFT's composition and torch.compile of it.

    python benchmarks/layers.py qkv                     # d = 768, the three projections of an attention layer as one
    python benchmarks/layers.py shapes --dtypes bf16    # layers of SD 1.5, SDXL, FLUX, Llama; ranks; rows 1 .. 4096
    python benchmarks/layers.py decode                  # 1 .. 16 rows: share of the read bandwidth

Medians of interleaved rounds; ratios are medians of the ratio within a round. `ours / frozen`: the time of our LoRA
layer over that of torch's layer without LoRA. Shares are of the ceilings measured in the same run. Results: README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

import loraaccel
from loraaccel.bench import ceilings
from loraaccel.timing import Samples, interleave, ratio

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALING = 2.0
LAYERS = {  # name: inputs, outputs
    "SD 1.5 attention, 320": (320, 320),
    "SD 1.5 attention, 640": (640, 640),
    "SD 1.5 and SDXL attention, 1280": (1280, 1280),
    "SD 1.5 cross-attention, 768 -> 1280": (768, 1280),
    "encoder QKV, 768 -> 2304": (768, 2304),
    "SDXL feed-forward, 1280 -> 10240": (1280, 10240),
    "FLUX attention, 3072": (3072, 3072),
    "Llama attention, 4096": (4096, 4096),
    "Llama feed-forward, 4096 -> 14336": (4096, 14336),
}


@dataclasses.dataclass
class Layer:
    """Operands of one layer and the ways to compute it, forward and forward + backward."""

    rows: int
    inputs: int
    outputs: int
    rank: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(self.dtype)

        self.x = normal(self.rows, self.inputs).requires_grad_()
        self.weight = normal(self.outputs, self.inputs, scale=self.inputs**-0.5)
        self.bias = normal(self.outputs)
        self.a = normal(self.rank, self.inputs, scale=self.inputs**-0.5).requires_grad_()
        self.b = normal(self.outputs, self.rank).requires_grad_()
        self.grad = normal(self.rows, self.outputs)

    def frozen(self) -> Tensor:
        return linear(self.x, self.weight, self.bias)

    def peft(self) -> Tensor:
        return linear(self.x, self.weight, self.bias) + linear(linear(self.x, self.a), self.b) * SCALING

    def addmm(self) -> Tensor:
        """The update added in place: no gradients."""
        y = linear(self.x, self.weight, self.bias)
        return y.addmm_(linear(self.x, self.a), self.b.T, alpha=SCALING)

    def ours(self) -> Tensor:
        return loraaccel.lora_linear(self.x, self.weight, self.bias, self.a, self.b, SCALING)

    def forward(self, way: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return way()

        return call

    def step(self, way: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> None:
            way().backward(self.grad)
            self.x.grad = self.a.grad = self.b.grad = None

        return call

    @property
    def gflop(self) -> float:
        """Of the frozen product and the update, forward."""
        return 2e-9 * self.rows * (self.inputs * self.outputs + self.rank * (self.inputs + self.outputs))

    @property
    def read_gigabytes(self) -> float:
        numbers = self.outputs * self.inputs + self.rank * (self.inputs + self.outputs)
        return 1e-9 * numbers * self.weight.element_size()


def text(samples: Samples) -> str:
    low, high = samples.quartiles
    return f"{samples.median * 1e3:.3f} ({low * 1e3:.3f}-{high * 1e3:.3f})"


def share(of: float, limit: float) -> str:
    return f"{100 * of / limit:.0f} %"


def measured(
    layer: Layer, names: list[str], rounds: int, *, compiled: bool = False
) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Samples of the forward passes, and of forward and backward, by name."""
    ways: dict[str, Callable[[], Tensor]] = {name: getattr(layer, name) for name in names}
    if compiled:
        ways["torch.compile"] = torch.compile(layer.peft, dynamic=False)
    forward = {name: layer.forward(way) for name, way in ways.items()}
    step = {name: layer.step(way) for name, way in ways.items() if name != "addmm"}
    return interleave(forward, rounds, warmup=2), interleave(step, rounds, warmup=2)


def qkv(args: argparse.Namespace, limits: ceilings.Ceilings) -> None:
    names = ["frozen", "peft", "addmm", "ours"]
    head = ["tokens, dtype", "frozen", "PEFT", "addmm_ form", "ours", "torch.compile(PEFT)"]
    print("| " + " | ".join([*head, "PEFT / ours", "ours / frozen", "GFLOP/s of ours"]) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        for rows in (1024, 4096):
            layer = Layer(rows, 768, 2304, 8, DTYPES[dtype])
            for kind, r in zip(
                ("", ", with backward"), measured(layer, names, args.rounds, compiled=True), strict=True
            ):
                rate = layer.gflop / r["ours"].median
                peak = (
                    ""
                    if kind or dtype not in limits.fma
                    else f", {share(rate, limits.fma[dtype].all_threads_gflops)}"
                )
                cells = [
                    f"{rows} {dtype}{kind}",
                    *(text(r[name]) if name in r else "-" for name in (*names, "torch.compile")),
                    f"{ratio(r['peft'], r['ours']).median:.2f}",
                    f"{ratio(r['ours'], r['frozen']).median:.2f}",
                    "-" if kind else f"{rate:.0f}{peak}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)


def shapes(args: argparse.Namespace, limits: ceilings.Ceilings) -> None:
    print("ours / frozen: forward, forward with backward; share of the FMA ceiling of the forward pass")
    for dtype in args.dtypes:
        print(f"\n| {dtype} | r | " + " | ".join(f"M = {m}" for m in args.rows) + " |")
        print("|---|---|" + "---|" * len(args.rows))
        for name, (inputs, outputs) in LAYERS.items():
            for rank in args.ranks:
                cells = []
                for rows in args.rows:
                    layer = Layer(rows, inputs, outputs, rank, DTYPES[dtype])
                    rounds = max(5, min(args.rounds, int(400 / max(layer.gflop, 0.1))))
                    forward, step = measured(layer, ["frozen", "ours"], rounds)
                    both = [ratio(r["ours"], r["frozen"]).median for r in (forward, step)]
                    rate = layer.gflop / forward["ours"].median
                    peak = limits.fma.get(dtype)
                    cells.append(
                        f"{both[0]:.2f}, {both[1]:.2f}"
                        + (f"; {share(rate, peak.all_threads_gflops)}" if peak is not None else "")
                    )
                print(f"| {name} | {rank} | " + " | ".join(cells) + " |", flush=True)


def decode(args: argparse.Namespace, limits: ceilings.Ceilings) -> None:
    print(
        "| 4096 x 4096, r = 8 | M | frozen | ours | ours / frozen | GB/s of ours | share of the read ceiling |"
    )
    print("|---|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        for rows in (1, 2, 4, 8, 16):
            layer = Layer(rows, 4096, 4096, 8, DTYPES[dtype])
            forward, _ = measured(layer, ["frozen", "ours"], args.rounds)
            rate = layer.read_gigabytes / forward["ours"].median
            print(
                f"| {dtype} | {rows} | {text(forward['frozen'])} | {text(forward['ours'])} | "
                f"{ratio(forward['ours'], forward['frozen']).median:.2f} | {rate:.1f} | "
                f"{share(rate, limits.read_gbytes)} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=["qkv", "shapes", "decode"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 77, 256, 1024, 4096])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8])
    args = parser.parse_args()
    # Large blocks come from the heap from now on, not from fresh pages of the system, for both sides.
    del_me = torch.empty(7 << 20)
    del del_me
    limits = ceilings.measure(torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; ceilings: {limits}")
    {"qkv": qkv, "shapes": shapes, "decode": decode}[args.table](args, limits)


if __name__ == "__main__":
    main()
