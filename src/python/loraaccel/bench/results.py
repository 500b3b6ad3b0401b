"""What a run found, as plain data: the tables, the plot and the JSON output are made from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from loraaccel.bench import references
from loraaccel.bench.ceilings import Ceilings
from loraaccel.timing import Samples, Spread

SCHEMA = 1


@dataclass
class VariantResult:
    """Times of one variant in one case, or why there are none. Errors are relative, in the Euclidean norm."""

    samples: Samples | None = None
    skipped: str | None = None
    first_call_seconds: float | None = None  # of the compiled variant: mostly compilation
    gflops: float | None = None
    share_of_fma_ceiling: float | None = None
    error: float | None = None
    allowed_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Times in seconds. An error that is not finite, which JSON has no number for, is null."""
        data = {name: value for name, value in vars(self).items() if name != "samples"}
        if self.error is not None and not math.isfinite(self.error):
            data["error"] = None
        if self.samples:
            data |= {f"{name}_seconds": value for name, value in asdict(self.samples.spread).items()}
            data["seconds"] = list(self.samples.seconds)
        return data


@dataclass
class CaseResult:
    """One line of a table."""

    row: str
    case: str
    dtype: str
    variants: dict[str, VariantResult]
    ratios: dict[str, Spread]  # "peft/loraaccel": per-round ratio of the times
    fused_calls: int
    fallback_calls: int
    failures: list[str]

    def to_json(self) -> dict[str, Any]:
        """All fields, the samples summarised and in full."""
        return {
            **vars(self),
            "variants": {name: variant.to_json() for name, variant in self.variants.items()},
            "ratios": {name: asdict(spread) for name, spread in self.ratios.items()},
        }


@dataclass
class ModelResult:
    """A model in one dtype and the cases measured with it."""

    dtype: str
    dtype_note: str
    ceiling: str  # key of Ceilings.fma
    config: dict[str, Any]
    base_parameters: int
    lora_parameters: int
    patch: dict[str, Any]  # num_fused, num_fallback, reasons
    cases: list[CaseResult] = field(default_factory=list)


@dataclass
class Report:
    """A whole run."""

    machine: dict[str, Any]
    versions: dict[str, str | None]
    settings: dict[str, Any]
    ceilings: Ceilings
    models: list[ModelResult] = field(default_factory=list)
    seconds: float = 0.0

    def set_ceilings(self, ceilings: Ceilings) -> None:
        """Set the ceilings, and every share of them anew."""
        self.ceilings = ceilings
        for model in self.models:
            gflops = ceilings.fma[model.ceiling].all_threads_gflops
            for case in model.cases:
                for variant in case.variants.values():
                    if variant.gflops is not None:
                        variant.share_of_fma_ceiling = variant.gflops / gflops

    @property
    def cases(self) -> list[CaseResult]:
        """All lines of all tables, in the order of measurement."""
        return [case for model in self.models for case in model.cases]

    @property
    def failures(self) -> list[str]:
        """Everything that makes the run fail, one sentence each."""
        return [f"{c.row}, {c.case}, {c.dtype}: {text}" for c in self.cases for text in c.failures]

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that the json module writes."""
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "versions": self.versions,
            "settings": self.settings,
            "ceilings": asdict(self.ceilings),
            "models": [
                {**vars(model), "cases": [case.to_json() for case in model.cases]} for model in self.models
            ],
            "reported_elsewhere": {
                "machine": references.WHERE,
                "rows": {name: asdict(reference) for name, reference in references.REFERENCES.items()},
            },
            "failures": self.failures,
            "seconds": self.seconds,
        }
