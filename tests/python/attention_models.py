"""A small attention module with an exchangeable processor, as diffusers has them, and comparisons with PEFT's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft_models import config, counted, distance, lora_layers
from torch import Tensor, nn

import loraaccel
from reference.tolerance import unit_roundoff

TARGETS = ["to_q", "to_k", "to_v", "to_out"]
# Calls of a Block: one input, two, and no groups.
SELF = {"lora_qkv": 3, "lora_linear": 1}
CROSS = {"lora_qkv": 2, "lora_linear": 2}
APART = {"lora_linear": 4}


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (attn.heads, -1)).transpose(-3, -2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


def processor(attn: Any, x: Tensor, context: Tensor | None) -> Tensor:
    q = attn.to_q(x)
    context = x if context is None else context
    return attend(attn, q, attn.to_k(context), attn.to_v(context))


def crossed(attn: Any, x: Tensor, context: Any) -> Tensor:
    """v reads something else than q and k."""
    return attend(attn, attn.to_q(x), attn.to_k(x), attn.to_v(x * 2))


def own_context(attn: Any, x: Tensor, context: Any) -> Tensor:
    """k and v read a tensor of which the module's arguments say nothing."""
    other = x.flip(0)
    return attend(attn, attn.to_q(x), attn.to_k(other), attn.to_v(other))


def without_keys(attn: Any, x: Tensor, context: Any) -> Tensor:
    return attn.to_q(x) + attn.to_v(x)


class Attn(nn.Module):
    """width → width, k and v from a second input of `context` numbers where one is given."""

    def __init__(self, width: int = 16, context: int | None = None, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.to_k, self.to_v = (nn.Linear(context or width, width, bias=i == 1) for i in range(2))
        self.processor: Callable[..., Tensor] = processor

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return self.to_out(self.processor(self, hidden_states, encoder_hidden_states))


class Block(nn.Module):
    """What owns the attention module, as in a model."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.attn = Attn(*args)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attn(*args, **kwargs)


def block(
    *args: Any, dtype: torch.dtype = torch.float32, adapters: torch.dtype | None = None, **changes: Any
) -> Any:
    """A Block whose attention has adapters on all four projections; not patched."""
    import peft

    torch.manual_seed(0)
    changes.setdefault("target_modules", TARGETS)
    model = peft.inject_adapter_in_model(config(**changes), Block(*args).to(dtype))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" in name:
            p.data = p.data.to(adapters or dtype)
    return model


def patched(*args: Any, **options: Any) -> Any:
    model = block(*args, **options)
    assert loraaccel.patch(model, strict=True).num_fused == 4
    return model


def ungrouped() -> dict[str, int]:
    return dict(loraaccel.info()["ungrouped"])


def other_inputs() -> int:
    return ungrouped().get("other_input", 0)


def second_adapter(model: nn.Module, targets: list[str], **changes: Any) -> None:
    """Adapter "b" on some of the projections; not active."""
    import peft

    with warnings.catch_warnings():  # (that there is one already)
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config(target_modules=targets, **changes), model, "b")
    for layer in lora_layers(model).values():
        layer.set_adapter("default")


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(model: nn.Module, forward: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The output (or outputs), and the gradients of every floating input and of every parameter that requires one."""
    given = [t.detach().clone().requires_grad_() if _is_float(t) else t for t in inputs]
    y = forward(*given)
    outputs = y if isinstance(y, tuple) else (y,)
    leaves = {f"input {i}": t for i, t in enumerate(given) if _is_float(t)}
    leaves |= {n: p for n, p in model.named_parameters() if p.requires_grad}
    upstream = [tensor(*t.shape, dtype=t.dtype, seed=7 + i) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, upstream)  # (autograd.grad() is not for re-entrant checkpoints)
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    found |= {n: t.grad for n, t in leaves.items() if t.grad is not None}
    for t in leaves.values():
        t.grad = None
    return found


def _is_float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def doubled(inputs: Sequence[Any]) -> list[Any]:
    return [t.double() if _is_float(t) else t for t in inputs]


def check(
    model: nn.Module,
    inputs: Sequence[Any],
    counts: dict[str, int] | None = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """A patched model, outputs and every gradient, is about as far from itself in float64 as without loraaccel (the
    error of a tensor of a few numbers that a dozen layers went into is a matter of chance: hence the factor).

    forward(model, *inputs): how it is called. counts: of the calls, as `counted`; without it some must be lora_qkv.
    """
    call = forward or (lambda m, *given: m(*given))
    with loraaccel.disabled():
        own = gradients(model, lambda *given: call(model, *given), inputs)
        exact = copy.deepcopy(model).double()
        ref = gradients(exact, lambda *given: call(exact, *given), doubled(inputs))
    with counted() as calls:
        got = gradients(model, lambda *given: call(model, *given), inputs)
    if counts is None:
        assert calls.get("lora_qkv"), calls
    else:
        assert calls == counts
    assert got.keys() == own.keys() == ref.keys()
    assert len(got) > 2
    rounding = max(unit_roundoff(t.dtype) for t in (*model.parameters(), *own.values()))
    floor = 64 * 2.0**-53 if rounding == 2.0**-53 else 4 * rounding
    for name, g in got.items():
        assert (g.shape, g.dtype) == (own[name].shape, own[name].dtype), name
        theirs, ours = distance(own[name], ref[name]), distance(g, ref[name])
        assert ours <= 5 * theirs + floor, f"{name}: {ours:.2e} from float64, PEFT {theirs:.2e}"
