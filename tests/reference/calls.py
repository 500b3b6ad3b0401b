"""Operands of one call, running them, and checking what comes out against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference import lora_linear as formula
from reference.dropout import dropout_factor
from reference.tolerance import assert_within, bound

Results = dict[str, Tensor]  # "y", then the gradients as reference.lora_linear.backward names them

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(repr=False)
class Call:
    """x [..., K], weight [N, K], bias [N] or None, adapters, and the upstream gradient [..., N]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    grad: Tensor
    scalings: list[float]
    dropouts: list[float] = field(default_factory=list)
    seed: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.dropouts = self.dropouts or [0.0] * len(self.lora_a)

    def __repr__(self) -> str:
        """Shapes instead of numbers."""

        def text(t: Tensor | None) -> str:
            return (
                "None" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}/{t.stride()}"
            )

        lists = [", ".join(text(t) for t in ts) for ts in (self.lora_a, self.lora_b)]
        return (
            f"Call(x={text(self.x)}, weight={text(self.weight)}, bias={text(self.bias)}, lora_a=[{lists[0]}], "
            f"lora_b=[{lists[1]}], grad={text(self.grad)}, scalings={self.scalings}, dropouts={self.dropouts}, "
            f"seed={self.seed})"
        )

    @property
    def rows(self) -> int:
        return self.x.shape[:-1].numel()

    def adapters(self, convert: Callable[[Tensor], Tensor]) -> list[formula.Adapter]:
        factors = [
            dropout_factor(self.seed[0], self.seed[1] + i, self.rows, self.x.shape[-1], p) if p > 0 else None
            for i, p in enumerate(self.dropouts)
        ]
        return [
            formula.Adapter(convert(a), convert(b), s, f)
            for a, b, s, f in zip(self.lora_a, self.lora_b, self.scalings, factors, strict=True)
        ]

    def leaves(self) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor]]:
        """The operands with their strides, as leaves that require grad."""

        def leaf(t: Tensor) -> Tensor:
            return t.detach().requires_grad_()

        bias = None if self.bias is None else leaf(self.bias)
        return (
            leaf(self.x),
            leaf(self.weight),
            bias,
            [leaf(a) for a in self.lora_a],
            [leaf(b) for b in self.lora_b],
        )


def make_call(
    lead: tuple[int, ...],
    inputs: int,
    outputs: int,
    ranks: int | list[int],
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    *,
    bias: bool = True,
    dropouts: list[float] | None = None,
    update: float = 1.0,
    seed: int = 0,
) -> Call:
    """Random operands; dtypes are those of the layer and of the adapters. x W^T is about 1 in size, and each adapter's
    part about `update`, whatever the rank.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = [ranks] if isinstance(ranks, int) else ranks
    layer, adapter = dtypes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def scaled(*shape: int) -> Tensor:
        return normal(*shape) / max(inputs, 1) ** 0.5

    return Call(
        x=normal(*lead, inputs).to(layer),
        weight=scaled(outputs, inputs).to(layer),
        bias=normal(outputs).to(layer) if bias else None,
        lora_a=[scaled(r, inputs).to(adapter) for r in ranks],
        lora_b=[(update / r**0.5 * normal(outputs, r)).to(adapter) for r in ranks],
        grad=normal(*lead, outputs).to(layer),
        scalings=[1.7 - 2.9 * i for i in range(len(ranks))],  # no powers of two, both signs
        dropouts=list(dropouts or []),
        seed=(seed + 2**40 + 17, 3 * seed + 2**50 + 5),
    )


def operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    call: Call,
) -> Tensor:
    """The operator with the call's seed: the registered one, else the eager Function."""
    from loraaccel import _autograd, _operators

    seed = torch.tensor(call.seed) if any(call.dropouts) else None
    if _operators.REGISTERED:
        op = _operators.operator("lora_linear")
        return op(x, weight, bias, lora_a, lora_b, call.scalings, call.dropouts, seed)[0]
    pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
    lists = (lora_a, lora_b, call.scalings, call.dropouts, ())
    return _autograd.LoraLinearFunction.apply(x, weight, bias, lists, seed, None, *pairs)


def function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    call: Call,
) -> Tensor:
    """loraaccel.ops.lora_linear_adapters, the function behind lora_linear; its masks cannot be given."""
    from loraaccel.ops import lora_linear_adapters

    assert not any(call.dropouts)
    return lora_linear_adapters(x, weight, bias, lora_a, lora_b, call.scalings, call.dropouts)


def run(call: Call, how: Callable[..., Tensor] = operator) -> Results:
    """y and every gradient."""
    x, weight, bias, lora_a, lora_b = call.leaves()
    y = how(x, weight, bias, lora_a, lora_b, call)
    y.backward(call.grad)
    leaves = {"x": x, "weight": weight}
    if bias is not None:
        leaves["bias"] = bias
    for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
        leaves |= {f"lora_A.{i}": a, f"lora_B.{i}": b}
    results = {"y": y.detach()}
    for name, t in leaves.items():
        assert t.grad is not None, f"{name} has no gradient"
        assert t.grad.dtype == t.dtype
        results[name] = t.grad
    return results


def expected(call: Call, *, lent: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Reference and bound by name. lent: x W^T + bias and G W come from torch's GEMM, in the operands' type."""
    x, weight, bias, grad = (formula.double(t) for t in (call.x, call.weight, call.bias, call.grad))
    x, grad = x.reshape(call.rows, x.shape[-1]), grad.reshape(call.rows, grad.shape[-1])
    adapters = call.adapters(formula.double)
    refs = {"y": formula.forward(x, weight, bias, adapters)}
    refs |= formula.backward(grad, x, weight, adapters)

    def size(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.abs()

    sizes = [ad._replace(a=ad.a.abs(), b=ad.b.abs(), scaling=abs(ad.scaling)) for ad in adapters]
    terms = {"y": formula.forward(size(x), size(weight), size(bias), sizes)}
    terms |= formula.backward(size(grad), size(x), size(weight), sizes)

    (m, k), n = x.shape, weight.shape[0]
    rank = sum(ad.a.shape[0] for ad in adapters)
    lengths = {"y": max(k, rank), "x": max(n, rank), "weight": m, "bias": m}
    for i in range(len(adapters)):
        lengths |= {f"lora_A.{i}": max(m, n), f"lora_B.{i}": max(m, k)}
    dtypes = dict.fromkeys(refs, call.x.dtype)
    for i, a in enumerate(call.lora_a):
        dtypes |= {f"lora_A.{i}": a.dtype, f"lora_B.{i}": a.dtype}
    lent = lent and call.x.dtype in SIXTEEN_BIT
    handed_over = {"y": formula.forward(x, weight, bias, []), "x": grad @ weight} if lent else {}

    result = {}
    for name, ref in refs.items():
        limit = bound(
            ref, terms[name], lengths[name], dtypes[name], backward=name != "y", lent=handed_over.get(name)
        )
        shape = {"y": call.grad.shape, "x": call.x.shape}.get(name, ref.shape)
        result[name] = ref.reshape(shape), limit.reshape(shape)
    if call.bias is None:
        del result["bias"]
    return result


def check(call: Call, results: Results, *, lent: bool = True) -> None:
    """Every result within its bound, and none missing."""
    wanted = expected(call, lent=lent)
    assert results.keys() == wanted.keys()
    assert results["y"].dtype == call.x.dtype
    for name, (ref, limit) in wanted.items():
        assert_within(name, results[name], ref, limit)
