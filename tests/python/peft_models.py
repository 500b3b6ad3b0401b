"""Small models with LoRA layers, and PEFT's own results to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loraaccel
from reference.tolerance import assert_within, bound, unit_roundoff

LoraLinear = peft.tuners.lora.layer.Linear


# ---- models ----------------------------------------------------------------------------------------------------------


class Host(nn.Module):
    """One linear layer to adapt."""

    def __init__(self, k: int, n: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(k, n, bias=bias)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.proj(x, **kwargs)


class Mlp(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i == 3) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, max_position_embeddings=32, initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


TARGETS = {
    Host: ["proj"],
    Mlp: ["up", "down"],
    Attention: ["q", "k", "v", "o"],
    bert: ["query", "key", "value", "dense"],
    llama: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def config(**changes: Any) -> peft.LoraConfig:
    """Rank 4, scale 2 (alpha is not r, so that a forgotten scale shows), B not zero."""
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **changes})


def lora_model(
    make: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype | None = None,
    seed: int = 0,
    **changes: Any,
) -> peft.PeftModel:
    """make() with an adapter "default". adapter_dtype: None is dtype."""
    torch.manual_seed(seed)
    changes.setdefault("target_modules", TARGETS.get(make))
    model = peft.get_peft_model(make().to(dtype), config(**changes), autocast_adapter_dtype=False)
    for layer in lora_layers(model).values():
        layer.lora_A.to(adapter_dtype or dtype)
        layer.lora_B.to(adapter_dtype or dtype)
    return model


def lora_host(k: int = 24, n: int = 16, *, bias: bool = True, **options: Any) -> peft.PeftModel:
    """A model of one LoRA layer; `the_layer` of it is the layer."""
    return lora_model(lambda: Host(k, n, bias), target_modules=["proj"], **options)


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.layer.LoraLayer)}


def the_layer(model: nn.Module) -> nn.Module:
    (layer,) = lora_layers(model).values()
    return layer


def add_adapter(model: peft.PeftModel, name: str, **changes: Any) -> None:
    """Another adapter on the same layers, in their dtype."""
    model.add_adapter(name, config(target_modules=model.peft_config["default"].target_modules, **changes))
    for layer in lora_layers(model).values():
        dtype = layer.lora_A["default"].weight.dtype
        layer.lora_A[name].to(dtype)
        layer.lora_B[name].to(dtype)


def plain(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PEFT's own forward, also of a patched layer."""
    return own_class(layer).forward(layer, x, *args, **kwargs)


def own_class(layer: nn.Module) -> type:
    """The class that PEFT gave the layer: a patched one is of a subclass of the same name."""
    return next(
        c
        for c in type(layer).__mro__
        if c.__module__.startswith("peft.") and "_loraaccel_base" not in vars(c)
    )


# ---- what loraaccel counts -------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """After the block: how many calls were counted in it, by kind and by reason."""
    before, result = loraaccel.info()["calls"], {}
    yield result
    after = loraaccel.info()["calls"]
    for group in ("fused", "fallback"):
        for key, n in after[group].items():
            if n != before[group].get(key, 0):
                result[key] = n - before[group].get(key, 0)


class Varied(nn.Module):
    """Every kind of layer that an adapter goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 8), nn.Linear(8, 16)
        self.conv, self.down = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.embed(ids)))
        return self.down(torch.tanh(self.conv(h[:, None])).transpose(1, 2).flatten(2))


# ---- comparison ------------------------------------------------------------------------------------------------------


def results(
    model: nn.Module, forward: Callable[..., Any], x: Tensor, grad: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Output y, and the gradients of x and of every parameter that requires one, for the upstream gradient."""
    x = x.detach().requires_grad_()
    y = forward(x)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    leaves = {"x": x, **{n: p for n, p in model.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype), allow_unused=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def check_layer(layer: nn.Module, x: Tensor, counts: dict[str, int] | None = None) -> None:
    """A patched LoRA layer against PEFT's formula in float64 on the operands as stored, within `tolerance.bound`.

    Also: fused exactly once (or ``counts``), and shapes, dtypes and absent gradients as in PEFT's own forward.
    """
    with counted() as calls:
        got = results(layer, layer, x)
    assert calls == ({"lora_linear": 1} if counts is None else counts)
    own = results(layer, lambda x: plain(layer, x), x)
    grad = torch.randn(own["y"].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    grad = grad.to(own["y"].dtype).double()
    exact = copy.deepcopy(layer).double()
    sizes = copy.deepcopy(exact)  # the same sums over absolute values
    with torch.no_grad():
        for p in sizes.parameters():
            p.abs_()
    sizes.scaling = {name: abs(float(s)) for name, s in sizes.scaling.items()}
    ref = results(exact, lambda x: plain(exact, x), x.double(), grad)
    size = results(sizes, lambda x: plain(sizes, x), x.double().abs(), grad.abs())
    product = results(exact, exact.base_layer, x.double(), grad)
    assert got.keys() == own.keys() == ref.keys()
    k, n, rows = layer.in_features, layer.out_features, x.numel() // max(layer.in_features, 1)
    for name, g in got.items():
        if own[name] is None or g is None:
            assert own[name] is g, f"{name}: gradient {g}, PEFT's {own[name]}"
            continue
        assert (g.shape, g.dtype) == (own[name].shape, own[name].dtype), name
        lent = product[name] if name in ("y", "x") and g.dtype.itemsize == 2 else None
        length = k if name == "y" else max(k, n, rows)
        limit = bound(ref[name], size[name], length, g.dtype, backward=name != "y", lent=lent)
        assert_within(name, g, ref[name], limit)


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def check_model(
    model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], x: Tensor, fused: int
) -> None:
    """A whole model, patched, is about as far from itself in float64 as PEFT's own is; output and every gradient."""
    own = results(model, lambda x: forward(model, x), x)
    exact = copy.deepcopy(model).double()
    ref = results(exact, lambda x: forward(exact, x), x.double())
    loraaccel.patch(model, strict=True)
    with counted() as calls:
        got = results(model, lambda x: forward(model, x), x)
    assert calls == {"lora_linear": fused}
    assert got.keys() == own.keys() == ref.keys()
    assert len(got) > 2
    # Two roundings of the same sums differ by chance; a model that is float64 throughout is its own reference.
    floor = (
        64 * 2.0**-53
        if x.dtype == torch.float64
        else 4 * max(unit_roundoff(t.dtype) for t in (x, *model.parameters()))
    )
    for name, g in got.items():
        assert (g.shape, g.dtype) == (own[name].shape, own[name].dtype), name
        theirs, ours = distance(own[name], ref[name]), distance(g, ref[name])
        assert ref[name].norm() > 0, name
        assert ours <= 3 * theirs + floor, f"{name}: {ours:.2e} from float64, PEFT {theirs:.2e}"
