"""The operators, one short function each. Shapes and types are checked in native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loraaccel import _eager, _state
from loraaccel._autograd import LoraLinearFunction, autocast_dtype, forward_below, forward_op


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float = 1.0,
    *,
    input_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """LoRA linear layer:  y = x Wᵀ + bias + scaling · (D(x) Aᵀ) Bᵀ.

    x [..., K] → y [..., N]; weight [N, K], bias [N] or None, lora_A [R, K], lora_B [N, R].
    ``scaling`` is alpha / r (alpha / √r for rank-stabilised LoRA), already divided.
    D is dropout with probability ``input_dropout`` in training (PEFT's place for it); its mask is a function of two
    numbers drawn from torch's default CPU generator, so it follows ``torch.manual_seed`` and is recomputed, not stored.

    x, weight and bias share a dtype: float32, float64, bfloat16 or float16; y has it too. The adapters share it or are
    float32 beside 16-bit operands, or 16-bit beside float32. Under autocast y has autocast's dtype. Sums are
    float32 (float64 for float64), y is rounded once, or twice where torch's 16-bit GEMM computes x Wᵀ.
    Any strides, any number of leading dimensions, zero rows. Gradients: x, weight, bias, lora_A, lora_B, each in its
    own dtype, only where required; a gradient of a gradient raises RuntimeError.

    Raises RuntimeError naming the argument, what was found and what was expected for wrong shapes, dtypes, a scaling
    that is not finite or a probability outside [0, 1];
    ValueError for tensors on different devices, TypeError for what is no tensor;
    NotImplementedError for the three dropouts that are not part of this version.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    for name, p in (("hidden", hidden_dropout), ("rank", rank_dropout), ("output", output_dropout)):
        if p != 0.0:
            raise NotImplementedError(
                f"lora_linear: {name}_dropout is {p}; this version has input_dropout only"
            )
    _check_tensors(x, weight, bias, lora_A, lora_B)
    dropout = input_dropout if training or not 0.0 <= input_dropout <= 1.0 else 0.0
    try:
        scale = float(scaling)
    except (TypeError, ValueError):
        raise TypeError(f"lora_linear: scaling is {scaling!r}, expected a number") from None
    return lora_linear_adapters(x, weight, bias, (lora_A,), (lora_B,), [scale], [float(dropout)])


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> None:
    """What the dispatcher would report without naming the argument, or not at all."""
    operands = {"x": x, "weight": weight, "bias": bias, "lora_A": lora_a, "lora_B": lora_b}
    if bias is None:
        del operands["bias"]
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"lora_linear: {name} is a {type(t).__name__}, expected a torch.Tensor")
        if t.device != x.device:
            raise ValueError(f"lora_linear: {name} is on {t.device}, expected {x.device} as x")


def lora_linear_adapters(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: list[float],
    dropouts: list[float],
) -> Tensor:
    """`lora_linear` with any number of adapters on one input:  y = x Wᵀ + bias + Σ sᵢ (Dᵢ(x) Aᵢᵀ) Bᵢᵀ, rounded once.

    Each adapter has a mask of its own. The dropouts are those in force: 0 outside training.
    """
    if _state.off():
        return _eager.lora_linear(x, weight, bias, lora_a, lora_b, scalings, dropouts)
    cast = autocast_dtype(x, weight)
    return run_lora_linear((x, weight, bias, list(lora_a), list(lora_b), scalings, dropouts, cast))


# x, weight, bias, lora_A, lora_B, scalings, dropouts, type that autocast gives x and weight (None: as they are).
LoraLinearCall: TypeAlias = tuple[
    Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor], list[float], list[float], torch.dtype | None
]


def run_lora_linear(call: LoraLinearCall) -> Tensor:
    """The operator by the cheapest way that gives the gradients which may be asked for."""
    x, weight, bias, lora_a, lora_b, scalings, dropouts, cast = call
    # device: not torch.set_default_device's, the operator reads the two numbers on the host.
    seed = torch.randint(0, 2**62, (2,), dtype=torch.int64, device="cpu") if any(dropouts) else None
    if torch.compiler.is_compiling():
        if cast is not None:
            x, weight = x.to(cast), weight.to(cast)
            bias = None if bias is None else bias.to(cast)
        return forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed)[0]
    if (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        # (The last two have no fused form, and the Function says so.)
        pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
        return LoraLinearFunction.apply(x, weight, bias, seed, scalings, dropouts, cast, *pairs)
    return forward_below(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, cast)[0]
