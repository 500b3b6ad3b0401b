"""lora_linear inside what training is made of: autograd, autocast, checkpoints, compilers, dispatch modes, threads."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel.ops import lora_linear, lora_linear_adapters
from reference import lora_linear as formula
from reference.calls import Call, check, expected, function, make_call, operator, run
from reference.operators import OPS
from reference.tolerance import assert_within, bound, unit_roundoff

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FORWARD = OPS.lora_linear
BACKWARD = OPS.lora_linear_backward
SEED = torch.tensor([2**40 + 3, 5])
DOUBLE_BACKWARD = "gradient of a gradient"


class Layer(nn.Module):
    """A frozen linear layer with one adapter, on lora_linear or, where `fused` is off, on plain torch."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, *, dropout: float = 0.0, fused: bool = True
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(inputs + 7 * outputs + 31 * rank)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / inputs**0.5)

        self.weight, self.bias = (
            normal(outputs, inputs).requires_grad_(False),
            normal(outputs).requires_grad_(False),
        )
        self.lora_a, self.lora_b = normal(rank, inputs), normal(outputs, rank)
        self.dropout, self.fused = dropout, fused

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return formula.peft_composition(
                x, self.weight, self.bias, [formula.Adapter(self.lora_a, self.lora_b, 2.0)]
            )
        args = (x, self.weight, self.bias, self.lora_a, self.lora_b, 2.0)
        return lora_linear(*args, input_dropout=self.dropout, training=self.training)


def leaves(call: Call) -> list[Tensor]:
    x, weight, bias, (a,), (b,) = call.leaves()
    return [x, weight, bias, a, b]


# ---- opcheck, gradcheck ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("dropouts", [[0.0], [0.5], [0.5, 0.0]], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.registered
def test_opcheck_forward(bias: bool, dropouts: list[float], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    call = make_call((2, 3), 8, 6, [2, 3][: len(dropouts)], dtypes, bias=bias, dropouts=dropouts)
    x, weight, bias_leaf, lora_a, lora_b = call.leaves()
    seed = SEED if any(dropouts) else None
    torch.library.opcheck(FORWARD, (x, weight, bias_leaf, lora_a, lora_b, call.scalings, dropouts, seed))


@pytest.mark.parametrize(
    "mask",
    [[True] * 5, [False, False, False, True, True], [True, False, False, False, False], [False] * 5],
    ids=lambda m: "".join("01"[w] for w in m),
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.registered
def test_opcheck_backward(dropout: float, mask: list[bool]) -> None:
    call = make_call((2, 3), 8, 6, 2, (BF16, F32), dropouts=[dropout])
    tail = (call.scalings, [dropout], SEED if dropout else None)
    _, hidden = FORWARD(call.x, call.weight, None, call.lora_a, call.lora_b, *tail)
    args = (call.grad, call.x, call.weight, call.lora_a, call.lora_b, hidden, *tail, mask)
    torch.library.opcheck(BACKWARD, args)
    shapes = [call.x.shape, call.weight.shape, (6,), call.lora_a[0].shape, call.lora_b[0].shape]
    assert [g.shape for g in BACKWARD(*args)] == [s for s, wanted in zip(shapes, mask, strict=True) if wanted]


@pytest.mark.parametrize("how", [function, operator], ids=["function", "operator"])
def test_gradcheck(how: Callable[..., Tensor]) -> None:
    """Every gradient by finite differences, two adapters; for the operator with a mask too."""
    call = make_call((2, 3), 5, 4, [2, 3], (F64, F64), dropouts=[0.0, 0.4] if how is operator else None)
    x, weight, bias, lora_a, lora_b = call.leaves()

    def f(x: Tensor, weight: Tensor, bias: Tensor, *adapters: Tensor) -> Tensor:
        return how(x, weight, bias, list(adapters[0::2]), list(adapters[1::2]), call)

    pairs = [t for pair in zip(lora_a, lora_b, strict=True) for t in pair]
    assert torch.autograd.gradcheck(f, [x, weight, bias, *pairs])


@pytest.mark.registered
def test_operator_without_adapters_has_gradients() -> None:
    """No adapter is allowed: a plain linear layer, in this route too."""
    call = make_call((4,), 6, 5, [], (F32, F32))
    check(call, run(call, operator))
    x, weight, bias, _, _ = call.leaves()
    torch.library.opcheck(FORWARD, (x, weight, bias, [], [], [], [], None))


# ---- grad modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [function, operator], ids=["function", "operator"])
def test_no_grad_and_inference_mode(how: Callable[..., Tensor]) -> None:
    call = make_call((50,), 12, 10, 3)
    wanted = run(call)["y"]
    with torch.no_grad():
        y = how(*call.leaves(), call)
    assert torch.equal(y, wanted)
    assert not y.requires_grad
    with torch.inference_mode():
        y = how(*call.leaves(), call)
    assert torch.equal(y, wanted)
    assert y.is_inference()


def double_backward(f: Callable[[list[Tensor]], Tensor], *, by: str) -> None:
    """A gradient of a gradient with respect to A. Outside this product it would be a number."""
    operands = leaves(make_call((3,), 4, 5, 2))
    a = operands[3]
    first = torch.autograd.grad(f(operands).square().sum(), [operands[0], a, operands[4]], create_graph=True)
    penalty = sum(g.square().sum() for g in first) + a.sum()  # a path to A that has a second derivative
    if by == "backward":
        penalty.backward()
    else:
        torch.autograd.grad(penalty, [a], allow_unused=by == "grad, unused allowed")


@pytest.mark.parametrize("by", ["backward", "grad", "grad, unused allowed"])
@pytest.mark.parametrize(
    "route",
    [
        lambda t: lora_linear(*t, 2.0),
        lambda t: lora_linear(*t, 2.0, input_dropout=0.5),
        lambda t: FORWARD(t[0], t[1], t[2], [t[3]], [t[4]], [2.0], [0.0], None)[0],
    ],
    ids=["function", "dropout", "operator"],
)
def test_double_backward_raises(route: Callable[[list[Tensor]], Tensor], by: str) -> None:
    """In every route and however it is asked for: never a second derivative that lacks a part."""
    with pytest.raises(RuntimeError, match=DOUBLE_BACKWARD):
        double_backward(route, by=by)


def test_second_order_update_raises() -> None:
    """The inner step of a second-order method: the outer gradient reaches A directly and through the inner gradient."""
    x, weight, bias, a, b = leaves(make_call((3,), 4, 5, 2))
    (inner,) = torch.autograd.grad(lora_linear(x, weight, bias, a, b).square().sum(), [a], create_graph=True)
    outer = F.linear(F.linear(x, a - 0.1 * inner), b).square().sum()
    with pytest.raises(RuntimeError, match=DOUBLE_BACKWARD):
        torch.autograd.grad(outer, [a])


def test_create_graph_alone_changes_no_gradient() -> None:
    """Logging code asks for it and then never uses the graph."""
    call = make_call((6,), 8, 5, 2)
    wanted = run(call)
    operands = leaves(call)
    grads = torch.autograd.grad(
        lora_linear(*operands, call.scalings[0]), operands, call.grad, create_graph=True
    )
    for g, name in zip(grads, ("x", "weight", "bias", "lora_A.0", "lora_B.0"), strict=True):
        assert torch.equal(g.detach(), wanted[name])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.vmap(f)(x),
        lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_function_transforms_raise(transform: Callable[..., Any]) -> None:
    """torch.func is not supported: an error, never a wrong number."""
    call = make_call((3,), 4, 5, 2)

    def f(x: Tensor) -> Tensor:
        return lora_linear(x, call.weight, call.bias, call.lora_a[0], call.lora_b[0])

    with pytest.raises((RuntimeError, NotImplementedError)):
        transform(f, call.x)
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        transform(f, call.x)  # forward mode and vmap work in no_grad as well


def test_forward_mode_raises() -> None:
    """Dual numbers: a lost tangent would be a derivative of zero."""
    import torch.autograd.forward_ad as forward_ad

    call = make_call((3,), 4, 5, 2)
    args = (call.weight, call.bias, call.lora_a[0], call.lora_b[0])
    for enabled in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(enabled):
            x = forward_ad.make_dual(call.x, torch.ones_like(call.x))
            with pytest.raises((RuntimeError, NotImplementedError)):
                lora_linear(x, *args)


# ---- tensors without numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("how", ["function", "operator"])
def test_meta_tensors(how: str, dropout: float) -> None:
    call = make_call((2, 3), 8, 6, 4, (BF16, F32))
    operands = [t.detach().to("meta").requires_grad_() for t in leaves(call)]
    if how == "function":
        y = lora_linear(*operands, input_dropout=dropout)
    else:
        x, weight, bias, a, b = operands
        y = FORWARD(x, weight, bias, [a], [b], [1.0], [dropout], SEED if dropout else None)[0]
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 6), BF16, "meta")
    y.backward(torch.empty_like(y))
    for t in operands:
        assert (t.grad.shape, t.grad.dtype, t.grad.device.type) == (t.shape, t.dtype, "meta")


@pytest.mark.parametrize("cast", [None, BF16], ids=str)
def test_fake_tensors_say_what_real_ones_are(cast: torch.dtype | None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtypes, lead in (((F32, F32), (2, 3)), ((BF16, F32), ()), ((F64, F64), (0,))):
        call = make_call(lead, 8, 6, 4, dtypes)
        results = []
        for mode in (None, FakeTensorMode()):
            operands = leaves(call)
            if mode is not None:
                operands = [mode.from_tensor(t) for t in operands]
                mode.__enter__()
            try:
                with torch.autocast("cpu", cast or BF16, enabled=cast is not None):
                    y = lora_linear(*operands, input_dropout=0.5)
                y.backward(torch.ones_like(y))
            finally:
                if mode is not None:
                    mode.__exit__(None, None, None)
            results.append([(t.shape, t.dtype, t.stride()) for t in (y, *(t.grad for t in operands))])
        assert results[0] == results[1]


# ---- autocast, VT2 ---------------------------------------------------------------------------------------------------


def try_call(f: Callable[[], Tensor], cast: torch.dtype | None) -> Tensor | str:
    try:
        if cast is None:
            return f()
        with torch.autocast("cpu", cast):
            return f()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("cast", [None, BF16, F16], ids=str)
@pytest.mark.parametrize(
    "shape", [(5,), (52,)], ids=str
)  # below and above the rows that the wide kernels want
def test_vt2_autocast_matrix(shape: tuple[int, ...], cast: torch.dtype | None) -> None:
    """VT2: every combination of types of x, W and the adapters, inside and outside autocast. lora_linear raises where
    PEFT's composition of nn.Linear raises; where that runs, the output's type is the same, each gradient has its
    parameter's type, and the numbers lie within the bound of the operands as autocast leaves them.
    """
    raised = 0
    for layer, weight_type, adapter in itertools.product((F32, BF16, F16), repeat=3):
        call = make_call(shape, 24, 10, 3, (F32, adapter))
        call.x, call.weight, call.bias = (
            call.x.to(layer),
            call.weight.to(weight_type),
            call.bias.to(weight_type),
        )
        ours_operands, their_operands = leaves(call), leaves(call)
        ours = try_call(lambda: lora_linear(*ours_operands, call.scalings[0]), cast)  # noqa: B023
        theirs = try_call(
            lambda: formula.peft_composition(
                *their_operands[:3],  # noqa: B023
                [formula.Adapter(*their_operands[3:], call.scalings[0])],  # noqa: B023
            ),
            cast,
        )
        case = f"x {layer}, W {weight_type}, A and B {adapter}"
        assert isinstance(ours, str) == isinstance(theirs, str), f"{case}: {ours}, composed: {theirs}"
        if isinstance(ours, str):
            raised += 1
            continue
        assert ours.dtype == theirs.dtype, case
        # What the layer computes with: x, W and the bias in autocast's type, the adapters as they are.
        seen = cast or layer
        call.x, call.weight, call.bias = (t.to(seen) for t in (call.x, call.weight, call.bias))
        call.grad = call.grad.to(seen)
        ours.backward(call.grad)
        theirs.backward(call.grad)
        names = ("x", "weight", "bias", "lora_A.0", "lora_B.0")
        wanted = expected(call, lent=True)
        assert_within(case, ours, *wanted["y"])
        for name, t, other in zip(names, ours_operands, their_operands, strict=True):
            assert t.grad.dtype == other.grad.dtype == t.dtype, f"{case}: {name}"
            ref, limit = wanted[name]  # one more rounding where autocast's type is not the parameter's
            assert_within(f"{case}: {name}", t.grad, ref, limit + unit_roundoff(t.dtype) * ref.abs())
    assert raised == (18 if cast is None else 0)


@pytest.mark.registered
def test_autocast_of_the_operator_itself() -> None:
    """torch.ops.loraaccel.lora_linear under autocast: as the function, in forward and backward."""
    call = make_call((50,), 24, 10, 3)
    results = []
    for how in (function, operator):
        x, weight, bias, lora_a, lora_b = call.leaves()
        with torch.autocast("cpu", BF16):
            y = how(x, weight, bias, lora_a, lora_b, call)
        assert y.dtype == BF16
        y.backward(call.grad.to(BF16))
        results.append([y.detach(), *(t.grad for t in (x, weight, bias, *lora_a, *lora_b))])
    for first, second in zip(*results, strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)


def test_autocast_leaves_float64_alone_and_can_be_disabled_inside() -> None:
    """As F.linear does."""
    for layer in (F64, F32):
        call = make_call((5,), 8, 6, 2, (layer, layer))
        with torch.autocast("cpu", BF16):
            assert F.linear(call.x, call.weight).dtype == (F64 if layer == F64 else BF16)
            if layer == F32:
                with torch.autocast("cpu", enabled=False):
                    results = run(call)
            else:
                results = run(call)
        check(call, results)


def test_backward_inside_autocast() -> None:
    """Users call loss.backward() inside the block as well."""
    call = make_call((50,), 24, 10, 3)
    outside, inside = leaves(call), leaves(call)
    with torch.autocast("cpu", BF16):
        y = lora_linear(*outside, 2.0)
        lora_linear(*inside, 2.0).backward(call.grad.to(BF16))
    y.backward(call.grad.to(BF16))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(outside, inside, strict=True))


# ---- checkpoints, VT1 ------------------------------------------------------------------------------------------------


def two_blocks(dropout: float) -> nn.ModuleList:
    return nn.ModuleList([Layer(12, 16, 3, dropout=dropout), Layer(16, 12, 3, dropout=dropout)])


def through(blocks: nn.ModuleList, x: Tensor, how: bool | None) -> Tensor:
    """how: use_reentrant of the checkpoints, None for none."""
    for block in blocks:
        if how is None:
            x = torch.tanh(block(x))
        else:
            x = checkpoint(lambda t, b=block: torch.tanh(b(t)), x, use_reentrant=how)
    return x


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_vt1_checkpointed_gradients_are_the_same(reentrant: bool, dropout: float) -> None:
    """VT1: with an input that requires grad, bit for bit: the recomputed forward pass draws the same mask."""
    results = []
    for how in (None, reentrant):
        blocks = two_blocks(dropout)
        torch.manual_seed(3)
        x = torch.randn(50, 12).requires_grad_()
        y = through(blocks, x, how)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in blocks.parameters() if p.requires_grad)])
    assert len(results[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_vt1_frozen_input_trains_with_the_non_reentrant_kind() -> None:
    """VT1: three steps with an input that requires no grad; every A and B moves, as without checkpoints."""
    final = []
    for how in (None, False):
        blocks = two_blocks(0.2)
        for block in blocks:
            nn.init.zeros_(block.lora_b)
        start = {n: p.detach().clone() for n, p in blocks.named_parameters()}
        optimiser = torch.optim.SGD([p for p in blocks.parameters() if p.requires_grad], lr=0.1)
        torch.manual_seed(4)
        x = torch.randn(50, 12)
        for _ in range(3):
            optimiser.zero_grad()
            through(blocks, x, how).square().sum().backward()
            optimiser.step()
        for name, p in blocks.named_parameters():
            assert torch.equal(p.detach(), start[name]) != p.requires_grad, name
        final.append([p.detach() for p in blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*final, strict=True))


def test_vt1_frozen_input_with_the_reentrant_kind_is_not_silent() -> None:
    """VT1: torch cannot give gradients here. It says so, and the output does not pretend to have any."""
    blocks = two_blocks(0.0)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        y = through(blocks, torch.randn(5, 12), True)
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = through(blocks, torch.randn(5, 12).requires_grad_(), True)
    y.sum().backward()  # the documented way out: make the input require grad
    assert all(p.grad is not None for p in blocks.parameters() if p.requires_grad)


# ---- compilers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, dropout: float) -> Tensor:
    return torch.tanh(lora_linear(x * 1.5, weight, bias, a, b, 2.0, input_dropout=dropout)).square()


def compiled_and_plain(backend: Any, call: Call, dropout: float, cast: torch.dtype | None = None) -> None:
    """Forward and backward compiled without a graph break, against eager: the same numbers."""
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for f in (compiled, model):
        operands = leaves(call)
        torch.manual_seed(1)
        with torch.autocast("cpu", cast or BF16, enabled=cast is not None):
            y = f(*operands, dropout)
        torch.manual_seed(2)  # whatever backward draws does not come from here
        y.sum().backward()
        results.append([y.detach(), *(t.grad for t in operands)])
    for ours, eager in zip(*results, strict=True):
        assert ours.dtype == eager.dtype
        limit = bound(
            eager.double(), eager.double().abs().amax().expand(eager.shape), 64, eager.dtype, backward=True
        )
        assert_within("compiled", ours, eager.double(), limit)


@pytest.mark.parametrize("cast", [None, BF16], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.registered
def test_compiled_equals_eager(
    backend: str, dropout: float, cast: torch.dtype | None, fresh_dynamo: None
) -> None:
    compiled_and_plain(backend, make_call((3, 20), 24, 20, 4), dropout, cast)


@pytest.mark.slow
@pytest.mark.registered
def test_compiled_by_inductor_equals_eager(fresh_dynamo: None) -> None:
    """Inductor draws other random numbers than eager torch unless asked, for torch's own dropout as well. Either way
    the backward pass must have the forward pass's mask, and the seed must decide it."""
    from torch._inductor import config

    compiled_and_plain("inductor", make_call((60,), 24, 20, 4), 0.0)
    with config.patch(fallback_random=True):
        compiled_and_plain("inductor", make_call((60,), 24, 20, 4), 0.5)
    torch._dynamo.reset()
    eye, zero = torch.eye(64), torch.zeros(64, 64)
    dropped = torch.compile(
        lambda x: lora_linear(x, zero, None, eye, eye, input_dropout=0.25), fullgraph=True, backend="inductor"
    )
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        x = torch.ones(64, 64).requires_grad_()
        y = dropped(x)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad)  # with ones and identities, both are the mask over 1 - p
        kept = float((y != 0).float().mean())
        assert abs(kept - 0.75) < 4 * (0.75 * 0.25) ** 0.5 / 64
        outputs.append(y.detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.registered
def test_vt3_no_graph_break_and_no_recompilation_for_new_lengths(fresh_dynamo: None) -> None:
    """VT3: one graph; with dynamic shapes it serves every number of rows, at each the right numbers."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    args = leaves(make_call((2,), 24, 20, 4))[1:]
    explained = torch._dynamo.explain(model)(torch.randn(5, 24), *args, 0.5)
    assert explained.graph_break_count == 0
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for rows in (3, 5, 17, 64):
        x = torch.randn(rows, 24)
        assert torch.equal(compiled(x, *args, 0.0), model(x, *args, 0.0))
    assert len(graphs) == 1


@pytest.mark.registered
def test_export(fresh_dynamo: None) -> None:
    layer = Layer(24, 20, 4).eval()
    x = torch.randn(7, 24)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert FORWARD in targets
    for m in (2, 7, 100):
        x = torch.randn(m, 24)
        assert torch.equal(program.module()(x), layer(x))


# ---- dispatch modes --------------------------------------------------------------------------------------------------


@pytest.mark.registered
def test_dispatch_modes_see_the_operator() -> None:
    """FlopCounterMode and friends: the same numbers, and one operator each way."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen: list[Any] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    call = make_call((5,), 8, 6, 2)
    wanted = run(call)
    for mode in (Record(), FlopCounterMode(display=False)):
        with mode:
            results = run(call)
        assert all(torch.equal(results[name], wanted[name]) for name in wanted)
    assert seen.count(FORWARD) == 1
    assert seen.count(BACKWARD) == 1


# ---- threads and processes -------------------------------------------------------------------------------------------


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


KERNELS = ["auto", *(k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"])]


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_threads_gives_the_same_bits(
    kernel: str, torch_threads: None, force_kernel: Callable[[str], None]
) -> None:
    """Promised for gradients; and the same call twice is the same always (no atomics)."""
    force_kernel(kernel)
    for dtypes in ((F32, F32), (BF16, BF16), (F16, F32)):
        if dtypes[0] != F32 and kernel in ("avx512", "avx2", "portable"):
            continue
        size = (40, 33, 30) if kernel == "ref" else (300, 257, 130)
        for dropout in (0.0, 0.3):
            call = make_call(size[:1], *size[1:], [24, 3], dtypes, dropouts=[dropout, 0.0])
            results = []
            for threads in (1, 2, 2, 5):
                torch.set_num_threads(threads)
                results.append(run(call))
            assert all(torch.equal(results[1][name], results[2][name]) for name in results[0])
            for other in results[1:]:
                for name in set(other) - {"y"}:
                    assert torch.equal(other[name], results[0][name]), name


def test_calls_from_several_python_threads() -> None:
    """VX5: eight threads at once, each with its own operands, forward and backward, with the GIL released or not."""
    calls = [make_call((48 + i,), 40, 36, 4, (F32, F32), seed=i) for i in range(8)]
    wanted = [run(c) for c in calls]
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait(timeout=60)
        for _ in range(10):
            results = run(calls[i])
            assert all(torch.equal(results[name], wanted[i][name]) for name in results)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, i) for i in range(8)]:
            future.result(timeout=120)


def test_vx5_a_long_call_lets_other_threads_run(force_kernel: Callable[[str], None]) -> None:
    """VX5: the GIL is released in the operator, in forward and in backward. Held, the loop would turn once."""
    force_kernel("ref")  # plain loops: slow enough to watch
    call = make_call((600,), 400, 400, 8)
    with ThreadPoolExecutor(1) as pool:
        for how in (
            lambda: operator(call.x, call.weight, call.bias, call.lora_a, call.lora_b, call),
            lambda: run(call),
        ):
            pool.submit(int).result()
            started, turns = pool.submit(how), 0
            while not started.done():
                time.sleep(0.001)
                turns += 1
            started.result()
            assert turns > 3


def test_backward_from_several_python_threads_accumulates() -> None:
    """One adapter, backward passes of several threads: autograd adds them up."""
    call = make_call((20,), 16, 12, 3, (F64, F64))
    x, weight, bias, (a,), (b,) = call.leaves()
    ys = [lora_linear(x.detach(), weight.detach(), bias.detach(), a, b, call.scalings[0]) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda y: y.backward(call.grad), ys))
    once = run(call)
    assert torch.allclose(a.grad, 4 * once["lora_A.0"], rtol=1e-13, atol=0)
    assert torch.allclose(b.grad, 4 * once["lora_B.0"], rtol=1e-13, atol=0)


FORKED = """
import os, signal, sys, torch
from loraaccel.ops import lora_linear

def grads():
    torch.manual_seed(0)
    t = [torch.randn(*s).requires_grad_() for s in ((100, 64), (48, 64), (48,), (8, 64), (48, 8))]
    y = lora_linear(*t, 2.0, input_dropout=0.25)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in t)]

wanted = grads()                    # the parent's threads exist now
child = os.fork()
if child == 0:
    signal.alarm(60)
    torch.set_num_threads(1)        # as DataLoader does: OpenMP does not survive a fork, with torch's own operators too
    same = all(torch.equal(a, b) for a, b in zip(grads(), wanted))
    os._exit(0 if same else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
again = all(torch.equal(a, b) for a, b in zip(grads(), wanted))
sys.exit(status if again else 4)
"""


def test_after_a_fork_both_processes_keep_working(run_python: Callable[..., Any]) -> None:
    done = run_python(FORKED)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


class Features(torch.utils.data.Dataset[Tensor]):
    """Computes with the operator inside a DataLoader's worker."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        c = self.call
        return lora_linear_adapters(
            c.x * (index + 1), c.weight, c.bias, c.lora_a, c.lora_b, c.scalings, c.dropouts
        )


def test_data_loader_workers() -> None:
    data = Features(make_call((60,), 24, 20, 4))
    here = [data[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, timeout=120)
    for ours, wanted in zip(loader, here, strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6)
