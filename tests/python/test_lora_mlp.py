"""lora_mlp against the layers one after the other in float64: values, gradients, what is kept, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft_models import distance
from torch import Tensor

from loraaccel.ops import LoraWeights, lora_mlp
from reference.operators import OPS
from reference.tolerance import unit_roundoff

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
}
Layers = dict[str, LoraWeights | None]  # gate, up, down


def make_layers(
    k: int, ffn: int, n: int, dtype: torch.dtype = F32, *, gated: bool = True, rank: int = 4, seed: int = 0
) -> Layers:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    def layer(inputs: int, outputs: int, scaling: float) -> LoraWeights:
        down = inputs**-0.5
        a, b = normal(rank, inputs, scale=down), normal(outputs, rank, scale=rank**-0.5)
        return LoraWeights(normal(outputs, inputs, scale=down), normal(outputs), a, b, scaling)

    gate, up = layer(k, ffn, 1.7), layer(k, ffn, -0.9)
    return {"gate": gate if gated else None, "up": up, "down": layer(ffn, n, 0.6)}


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def composed(x: Tensor, gate: Any, up: Any, down: Any, activation: str) -> Tensor:
    """The block as PEFT runs it, in the operands' types."""

    def layer(t: Tensor, w: LoraWeights) -> Tensor:
        y = F.linear(t, w.weight, w.bias)
        return (
            y
            if w.lora_A is None
            else (y + F.linear(F.linear(t.to(w.lora_A.dtype), w.lora_A), w.lora_B) * w.scaling).to(y.dtype)
        )

    act = ACTIVATIONS[activation]
    if gate is None:
        return layer(act(layer(x, up)), down)
    return layer(act(layer(x, gate)) * layer(x, up), down)


def leaves_of(layers: Layers, dtype: torch.dtype | None = None) -> tuple[Layers, dict[str, Tensor]]:
    """The layers with their tensors as leaves, in `dtype` where given, and the leaves by name."""
    leaves: dict[str, Tensor] = {}
    made: Layers = {}
    for name, w in layers.items():
        if w is None:
            made[name] = None
            continue
        tensors = {}
        for part in ("weight", "bias", "lora_A", "lora_B"):
            t = getattr(w, part)
            if t is not None:
                tensors[part] = t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
                leaves[f"{name}.{part}"] = tensors[part]
        made[name] = w._replace(**tensors)
    return made, leaves


def results(
    how: Callable[..., Tensor], x: Tensor, layers: Layers, activation: str, grad: Tensor,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """y and every gradient."""
    layers, leaves = leaves_of(layers, dtype)
    leaves["x"] = x = x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
    y = how(x, **layers, activation=activation)
    y.backward(grad.to(y.dtype))
    found = {"y": y.detach()}
    for name, t in leaves.items():
        assert t.grad is not None, f"{name} has no gradient"
        assert t.grad.dtype == t.dtype
        found[name] = t.grad
    return found


def relative(got: Tensor, want: Tensor) -> float:
    """Root mean square error, relative to the root mean square of the wanted numbers."""
    error = (got.detach().double() - want.detach().double()).norm()
    return float(error / want.detach().double().norm().clamp_min(1e-30))


# Of the relative root mean square error: three layers, each result rounded a few times.
LIMIT = {F64: 1e-14, F32: 2e-6, BF16: 2e-2, F16: 3e-3}


def check(x: Tensor, layers: Layers, activation: str, grad: Tensor) -> dict[str, Tensor]:
    ours = results(lora_mlp, x, layers, activation, grad)
    exact = results(composed, x, layers, activation, grad, F64)
    assert ours.keys() == exact.keys()
    assert ours["y"].dtype == x.dtype
    for name, want in exact.items():
        assert ours[name].shape == want.shape, name
        assert relative(ours[name], want) <= LIMIT[x.dtype], name
    return ours


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_values_and_gradients(dtype: torch.dtype, gated: bool, activation: str) -> None:
    for m, k, ffn, n in [(0, 8, 6, 4), (1, 5, 3, 1), (3, 17, 33, 9), (17, 65, 40, 31), (70, 40, 130, 50)]:
        layers = make_layers(k, ffn, n, dtype, gated=gated)
        check(randn(m, k, dtype=dtype), layers, activation, randn(m, n, dtype=dtype, seed=2))


def no_larger(ours: Tensor, theirs: Tensor) -> bool:
    """The mean logarithm of the ratio, over the inputs, is at most four of its standard errors above 0."""
    ratio = (ours / theirs).log()
    return bool(ratio.mean() <= 4 * ratio.std() / len(ratio) ** 0.5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(64, 96, 160, 80), (8, 256, 320, 256)], ids=str)
def test_error_is_no_larger_than_eagers(
    shape: tuple[int, int, int, int], activation: str, dtype: torch.dtype
) -> None:
    """Root mean square and largest error. The spread of their ratio is measured: the largest of gradients that share a
    hidden unit varies by a third from input to input."""
    m, k, ffn, n = shape
    errors: dict[str, list[Tensor]] = {}
    for seed in range(20):
        layers = make_layers(k, ffn, n, dtype, seed=100 + seed)
        x, grad = randn(m, k, dtype=dtype, seed=200 + seed), randn(m, n, dtype=dtype, seed=300 + seed)
        ours, theirs = (results(how, x, layers, activation, grad) for how in (lora_mlp, composed))
        for name, want in results(composed, x, layers, activation, grad, F64).items():
            both = [found[name].double() - want for found in (ours, theirs)]
            errors.setdefault(name, []).append(
                torch.stack([t for e in both for t in (e.norm(), e.abs().max())])
            )
    for name, of_inputs in errors.items():
        ours_rms, ours_largest, theirs_rms, theirs_largest = torch.stack(of_inputs).T
        assert no_larger(ours_rms, theirs_rms), name
        assert no_larger(ours_largest, theirs_largest), name


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("missing", ["gate", "up", "down", "gate up down"])
@pytest.mark.parametrize("what", ["bias", "adapter", "both"])
def test_layers_may_lack_bias_and_adapter(what: str, missing: str, dtype: torch.dtype) -> None:
    layers = make_layers(24, 40, 20, dtype)
    parts = {"bias": ["bias"], "adapter": ["lora_A", "lora_B"], "both": ["bias", "lora_A", "lora_B"]}[what]
    for name in missing.split():
        layers[name] = layers[name]._replace(**dict.fromkeys(parts))
    check(randn(9, 24, dtype=dtype), layers, "silu", randn(9, 20, dtype=dtype))


@pytest.mark.parametrize("types", [(BF16, F32), (F32, BF16)], ids=str)
def test_adapters_of_another_type(types: tuple[torch.dtype, torch.dtype]) -> None:
    layer, adapter = types
    layers = make_layers(24, 40, 20, layer)
    layers = {
        name: w._replace(lora_A=w.lora_A.to(adapter), lora_B=w.lora_B.to(adapter))
        for name, w in layers.items()
    }
    x, grad = randn(9, 24, dtype=layer), randn(9, 20, dtype=layer)
    ours, exact = results(lora_mlp, x, layers, "silu", grad), results(composed, x, layers, "silu", grad, F64)
    for name, want in exact.items():
        assert relative(ours[name], want) <= LIMIT[BF16], name
    if layer == F32:  # only what is stored in 16 bits has their error
        assert relative(ours["y"], exact["y"]) <= LIMIT[F32]


@pytest.mark.parametrize("lead", [(2, 5), (3, 1, 4), ()], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    """The same numbers as those of the rows in two dimensions."""
    layers = make_layers(24, 40, 20)
    x, grad = randn(*lead, 24), randn(*lead, 20)
    ours = check(x, layers, "silu", grad)
    flat = results(lora_mlp, x.reshape(-1, 24), layers, "silu", grad.reshape(-1, 20))
    assert ours["y"].shape == (*lead, 20)
    for name, t in ours.items():
        assert torch.equal(t.reshape(flat[name].shape), flat[name]), name


def test_a_tuple_is_a_layer() -> None:
    layers = make_layers(24, 40, 20)
    want = lora_mlp(randn(9, 24), **layers)
    assert torch.equal(lora_mlp(randn(9, 24), *(tuple(w) for w in layers.values())), want)
    assert torch.equal(lora_mlp(randn(9, 24), **layers, activation="silu"), want)  # the default


def test_by_hand() -> None:
    """Two hidden units, the gate of the second exactly 0; every number is exact."""
    t = torch.tensor
    gate = LoraWeights(t([[1.0, 0.0], [2.0, -1.0]]), None, t([[1.0, 1.0]]), t([[1.0], [0.0]]), 0.5)
    up = LoraWeights(t([[2.0, 0.0], [1.0, 1.0]]), t([0.5, 0.0]))
    down = LoraWeights(t([[2.0, 5.0]]), None, t([[4.0, 1.0]]), t([[2.0]]), -1.0)
    # gate [1 + 0.5 * 3, 0], up [2.5, 3], t [6.25, 0], h of down 25: y = 12.5 - 50; dt = 2 [2, 5] - 4 [4, 1] = [-12, 6].
    layers: Layers = {"gate": gate, "up": up, "down": down}
    found = results(lora_mlp, t([[1.0, 2.0]]), layers, "relu", t([[2.0]]))
    wanted = {
        "y": [-37.5], "x": [-105.0, -15.0],
        "gate.weight": [-30.0, -60.0, 0.0, 0.0], "gate.lora_A": [-15.0, -30.0], "gate.lora_B": [-45.0, 0.0],
        "up.weight": [-30.0, -60.0, 0.0, 0.0], "up.bias": [-30.0, 0.0],
        "down.weight": [12.5, 0.0], "down.lora_A": [-25.0, 0.0], "down.lora_B": [-50.0],
    }  # fmt: skip
    assert {name: v.flatten().tolist() for name, v in found.items()} == wanted


# ---- autograd and compile --------------------------------------------------------------------------------------------


def saved_by(call: Callable[[], Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by address: views of one buffer count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("frozen", [True, False], ids=["adapters", "everything"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_only_x_gate_and_up_are_kept(dtype: torch.dtype, frozen: bool, gated: bool) -> None:
    """Beside the operands: M * ffn numbers twice (once without a gate), where eager keeps more, and R numbers a row
    for each adapter. Nothing of the size of t = act(gate) * up is a third."""
    m, k, ffn, n, rank = 64, 24, 200, 20, 4
    made, leaves = leaves_of(make_layers(k, ffn, n, dtype, gated=gated, rank=rank))
    if frozen:
        for name, t in leaves.items():
            t.requires_grad_("lora" in name)
    x = randn(m, k, dtype=dtype).requires_grad_()
    operands = storages([x, *leaves.values()])
    kept = storages(saved_by(lambda: lora_mlp(x, **made)))
    assert x.untyped_storage().data_ptr() in kept
    inner = 2 if gated else 1
    hidden = (inner + 1) * m * rank * 4  # float32
    beside = [size for at, size in kept.items() if at not in operands]
    assert sum(beside) == inner * m * ffn * dtype.itemsize + hidden
    eager = storages(saved_by(lambda: composed(x, **made, activation="silu")))
    of_ffn = [size for at, size in eager.items() if at not in operands and size == m * ffn * dtype.itemsize]
    assert len(of_ffn) > inner  # the measurement sees what eager keeps


def test_x_is_not_kept_where_nothing_reads_it() -> None:
    """Only down's adapter is trained: neither x nor the other layers' operands are needed."""
    made, leaves = leaves_of(make_layers(24, 40, 20))
    for name, t in leaves.items():
        t.requires_grad_(name.startswith("down.lora"))
    x = randn(9, 24)
    kept = storages(saved_by(lambda: lora_mlp(x, **made)))
    assert x.untyped_storage().data_ptr() not in kept


@pytest.mark.parametrize(
    "wanted", ["x", "gate.weight", "gate.bias", "gate.lora_B", "up.lora_A", "down.weight", "down.lora_A"]
)
def test_one_gradient_alone_is_the_same_number(wanted: str) -> None:
    layers = make_layers(24, 40, 20)
    x, grad = randn(9, 24), randn(9, 20)
    whole = results(lora_mlp, x, layers, "silu", grad)
    made, leaves = leaves_of(layers)
    leaves["x"] = x.clone().requires_grad_()
    for name, t in leaves.items():
        t.requires_grad_(name == wanted)
    lora_mlp(leaves["x"], **made).backward(grad)
    assert [name for name, t in leaves.items() if t.grad is not None] == [wanted]
    assert torch.equal(leaves[wanted].grad, whole[wanted])


def test_a_gradient_of_a_gradient_is_refused() -> None:
    made, _ = leaves_of(make_layers(8, 6, 4))
    x = randn(3, 8).requires_grad_()
    (gx,) = torch.autograd.grad(lora_mlp(x, **made).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="loraaccel"):
        gx.sum().backward()


def test_no_grad() -> None:
    made, _ = leaves_of(make_layers(24, 40, 20))
    x = randn(9, 24).requires_grad_()
    with torch.no_grad():
        y = lora_mlp(x, **made)
        assert saved_by(lambda: lora_mlp(x, **made)) == []
    assert not y.requires_grad
    assert torch.equal(y, lora_mlp(x, **made).detach())


@pytest.mark.parametrize("enabled", [F32, BF16], ids=str)
def test_autocast(enabled: torch.dtype) -> None:
    """y has autocast's type, each gradient that of its operand."""
    layers = make_layers(24, 40, 20, enabled)
    x, grad = randn(9, 24, dtype=enabled), randn(9, 20, dtype=enabled)

    def cast(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", BF16):
            return lora_mlp(*args, **kwargs)

    found, exact = results(cast, x, layers, "silu", grad), results(composed, x, layers, "silu", grad, F64)
    assert found["y"].dtype == BF16
    for name, want in exact.items():
        assert relative(found[name], want) <= LIMIT[BF16], name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_compiled_is_the_same(dtype: torch.dtype, gated: bool, backend: str) -> None:
    """One graph, and the same operator in it: the same numbers, up to where the scale is multiplied in."""
    torch._dynamo.reset()
    layers = make_layers(24, 40, 20, dtype, gated=gated)
    x, grad = randn(2, 5, 24, dtype=dtype), randn(2, 5, 20, dtype=dtype)
    eager = results(lora_mlp, x, layers, "gelu_tanh", grad)
    compiled = results(torch.compile(lora_mlp, fullgraph=True, backend=backend), x, layers, "gelu_tanh", grad)
    torch._dynamo.reset()
    for name, want in eager.items():
        assert compiled[name].dtype == want.dtype
        assert distance(compiled[name], want) <= (1e-6 if dtype == F32 else 2 * unit_roundoff(dtype)), name


@pytest.mark.registered
def test_the_registered_operator() -> None:
    """Schema, fake implementation and formula of the gradient agree."""
    made, _ = leaves_of(make_layers(8, 6, 4))
    w = list(made.values())
    operands = [[getattr(t, part) for t in w] for part in ("weight", "bias", "lora_A", "lora_B")]
    args = (
        randn(3, 8).requires_grad_(), *operands[:2], [True] * 3, *operands[2:], [1] * 3, [1.0, 2.0, 0.5], [0.0] * 3,
        None, 0,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.loraaccel.lora_mlp.default, args)


# ---- what a user can get wrong ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("gate", {"weight": torch.ones(6, 7)}, RuntimeError, ("gate", "weight", "[6, 7]", "8")),
    ("gate", {"weight": torch.ones(5, 8)}, RuntimeError, ("gate", "weight", "[5, 8]", "6")),
    ("up", {"bias": torch.ones(5)}, RuntimeError, ("up", "bias", "[5]", "[6]")),
    ("up", {"lora_A": torch.ones(2, 7)}, RuntimeError, ("up", "lora_A", "[2, 7]", "[R, 8]")),
    ("down", {"lora_B": torch.ones(3, 4)}, RuntimeError, ("down", "lora_B", "[3, 4]", "[4, 4]")),
    ("down", {"weight": torch.ones(4, 5)}, RuntimeError, ("[4, 5]", "[6, 8]")),
    ("down", {"scaling": float("nan")}, RuntimeError, ("down", "scaling", "nan", "finite")),
    ("down", {"weight": torch.ones(4, 6).bfloat16()}, RuntimeError, ("down", "weight", "bfloat16", "float32")),
    ("up", {"scaling": "much"}, TypeError, ("scaling", "'much'", "number")),
    ("gate", {"lora_B": None}, ValueError, ("gate", "lora_B", "both or neither")),
    ("down", {"lora_A": None}, ValueError, ("down", "lora_A", "both or neither")),
    ("up", {"weight": [1.0]}, TypeError, ("up", "weight", "list", "torch.Tensor")),
    ("gate", {"bias": torch.ones(6, device="meta")}, ValueError, ("gate", "bias", "meta", "cpu")),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "wrong", "error", "words"), WRONG)
def test_errors_name_the_layer(
    layer: str, wrong: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    layers = make_layers(8, 6, 4)
    with pytest.raises(error) as caught:
        lora_mlp(torch.ones(3, 8), **{**layers, layer: layers[layer]._replace(**wrong)})
    text = str(caught.value).split("native stack")[0]
    assert not [w for w in ("lora_mlp", *words) if w not in text], text
    check(randn(3, 8), layers, "silu", randn(3, 4))  # the next call is right


def test_other_errors() -> None:
    layers = make_layers(8, 6, 4)
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="'swish', expected one of silu, gelu, gelu_tanh, relu"):
        lora_mlp(x, **layers, activation="swish")
    with pytest.raises(TypeError, match="down is a Tensor, expected LoraWeights"):
        lora_mlp(x, layers["gate"], layers["up"], torch.ones(4, 6))
    with pytest.raises(TypeError, match="up is a NoneType, expected LoraWeights"):
        lora_mlp(x, layers["gate"], None, layers["down"])
    with pytest.raises(RuntimeError, match=r"lora_mlp: x has no dimensions, expected \[..., K\]"):
        lora_mlp(torch.tensor(1.0), **layers)
    weights = [w.weight for w in layers.values()]
    op = OPS.lora_mlp
    with pytest.raises(RuntimeError, match="activation 4, expected 0"):
        op(x, weights, [], [False] * 3, [], [], [0] * 3, [], [], None, 4)
    with pytest.raises(RuntimeError, match="1 weights, expected gate, up and down"):
        op(x, weights[:1], [], [False], [], [], [0], [], [], None, 0)
