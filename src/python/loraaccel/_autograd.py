"""Gradients of the operators: an eager autograd.Function, and the same formulas registered for torch.compile.

Both call one forward and one backward operator; the mathematics is in the C++ header loraaccel/lora_linear.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loraaccel import _eager, _packing, _state
from loraaccel._layers import says_layer
from loraaccel._operators import operator, register_autocast, register_autograd, register_fake
from loraaccel._saved import keep_or_shape, kept_or_shape

forward_op = operator("lora_linear")
backward_op = operator("lora_linear_backward")
pack_op = operator("pack_weight")

_DOUBLE_BACKWARD = (
    "loraaccel::lora_linear: the gradient of a gradient (create_graph=True) is not supported. Compute it inside "
    "loraaccel.disabled(), or with an unpatched model."
)
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# The registered formula is a Python function that the dispatcher calls whether or not anything needs a gradient
# (8 us a call); the eager paths, which bring a formula of their own or need none, go below it.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class RankMasks(NamedTuple):
    """What is done to the rank activations of a call, where anything is."""

    rank_dropouts: Sequence[float] = ()  # hidden_dropout and rank_dropout of each adapter, or none at all
    adapter_ids: Tensor | None = None  # the adapter of each sample, -1 for none
    rank_factors: Tensor | None = None  # [M, sum of R], factors that the caller drew


NO_MASKS: tuple[()] = ()


def refuse_transforms(op: str) -> None:
    """RuntimeError inside torch.func and forward-mode differentiation, where the dispatcher would take an operator's
    output for a constant. In plain torch, with the switch off, there is nothing to refuse."""
    if torch.compiler.is_compiling() or _state.off():
        return
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"loraaccel::{op}: torch.func transforms and forward-mode differentiation are not supported. Compute "
            "inside loraaccel.disabled()."
        )


class _RefuseDoubleBackward(torch.autograd.Function):
    """The gradients of a backward pass that builds a graph, tied to what they depend on: differentiating them raises.

    torch's once_differentiable gives constants where the incoming gradient needs no gradient, and a second derivative
    would silently be zero.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:  # gradients, then what they depend on
        ctx.set_materialize_grads(False)
        return tuple(g.clone() for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(_DOUBLE_BACKWARD)


def _refuse_double_backward(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if not torch.is_grad_enabled():
        return grads
    some = [g for g in grads if g is not None]
    if not some:
        return grads
    guarded = iter(_RefuseDoubleBackward.apply(len(some), *some, *sources))
    return [None if g is None else next(guarded) for g in grads]


def forward_below(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    cast: torch.dtype | None,
    masks: RankMasks | tuple[()] = NO_MASKS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, hidden, and x and weight in the type they were used in; nothing is recorded for a backward pass."""
    if cast is None:
        packed = kept_packing(weight, x, False)
        with _below_autograd():
            y, hidden = forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, packed, *masks)
        return y, hidden, x, weight
    given = weight
    x, weight = x.to(cast), weight.to(cast)
    bias = None if bias is None else bias.to(cast)
    packed = kept_packing(weight, x, False) if weight is given else None
    with _below_autograd(), torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        y, hidden = forward_op(x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, packed, *masks)
    return y, hidden, x, weight


def kept_packing(weight: Tensor, x: Tensor, for_input_gradient: bool) -> Tensor | None:
    """What loraaccel.set_packing() lets a call use."""
    if _packing.policy != "always":
        return None
    return _packing.kept(weight, math.prod(x.shape[:-1]), for_input_gradient, pack_op)


# A, B, scalings, dropouts of each adapter; masks of the rank activations, where there are any.
AdapterLists: TypeAlias = tuple[list[Tensor], list[Tensor], list[float], list[float], RankMasks | tuple[()]]


@says_layer
class LoraLinearFunction(torch.autograd.Function):
    """Eager path: about a third of the dispatcher's overhead for a registered formula."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lists: AdapterLists,
        seed: Tensor | None,
        cast: torch.dtype | None,
        *adapters: Tensor,  # A, B of each adapter: those of `lists`
    ) -> Tensor:
        lora_a, lora_b, scalings, dropouts, masks = lists
        dtypes = None if cast is None else (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y, hidden, x, weight = forward_below(
            x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, cast, masks
        )
        # Only what some gradient reads (those of W and A read x, that of x reads W and A): it may be large, and a user
        # may change it in place where nothing needs it.
        needs = ctx.needs_input_grad
        needs_x = needs[0]
        keep = [needs[1] or True in needs[6::2], needs_x]
        for _ in lora_a:
            keep += (needs_x, True)
        saved, likes = keep_or_shape((x, weight, *adapters), keep)
        ctx.save_for_backward(hidden, *saved)
        ctx.rest = (likes, scalings, dropouts, seed, dtypes, masks)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        likes, scalings, dropouts, seed, dtypes, masks = ctx.rest
        hidden, *saved = ctx.saved_tensors
        x, weight, *adapters = kept_or_shape(saved, likes)
        needs = ctx.needs_input_grad
        mask = [*needs[:3], *needs[6:]]
        if _is_batched(grad):
            if masks:
                raise RuntimeError(
                    "loraaccel::lora_linear: batched gradients with masked rank activations are not supported"
                )
            computed = _batched_backward(grad, x, weight, adapters, hidden, scalings, dropouts, mask)
        else:
            a, b = adapters[0::2], adapters[1::2]
            # (A cast weight is another tensor in each call.)
            packed = kept_packing(weight, grad, True) if mask[0] and dtypes is None else None
            with _below_autograd():
                computed = backward_op(
                    grad, x, weight, a, b, hidden, scalings, dropouts, seed, mask, packed, *masks
                )
        wanted = iter(computed)
        grads = [next(wanted) if m else None for m in mask]
        return _linear_gradients(grads, dtypes, (grad, x, weight, *adapters))

    @staticmethod
    def backward_in_torch(ctx: Any, grad: Tensor) -> Any:
        """The gradients where the operator fails; None with dropout, whose masks only native code makes."""
        likes, scalings, dropouts, _, dtypes, masks = ctx.rest
        if any(dropouts) or masks:
            return None
        hidden, *saved = ctx.saved_tensors
        x, weight, *adapters = kept_or_shape(saved, likes)
        needs = ctx.needs_input_grad
        computed = _eager.lora_linear_backward(grad, x, weight, adapters, hidden, scalings)
        grads = [g if m else None for g, m in zip(computed, [*needs[:3], *needs[6:]], strict=True)]
        return _linear_gradients(grads, dtypes, (grad, x, weight, *adapters))


def _linear_gradients(
    grads: list[Tensor | None], dtypes: Sequence[Any] | None, sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """What LoraLinearFunction.backward returns. dtypes: of x, weight and bias before autocast; sources: grad, x as it
    was used, and the rest."""
    if dtypes is not None:
        # Through autocast's type, the bias's too: as where autocast's casts are recorded (compiled code).
        used = sources[1].dtype
        grads[:3] = [None if g is None else g.to(used).to(t) for g, t in zip(grads[:3], dtypes, strict=True)]
    gx, gw, gb, *gab = _refuse_double_backward(grads, sources)
    return gx, gw, gb, None, None, None, *gab


def _is_batched(grad: Tensor) -> bool:
    """Many gradients at once: torch.autograd.grad(is_grads_batched=True), jacobian(vectorize=True)."""
    return torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad)


def _batched_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    adapters: Sequence[Tensor],
    hidden: Tensor,
    scalings: list[float],
    dropouts: list[float],
    mask: list[bool],
) -> list[Tensor]:
    """The formulas in plain torch, which knows how to batch them; only the gradients that the mask asks for."""
    if any(dropouts):
        raise RuntimeError("loraaccel::lora_linear: batched gradients with active dropout are not supported")
    grads = _eager.lora_linear_backward(grad, x, weight, adapters, hidden, scalings)
    return [g for g, m in zip(grads, mask, strict=True) if m]


# ---- the same for the dispatcher: torch.compile, torch.export, direct users of torch.ops ----


def _wrong(op: str, name: str, t: Tensor, expected: str) -> str:
    return f"loraaccel::{op}: {name} has shape {list(t.shape)}, expected {expected}"


def _check_devices(op: str, x: Tensor, seed: Tensor | None, **operands: Tensor | list[Tensor] | None) -> None:
    """One operand on the meta device sends a call here: the others must be there too, or memory would be garbage."""
    for name, value in operands.items():
        for t in value if isinstance(value, list) else (value,):
            if t is not None and t.device != x.device:
                raise ValueError(f"loraaccel::{op}: {name} is on {t.device}, expected {x.device} as x")
    if seed is not None and seed.device.type != "cpu":
        raise ValueError(f"loraaccel::{op}: seed is on {seed.device}, expected cpu")


@register_fake("lora_linear")
def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    packed: Tensor | None = None,
    rank_dropouts: Sequence[float] = (),
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    op = "lora_linear"
    _check_devices(op, x, seed, weight=weight, bias=bias, lora_A=lora_A, lora_B=lora_B)
    torch._check(x.dim() >= 1, lambda: f"loraaccel::{op}: x has no dimensions, expected [..., K]")
    torch._check(weight.dim() == 2, lambda: _wrong(op, "weight", weight, "two dimensions"))
    n, k = weight.shape
    torch._check(x.shape[-1] == k, lambda: _wrong(op, "weight", weight, f"[N, {x.shape[-1]}] to go with x"))
    if bias is not None:
        torch._check(bias.dim() == 1 and bias.shape[0] == n, lambda: _wrong(op, "bias", bias, f"[{n}]"))
    for a, b in zip(lora_A, lora_B, strict=True):
        torch._check(a.dim() == 2 and a.shape[1] == k, lambda a=a: _wrong(op, "lora_A", a, f"[R, {k}]"))
        torch._check(
            b.dim() == 2 and b.shape[0] == n and b.shape[1] == a.shape[0],
            lambda a=a, b=b: _wrong(op, "lora_B", b, f"[{n}, {a.shape[0]}]"),
        )
    rank = sum(a.shape[0] for a in lora_A)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, x.new_empty((math.prod(x.shape[:-1]), rank), dtype=sums)


@register_fake("pack_weight")
def _pack_fake(weight: Tensor, for_input_gradient: bool) -> Tensor:
    # The size depends on the CPU.
    bytes_ = torch.library.get_ctx().new_dynamic_size(min=64)
    return weight.new_empty(bytes_, dtype=torch.uint8)


@register_fake("lora_linear_backward")
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    hidden: Tensor,
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    output_mask: list[bool],
    packed: Tensor | None = None,
    rank_dropouts: Sequence[float] = (),
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> list[Tensor]:
    _check_devices(
        "lora_linear_backward", x, seed, grad=grad, weight=weight, hidden=hidden, lora_A=lora_A, lora_B=lora_B
    )
    dense = torch.contiguous_format
    outputs = [torch.empty_like(x, memory_format=dense)] if output_mask[0] else []
    if output_mask[1]:
        outputs.append(torch.empty_like(weight, memory_format=dense))
    if output_mask[2]:
        sums = (
            torch.float64 if x.dtype == torch.float64 else torch.float32
        )  # the bias may be float32 beside 16 bit
        outputs.append(weight.new_empty(weight.shape[0], dtype=sums))
    for i, (a, b) in enumerate(zip(lora_A, lora_B, strict=True)):
        if output_mask[3 + 2 * i]:
            outputs.append(torch.empty_like(a, memory_format=dense))
        if output_mask[4 + 2 * i]:
            outputs.append(torch.empty_like(b, memory_format=dense))
    return outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, lora_a, lora_b, scalings, dropouts, seed, packed, *masks = inputs
    hidden = output[1]
    ctx.rest = no_gradients((packed, *masks))
    ctx.rank_dropouts, adapter_ids, rank_factors = masks
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, hidden, seed, adapter_ids, rank_factors, *lora_a, *lora_b)
    ctx.scalings, ctx.dropouts, ctx.adapters, ctx.has_bias = scalings, dropouts, len(lora_a), bias is not None
    # Inputs that are lists are one entry of needs_input_grad, or one per tensor, depending on the version of torch.
    ctx.wanted = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    for a, b in zip(lora_a, lora_b, strict=True):
        ctx.wanted += [a.requires_grad, b.requires_grad]


def no_gradient(value: Any) -> list[None] | None:
    """In the place of a gradient that an argument has not: an empty list of numbers is taken for one of tensors."""
    return [] if isinstance(value, (list, tuple)) and not value else None


def no_gradients(optional: Sequence[Any]) -> list[Any]:
    """The same for arguments at the end of a schema: the dispatcher drops those that are their defaults."""
    given = len(optional)
    while given and not isinstance(optional[given - 1], Tensor) and not optional[given - 1]:
        given -= 1
    return [no_gradient(value) for value in optional[:given]]


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: Tensor | None) -> Any:
    x, weight, hidden, seed, adapter_ids, rank_factors, *adapters = ctx.saved_tensors
    n = ctx.adapters
    numbers = no_gradient(ctx.scalings)
    rest = (None, *ctx.rest)
    if grad is None:
        return (None, None, None, [None] * n, [None] * n, numbers, numbers, *rest)
    lora_a, lora_b = adapters[:n], adapters[n:]
    wanted = iter(
        backward_op(
            grad, x, weight, lora_a, lora_b, hidden, ctx.scalings, ctx.dropouts, seed, ctx.wanted, None,
            ctx.rank_dropouts, adapter_ids, rank_factors,
        )
    )  # fmt: skip
    gx, gw, gb, *gab = [next(wanted) if m else None for m in ctx.wanted]
    return (gx, gw, gb, gab[0::2], gab[1::2], numbers, numbers, *rest)


def _backward_of_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(_DOUBLE_BACKWARD)


register_autograd("lora_linear", _backward, setup_context=_setup_context)
register_autograd("lora_linear_backward", _backward_of_backward)


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The type that autocast gives a linear layer on these operands; None where it leaves them alone."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch knows no autocast for meta
        return None
    if x.dtype == torch.float64 or weight.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _autocast_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    packed: Tensor | None = None,
    rank_dropouts: Sequence[float] = (),
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Direct calls of the operator under autocast: x, weight, bias in autocast's type as in F.linear; adapters stay."""
    cast = autocast_dtype(x, weight)
    with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        if cast is not None:
            x, weight = x.to(cast), weight.to(cast)
            bias = None if bias is None else bias.to(cast)
        return forward_op(
            x,
            weight,
            bias,
            lora_A,
            lora_B,
            scalings,
            dropouts,
            seed,
            packed,
            rank_dropouts,
            adapter_ids,
            rank_factors,
        )


register_autocast("lora_linear", _autocast_forward)
