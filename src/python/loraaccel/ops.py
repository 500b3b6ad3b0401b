"""The operators, one short function each. Shapes and types are checked in native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loraaccel import _delta, _eager, _mlp, _qkv, _state
from loraaccel._autograd import (
    NO_MASKS,
    LoraLinearFunction,
    RankMasks,
    autocast_dtype,
    forward_below,
    forward_op,
)
from loraaccel._checks import check_operands, in_force, number, scaled_factors
from loraaccel._rank_dropout import shared_ranks


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
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoRA linear layer:  y = x Wᵀ + bias + scaling · O ∘ ((R ∘ H ∘ (D(x) Aᵀ)) Bᵀ).

    x [..., K] → y [..., N]; weight [N, K], bias [N] or None, lora_A [R, K], lora_B [N, R].
    ``scaling`` is alpha / r (alpha / √r for rank-stabilised LoRA), already divided.

    Dropouts, all in training only, each by its probability p, kept values times 1 / (1 - p):
    D on the input (``input_dropout``, PEFT), H on the rank activations (``hidden_dropout``, kohya's dropout), R on
    whole ranks of a sample (``rank_dropout``, kohya; a sample is an index of x's first dimension), O on the adapter's
    output (``output_dropout``, LyCORIS in bypass mode; the frozen product and the update are then two passes over y).
    Masks are functions of two numbers drawn from torch's default CPU generator, so they follow ``torch.manual_seed``
    and are recomputed, not stored. ``rank_dropout_dialect="lycoris"`` drops the same ranks for the whole batch and
    scales nothing, ``"lycoris_scaled"`` divides by the mean of the mask that was drawn (its rank_dropout_scale); the
    mask is LyCORIS's own under the same seed, and an update that is dropped whole is zero.

    x, weight and bias share a dtype: float32, float64, bfloat16 or float16; y has it too. The adapters share it or are
    float32 beside 16-bit operands, or 16-bit beside float32. Under autocast y has autocast's dtype. Sums are
    float32 (float64 for float64), y is rounded once, or twice where torch's 16-bit GEMM computes x Wᵀ or with O.
    Any strides, any number of leading dimensions, zero rows. Gradients: x, weight, bias, lora_A, lora_B, each in its
    own dtype, only where required; a gradient of a gradient raises RuntimeError.

    Raises RuntimeError naming the argument, what was found and what was expected for wrong shapes, dtypes, a scaling
    that is not finite or a probability outside [0, 1];
    ValueError for tensors on different devices, TypeError for what is no tensor.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    _check_tensors(x, weight, bias, lora_A, lora_B)
    scale = number("lora_linear", scaling)
    p_input, p_hidden, p_output = in_force(training, input_dropout, hidden_dropout, output_dropout)
    lora_A, lora_B, p_rank = shared_ranks(
        "lora_linear", lora_A, lora_B, rank_dropout, rank_dropout_dialect, training
    )
    ranks = [p_hidden, p_rank] if p_hidden or p_rank else []
    if p_output:
        base = lora_linear_adapters(x, weight, bias, (), (), [], [])
        return lora_delta_adapters(x, base, (lora_A,), (lora_B,), [scale], [p_input], ranks, p_output)
    return lora_linear_adapters(x, weight, bias, (lora_A,), (lora_B,), [scale], [p_input], ranks)


def lora_delta(
    x: Tensor,
    base: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float = 1.0,
    *,
    input_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """The adapter alone, added to a frozen layer's output:  y = base + scaling · O ∘ ((R ∘ H ∘ (D(x) Aᵀ)) Bᵀ).

    For frozen layers that compute their own output: quantised ones, or anything else that maps x [..., K] to
    base [..., N]. base is read once and not changed; y has its shape and dtype, and is rounded once. x and base may
    differ in dtype (under autocast x is used in autocast's). The gradient of base is that of y. Everything else as in
    `lora_linear`.
    """
    check_operands("lora_delta", {"x": x, "base": base, "lora_A": lora_A, "lora_B": lora_B}, x)
    if x.shape[:-1] != base.shape[:-1]:
        expected = ", ".join(str(n) for n in (*x.shape[:-1], lora_B.shape[0] if lora_B.dim() else "N"))
        raise RuntimeError(
            f"lora_delta: base has shape {list(base.shape)}, expected [{expected}] to go with x"
        )
    scale = number("lora_delta", scaling)
    p_input, p_hidden, p_output = in_force(training, input_dropout, hidden_dropout, output_dropout)
    lora_A, lora_B, p_rank = shared_ranks(
        "lora_delta", lora_A, lora_B, rank_dropout, rank_dropout_dialect, training
    )
    ranks = [p_hidden, p_rank] if p_hidden or p_rank else []
    return lora_delta_adapters(x, base, (lora_A,), (lora_B,), [scale], [p_input], ranks, p_output)


def lora_linear_batched(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scalings: Sequence[float],
    adapter_ids: Tensor | Sequence[int],
) -> Tensor:
    """LoRA linear layer with another adapter for each sample:  y_s = x_s Wᵀ + bias + scaling_i · (x_s A_iᵀ) B_iᵀ,
    i = adapter_ids[s]; the frozen layer's output alone where that is -1.

    x [S, ..., K] → y [S, ..., N]; weight [N, K], bias [N] or None; lora_As [R_i, K], lora_Bs [N, R_i] and scalings of
    equal length, ranks may differ; adapter_ids: one integer for each of the S samples. A sample's result does not
    depend on which adapters the others have. Gradients of x, weight, bias and every adapter (zeros for those that no
    sample has). Types, autocast and errors as in `lora_linear`; ValueError for sequences of different lengths,
    RuntimeError naming the sample for an id that is none.
    """
    lengths = {"lora_As": len(lora_As), "lora_Bs": len(lora_Bs), "scalings": len(scalings)}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{n} {name}" for name, n in lengths.items())
        raise ValueError(f"lora_linear_batched: {found}, expected as many of each")
    where = "lora_linear_batched"
    check_operands(where, {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias}), x)
    for i, (a, b) in enumerate(zip(lora_As, lora_Bs, strict=True)):
        check_operands(f"{where}: adapter {i}", {"lora_A": a, "lora_B": b}, x)
    scales = [number(where, s) for s in scalings]
    samples = x.shape[0] if x.dim() > 1 else 1
    ids = _adapter_ids(where, adapter_ids, samples)
    if not lora_As:
        if samples and bool((ids != -1).any()):
            raise RuntimeError(
                f"{where}: sample has adapter {int(ids.max())}, expected -1: there are no adapters"
            )
        return lora_linear_adapters(x, weight, bias, (), (), [], [])
    none = [0.0] * len(scales)
    return lora_linear_adapters(x, weight, bias, lora_As, lora_Bs, scales, none, [], ids)


def _adapter_ids(where: str, given: Tensor | Sequence[int], samples: int) -> Tensor:
    try:
        ids = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{where}: adapter_ids is a {type(given).__name__}, expected integers, one for each sample"
        ) from None
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool or ids.is_complex()):
        raise TypeError(f"{where}: adapter_ids is {ids.dtype}, expected integers")
    if ids.dim() != 1 or ids.shape[0] != samples:
        raise ValueError(
            f"{where}: adapter_ids has shape {list(ids.shape)}, expected [{samples}], one for each sample of x"
        )
    return ids.to(torch.int64).contiguous()


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> None:
    """What the dispatcher would report without naming the argument, or not at all."""
    operands = {"x": x, "weight": weight, "bias": bias, "lora_A": lora_a, "lora_B": lora_b}
    if bias is None:
        del operands["bias"]
    check_operands("lora_linear", operands, x)


def lora_linear_adapters(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: list[float],
    dropouts: list[float],
    rank_dropouts: Sequence[float] = (),
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> Tensor:
    """`lora_linear` with any number of adapters on one input:  y = x Wᵀ + bias + Σ sᵢ (Hᵢ ∘ (Dᵢ(x) Aᵢᵀ)) Bᵢᵀ.

    Each adapter has masks of its own. The dropouts are those in force: 0 outside training; rank_dropouts has two for
    each adapter (hidden, rank) or is empty. adapter_ids: which one of them each sample has, -1 for none.
    rank_factors [M, sum of Rᵢ]: further factors of the rank activations, drawn by the caller, in float32 (float64 for
    float64).
    """
    if _state.off():
        y = _eager.lora_linear(x, weight, bias, (), (), (), ())
        return _eager.lora_delta(
            x, y, lora_a, lora_b, scalings, dropouts, rank_dropouts, 0.0, adapter_ids, rank_factors
        )
    if torch.compiler.is_compiling():
        lora_a, lora_b, scalings = _scaled(lora_a, lora_b, scalings)
    plain = not rank_dropouts and adapter_ids is None and rank_factors is None
    masks = NO_MASKS if plain else RankMasks(rank_dropouts, adapter_ids, rank_factors)
    cast = autocast_dtype(x, weight)
    call = (x, weight, bias, list(lora_a), list(lora_b), scalings, dropouts, cast)
    return run_lora_linear(call, masks)


def lora_delta_adapters(
    x: Tensor,
    base: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: list[float],
    dropouts: list[float],
    rank_dropouts: Sequence[float] = (),
    output_dropout: float = 0.0,
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> Tensor:
    """`lora_delta` with any number of adapters: base + O ∘ (their sum), rounded once. Arguments as above."""
    if _state.off():
        return _eager.lora_delta(
            x,
            base,
            lora_a,
            lora_b,
            scalings,
            dropouts,
            rank_dropouts,
            output_dropout,
            adapter_ids,
            rank_factors,
        )
    if torch.compiler.is_compiling():
        lora_a, lora_b, scalings = _scaled(lora_a, lora_b, scalings)
    cast = autocast_dtype(x, base)
    drops = output_dropout or any(dropouts) or any(rank_dropouts)
    seed = _dropout_seed() if drops else None
    call = _delta.DeltaCall(
        scalings, dropouts, seed, rank_dropouts, output_dropout, adapter_ids, rank_factors
    )
    pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
    if cast is not None and x.dtype != cast:
        x = x.to(cast)
    if torch.compiler.is_compiling():
        return _delta.forward_op(x, base, list(lora_a), list(lora_b), scalings, dropouts, seed, *call.masks)[
            0
        ]
    if _records_gradients():
        return _delta.LoraDeltaFunction.apply(x, base, call, *pairs)
    return _delta.forward_below(x, base, call, pairs)[0]


def _scaled(
    lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], scalings: Sequence[float]
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """`scaled_factors` of each adapter."""
    found = [scaled_factors(a, b, s) for a, b, s in zip(lora_a, lora_b, scalings, strict=True)]
    return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]


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


def run_lora_linear(call: LoraLinearCall, masks: RankMasks | tuple[()] = NO_MASKS) -> Tensor:
    """The operator by the cheapest way that gives the gradients which may be asked for."""
    x, weight, bias, lora_a, lora_b, scalings, dropouts, cast = call
    seed = _dropout_seed() if any(dropouts) or (masks and any(masks[0])) else None
    if torch.compiler.is_compiling():
        if cast is not None:
            x, weight = x.to(cast), weight.to(cast)
            bias = None if bias is None else bias.to(cast)
        if not masks:
            return forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed)[0]
        return forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, None, *masks)[0]
    if _records_gradients():
        pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
        return LoraLinearFunction.apply(
            x, weight, bias, (lora_a, lora_b, scalings, dropouts, masks), seed, cast, *pairs
        )
    return forward_below(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, cast, masks)[0]


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
    [..., sum of N_j]: concatenating them costs nothing where the caller takes the buffer instead. Each of them may be
    changed in place.

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
        check_operands(f"lora_qkv: projection {j}", {k: v for k, v in named.items() if v is not None}, x)
    scales = [
        [] if pair is None else [number("lora_qkv", s)] for pair, s in zip(pairs, scalings, strict=True)
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
    rank_dropouts: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    """`lora_qkv` with any number of adapters (A, B) on each projection, each with an input dropout in force.

    rank_dropouts: hidden and rank dropout of each adapter of each projection, one after the other, or empty.
    """
    if _state.off():
        return _eager.lora_qkv(x, weights, biases, adapters, scalings, dropouts, rank_dropouts)
    call, tensors = _group_call(x, weights, biases, adapters, scalings, dropouts, rank_dropouts)
    if not torch.compiler.is_compiling() and _records_gradients():
        return _qkv.LoraQkvFunction.apply(call, x, _group_seed(call), *tensors)
    y = _qkv_below(call, x, tensors)
    return _qkv.split(y, weights) if torch.compiler.is_compiling() else _qkv.split_apart(y, weights)


def lora_qkv_packed(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    adapters: list[list[tuple[Tensor, Tensor]]],
    scalings: list[list[float]],
    dropouts: list[list[float]] | None = None,
    rank_dropouts: Sequence[float] = (),
    rank_factors: Tensor | None = None,
) -> Tensor:
    """The same, the outputs side by side: [..., sum of N_j]. rank_factors as in `lora_linear_adapters`."""
    if _state.off():
        outputs = _eager.lora_qkv(
            x, weights, biases, adapters, scalings, dropouts, rank_dropouts, rank_factors
        )
        return torch.cat(outputs, dim=-1)
    call, tensors = _group_call(x, weights, biases, adapters, scalings, dropouts, rank_dropouts, rank_factors)
    if not torch.compiler.is_compiling() and _records_gradients():
        return _qkv.LoraQkvPackedFunction.apply(call, x, _group_seed(call), *tensors)
    return _qkv_below(call, x, tensors)


def _group_seed(call: _qkv.GroupCall) -> Tensor | None:
    return _dropout_seed() if call.dropped else None


def _qkv_below(call: _qkv.GroupCall, x: Tensor, tensors: list[Tensor]) -> Tensor:
    x, tensors = call.to_cast(x, tensors)
    return _run_group(_qkv.forward_op, call, x, tensors, _group_seed(call), *call.masks)[0]


def _group_call(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    adapters: list[list[tuple[Tensor, Tensor]]],
    scalings: list[list[float]],
    dropouts: list[list[float]] | None,
    rank_dropouts: Sequence[float] = (),
    rank_factors: Tensor | None = None,
) -> tuple[_qkv.GroupCall, list[Tensor]]:
    """The call, and its tensors in one list: weights, biases that there are, A and B of each adapter."""
    if torch.compiler.is_compiling():
        scaled = [
            _scaled([a for a, _ in ab], [b for _, b in ab], scale)
            for ab, scale in zip(adapters, scalings, strict=True)
        ]
        adapters = [list(zip(a, b, strict=True)) for a, b, _ in scaled]
        scalings = [scale for *_, scale in scaled]
    call = _qkv.GroupCall(
        has_bias=[b is not None for b in biases],
        adapters=[len(ab) for ab in adapters],
        scalings=[s for scale in scalings for s in scale],
        dropouts=[p for d in dropouts for p in d] if dropouts else [0.0 for s in scalings for _ in s],
        cast=autocast_dtype(x, weights[0]),
        rank_dropouts=list(rank_dropouts),
        rank_factors=rank_factors,
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
        check_operands(f"lora_mlp: {name}", {k: v for k, v in operands.items() if v is not None}, x)
    pairs = [[] if w.lora_A is None or w.lora_B is None else [(w.lora_A, w.lora_B)] for w in layers.values()]
    scalings = [
        [number("lora_mlp", w.scaling)] if ab else [] for w, ab in zip(layers.values(), pairs, strict=True)
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
