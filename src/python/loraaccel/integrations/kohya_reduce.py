"""kohya's mean of the gradients over several processes: a few large reductions instead of one for each parameter.

The host asks `accelerator.reduce(grad, reduction="mean")` for each parameter with a gradient, and puts the result in
the gradient's place. Here gradients of one type lie one after the other in a buffer, in the parameters' order, and the
same function reduces that; the new gradients are views of it. Between two processes every number is the same sum of
two, so the results are the host's bits; between more the order of a sum may depend on its place in a buffer.

Which gradients there are must not differ between the processes, as in the host. For the same reason an error here is
never answered by doing it the host's way: the others would wait for something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loraaccel.integrations.kohya_work import (
    Compared,
    Plan,
    Task,
    relative_error,
    uses_only,
    why_not_tensors,
)

_METHOD = "all_reduce_network"
_NAMES = frozenset(["parameters", "grad", "reduce"])
BUFFER_BYTES = 64 << 20  # of a buffer; what is reduced needs as much again, twice
# verify between more than two processes: sums in another order.
_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _plan(trainer: Any, args: tuple[Any, ...]) -> Plan | str:
    accelerator, network = args
    if accelerator.num_processes == 1:
        return ""
    parameters = [p for p in network.parameters() if p.grad is not None]
    for parameter in parameters:
        reason = why_not_tensors(parameter.grad)
        if reason:
            return reason
        if parameter.grad.dtype not in _BOUND:
            return "dtype"
    if not parameters:
        return ""
    return Plan(
        functools.partial(_reduce, accelerator, parameters),
        functools.partial(_compare, trainer, accelerator, parameters),
    )


def _reduce(accelerator: Any, parameters: list[Any]) -> None:
    for some in buffers(parameters):
        grads = [p.grad for p in some]
        flat = accelerator.reduce(torch.cat([_in_memory(g) for g in grads]), reduction="mean")
        for p, g, part in zip(some, grads, flat.split([g.numel() for g in grads]), strict=True):
            p.grad = part.as_strided(g.size(), _strides(g), part.storage_offset())


def buffers(parameters: list[Any]) -> Iterator[list[Any]]:
    """The parameters by device and type of their gradients, in their order, each list of at most `BUFFER_BYTES`."""
    kinds: dict[Any, list[Any]] = {}
    for p in parameters:
        kinds.setdefault((p.grad.device, p.grad.dtype), []).append(p)
    for same in kinds.values():
        some: list[Any] = []
        size = 0
        for p in same:
            size += p.grad.nbytes
            if some and size > BUFFER_BYTES:
                yield some
                some, size = [], p.grad.nbytes
            some.append(p)
        yield some


def _strides(grad: Tensor) -> tuple[int, ...]:
    """Of the copy that the host makes of it."""
    return grad.stride() if grad.is_contiguous() else torch.empty_like(grad, device="meta").stride()


def _in_memory(grad: Tensor) -> Tensor:
    """Its numbers, one after the other, as they lie in such a copy."""
    if grad.is_contiguous():
        return grad.reshape(-1)
    copy = grad.clone()
    return copy.as_strided((copy.numel(),), (1,))


def _compare(trainer: Any, accelerator: Any, parameters: list[Any], host: Callable[..., Any]) -> Compared:
    copies = [SimpleNamespace(grad=p.grad) for p in parameters]
    host(trainer, accelerator, SimpleNamespace(parameters=lambda: copies))
    exact = accelerator.num_processes == 2

    def error(result: None) -> float:
        pairs = [(p.grad, c.grad) for p, c in zip(parameters, copies, strict=True)]
        return max(relative_error(*pair) if pair[0].stride() == pair[1].stride() else 1.0 for pair in pairs)

    def adopt() -> None:
        for p, c in zip(parameters, copies, strict=True):
            p.grad = c.grad

    return Compared(error, 0.0 if exact else max(_BOUND[p.grad.dtype] for p in parameters), adopt)


@functools.lru_cache(maxsize=256)
def follows(cls: Any) -> bool:
    """True where the trainer's method puts accelerator.reduce(grad, reduction="mean") in the place of every gradient
    that there is, in the parameters' order, and does no more."""
    if not uses_only(cls, _METHOD, _NAMES):
        return False
    grads = [torch.full((n,), float(n)) if n else None for n in (1, 2, 0, 3)]
    parameters = [SimpleNamespace(grad=g) for g in grads]
    asked: list[Any] = []

    def reduce(tensor: Tensor, reduction: str = "", scale: float = 1.0) -> Tensor:
        asked.append((tensor, reduction, scale))
        return tensor + 1

    try:
        result = getattr(cls, _METHOD)(
            object(), SimpleNamespace(reduce=reduce), SimpleNamespace(parameters=lambda: parameters)
        )
    except Exception:  # noqa: BLE001  whatever it needs, we do not know it
        return False
    wanted = [g for g in grads if g is not None]
    return (
        result is None
        and len(asked) == len(wanted)
        and all(
            a[0] is g and a[1:] == ("mean", 1.0) and torch.equal(g, torch.full_like(g, g.numel()))
            for a, g in zip(asked, wanted, strict=True)
        )
        and all(
            p.grad is None if g is None else torch.equal(p.grad, g + 1)
            for p, g in zip(parameters, grads, strict=True)
        )
    )


TASK = Task("mean of gradients", _METHOD, follows, _plan, ("accelerator", "network"))
