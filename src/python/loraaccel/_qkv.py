"""Gradients of lora_qkv: the eager autograd.Function and the same formulas for torch.compile, as in `_autograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._autograd import _NO_AUTOCAST, _below_autograd
from loraaccel._layers import says_layer
from loraaccel._operators import operator, register_autocast, register_autograd, register_fake
from loraaccel._saved import Shape, keep_or_shape, kept_or_shape

forward_op = operator("lora_qkv")
backward_op = operator("lora_qkv_backward")


class GroupCall(NamedTuple):
    """One call of several layers: everything that is not a tensor."""

    has_bias: list[bool]  # of each layer
    adapters: list[int]  # number of adapters of each layer
    scalings: list[float]  # of each adapter
    dropouts: list[float]  # in force, of each adapter
    cast: torch.dtype | None  # type that autocast gives x, weights and biases
    rank_dropouts: Sequence[float] = ()  # hidden_dropout and rank_dropout of each adapter, or none at all
    rank_factors: Tensor | None = None  # [M, sum of R], factors that the caller drew

    @property
    def masks(self) -> tuple[Any, ...]:
        """The operator's arguments, where they are not its defaults."""
        if self.rank_factors is not None:
            return self.rank_dropouts, self.rank_factors
        return (self.rank_dropouts,) if self.rank_dropouts else ()

    @property
    def dropped(self) -> bool:
        return any(self.dropouts) or any(self.rank_dropouts)

    def cut(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Weights, biases, and A and B of each adapter, from the flat list of a call."""
        n, biased = len(self.has_bias), sum(self.has_bias)
        return tensors[:n], tensors[n : n + biased], tensors[n + biased :]

    def mask(self, x: bool, needs: Sequence[bool]) -> list[bool]:
        """The operators' output_mask: x, then weight, bias, A and B ... of each layer."""
        weights, biases, adapters = self.cut(needs)
        bias, mask, at = iter(biases), [x], 0
        for w, biased, count in zip(weights, self.has_bias, self.adapters, strict=True):
            mask += [w, biased and next(bias), *adapters[at : at + 2 * count]]
            at += 2 * count
        return mask

    def mask_of_used(self, x: bool, needs: Sequence[bool], grads: Sequence[Tensor | None]) -> list[bool]:
        """mask() without the layers whose output has no gradient: as where each layer is a node of its own, theirs are
        None, and an optimizer leaves them alone."""
        mask, at = self.mask(x, needs), 1
        for grad, count in zip(grads, self.adapters, strict=True):
            end = at + 2 + 2 * count
            if grad is None:
                mask[at:end] = [False] * (end - at)
            at = end
        return mask

    def flat(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients in the order of the mask, None where not wanted: that of x, and those of the flat list."""
        x, *rest = grads
        following = iter(rest)
        weights, biases, adapters = [], [], []
        for biased, count in zip(self.has_bias, self.adapters, strict=True):
            weights.append(next(following))
            bias = next(following)
            if biased:
                biases.append(bias)
            adapters += [next(following) for _ in range(2 * count)]
        return x, [*weights, *biases, *adapters]

    def to_cast(self, x: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """x and the flat list with weights and biases in autocast's type."""
        if self.cast is None:
            return x, list(tensors)
        weights, biases, adapters = self.cut(tensors)
        return x.to(self.cast), [*(t.to(self.cast) for t in (*weights, *biases)), *adapters]


def split(y: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of the projections: views of the packed result."""
    return y.split([w.shape[0] for w in weights], dim=-1)


def split_apart(y: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same as tensors of their own to autograd, each with a version counter: they share no number, only the
    buffer, and torch refuses changes in place of views that one Function returned."""
    return tuple(part.data for part in split(y, weights))


def run_below(op: Any, call: GroupCall, x: Tensor, tensors: Sequence[Tensor], *rest: Any) -> Any:
    """A forward operator over several layers; nothing is recorded for a backward pass. Types are as after to_cast()."""
    weights, biases, adapters = call.cut(tensors)
    with _below_autograd(), torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        return op(
            x, list(weights), list(biases), call.has_bias, list(adapters[0::2]), list(adapters[1::2]),
            call.adapters, call.scalings, call.dropouts, *rest,
        )  # fmt: skip


def keep_operands(
    call: GroupCall, x: Tensor, tensors: Sequence[Tensor], keep_x: bool, keep: Sequence[bool]
) -> tuple[list[Tensor | None], list[Shape | None]]:
    """keep_or_shape() of x, weights and adapters (biases are not read)."""
    weights, _, adapters = call.cut(tensors)
    return keep_or_shape((x, *weights, *adapters), (keep_x, *keep))


def kept_operands(
    call: GroupCall, saved: Sequence[Tensor], likes: Sequence[Shape | None]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x, weights and adapters."""
    operands = kept_or_shape(saved, likes)
    n = len(call.has_bias)
    return operands[0], operands[1 : 1 + n], operands[1 + n :]


def original_types(
    call: GroupCall, x: Tensor | None, grads: list[Tensor | None], dtypes: Sequence[torch.dtype] | None
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients in the types that x, weights and biases had before autocast."""
    if dtypes is None:
        return x, grads
    typed = [None if g is None else g.to(t) for g, t in zip((x, *grads), dtypes, strict=False)]
    return typed[0], [*typed[1:], *grads[len(typed) - 1 :]]


def types_before(call: GroupCall, x: Tensor, tensors: Sequence[Tensor]) -> list[torch.dtype] | None:
    if call.cast is None:
        return None
    weights, biases, _ = call.cut(tensors)
    return [t.dtype for t in (x, *weights, *biases)]


@says_layer
class LoraQkvFunction(torch.autograd.Function):
    """`tensors`: the weights, the biases that there are, and A and B of each adapter."""

    @staticmethod
    def forward(
        ctx: Any, call: GroupCall, x: Tensor, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        y = _forward(ctx, call, x, seed, tensors)
        return split_apart(y, tensors[: len(call.has_bias)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _group_backward(ctx, grads)


@says_layer
class LoraQkvPackedFunction(torch.autograd.Function):
    """The same with the outputs side by side in one tensor."""

    @staticmethod
    def forward(ctx: Any, call: GroupCall, x: Tensor, seed: Tensor | None, *tensors: Tensor) -> Tensor:
        return _forward(ctx, call, x, seed, tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return _group_backward(ctx, grad.split(ctx.sizes, dim=-1))


def _forward(ctx: Any, call: GroupCall, x: Tensor, seed: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    """y of all layers; keeps what the backward pass reads."""
    ctx.set_materialize_grads(False)
    ctx.call = call
    ctx.dtypes = types_before(call, x, tensors)
    x, used = call.to_cast(x, tensors)
    y, hidden = run_below(forward_op, call, x, used, seed, *call.masks)
    need_x, _, *needs = ctx.needs_input_grad[1:]
    need_w, _, need_ab = call.cut(needs)
    keep = [need_x] * len(need_w) + [need_x or i % 2 == 1 for i in range(len(need_ab))]
    keep_x = any(need_w) or any(need_ab[0::2])
    saved, ctx.likes = keep_operands(call, x, used, keep_x, keep)
    ctx.save_for_backward(hidden, seed, *saved)
    ctx.sizes = [w.shape[0] for w in call.cut(used)[0]]
    return y


def _group_backward(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    call: GroupCall = ctx.call
    hidden, seed, *saved = ctx.saved_tensors
    x, weights, adapters = kept_operands(call, saved, ctx.likes)
    need_x, _, *needs = ctx.needs_input_grad[1:]
    mask = call.mask_of_used(need_x, needs, grads)
    present = [g for g in grads if g is not None]
    refuse_batched("lora_qkv", present)
    with _below_autograd():
        computed = backward_op(
            present, [g is not None for g in grads], x, weights, adapters[0::2], adapters[1::2],
            call.adapters, hidden, call.scalings, call.dropouts, seed, mask, *call.masks,
        )  # fmt: skip
    return (None, *finish_backward(ctx, call, computed, mask, (*present, x, *weights, *adapters)))


def refuse_batched(op: str, grads: Sequence[Tensor]) -> None:
    if any(_autograd._is_batched(g) for g in grads):
        raise RuntimeError(
            f"loraaccel::{op}: batched gradients (is_grads_batched, vectorized jacobians) are not supported. "
            "Compute them inside loraaccel.disabled()."
        )


def finish_backward(
    ctx: Any, call: GroupCall, computed: Sequence[Tensor], mask: list[bool], sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, of the seed (none), and of the flat list, from what the operator returned for the mask."""
    wanted = iter(computed)
    in_order: Sequence[Tensor | None] = [next(wanted) if m else None for m in mask]
    x, grads = call.flat(_autograd._refuse_double_backward(in_order, sources))
    x, grads = original_types(call, x, grads, ctx.dtypes)
    return (x, None, *grads)


# ---- the same for the dispatcher ----


@register_fake("lora_qkv")
def _forward_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    adapters: list[int],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    rank_dropouts: Sequence[float] = (),
    rank_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    op = "lora_qkv"
    _autograd._check_devices(op, x, seed, weights=weights, biases=biases, lora_A=lora_A, lora_B=lora_B)
    torch._check(x.dim() >= 1, lambda: f"loraaccel::{op}: x has no dimensions, expected [..., K]")
    k = x.shape[-1]
    for w in weights:
        torch._check(
            w.dim() == 2 and w.shape[1] == k,
            lambda w=w: _autograd._wrong(op, "weight", w, f"[N, {k}] to go with x"),
        )
    for a in lora_A:
        torch._check(
            a.dim() == 2 and a.shape[1] == k, lambda a=a: _autograd._wrong(op, "lora_A", a, f"[R, {k}]")
        )
    y = x.new_empty((*x.shape[:-1], sum(w.shape[0] for w in weights)))
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, x.new_empty((math.prod(x.shape[:-1]), sum(a.shape[0] for a in lora_A)), dtype=sums)


@register_fake("lora_qkv_backward")
def _backward_fake(
    grads: list[Tensor],
    has_grad: list[bool],
    x: Tensor,
    weights: list[Tensor],
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    adapters: list[int],
    hidden: Tensor,
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    output_mask: list[bool],
    rank_dropouts: Sequence[float] = (),
    rank_factors: Tensor | None = None,
) -> list[Tensor]:
    _autograd._check_devices(
        "lora_qkv_backward", x, seed, grads=grads, weights=weights, lora_A=lora_A, lora_B=lora_B
    )
    return fake_gradients(x, weights, lora_A, lora_B, adapters, output_mask)


def fake_gradients(
    x: Tensor,
    weights: list[Tensor],
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    adapters: list[int],
    output_mask: list[bool],
) -> list[Tensor]:
    """Empty gradients of a group of layers, those that the mask asks for."""
    dense = torch.contiguous_format
    mask = iter(output_mask)
    outputs = [torch.empty_like(x, memory_format=dense)] if next(mask) else []
    pairs = iter(zip(lora_a, lora_b, strict=True))
    for w, count in zip(weights, adapters, strict=True):
        if next(mask):
            outputs.append(torch.empty_like(w, memory_format=dense))
        if next(mask):
            outputs.append(w.new_empty(w.shape[0]))
        for _ in range(count):
            outputs += [torch.empty_like(t, memory_format=dense) for t in next(pairs) if next(mask)]
    return outputs


def dispatcher_needs(call: GroupCall, inputs: Sequence[Any]) -> list[bool]:
    """output_mask for a call that came through the dispatcher: x, weights, biases, has_bias, lora_A, lora_B, ..."""
    x, weights, biases, _, lora_a, lora_b = inputs[:6]
    pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
    return call.mask(x.requires_grad, [t.requires_grad for t in (*weights, *biases, *pairs)])


def dispatcher_grads(
    call: GroupCall, in_order: Sequence[Tensor | None] | None, numbers: int
) -> tuple[Any, ...]:
    """Gradients as the dispatcher's formula returns them: x, weights, biases, has_bias, lora_A, lora_B, adapters,
    scalings, dropouts, and `numbers` arguments more."""
    n, biased, m = len(call.has_bias), sum(call.has_bias), sum(call.adapters)
    if in_order is None:
        in_order = [None] * (1 + 2 * n + 2 * m)
    x, grads = call.flat(in_order)
    ab = grads[n + biased :]
    return (x, grads[:n], grads[n : n + biased], None, ab[0::2], ab[1::2], *[None] * (3 + numbers))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, _, has_bias, lora_a, lora_b, adapters, scalings, dropouts, seed, *masks = inputs
    ctx.rest = _autograd.no_gradients(masks)
    rank_dropouts, rank_factors = masks
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], seed, rank_factors, *weights, *lora_a, *lora_b)
    ctx.call = GroupCall(
        list(has_bias), list(adapters), list(scalings), list(dropouts), None, list(rank_dropouts)
    )
    ctx.wanted = dispatcher_needs(ctx.call, inputs)


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: Tensor | None) -> Any:
    call: GroupCall = ctx.call
    n, m = len(call.has_bias), sum(call.adapters)
    x, hidden, seed, rank_factors, *rest = ctx.saved_tensors
    call = call._replace(rank_factors=rank_factors)
    weights, lora_a, lora_b = rest[:n], rest[n : n + m], rest[n + m :]
    if grad is None:
        return (*dispatcher_grads(call, None, 1), *ctx.rest)
    computed = iter(
        backward_op(
            list(split(grad, weights)), [True] * n, x, weights, lora_a, lora_b, call.adapters, hidden,
            call.scalings, call.dropouts, seed, ctx.wanted, *call.masks,
        )
    )  # fmt: skip
    grads = dispatcher_grads(call, [next(computed) if w else None for w in ctx.wanted], 1)
    return (*grads, *ctx.rest)


register_autograd("lora_qkv", _backward, setup_context=_setup_context)
register_autograd("lora_qkv_backward", _autograd._backward_of_backward)


def _autocast_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    cast = _autograd.autocast_dtype(x, weights[0]) if weights else None
    with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        if cast is not None:
            x, weights, biases = x.to(cast), [w.to(cast) for w in weights], [b.to(cast) for b in biases]
        return forward_op(x, weights, biases, *rest)


register_autocast("lora_qkv", _autocast_forward)
