"""Measures one workload with all variants of its model, and checks them against one another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from loraaccel.bench.calls import CallCounter
from loraaccel.bench.compare import Comparison, compare
from loraaccel.bench.results import CaseResult, VariantResult
from loraaccel.bench.variants import COMPILED, FROZEN, OURS, PEFT, Precision, Variants, copy_adapters
from loraaccel.bench.workload import Workload
from loraaccel.timing import Samples, interleave, ratio

WARMUP_ROUNDS = 1  # after the calls that compiled, compared and counted
CASE_SECONDS = 1.5  # short calls get more rounds, until a case has taken about this long
MAX_ROUNDS_FACTOR = 10
RATIOS = ((PEFT, OURS), (COMPILED, OURS), (PEFT, FROZEN), (OURS, FROZEN))


def _checked(
    variants: Variants, names: list[str], workload: Workload, precision: Precision
) -> dict[str, Comparison]:
    """Compare the named variants with the float64 reference, PEFT's own error being the measure."""
    reference = workload.observe(variants.reference, torch.float64)
    peft = workload.observe(variants.modules[PEFT], precision.base)
    epsilon = torch.finfo(precision.base).eps
    observed = {
        name: workload.observe(variants.modules[name], precision.base) for name in names if name != PEFT
    }
    return {
        name: compare(results, peft, reference, epsilon) for name, results in {PEFT: peft, **observed}.items()
    }


def _first_compiled_call(variants: Variants, workload: Workload, precision: Precision) -> float | None:
    """Compile by calling; returns the seconds that took. A failure is recorded as the reason to skip the variant."""
    if COMPILED not in variants.modules:
        return None
    start = time.perf_counter()
    try:
        # Beyond its limit of graphs torch.compile would go on uncompiled, with a warning only.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            workload.observe(variants.modules[COMPILED], precision.base)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is reported, in the row
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        variants.skip(COMPILED, f"torch.compile failed: {type(error).__name__}: {first_line}")
        return None
    return time.perf_counter() - start


def _num_rounds(rounds: int, call: Mapping[str, Callable[[], object]]) -> int:
    """At least `rounds`, more when a round is short."""
    start = time.perf_counter()
    for function in call.values():
        function()
    return max(
        rounds, min(MAX_ROUNDS_FACTOR * rounds, math.ceil(CASE_SECONDS / (time.perf_counter() - start)))
    )


def _failures(checks: Mapping[str, list[Comparison]], counter: CallCounter, names: list[str]) -> list[str]:
    failures = [
        f"{name} is wrong: relative error {check.error:.2e} in {check.tensor}, {check.allowed:.2e} allowed"
        for name, found in checks.items()
        for check in found
        if not check.ok
    ]
    if not counter.fused(OURS):
        failures.append("loraaccel fused no forward call")
    failures += [
        f"{name} ran {counter.fused(name)} fused calls and is no baseline"
        for name in names
        if name != OURS and counter.fused(name)
    ]
    return failures


def _variant_result(samples: Samples, checks: list[Comparison], flops: int | None) -> VariantResult:
    result = VariantResult(samples=samples)
    if flops is not None:
        result.gflops = flops / samples.median * 1e-9
    if checks:
        worst = max(checks, key=lambda check: (not check.ok, check.error / check.allowed))
        result.error, result.allowed_error = worst.error, worst.allowed
    return result


def measure_case(
    variants: Variants,
    workload: Workload,
    dtype: str,
    precision: Precision,
    rank: int,
    rounds: int,
    on_progress: Callable[[float], object],
) -> CaseResult:
    """Compile, compare, time, and for training compare again with the trained adapters.

    `on_progress` hears the finished share of the timing, 0 to 1.
    """
    first_call_seconds = _first_compiled_call(variants, workload, precision)
    names = list(variants.modules)
    with_lora = [name for name in names if name != FROZEN]
    checks = {name: [check] for name, check in _checked(variants, with_lora, workload, precision).items()}

    calls = {name: workload.make_call(module, precision.base) for name, module in variants.modules.items()}
    rounds = _num_rounds(rounds, calls)
    counter = CallCounter()
    samples = interleave(
        calls,
        rounds,
        WARMUP_ROUNDS,
        around=counter.around,
        on_round=lambda done: on_progress(done / (rounds + WARMUP_ROUNDS)),
    )
    if workload.trains:  # stale copies of A and B would show here
        copy_adapters(variants.modules[OURS], variants.modules[PEFT], variants.reference)
        checks[OURS].append(_checked(variants, [OURS], workload, precision)[OURS])

    results = {
        name: _variant_result(
            samples[name], checks.get(name, []), workload.flops(0 if name == FROZEN else rank)
        )
        for name in names
    }
    if COMPILED in results:
        results[COMPILED].first_call_seconds = first_call_seconds
    results |= {name: VariantResult(skipped=reason) for name, reason in variants.skipped.items()}
    return CaseResult(
        row=workload.row,
        case=workload.case,
        dtype=dtype,
        variants=results,
        ratios={
            f"{a}/{b}": ratio(samples[a], samples[b]) for a, b in RATIOS if a in samples and b in samples
        },
        fused_calls=counter.fused(OURS),
        fallback_calls=counter.fallback(OURS),
        failures=_failures(checks, counter, names),
    )
