"""torch.compile of a patched model: one graph, the same numbers, and it follows the adapters' state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft_models import (
    Attention,
    Mlp,
    add_adapter,
    check_layer,
    distance,
    lora_host,
    lora_model,
    plain,
    results,
    the_layer,
)
from torch import Tensor, nn

import loraaccel

pytestmark = pytest.mark.registered

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def x_of(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_compiled(model: nn.Module, x: Tensor, backend: str = "aot_eager") -> None:
    """Compiled against eager, output and every gradient, with no graph break."""
    eager = results(model, model, x)
    compiled = results(model, torch.compile(model, fullgraph=True, backend=backend), x)
    for name, want in eager.items():
        assert compiled[name].dtype == want.dtype, name
        limit = 1e-5 if want.dtype == F32 else 2e-2
        assert distance(compiled[name], want) <= limit, name


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("make", [Mlp, Attention], ids=["mlp", "attention"])
def test_vt3_compiled_equals_eager(
    make: Callable[[], nn.Module], dtype: torch.dtype, fresh_dynamo: None
) -> None:
    width = 12 if make is Mlp else 16
    model = lora_model(make, dtype=dtype, bias="all")
    loraaccel.patch(model, strict=True)
    check_compiled(model, x_of(2, 5, width, dtype=dtype))


def test_vt3_compiled_graph_holds_the_operator(fresh_dynamo: None) -> None:
    """Inside a compiled graph nothing is counted, so the graph itself is looked at."""
    model = lora_model(Mlp)
    loraaccel.patch(model)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend=backend)(x_of(5, 12)), model(x_of(5, 12))
    )
    assert sum("loraaccel.lora_linear" in t for t in seen) == 2
    assert not any("linear" in t and "loraaccel" not in t for t in seen)


def test_compiled_with_inductor(fresh_dynamo: None) -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    check_compiled(model, x_of(5, 12), "inductor")


def test_vt4_compiled_follows_scale_adapter_and_switches(fresh_dynamo: None) -> None:
    model = lora_host()
    add_adapter(model, "b", r=7)
    loraaccel.patch(model)
    layer, x = the_layer(model), x_of(5, 24)
    compiled = torch.compile(model, backend="aot_eager")

    def agrees() -> Tensor:
        y = compiled(x)
        torch.testing.assert_close(y, plain(layer, x), rtol=1e-5, atol=1e-5)
        return y

    before = agrees()
    for change in (
        *(lambda s=s: layer.set_scale("default", s) for s in (0.5, 0, 1)),
        *(lambda a=a: layer.set_adapter(a) for a in ("b", ["b", "default"], "default")),
        layer.merge,
        layer.unmerge,
        *(lambda on=on: layer.enable_adapters(on) for on in (False, True)),
    ):
        change()
        agrees()
    torch.testing.assert_close(agrees(), before, rtol=1e-4, atol=1e-5)
    with loraaccel.disabled():
        assert torch.equal(compiled(x), plain(layer, x))
    loraaccel.unpatch(model)
    assert torch.equal(compiled(x), plain(layer, x))


def test_vt4_strengths_and_swaps_do_not_compile_again(fresh_dynamo: None) -> None:
    """Python numbers: once, at the first change, as PEFT itself; a hot-swappable model: never."""
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap
    from torch._dynamo.testing import CompileCounterWithBackend

    x = x_of(5, 24)
    model = lora_host()
    loraaccel.patch(model, strict=True)
    layer = the_layer(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for strength in (1.0, 0.5, 2.0, 0.25, 0.0, 3.0):
        layer.set_scale("default", strength)
        torch.testing.assert_close(compiled(x), plain(layer, x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
    model = lora_host(r=4)
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    loraaccel.patch(model, strict=True)
    layer = the_layer(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for strength in (1.0, 0.5, 0.0):
        layer.scaling["default"].fill_(strength)
        torch.testing.assert_close(compiled(x), plain(layer, x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # another adapter, of rank 6, padded with zeros
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a.copy_(torch.randn_like(a))[6:] = 0
        b.copy_(torch.randn_like(b))[:, 6:] = 0
        layer.scaling["default"].fill_(8 / 6)
    torch.testing.assert_close(compiled(x), plain(layer, x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    names = [str(n.target) for g in counter.graphs for n in g.graph.nodes]
    assert names.count("loraaccel.lora_linear.default") == 1


def test_compiled_dropout_draws_new_masks(fresh_dynamo: None) -> None:
    layer = the_layer(lora_host(32, 32, r=32, bias=False, lora_dropout=0.5))
    loraaccel.patch(layer)
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        nn.init.eye_(layer.lora_A["default"].weight)
        nn.init.eye_(layer.lora_B["default"].weight)
    layer.scaling["default"] = 1.0
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.ones(64, 32, requires_grad=True)
    one, two = compiled(x), compiled(x)
    assert set(one.unique().tolist()) == {0.0, 2.0}
    assert abs(int((one == two).sum()) - 1024) <= 91
    (g,) = torch.autograd.grad(two, x, torch.ones_like(two))
    assert torch.equal(g, two)  # the mask of its own forward pass


def test_compiled_hotswap_scaling(fresh_dynamo: None) -> None:
    layer = the_layer(lora_host())
    layer.scaling["default"] = torch.tensor(2.0)
    loraaccel.patch(layer)
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), x_of(5, 24)
    for scale in (2.0, 0.5):
        layer.scaling["default"].fill_(scale)
        torch.testing.assert_close(compiled(x), plain(layer, x))
        check_layer(layer, x)


def test_vt2_compiled_under_autocast(fresh_dynamo: None) -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    x = x_of(5, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=BF16):
        own, got = results(model, model, x), results(model, compiled, x)
    assert got["y"].dtype == BF16
    for name, want in own.items():
        assert got[name].dtype == want.dtype
        assert distance(got[name], want) <= 2e-2, name
    assert F.mse_loss(model(x), compiled(x)) < 1e-10
