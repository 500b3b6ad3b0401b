"""Runs the requested rows, one model and dtype after the other."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import loraaccel
from loraaccel.bench import ceilings, machine
from loraaccel.bench.measure import measure_case
from loraaccel.bench.qkv import QkvFamily
from loraaccel.bench.results import ModelResult, Report
from loraaccel.bench.unet import QUICK_SIZE, UNetFamily, UNetSize
from loraaccel.bench.variants import (
    FROZEN,
    PEFT,
    PRECISIONS,
    Variants,
    make_variants,
    num_parameters,
)
from loraaccel.bench.workload import Family

QUICK_TOKENS = (77, 1024)


@dataclass(frozen=True)
class Settings:
    """What the command line asked for. `threads` None: as many as torch uses anyway."""

    rows: tuple[str, ...]
    dtypes: tuple[str, ...]
    rounds: int
    quick: bool = False
    compile: bool = True
    threads: int | None = None


def families(settings: Settings) -> list[Family]:
    """The models that the requested rows need."""
    found: list[Family] = []
    if "qkv" in settings.rows:
        found.append(QkvFamily(tokens=QUICK_TOKENS) if settings.quick else QkvFamily())
    unet_rows = tuple(row for row in settings.rows if row in ("forward", "epoch"))
    if unet_rows:
        found.append(UNetFamily(unet_rows, QUICK_SIZE if settings.quick else UNetSize()))
    return found


def _make_model(family: Family, dtype: str, settings: Settings) -> tuple[Variants, ModelResult]:
    precision = PRECISIONS[dtype]
    reason = "left out by --quick" if settings.quick else "left out by --no-compile"
    compile_model = family.compile_model if settings.compile and not settings.quick else None
    variants = make_variants(family.build, family.targets, family.rank, precision, compile_model, reason)
    result = ModelResult(
        dtype=dtype,
        dtype_note=precision.note,
        ceiling=precision.ceiling,
        config=dict(family.config),
        base_parameters=num_parameters(variants.modules[FROZEN], trainable=False),
        lora_parameters=num_parameters(variants.modules[PEFT], trainable=True),
        patch={
            "num_fused": variants.num_fused,
            "num_fallback": variants.num_fallback,
            "reasons": variants.fallback_reasons,
        },
    )
    return variants, result


def num_cases(settings: Settings) -> int:
    """How many lines the tables will have."""
    return len(settings.dtypes) * sum(len(family.workloads) for family in families(settings))


def _share_reporter(
    on_progress: Callable[[str, float], object], title: str, num_done: int
) -> Callable[[float], object]:
    return lambda share: on_progress(title, num_done + share)


def run(settings: Settings, on_progress: Callable[[str, float], object]) -> Report:
    """Measure everything. `on_progress(title, num_done)`: what is being measured, and how many cases are finished."""
    start = time.perf_counter()
    threads = settings.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    loraaccel.set_num_threads(threads)
    on_progress("ceilings of this machine", 0.0)
    report = Report(
        machine=machine.describe(threads),
        versions=machine.versions(),
        settings=asdict(settings),
        ceilings=ceilings.measure(threads),
    )
    for family in families(settings):
        for dtype in settings.dtypes:
            on_progress(f"building {dtype}", len(report.cases))
            variants, result = _make_model(family, dtype, settings)
            report.models.append(result)
            for workload in family.workloads:
                title, num_done = f"{workload.row} {dtype}: {workload.case}", len(report.cases)
                on_progress(title, num_done)
                result.cases.append(
                    measure_case(
                        variants,
                        workload,
                        dtype,
                        PRECISIONS[dtype],
                        family.rank,
                        settings.rounds,
                        _share_reporter(on_progress, title, num_done),
                    )
                )
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()  # compiled graphs hold their models
            del variants
            gc.collect()
            report.set_ceilings(report.ceilings.merged(ceilings.measure(threads)))
    report.seconds = time.perf_counter() - start
    return report
