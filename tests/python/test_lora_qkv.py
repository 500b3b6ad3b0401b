"""lora_qkv against the layers one by one in float64: values, gradients, compiled, the shared buffer, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft_models import distance
from torch import Tensor

import loraaccel
from loraaccel.ops import lora_linear, lora_qkv
from reference.calls import Call, expected, make_call
from reference.operators import OPS
from reference.tolerance import assert_within, unit_roundoff

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]

# Outputs, rank (0: no adapter) and bias of each projection.
GROUPS = {
    "grouped-query": [(64, 8, True), (16, 8, True), (16, 8, True)],
    "odd": [(33, 4, True), (1, 3, False), (70, 0, True)],
    "four": [(5, 0, False), (31, 1, False), (17, 16, True), (48, 2, True)],
    "one": [(20, 5, True)],
    "no adapter": [(7, 0, False), (18, 0, True)],
}
ODD = GROUPS["odd"]


def make_group(
    lead: tuple[int, ...],
    inputs: int,
    group: Sequence[tuple[int, int, bool]],
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32),
) -> list[Call]:
    """A call of each projection alone, all with the same x."""
    calls = [
        make_call(lead, inputs, n, [rank] if rank else [], dtypes, bias=bias, seed=j)
        for j, (n, rank, bias) in enumerate(group)
    ]
    for j, call in enumerate(calls):
        call.x = calls[0].x
        call.scalings = [1.7 - 0.6 * j] * len(call.lora_a)
    return calls


class Leaves:
    """The arguments of lora_qkv as leaves that require grad."""

    def __init__(self, calls: list[Call]) -> None:
        made = [call.leaves() for call in calls]
        self.x = made[0][0]
        self.weights = [m[1] for m in made]
        self.biases = [m[2] for m in made]
        self.lora_a = [m[3][0] if m[3] else None for m in made]
        self.lora_b = [m[4][0] if m[4] else None for m in made]
        self.scalings = [call.scalings[0] if call.scalings else 1.0 for call in calls]

    def args(self) -> tuple[Any, ...]:
        return self.x, self.weights, self.biases, self.lora_a, self.lora_b, self.scalings

    def named(self) -> dict[str, Tensor]:
        lists = {
            "weight": self.weights,
            "bias": self.biases,
            "lora_A.0": self.lora_a,
            "lora_B.0": self.lora_b,
        }
        found = {f"{j} {name}": t for name, ts in lists.items() for j, t in enumerate(ts) if t is not None}
        return {"x": self.x} | found


def run(calls: list[Call], how: Callable[..., Sequence[Tensor]] = lora_qkv) -> dict[str, Tensor]:
    """Outputs and every gradient."""
    made = Leaves(calls)
    outputs = how(*made.args())
    torch.autograd.backward(list(outputs), [call.grad for call in calls])
    results = {f"{j} y": y.detach() for j, y in enumerate(outputs)}
    for name, t in made.named().items():
        assert t.grad is not None, f"{name} has no gradient"
        assert t.grad.dtype == t.dtype
        results[name] = t.grad
    return results


def check(calls: list[Call], results: dict[str, Tensor]) -> None:
    """Every result within its bound, and none missing. That of dx is the sum of the projections' bounds."""
    x, x_limit = torch.zeros(calls[0].x.shape, dtype=F64), torch.zeros(calls[0].x.shape, dtype=F64)
    seen = {"x"}
    for j, call in enumerate(calls):
        for name, (ref, limit) in expected(call, lent=True).items():
            if name == "x":
                x, x_limit = x + ref, x_limit + limit
            else:
                assert_within(f"{j} {name}", results[f"{j} {name}"], ref, limit)
                seen.add(f"{j} {name}")
    assert results.keys() == seen
    assert_within("x", results["x"], x, x_limit)
    assert all(results[f"{j} y"].dtype == call.x.dtype for j, call in enumerate(calls))


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_values_and_gradients(
    group: list[tuple[int, int, bool]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for rows, inputs in itertools.product((0, 1, 16, 29), (33, 64)):
        calls = make_group((rows,), inputs, group, dtypes)
        check(calls, run(calls))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(
    kernel: str, force_kernel: Callable[[str], None], kernel_calls: Callable[[], dict[str, int]]
) -> None:
    force_kernel(kernel)
    for dtype in (F32, BF16):
        calls = make_group((21,), 33, ODD, (dtype, F32))
        check(calls, run(calls))
    assert kernel_calls() == {kernel: 4}  # one call for all projections, forward and backward


@pytest.mark.parametrize("lead", [(2, 5), (), (2, 3, 4), (3, 0)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    calls = make_group(lead, 24, ODD)
    results = run(calls)
    assert [results[f"{j} y"].shape for j in range(3)] == [(*lead, n) for n, _, _ in ODD]
    check(calls, results)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows", [3, 50])
def test_equals_lora_linear(rows: int, dtype: torch.dtype) -> None:
    """The very same bits as one call for each projection."""
    calls = make_group((rows,), 40, GROUPS["grouped-query"], (dtype, F32))
    for call, y in zip(calls, lora_qkv(*Leaves(calls).args()), strict=True):
        alone = lora_linear(call.x, call.weight, call.bias, call.lora_a[0], call.lora_b[0], call.scalings[0])
        assert torch.equal(y, alone)


def test_a_slice_of_a_larger_x() -> None:
    calls = make_group((2, 5), 24, ODD)
    for call in calls:
        call.x = torch.full((4, 5, 30), torch.nan)[1:3, :, 4:28].copy_(calls[0].x)
    check(calls, run(calls))


# ---- gradients on request --------------------------------------------------------------------------------------------


def composition(
    x: Tensor, weights: Any, biases: Any, lora_a: Any, lora_b: Any, scalings: Any
) -> list[Tensor]:
    """The layers in plain torch."""
    outputs = []
    for w, bias, a, b, s in zip(weights, biases, lora_a, lora_b, scalings, strict=True):
        y = F.linear(x, w, bias)
        outputs.append(y if a is None else y + s * F.linear(F.linear(x, a), b))
    return outputs


@pytest.mark.parametrize("used", [u for u in itertools.product([0, 1], repeat=3) if any(u)], ids=str)
def test_outputs_that_nothing_is_computed_from(used: tuple[int, ...]) -> None:
    """Against torch's own autograd in float64. What has no gradient in torch has none, or zeros, here."""
    calls = make_group((5,), 24, ODD, (F64, F64))
    grads = []
    for how in (lora_qkv, composition):
        made = Leaves(calls)
        outputs = how(*made.args())
        sum(
            (y.sin().sum() for y, u in zip(outputs, used, strict=True) if u), start=torch.zeros(())
        ).backward()
        grads.append(made.named())
    for name, t in grads[1].items():
        got = grads[0][name].grad
        if t.grad is None:
            assert got is None or not got.any(), name
        else:
            torch.testing.assert_close(got, t.grad, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    made = Leaves(make_group((3,), 5, [(4, 2, True), (3, 0, False), (2, 1, True)], (F64, F64)))
    w, a, b = made.weights, made.lora_a, made.lora_b

    def f(x: Tensor, w0: Tensor, w1: Tensor, a0: Tensor, b0: Tensor, a2: Tensor, bias2: Tensor) -> Any:
        return lora_qkv(
            x, [w0, w1, w[2]], [made.biases[0], None, bias2], [a0, None, a2], [b0, None, b[2]], made.scalings
        )

    assert torch.autograd.gradcheck(f, (made.x, w[0], w[1], a[0], b[0], a[2], made.biases[2]))


def test_gradients_only_where_required() -> None:
    """Wanted gradients are the very same numbers, the others stay None."""
    calls = make_group((19,), 24, ODD)
    whole = run(calls)
    for wanted in (
        ["x"],
        ["0 lora_A.0"],
        ["1 lora_B.0"],
        ["2 bias"],
        ["0 lora_A.0", "0 lora_B.0", "1 lora_A.0"],
    ):
        made = Leaves(calls)
        for name, t in made.named().items():
            t.requires_grad_(name in wanted)
        outputs = lora_qkv(*made.args())
        torch.autograd.backward(list(outputs), [call.grad for call in calls])
        for name, t in made.named().items():
            if name in wanted:
                assert torch.equal(t.grad, whole[name]), name
            else:
                assert t.grad is None, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_recording(mode: Callable[[], Any]) -> None:
    calls = make_group((19,), 24, ODD, (BF16, F32))
    recorded = run(calls)
    with mode():
        outputs = lora_qkv(*Leaves(calls).args())
    for j, y in enumerate(outputs):
        assert not y.requires_grad
        assert torch.equal(y, recorded[f"{j} y"])


def test_an_output_without_a_gradient_gives_its_layer_none() -> None:
    """As where each layer is a node of its own: an optimizer with weight decay leaves None alone, and not zeros."""
    made = Leaves(make_group((2, 5), 24, ODD, (F32, F32)))
    outputs = lora_qkv(*made.args())
    outputs[1].square().sum().backward()
    with_gradient = {name for name, t in made.named().items() if t.grad is not None}
    assert with_gradient == {"x", *(name for name in made.named() if name.startswith("1 "))}


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_may_be_changed_in_place(grad: bool) -> None:
    calls = make_group((2, 5), 24, ODD, (F32, F32))
    made = Leaves(calls)
    with torch.set_grad_enabled(grad):
        first, second, *_ = outputs = lora_qkv(*made.args())
        kept = [y.detach().clone() for y in outputs]
        squares = second.square()  # keeps the second
        first[..., 1:].mul_(3)
        first.add_(1)
    want = kept[0].clone()
    want[..., 1:] *= 3
    assert torch.equal(first, want + 1)
    assert all(torch.equal(y, k) for y, k in zip(outputs[1:], kept[1:], strict=True))
    if grad:
        (first.sum() + squares.sum()).backward()
        other = Leaves(calls)
        first, second, *_ = lora_qkv(*other.args())
        ones = torch.full_like(first, 3.0)
        ones[..., 0] = 1.0
        torch.autograd.backward([first, second], [ones, 2 * second.detach()])
        for (name, t), u in zip(made.named().items(), other.named().values(), strict=True):
            assert (t.grad is None and u.grad is None) or torch.equal(t.grad, u.grad), name


def test_gradient_of_a_gradient_is_refused() -> None:
    made = Leaves(make_group((3,), 5, ODD, (F64, F64)))
    (grad,) = torch.autograd.grad(lora_qkv(*made.args())[0].square().sum(), made.x, create_graph=True)
    with pytest.raises(RuntimeError, match="loraaccel"):
        grad.sum().backward()


def test_autocast() -> None:
    """The projections run in autocast's type; gradients come in the operands' own."""
    calls = make_group((5,), 24, ODD)
    with torch.autocast("cpu", dtype=BF16):
        results = run(calls)
    assert {results[f"{j} y"].dtype for j in range(3)} == {BF16}
    cast = make_group((5,), 24, ODD)
    for call in cast:
        call.x, call.weight = calls[0].x.to(BF16), call.weight.to(BF16)
        call.bias = None if call.bias is None else call.bias.to(BF16)
    for j, y in enumerate(lora_qkv(*Leaves(cast).args())):
        assert torch.equal(results[f"{j} y"], y)


def test_switched_off() -> None:
    """The layers in plain torch, to the bit."""
    calls = make_group((5,), 24, ODD)
    with loraaccel.disabled():
        off = run(calls)
    plain = run(calls, composition)
    for name, want in plain.items():
        torch.testing.assert_close(off[name], want)


@pytest.mark.parametrize("adapted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_vs5_adapters_on_any_of_the_projections(adapted: tuple[bool, ...]) -> None:
    """Grouped-query sizes, ranks that differ. Offsets are the frozen layers': a missing adapter moves nothing."""
    sizes = [(8, 3, True), (2, 1, False), (2, 5, True)]
    calls = make_group(
        (6,), 16, [(n, r if has else 0, b) for (n, r, b), has in zip(sizes, adapted, strict=True)]
    )
    results = run(calls)
    check(calls, results)
    plain = run(calls, composition)  # three plain linears
    for name, want in plain.items():
        torch.testing.assert_close(results[name], want, msg=lambda m, name=name: f"{name}: {m}")


def test_vs5_an_adapter_of_another_model() -> None:
    """k has 2 outputs, its adapter was made for 4: the error names the projection and both sizes."""
    weights = [torch.ones(8, 16), torch.ones(2, 16), torch.ones(2, 16)]
    lora_as = [torch.ones(3, 16), torch.ones(2, 16), None]
    lora_bs = [torch.ones(8, 3), torch.ones(4, 2), None]
    with pytest.raises(RuntimeError, match=r"projection 1.*lora_B.*\[4, 2\].*\[2, 2\]"):
        lora_qkv(torch.ones(6, 16), weights, [None] * 3, lora_as, lora_bs, [1.0] * 3)


# ---- the buffer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_are_views_of_one_buffer(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        outputs = lora_qkv(*Leaves(make_group((2, 5), 24, ODD)).args())
    total = sum(n for n, _, _ in ODD)
    assert len({y.untyped_storage().data_ptr() for y in outputs}) == 1
    assert outputs[0].untyped_storage().nbytes() == 2 * 5 * total * 4
    assert [y.storage_offset() for y in outputs] == [0, 33, 34]
    assert {y.stride() for y in outputs} == {(5 * total, total, 1)}


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_compiled(dtype: torch.dtype, backend: str) -> None:
    """One graph, and the same operator in it: the same numbers, up to where the scale is multiplied in."""
    torch._dynamo.reset()
    calls = make_group((2, 9), 24, ODD, (dtype, F32))
    eager = run(calls)
    compiled = run(calls, torch.compile(lora_qkv, fullgraph=True, backend=backend))
    torch._dynamo.reset()
    assert compiled.keys() == eager.keys()
    for name, want in eager.items():
        assert compiled[name].dtype == want.dtype
        assert distance(compiled[name], want) <= (1e-6 if dtype == F32 else 2 * unit_roundoff(dtype)), name


def operands(dtype: torch.dtype = F32) -> tuple[Any, ...]:
    made = Leaves(make_group((3,), 8, [(6, 2, True), (4, 0, True), (5, 3, True)], (dtype, F32)))
    adapters = [[t for t in ts if t is not None] for ts in (made.lora_a, made.lora_b)]
    return (made.x, made.weights, made.biases, [True] * 3, *adapters, [1, 0, 1], [1.7, 0.6], [0.0] * 2, None)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.registered
def test_the_registered_operator(dtype: torch.dtype) -> None:
    """Schema, fake implementation and formula of the gradient agree."""
    args = operands(dtype)
    torch.library.opcheck(torch.ops.loraaccel.lora_qkv.default, args)


@pytest.mark.registered
def test_the_registered_backward() -> None:
    x, weights, _, _, lora_a, lora_b, adapters, *tail = operands()
    _, hidden = OPS.lora_qkv(*operands())
    tensors = [x, *weights, *lora_a, *lora_b, hidden]
    for t in tensors:
        t.requires_grad_(False)
    grads = [torch.ones(3, 6), torch.ones(3, 5)]
    for mask in ([True] * 11, [True] + [False] * 10, [False, True, False] * 3 + [True, True]):
        args = (
            grads, [True, False, True], x, weights, lora_a, lora_b, adapters, hidden.detach(), *tail, mask
        )  # fmt: skip
        torch.library.opcheck(torch.ops.loraaccel.lora_qkv_backward.default, args)


# ---- what a user can get wrong ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("weights", torch.ones(6, 7), RuntimeError, ("projection 1", "weight", "[6, 7]", "8")),
    ("weights", torch.ones(5, 8), RuntimeError, ("projection 1", "lora_B", "[6, 2]", "[5, 2]")),
    ("weights", torch.ones(6, 8).bfloat16(), RuntimeError, ("projection 1", "weight", "bfloat16", "float32")),
    ("weights", [1.0], TypeError, ("projection 1", "weight", "list", "torch.Tensor")),
    ("biases", torch.ones(5), RuntimeError, ("projection 1", "bias", "[5]", "[6]")),
    ("biases", torch.ones(6, device="meta"), ValueError, ("projection 1", "bias", "meta", "cpu")),
    ("lora_As", torch.ones(2, 7), RuntimeError, ("projection 1", "lora_A", "[2, 7]", "[R, 8]")),
    ("lora_As", None, ValueError, ("projection 1", "no lora_A", "both or neither")),
    ("lora_Bs", torch.ones(6, 3), RuntimeError, ("projection 1", "lora_B", "[6, 3]", "[6, 2]")),
    ("lora_Bs", None, ValueError, ("projection 1", "no lora_B", "both or neither")),
    ("scalings", float("nan"), RuntimeError, ("projection 1", "scaling", "nan", "finite")),
    ("scalings", "much", TypeError, ("scaling", "'much'", "number")),
]


def valid() -> dict[str, list[Any]]:
    return {
        "weights": [torch.ones(4, 8), torch.ones(6, 8)],
        "biases": [None, torch.ones(6)],
        "lora_As": [torch.ones(3, 8), torch.ones(2, 8)],
        "lora_Bs": [torch.ones(4, 3), torch.ones(6, 2)],
        "scalings": [1.0, 2.0],
    }


@pytest.mark.parametrize(("name", "value", "error", "words"), WRONG)
def test_errors_name_the_projection(
    name: str, value: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    arguments = valid()
    arguments[name][1] = value
    with pytest.raises(error) as caught:
        lora_qkv(torch.ones(3, 8), **arguments)
    text = str(caught.value).split("native stack")[0]
    assert not [w for w in ("lora_qkv", *words) if w not in text], text
    q, k = lora_qkv(torch.ones(3, 8), **valid())  # the next call is right
    assert torch.equal(q, torch.full((3, 4), 8.0 + 24.0))
    assert torch.equal(k, torch.full((3, 6), 8.0 + 1.0 + 2.0 * 16.0))


@pytest.mark.parametrize("name", ["weights", "biases", "lora_As", "lora_Bs", "scalings"])
def test_lists_of_different_lengths(name: str) -> None:
    arguments = valid()
    arguments[name].pop()
    with pytest.raises(ValueError, match=f"lora_qkv: .*1 {name}.*as many of each"):
        lora_qkv(torch.ones(3, 8), **arguments)


def test_no_projection() -> None:
    with pytest.raises(ValueError, match=r"lora_qkv: 0 weights.*at least one"):
        lora_qkv(torch.ones(3, 8), [], [], [], [], [])
