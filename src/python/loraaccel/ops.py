"""The operators, one short function each. Shapes and types are checked in native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loraaccel import _eager, _mlp, _qkv, _state
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
    scale = _number("lora_linear", scaling)
    return lora_linear_adapters(x, weight, bias, (lora_A,), (lora_B,), [scale], [float(dropout)])


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> None:
    """What the dispatcher would report without naming the argument, or not at all."""
    operands = {"x": x, "weight": weight, "bias": bias, "lora_A": lora_a, "lora_B": lora_b}
    if bias is None:
        del operands["bias"]
    _check_operands("lora_linear", operands, x)


def _check_operands(where: str, operands: dict[str, Any], x: Tensor) -> None:
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{where}: {name} is a {type(t).__name__}, expected a torch.Tensor")
        if t.device != x.device:
            raise ValueError(f"{where}: {name} is on {t.device}, expected {x.device} as x")


def _number(op: str, scaling: Any) -> float:
    try:
        return float(scaling)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scaling is {scaling!r}, expected a number") from None


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


def _dropout_seed() -> Tensor:
    # device: not torch.set_default_device's, the operator reads the two numbers on the host.
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device="cpu")


def _records_gradients() -> bool:
    """True where the call must go through an autograd.Function."""
    # (The last two have no fused form, and the Function says so.)
    return (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


# x, weight, bias, lora_A, lora_B, scalings, dropouts, type that autocast gives x and weight (None: as they are).
LoraLinearCall: TypeAlias = tuple[
    Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor], list[float], list[float], torch.dtype | None
]


def run_lora_linear(call: LoraLinearCall) -> Tensor:
    """The operator by the cheapest way that gives the gradients which may be asked for."""
    x, weight, bias, lora_a, lora_b, scalings, dropouts, cast = call
    seed = _dropout_seed() if any(dropouts) else None
    if torch.compiler.is_compiling():
        if cast is not None:
            x, weight = x.to(cast), weight.to(cast)
            bias = None if bias is None else bias.to(cast)
        return forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed)[0]
    if _records_gradients():
        pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
        return LoraLinearFunction.apply(
            x, weight, bias, (lora_a, lora_b, scalings, dropouts), seed, cast, *pairs
        )
    return forward_below(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, cast)[0]


def lora_qkv(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    lora_As: Sequence[Tensor | None],
    lora_Bs: Sequence[Tensor | None],
    scalings: Sequence[float],
) -> tuple[Tensor, ...]:
    """Several LoRA linear layers over one input:  y_j = x W_jᵀ + bias_j + scaling_j · (x A_jᵀ) B_jᵀ.

    x [..., K] → a tuple of y_j [..., N_j], in the order given. Sequences of equal length, any number of projections:
    weights [N_j, K], biases [N_j] or None, lora_As [R_j, K] and lora_Bs [N_j, R_j], both or neither None. Sizes
    and ranks may differ (grouped-query attention). x is read once. The outputs are views of one packed buffer
    [..., sum of N_j]: concatenating them costs nothing where the caller takes the buffer instead.

    Types, gradients, autocast and errors as in `lora_linear`; dx is the sum over the projections, rounded once (16-bit
    sums by torch's GEMM: once for each projection).
    ValueError for sequences of different lengths or an adapter with only one of its two factors.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    lengths = {
        "weights": len(weights), "biases": len(biases), "lora_As": len(lora_As), "lora_Bs": len(lora_Bs),
        "scalings": len(scalings),
    }  # fmt: skip
    if len(set(lengths.values())) != 1 or not weights:
        found = ", ".join(f"{n} {name}" for name, n in lengths.items())
        raise ValueError(f"lora_qkv: {found}, expected as many of each, and at least one")
    pairs: list[tuple[Tensor, Tensor] | None] = []
    for j, (w, bias, a, b) in enumerate(zip(weights, biases, lora_As, lora_Bs, strict=True)):
        if (a is None) != (b is None):
            raise ValueError(
                f"lora_qkv: projection {j} has {'no lora_A' if a is None else 'no lora_B'}, expected both or neither"
            )
        pairs.append(None if a is None or b is None else (a, b))
        named = {"x": x, "weight": w, "bias": bias, "lora_A": a, "lora_B": b}
        _check_operands(f"lora_qkv: projection {j}", {k: v for k, v in named.items() if v is not None}, x)
    scales = [
        [] if pair is None else [_number("lora_qkv", s)] for pair, s in zip(pairs, scalings, strict=True)
    ]
    adapters = [[] if pair is None else [pair] for pair in pairs]
    return lora_qkv_adapters(x, list(weights), list(biases), adapters, scales)


def lora_qkv_adapters(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    adapters: list[list[tuple[Tensor, Tensor]]],
    scalings: list[list[float]],
    dropouts: list[list[float]] | None = None,
) -> tuple[Tensor, ...]:
    """`lora_qkv` with any number of adapters (A, B) on each projection, each with an input dropout in force."""
    dropouts = dropouts if dropouts is not None else [[0.0] * len(s) for s in scalings]
    if _state.off():
        return tuple(
            _eager.lora_linear(x, w, b, [p[0] for p in ab], [p[1] for p in ab], s, d)
            for w, b, ab, s, d in zip(weights, biases, adapters, scalings, dropouts, strict=True)
        )
    call, tensors = _group_call(x, weights, biases, adapters, scalings, dropouts)
    seed = _dropout_seed() if any(call.dropouts) else None
    if not torch.compiler.is_compiling() and _records_gradients():
        return _qkv.LoraQkvFunction.apply(call, x, seed, *tensors)
    x, tensors = call.to_cast(x, tensors)
    y, _ = _run_group(_qkv.forward_op, call, x, tensors, seed)
    return _qkv.split(y, weights)


def _group_call(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    adapters: list[list[tuple[Tensor, Tensor]]],
    scalings: list[list[float]],
    dropouts: list[list[float]],
) -> tuple[_qkv.GroupCall, list[Tensor]]:
    """The call, and its tensors in one list: weights, biases that there are, A and B of each adapter."""
    call = _qkv.GroupCall(
        has_bias=[b is not None for b in biases],
        adapters=[len(ab) for ab in adapters],
        scalings=[s for scale in scalings for s in scale],
        dropouts=[p for d in dropouts for p in d],
        cast=autocast_dtype(x, weights[0]),
    )
    pairs = [t for ab in adapters for pair in ab for t in pair]
    return call, [*weights, *(b for b in biases if b is not None), *pairs]


def _run_group(op: Any, call: _qkv.GroupCall, x: Tensor, tensors: list[Tensor], *rest: Any) -> Any:
    """Without an autograd.Function: compiled code has the registered formula, other calls need none."""
    if not torch.compiler.is_compiling():
        return _qkv.run_below(op, call, x, tensors, *rest)
    weights, biases, pairs = call.cut(tensors)
    return op(
        x, list(weights), list(biases), call.has_bias, list(pairs[0::2]), list(pairs[1::2]), call.adapters,
        call.scalings, call.dropouts, *rest,
    )  # fmt: skip


class LoraWeights(NamedTuple):
    """One LoRA linear layer: weight [N, K], bias [N] or None, lora_A [R, K] and lora_B [N, R] or neither."""

    weight: Tensor
    bias: Tensor | None = None
    lora_A: Tensor | None = None
    lora_B: Tensor | None = None
    scaling: float = 1.0


def lora_mlp(
    x: Tensor, gate: LoraWeights | None, up: LoraWeights, down: LoraWeights, activation: str = "silu"
) -> Tensor:
    """MLP block of three LoRA linear layers:  y = down(act(gate(x)) · up(x));  without a gate  y = down(act(up(x))).

    x [..., K] → y [..., N]; gate and up have weights [I, K], down has [N, I]. Each layer is `LoraWeights` (or a tuple
    like it). activation: "silu", "gelu" (by the error function), "gelu_tanh", "relu".

    For the backward pass only x and the outputs of gate and up are kept (and R numbers a row for each adapter):
    act(gate) · up is computed again. It is rounded once, to x's dtype. Types, gradients, autocast and errors as in
    `lora_linear`; ValueError for an unknown activation.
    Source: Hu et al., "LoRA", 2021; gated units: Shazeer, "GLU Variants Improve Transformer", 2020; GELU: Hendrycks
    and Gimpel, 2016.
    """
    if activation not in _mlp.ACTIVATIONS:
        raise ValueError(
            f"lora_mlp: activation {activation!r}, expected one of {', '.join(_mlp.ACTIVATIONS)}"
        )
    given = {"gate": gate, "up": up, "down": down}
    if gate is None:
        del given["gate"]
    layers: dict[str, LoraWeights] = {}
    for name, layer in given.items():
        if not isinstance(layer, tuple) or len(layer) > 5:
            raise TypeError(f"lora_mlp: {name} is a {type(layer).__name__}, expected LoraWeights")
        w = layers[name] = LoraWeights(*layer)
        if (w.lora_A is None) != (w.lora_B is None):
            missing = "lora_A" if w.lora_A is None else "lora_B"
            raise ValueError(f"lora_mlp: {name} has no {missing}, expected both or neither")
        operands = {"x": x, "weight": w.weight, "bias": w.bias, "lora_A": w.lora_A, "lora_B": w.lora_B}
        _check_operands(f"lora_mlp: {name}", {k: v for k, v in operands.items() if v is not None}, x)
    pairs = [[] if w.lora_A is None or w.lora_B is None else [(w.lora_A, w.lora_B)] for w in layers.values()]
    scalings = [
        [_number("lora_mlp", w.scaling)] if ab else [] for w, ab in zip(layers.values(), pairs, strict=True)
    ]
    weights, biases = [w.weight for w in layers.values()], [w.bias for w in layers.values()]
    dropouts = [[0.0] * len(s) for s in scalings]
    if _state.off():
        return _eager.lora_mlp(x, weights, biases, pairs, scalings, activation)
    call, tensors = _group_call(x, weights, biases, pairs, scalings, dropouts)
    kind = _mlp.ACTIVATIONS.index(activation)
    if not torch.compiler.is_compiling() and _records_gradients():
        return _mlp.LoraMlpFunction.apply(call, kind, x, None, *tensors)
    x, tensors = call.to_cast(x, tensors)
    return _run_group(_mlp.forward_op, call, x, tensors, None, kind)[0]
