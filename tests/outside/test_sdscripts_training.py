"""sd-scripts' train_network.py, unmodified, plain and under the launcher: losses, saved files, reports.

    LORAACCEL_SDSCRIPTS_DIR=DIR pytest tests/outside/test_sdscripts_training.py     or: nox -s hosts -- --sd-scripts DIR

Each run is 20 steps on random weights, from one seed. All random numbers come from the same calls in the same order, so
what is left between two runs is rounding: `sdscripts_compare.py` says how much. Most tests train a narrow U-Net.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from sdscripts_compare import (
    FLOAT32,
    SIXTEEN_BITS,
    assert_alike,
    assert_all_fused,
    assert_same_bytes,
)
from sdscripts_runs import Trainer

BF16 = {"mixed_precision": "bf16"}
CONV = ["conv_dim=4", "conv_alpha=2"]
DROPOUTS = {"network_dropout": 0.1, "network_args": ["rank_dropout=0.1", "module_dropout=0.1"]}
ALL_DROPOUTS = {**DROPOUTS, "network_args": [*DROPOUTS["network_args"], *CONV]}  # type: ignore[misc]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BF16,
    "full_bf16": {**BF16, "full_bf16": True},
    "convolutions": {"network_args": CONV},
    "convolutions in bfloat16": {**BF16, "network_args": CONV},
    "dropouts": ALL_DROPOUTS,
    "dropouts in bfloat16": {**BF16, **DROPOUTS},
    "checkpointing": {"gradient_checkpointing": True, "network_args": CONV},
    "checkpointing with dropouts": {"gradient_checkpointing": True, **ALL_DROPOUTS},
    "norms": {"scale_weight_norms": 0.05, "network_args": CONV},
    "U-Net only": {"network_train_unet_only": True},
    "text encoder only": {"network_train_text_encoder_only": True},
    "accumulated": {"gradient_accumulation_steps": 2, "train_batch_size": 2, "max_train_steps": 10},
    "saved in float16": {"save_precision": "fp16", "text_encoder_lr": 1e-4, "unet_lr": 2e-3},
    "validated": {"validation_split": 0.25, "max_validation_steps": 2, "validate_every_n_steps": 10},
    "LoRA-FA": {"network_module": "networks.lora_fa", "network_args": CONV},
}
CALLS: dict[str, int | None] = {  # of each layer, where it is not one a step
    "dropouts": None,  # a module that is dropped is not called
    "dropouts in bfloat16": None,
    "checkpointing": None,  # once more where the backward pass computes again
    "checkpointing with dropouts": None,
    "accumulated": 20,
    "validated": None,
}


# The rest is left out by `nox -s hosts -- --quick`.
QUICK = ("float32", "dropouts in bfloat16")


def slow_but(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


def bounds_of(variant: str) -> tuple[float, float, float]:
    return SIXTEEN_BITS if "mixed_precision" in VARIANTS[variant] else FLOAT32


@pytest.mark.parametrize("variant", slow_but(VARIANTS, QUICK))
def test_on(narrow: Trainer, variant: str) -> None:
    options = VARIANTS[variant]
    plain, fused = narrow(options), narrow(options, mode="on")
    assert plain.said == []
    assert_all_fused(fused, CALLS.get(variant, 20))
    assert_alike(fused, plain, bounds_of(variant), len(plain.losses))


@pytest.mark.parametrize(
    "variant", slow_but(("float32", "full_bf16", "checkpointing with dropouts"), ("float32",))
)
def test_off_is_the_script_alone(narrow: Trainer, variant: str) -> None:
    off = narrow(VARIANTS[variant], mode="off")
    assert_same_bytes(off, narrow(VARIANTS[variant]))
    assert off.said == []
    assert (off.report["mode"], off.report["layers"]) == ("off", [])


@pytest.mark.parametrize(
    "variant", slow_but(("float32", "bfloat16", "checkpointing with dropouts"), ("float32",))
)
def test_verify(narrow: Trainer, variant: str) -> None:
    """It compares the first calls and gives the operators' results: bit for bit those of on."""
    run = narrow(VARIANTS[variant], mode="verify")
    assert_alike(run, narrow(VARIANTS[variant]), bounds_of(variant))
    assert_all_fused(run, CALLS.get(variant, 20))
    errors = [layer["largest_error"] for layer in run.report["layers"]]
    limit = 1e-5 if bounds_of(variant) == FLOAT32 else 2e-2
    assert 0 < max(errors) < limit
    assert any(line.startswith("verify: largest relative error of an output ") for line in run.said)
    assert run.said[-1] == "verify: saved files: largest relative error 0.0e+00"


def test_auto(narrow: Trainer) -> None:
    """Without the option: the same operators as with on, and so the same bytes."""
    auto, on = narrow(ours=()), narrow(mode="on")
    assert_same_bytes(auto, on)
    assert auto.said == on.said
    assert auto.report["mode"] == "auto"


# ---- SD 1.5 as wide as it is ----

WIDE = {"train_batch_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on", "verify"])
@pytest.mark.parametrize("variant", ["float32", "bfloat16", "convolutions in bfloat16"])
def test_SD15(wide: Trainer, variant: str, mode: str) -> None:
    options = {**VARIANTS[variant], **WIDE}
    plain, run = wide(options), wide(options, mode=mode)
    assert_all_fused(run)
    assert_alike(run, plain, bounds_of(variant))


@pytest.mark.slow
def test_SD15_off(wide: Trainer) -> None:
    assert_same_bytes(wide(WIDE, mode="off"), wide(WIDE))
