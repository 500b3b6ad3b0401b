"""The variants of one model: frozen, PEFT eager, PEFT compiled, PEFT patched by loraaccel. Same weights in all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import loraaccel

FROZEN, PEFT, COMPILED, OURS = "frozen", "peft", "peft-compile", "loraaccel"
NAMES = (FROZEN, PEFT, COMPILED, OURS)


@dataclass(frozen=True)
class Precision:
    """How a model is stored. `ceiling` names the multiply-add rate it is compared with."""

    base: torch.dtype
    cast_adapters: bool  # PEFT's autocast_adapter_dtype: adapters of a bf16 model are kept in fp32
    ceiling: str
    note: str


PRECISIONS = {
    "fp32": Precision(torch.float32, True, "fp32", "base and adapters fp32"),
    "bf16": Precision(torch.bfloat16, True, "bf16", "base bf16, adapters fp32: PEFT's default"),
    "bf16-uniform": Precision(torch.bfloat16, False, "bf16", "base and adapters bf16"),
}


@dataclass
class Variants:
    """The modules by variant; `skipped` says why a variant is absent. `reference` is eager PEFT in float64."""

    modules: dict[str, nn.Module]
    skipped: dict[str, str]
    reference: nn.Module
    num_fused: int
    num_fallback: int
    fallback_reasons: dict[str, int]

    def skip(self, name: str, reason: str) -> None:
        """Leave `name` out from here on."""
        del self.modules[name]
        self.skipped[name] = reason


def num_parameters(module: nn.Module, trainable: bool) -> int:
    """Number of parameters that are trainable, or that are not."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad == trainable)


def attach_lora(model: nn.Module, targets: Sequence[str], rank: int, precision: Precision) -> nn.Module:
    """A copy of `model` with PEFT's LoRA layers. B is random as well, so that the LoRA branch changes the output."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), init_lora_weights=False)
    wrapped = get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=precision.cast_adapters)
    injected: nn.Module = (
        wrapped.get_base_model()
    )  # the layers without PeftModel around them, as diffusers holds them
    return injected


def make_variants(
    build: Callable[[], nn.Module],
    targets: Sequence[str],
    rank: int,
    precision: Precision,
    compile_model: Callable[[nn.Module], object] | None,
    no_compile_reason: str,
) -> Variants:
    """Build all variants of the model that `build` returns. `compile_model` compiles in place; None leaves that out."""
    frozen = build().to(precision.base).requires_grad_(False)
    peft = attach_lora(frozen, targets, rank, precision)
    modules = {FROZEN: frozen, PEFT: peft}
    skipped = {}
    if compile_model:
        modules[COMPILED] = copy.deepcopy(peft)
        compile_model(modules[COMPILED])
    else:
        skipped[COMPILED] = no_compile_reason
    modules[OURS] = copy.deepcopy(peft)
    report = loraaccel.patch(modules[OURS])
    return Variants(
        modules=modules,
        skipped=skipped,
        reference=copy.deepcopy(peft).to(torch.float64),
        num_fused=report.num_fused,
        num_fallback=report.num_fallback,
        fallback_reasons={str(reason): count for reason, count in report.reasons.items()},
    )


def copy_adapters(source: nn.Module, *targets: nn.Module) -> None:
    """Overwrite the trainable parameters of `targets` with those of the same name in `source`."""
    trained = {name: p.detach() for name, p in source.named_parameters() if p.requires_grad}
    for target in targets:
        parameters = dict(target.named_parameters())
        with torch.no_grad():
            for name, value in trained.items():
                parameters[name].copy_(value)
