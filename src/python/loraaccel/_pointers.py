"""The operators for torch 2.4 to 2.9, which lack the stable ABI of libloraaccel: the same code in `_core`, which reads
tensors by DLPack and links nothing of torch. Eager mode only; torch.compile and torch.export run plain torch instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from loraaccel import _core, _state

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)  # the order of host.cpp
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
_is_below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class Operator:
    """An operator of `_core`, called as torch.ops.loraaccel's of that name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._native = getattr(_core.ops, name)
        self.fake: Callable[..., Any] | None = None  # shapes alone
        # As torch.library.register_autograd takes them.
        self.formula: tuple[Callable[..., Any], Callable[..., Any] | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.formula is not None and torch.is_grad_enabled() and not _is_below_autograd(_AUTOGRAD):
            bound = self._signature().bind(*args, **kwargs)
            bound.apply_defaults()
            tensors = list(_tensors(bound.args))
            if any(t.requires_grad for t in tensors):
                return _Recorded.apply(self, bound.args, *tensors)
        return self.compute(*args, **kwargs)

    @functools.cache  # noqa: B019  (there are as many as operators, for good)
    def _signature(self) -> inspect.Signature:
        assert self.fake is not None
        return inspect.signature(self.fake)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Without gradients."""
        try:
            return self._native(*args, **kwargs)
        except (BufferError, RuntimeError, TypeError, ValueError):
            if self.fake is not None and any(_has_no_memory(t) for t in _tensors((*args, *kwargs.values()))):
                return self.fake(*args, **kwargs)
            raise


class _Recorded(torch.autograd.Function):
    """A call whose gradients the registered formula gives."""

    @staticmethod
    def forward(ctx: Any, op: Operator, args: tuple[Any, ...], *tensors: Tensor) -> Any:
        assert op.formula is not None
        output = op.compute(*args)
        backward, setup_context = op.formula
        ctx.backward, ctx.args = backward, [_like(value) for value in args]
        if setup_context is not None:
            setup_context(ctx, args, tuple(output) if isinstance(output, list) else output)
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        flat: list[Tensor | None] = []
        given = list(ctx.backward(ctx, *grads))
        for i, like in enumerate(ctx.args):
            grad = given[i] if i < len(given) else None
            if isinstance(like, list):
                flat += list(grad) if grad else [None] * len(like)
            elif like is not None:
                flat.append(grad)
        return (None, None, *flat)


def _like(value: Any) -> Any:
    """Where the tensors of an argument are: True for one, a list of as many for several, None for anything else."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, tuple)) and any(isinstance(t, Tensor) for t in value):
        return [True] * len(value)
    return None


_operators: dict[str, Operator] = {}


def operator(name: str) -> Operator:
    if name not in _operators:
        _operators[name] = Operator(name)
    return _operators[name]


def load() -> None:
    """Gives `_core` what it may call of torch."""
    _core.use_torch(
        tensor_type=Tensor,
        parameter_type=nn.Parameter,
        plain=_plain,
        to_dlpack=torch._C._to_dlpack,
        from_dlpack=torch._C._from_dlpack,
        empty_strided=_empty_strided,
        contiguous=torch.Tensor.contiguous,
        gemm=_gemm,
        num_threads=torch.get_num_threads,
    )
    _state.not_here = torch.compiler.is_compiling


def _plain(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"loraaccel: found a {type(value).__name__}, expected a tensor")
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"loraaccel: found a tensor of the class {type(value).__name__}, expected a plain one"
        )
    return value.resolve_neg()


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: int) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device="cpu")


def _gemm(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, alpha: float, beta: float) -> None:
    """c = alpha a b + beta c, or alpha a b + bias; below autograd and autocast, whatever surrounds the call."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        if bias is not None:
            torch.addmm(bias, a, b, alpha=alpha, out=c)
        elif beta == 0 and alpha == 1:
            torch.mm(a, b, out=c)
        else:
            torch.addmm(c, a, b, beta=beta, alpha=alpha, out=c)


def _tensors(args: Iterable[Any]) -> Iterable[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_no_memory(t: Tensor) -> bool:
    return t.is_meta or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__
