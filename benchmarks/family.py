"""The operators beside lora_linear against the tools that they replace.

    python benchmarks/family.py                          # all
    python benchmarks/family.py dropout dora conv        # some; also: lycoris batched
    python benchmarks/family.py --dtypes bf16 --rounds 15

Rivals: PEFT's own modules (dropout, DoRA, convolution, mixed batches) and LyCORIS's (LoHa, LoKr; those that are
installed, with their default settings, where a forward pass rebuilds the weight's update). Medians of interleaved
rounds, ratios are medians of the ratio within a round, with quartiles: rival time / ours, above 1 ours is faster.
Results: README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import peft
import torch
from torch import Tensor, nn

import loraaccel
from loraaccel.timing import interleave, ratio

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Way = Callable[[Tensor], Tensor]


class Case:
    """One layer, ours and the rival's, on the same operands."""

    def __init__(self, name: str, x: Tensor, rival: Way, ours: Way, parameters: list[Tensor]) -> None:
        self.name, self.x, self.rival, self.ours = name, x, rival, ours
        self.parameters = parameters

    def forward(self, way: Way) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return way(self.x)

        return call

    def step(self, way: Way) -> Callable[[], object]:
        x = self.x.detach().requires_grad_()
        grad = torch.randn(way(x).shape).to(x.dtype)

        def call() -> None:
            way(x).backward(grad)
            for t in (x, *self.parameters):
                t.grad = None

        return call


def check(case: Case, exact: bool = True) -> None:
    """The two compute the same (where no random mask differs)."""
    with torch.no_grad():
        a, b = case.rival(case.x).float(), case.ours(case.x).float()
    error = float((a - b).norm() / a.norm())
    if exact and error > (0.03 if case.x.dtype == torch.bfloat16 else 1e-4):
        raise SystemExit(f"{case.name}: the results differ by {error:.1e}")


def peft_case(
    name: str, base: nn.Module, x: Tensor, dtype: torch.dtype, *, training: bool = False, **settings: object
) -> Case:
    """A PEFT layer and a patched one that shares its parameters. Adapters are float32, as PEFT makes them."""
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, **settings)
    model = peft.get_peft_model(nn.Sequential(base.to(dtype)), config)
    layer = model.base_model.model[0]
    layer.train(training)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    own = type(layer).forward
    loraaccel.patch(layer, strict=True)
    case = Case(name, x, lambda t: own(layer, t), layer, parameters)
    check(case, exact=not settings.get("lora_dropout"))
    return case


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def dropout(dtype: torch.dtype) -> Iterator[Case]:
    for rows, k, n, r in (
        (1024, 768, 768, 8),
        (4096, 320, 320, 16),
        (1024, 1280, 1280, 16),
        (1024, 1280, 10240, 16),
    ):
        yield peft_case(
            f"LoRA, dropout 0.1, {rows} x {k} -> {n}, r = {r}", nn.Linear(k, n), normal(rows, k, dtype=dtype), dtype,
            training=True, r=r, lora_dropout=0.1,
        )  # fmt: skip


def dora(dtype: torch.dtype) -> Iterator[Case]:
    for rows, k, n, r, p in (
        (1024, 768, 768, 8, 0.0),
        (256, 1280, 1280, 16, 0.0),
        (1024, 1280, 1280, 16, 0.0),
        (1024, 1280, 1280, 16, 0.1),
    ):
        yield peft_case(
            f"DoRA, {rows} x {k} -> {n}, r = {r}" + (f", dropout {p}" if p else ""), nn.Linear(k, n),
            normal(rows, k, dtype=dtype), dtype, training=p > 0, r=r, use_dora=True, lora_dropout=p,
        )  # fmt: skip


def conv(dtype: torch.dtype) -> Iterator[Case]:
    for batch, c, n, size, kernel, r in (
        (1, 320, 320, 64, 3, 8), (4, 320, 320, 32, 3, 16), (1, 640, 640, 32, 3, 8), (2, 1280, 1280, 16, 3, 16),
        (1, 320, 320, 64, 1, 8), (1, 320, 320, 64, 3, 64),
    ):  # fmt: skip
        yield peft_case(
            f"convolution {kernel}x{kernel}, {batch} x {c} -> {n} x {size}x{size}, r = {r}",
            nn.Conv2d(c, n, kernel, padding=kernel // 2), normal(batch, c, size, size, dtype=dtype), dtype, r=r,
        )  # fmt: skip


def batched(dtype: torch.dtype) -> Iterator[Case]:
    for samples, tokens, k, n, r in (
        (8, 1, 4096, 4096, 16),
        (8, 16, 768, 768, 8),
        (8, 128, 768, 768, 8),
        (8, 256, 1280, 1280, 16),
    ):
        model = peft.get_peft_model(
            nn.Sequential(nn.Linear(k, n).to(dtype)),
            peft.LoraConfig(r=r, target_modules=["0"], init_lora_weights=False),
        )
        for i in range(7):
            model.add_adapter(f"a{i}", peft.LoraConfig(r=r, target_modules=["0"], init_lora_weights=False))
        model.eval()
        layer = model.base_model.model[0]
        names = ["default", *(f"a{i}" for i in range(7))]
        own = type(layer).forward
        loraaccel.patch(layer, strict=True)
        parameters = [p for n, p in layer.named_parameters() if "lora_" in n]
        for p in parameters:
            p.requires_grad_()

        def rival(t: Tensor, layer: nn.Module = layer, own: Way = own, names: list[str] = names) -> Tensor:
            return own(layer, t, adapter_names=names)

        def ours(t: Tensor, layer: nn.Module = layer, names: list[str] = names) -> Tensor:
            return layer(t, adapter_names=names)

        x = normal(samples, tokens, k, dtype=dtype)
        case = Case(f"8 adapters in a batch of 8 x {tokens}, {k} -> {n}, r = {r}", x, rival, ours, parameters)
        check(case)
        yield case


def lycoris(dtype: torch.dtype) -> Iterator[Case]:
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    for rows, k, n, r, factor in (
        (1024, 768, 768, 4, 8),
        (1024, 1280, 1280, 8, 8),
        (4096, 640, 640, 8, 16),
        (1024, 1280, 1280, 32, 8),
    ):
        base = nn.Linear(k, n).to(dtype).requires_grad_(False)
        x = normal(rows, k, dtype=dtype)
        loha = LohaModule("loha", base, 1.0, lora_dim=r, alpha=r / 2).to(dtype)
        for p in loha.parameters():
            nn.init.normal_(p, std=0.05)
        factors = [loha.hada_w1_a, loha.hada_w1_b, loha.hada_w2_a, loha.hada_w2_b]

        def loha_ours(t: Tensor, base: nn.Linear = base, factors: list[Tensor] = factors) -> Tensor:
            return loraaccel.loha_linear(t, base.weight, base.bias, *factors, 0.5)

        case = Case(f"LoHa, {rows} x {k} -> {n}, r = {r}", x, loha, loha_ours, factors)
        check(case)
        yield case
        if r == 32:
            continue
        base = nn.Linear(k, n).to(dtype).requires_grad_(False)
        lokr = LokrModule("lokr", base, 1.0, lora_dim=r, alpha=r / 2, factor=factor).to(dtype)
        for p in lokr.parameters():
            nn.init.normal_(p, std=0.05)
        w2 = (lokr.lokr_w2_a, lokr.lokr_w2_b) if hasattr(lokr, "lokr_w2_a") else lokr.lokr_w2

        def lokr_ours(t: Tensor, base: nn.Linear = base, lokr: nn.Module = lokr, w2: object = w2) -> Tensor:
            return loraaccel.lokr_linear(t, base.weight, base.bias, lokr.lokr_w1, w2, float(lokr.scale))

        case = Case(
            f"LoKr, {rows} x {k} -> {n}, r = {r}, factor {factor}",
            x,
            lokr,
            lokr_ours,
            list(lokr.parameters()),
        )
        check(case)
        yield case


SETS = {"dropout": dropout, "dora": dora, "conv": conv, "batched": batched, "lycoris": lycoris}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"of {', '.join(SETS)}; all")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    unknown = set(arguments.sets) - set(SETS)
    if unknown:
        sys.exit(f"unknown sets: {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, peft {peft.__version__}, {arguments.threads} threads, milliseconds\n")
    print("| layer | dtype | rival | ours | rival / ours | with backward: rival | ours | rival / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.sets or SETS:
        for key in arguments.dtypes.split(","):
            torch.manual_seed(0)
            for case in SETS[name](DTYPES[key]):
                cells = []
                for make in (case.forward, case.step):
                    samples = interleave(
                        {"rival": make(case.rival), "ours": make(case.ours)}, arguments.rounds, warmup=2
                    )
                    r = ratio(samples["rival"], samples["ours"])
                    low, high = r.first_quartile, r.third_quartile
                    times = [f"{samples[k].median * 1e3:.2f}" for k in ("rival", "ours")]
                    cells += [*times, f"{r.median:.2f} ({low:.2f}-{high:.2f})"]
                print(f"| {case.name} | {key} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
