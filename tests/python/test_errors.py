"""What a user can get wrong: the type of the exception, what the message names, and that the process goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import loraaccel
from loraaccel.ops import lora_linear, lora_linear_adapters
from reference.operators import OPS

OPERATOR = OPS.lora_linear
BACKWARD = OPS.lora_linear_backward


class Operands(NamedTuple):
    x: Tensor = torch.ones(3, 8)
    weight: Tensor = torch.ones(6, 8)
    bias: Tensor = torch.ones(6)
    lora_a: Tensor = torch.ones(2, 8)
    lora_b: Tensor = torch.ones(6, 2)
    scaling: float = 1.0


RIGHT = 8.0 + 1.0 + 16.0  # each output of the operands as they are


@pytest.fixture(autouse=True)
def next_call_is_right() -> Iterator[None]:
    """After each failure: the process is alive, and the same operands, put right, give the right numbers."""
    yield
    x, weight, bias, a, b, _ = Operands()
    assert torch.equal(lora_linear(x, weight, bias, a, b), torch.full((3, 6), RIGHT))
    y, hidden = OPERATOR(x, weight, bias, [a], [b], [1.0], [0.0], None)
    grads = BACKWARD(torch.ones(3, 6), x, weight, [a], [b], hidden, [1.0], [0.0], None, [True] * 5)
    assert torch.equal(y, torch.full((3, 6), RIGHT))
    assert [float(g.flatten()[0]) for g in grads] == [18.0, 3.0, 3.0, 18.0, 24.0]


def assert_names(error: BaseException, *words: str) -> None:
    """The message names these, in whatever case: operator, argument, what was found, what was expected."""
    text = str(error).split("native stack")[0]
    missing = [w for w in words if w.lower() not in text.lower()]
    assert not missing, f"{missing} not in: {text}"


# ---- shapes, types, numbers ------------------------------------------------------------------------------------------

WRONG_SHAPES = [
    ({"x": torch.tensor(1.0)}, ("x", "[..., K]")),
    ({"x": torch.ones(3, 7)}, ("[3, 7]", "[6, 8]", "weight", "7")),
    ({"weight": torch.ones(6, 9)}, ("weight", "[6, 9]", "[N, 8]", "x [3, 8]")),
    ({"weight": torch.ones(8)}, ("weight", "[8]", "two dimensions")),
    ({"weight": torch.ones(1, 6, 8)}, ("weight", "[1, 6, 8]", "two dimensions")),
    ({"bias": torch.ones(5)}, ("bias", "[5]", "[6]")),
    ({"bias": torch.ones(6, 1)}, ("bias", "[6, 1]", "one dimension")),
    ({"lora_a": torch.ones(2, 7)}, ("lora_A", "[2, 7]", "[R, 8]")),
    ({"lora_a": torch.ones(0, 8), "lora_b": torch.ones(6, 0)}, ("lora_A", "[0, 8]", "rank")),
    ({"lora_a": torch.ones(8)}, ("lora_A", "[8]", "two dimensions")),
    ({"lora_b": torch.ones(6, 3)}, ("lora_B", "[6, 3]", "[6, 2]")),
    ({"lora_b": torch.ones(5, 2)}, ("lora_B", "[5, 2]", "[6, 2]")),
    ({"lora_b": torch.ones(2, 6)}, ("lora_B", "[2, 6]", "[6, 2]")),
]
E8, I32 = torch.float8_e4m3fn, torch.int32
WRONG_TYPES = [
    ({"x": I32}, ("x", "int", "float32, float64, bfloat16 or float16")),
    ({"x": torch.complex64}, ("x", "complex", "float32, float64, bfloat16 or float16")),
    ({"weight": E8}, ("weight", "float8_e4m3fn", "float32, float64, bfloat16 or float16")),
    ({"bias": torch.bool}, ("bias", "bool", "float32, float64, bfloat16 or float16")),
    ({"lora_a": I32}, ("lora_a", "int", "float32, float64, bfloat16 or float16")),
    ({"weight": torch.bfloat16}, ("weight", "bfloat16", "float32", "x")),
    ({"bias": torch.float16}, ("bias", "float16", "float32", "x")),
    ({"lora_b": torch.bfloat16}, ("lora_B", "bfloat16", "float32", "lora_A")),
    ({"lora_a": torch.float64, "lora_b": torch.float64}, ("lora_A", "float64", "x", "float32")),
    (dict.fromkeys(("x", "weight", "bias"), torch.float64), ("lora_A", "float32", "x", "float64")),
]
WRONG_NUMBERS = [
    ({"scaling": float("nan")}, {}, ("scaling", "nan", "finite")),
    ({"scaling": float("inf")}, {}, ("scaling", "inf", "finite")),
    ({"scaling": -float("inf")}, {}, ("scaling", "-inf", "finite")),
    ({}, {"input_dropout": -0.1}, ("dropout", "-0.1", "0 to 1")),
    ({}, {"input_dropout": 1.5}, ("dropout", "1.5", "0 to 1")),
    ({}, {"input_dropout": float("nan")}, ("dropout", "nan", "0 to 1")),
    ({}, {"input_dropout": 1.5, "training": False}, ("dropout", "1.5", "0 to 1")),
]


def name_of(value: Any) -> str | None:
    return "-".join(value) if isinstance(value, dict) else ""


def both_routes(operands: Operands) -> Iterator[Callable[[], Tensor]]:
    x, weight, bias, a, b, s = operands
    yield lambda: lora_linear(x, weight, bias, a, b, s)
    yield lambda: OPERATOR(x, weight, bias, [a], [b], [s], [0.0], None)[0]


@pytest.mark.parametrize(("wrong", "words"), WRONG_SHAPES, ids=name_of)
def test_wrong_shapes(wrong: dict[str, Tensor], words: tuple[str, ...]) -> None:
    """VS6 among them: 0-D x, and K that differs."""
    for call in both_routes(Operands()._replace(**wrong)):
        with pytest.raises(RuntimeError) as error:
            call()
        assert_names(error.value, "loraaccel::lora_linear", *words)


@pytest.mark.parametrize(("wrong", "words"), WRONG_TYPES, ids=name_of)
def test_wrong_types(wrong: dict[str, torch.dtype], words: tuple[str, ...]) -> None:
    right = Operands()
    operands = right._replace(**{name: getattr(right, name).to(dtype) for name, dtype in wrong.items()})
    for call in both_routes(operands):
        with pytest.raises(RuntimeError) as error:
            call()
        assert_names(error.value, "loraaccel::lora_linear", *words, "expected")


@pytest.mark.parametrize(("wrong", "options", "words"), WRONG_NUMBERS, ids=name_of)
def test_wrong_numbers(wrong: dict[str, float], options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError) as error:
        lora_linear(*Operands()._replace(**wrong), **options)
    assert_names(error.value, "loraaccel::lora_linear", *words, "expected")


@pytest.mark.parametrize("name", ["input", "hidden", "rank", "output"])
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_no_probability(name: str, p: float) -> None:
    x, w, a, b = torch.ones(2, 8), torch.ones(4, 8), torch.ones(3, 8), torch.ones(4, 3)
    for training in (True, False):
        with pytest.raises(RuntimeError, match=f"{name}_dropout is .*expected a probability from 0 to 1"):
            loraaccel.lora_linear(x, w, None, a, b, **{f"{name}_dropout": p}, training=training)


def test_an_x_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="x is a list, expected a"):
        lora_linear([1.0], *Operands()[1:])
    with pytest.raises(TypeError, match="lora_B is a NoneType, expected a"):
        lora_linear(*Operands()[:4], None)


@pytest.mark.parametrize("argument", ["weight", "bias", "lora_a", "lora_b"])
def test_mixed_devices(argument: str) -> None:
    """VX6 on the CPU: what is not where x is, is named, with both devices; in either direction."""
    right = Operands()
    operands = right._replace(**{argument: getattr(right, argument).to("meta")})
    shown = argument.replace("_a", "_A").replace("_b", "_B")
    for call in both_routes(operands):
        with pytest.raises(ValueError, match="expected cpu as x") as error:
            call()
        assert_names(error.value, "lora_linear", shown, "meta")
    for call in both_routes(right._replace(x=right.x.to("meta"))):
        with pytest.raises(ValueError, match="expected meta as x") as error:
            call()
        assert_names(error.value, "lora_linear", "weight", "cpu")


# ---- the operators' own arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ((2, 1, 1, 1), ("2 lora_A", "1 lora_B")),
        ((1, 2, 1, 1), ("1 lora_A", "2 lora_B")),
        ((1, 1, 2, 1), ("2 scalings",)),
        ((1, 1, 1, 0), ("0 dropouts",)),
        ((0, 0, 1, 1), ("0 lora_A", "1 scalings")),
    ],
    ids=str,
)
def test_lists_of_different_lengths(lists: tuple[int, ...], words: tuple[str, ...]) -> None:
    x, weight, bias, a, b, _ = Operands()
    n_a, n_b, n_scalings, n_dropouts = lists
    tail = ([1.0] * n_scalings, [0.0] * n_dropouts, None)
    with pytest.raises(RuntimeError) as error:
        OPERATOR(x, weight, bias, [a] * n_a, [b] * n_b, *tail)
    assert_names(error.value, "loraaccel::lora_linear", *words, "expected as many")
    with pytest.raises((RuntimeError, ValueError)):
        lora_linear_adapters(x, weight, bias, [a] * n_a, [b] * n_b, *tail[:2])


@pytest.mark.parametrize(
    "seed",
    [
        None,
        torch.tensor([1.0, 2.0]),
        torch.tensor([1]),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3, 4])[::2],
        torch.tensor([1, 2], dtype=torch.int32),
    ],
    ids=["none", "float", "one", "three", "strided", "int32"],
)
def test_dropout_without_a_proper_seed(seed: Tensor | None) -> None:
    x, weight, bias, a, b, _ = Operands()
    with pytest.raises(RuntimeError) as error:
        OPERATOR(x, weight, bias, [a], [b], [1.0], [0.5], seed)
    assert_names(error.value, "loraaccel::lora_linear", "seed", "int64")


def test_wrong_arguments_of_the_backward_operator() -> None:
    x, weight, bias, a, b, _ = Operands()
    _, hidden = OPERATOR(x, weight, bias, [a], [b], [1.0], [0.0], None)
    grad, every = torch.ones(3, 6), [True] * 5

    def backward(**changed: Any) -> list[Tensor]:
        arguments = {
            "grad": grad,
            "x": x,
            "hidden": hidden,
            "output_mask": every,
            "dropouts": [0.0],
        } | changed
        grad_, x_, hidden_, mask, dropouts = arguments.values()
        return BACKWARD(grad_, x_, weight, [a], [b], hidden_, [1.0], dropouts, None, mask)

    assert len(backward()) == 5
    for changed, words in (
        ({"grad": torch.ones(3, 5)}, ("grad", "[3, 5]", "[3, 6]")),
        ({"grad": torch.ones(2, 6)}, ("grad", "[2, 6]", "[3, 6]")),
        ({"grad": grad.double()}, ("grad", "float64", "float32")),
        ({"grad": torch.tensor(1.0)}, ("grad",)),
        ({"hidden": hidden[:2]}, ("hidden", "[2, 2]", "[3, 2]")),
        ({"hidden": hidden.double()}, ("hidden", "float64", "float32")),
        ({"hidden": hidden.T.contiguous().T}, ("hidden", "dense")),
        ({"output_mask": [True] * 4}, ("output_mask", "4", "5")),
        ({"dropouts": [0.5]}, ("seed",)),
    ):
        with pytest.raises(RuntimeError) as error:
            backward(**changed)
        assert_names(error.value, "loraaccel::lora_linear_backward", *words)


def test_nothing_is_written_by_a_call_that_fails() -> None:
    """The gradient that is there stays as it is."""
    x, weight, bias, a, b, _ = (t.clone() if isinstance(t, Tensor) else t for t in Operands())
    a.requires_grad_()
    lora_linear(x, weight, bias, a, b).sum().backward()
    before = a.grad.clone()
    with pytest.raises(RuntimeError):
        lora_linear(x, weight, bias, a, b[:5])
    assert torch.equal(a.grad, before)


def test_layouts_without_strides_are_refused() -> None:
    operands = Operands()
    with pytest.raises((NotImplementedError, RuntimeError)):
        lora_linear(operands.x.to_sparse(), *operands[1:])


# ---- forced kernels --------------------------------------------------------------------------------------------------


def test_forcing_an_unknown_kernel(
    force_kernel: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_kernel("avx1024")
    for call in both_routes(Operands()):
        with pytest.raises(RuntimeError) as error:
            call()
        names = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear"]
        assert_names(error.value, "loraaccel::lora_linear", "LORAACCEL_FORCE_KERNEL=avx1024", *names)
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL")


def test_forcing_a_kernel_that_cannot_serve_the_call(
    force_kernel: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that names the reason, never another kernel in its place: forward, and backward alone."""
    doubles = Operands(*(t.double() for t in Operands()[:5]))
    x, weight, bias, a, b, _ = doubles
    a = a.clone().requires_grad_()
    y = lora_linear(x, weight, bias, a, b)
    for kernel in loraaccel.kernels():
        if kernel["name"] in ("torch", "ref"):
            continue
        force_kernel(kernel["name"])
        for call in (*both_routes(doubles), lambda: y.sum().backward(retain_graph=True)):
            with pytest.raises(RuntimeError) as error:
                call()
            reason = "float64" if kernel["available"] else kernel["reason"]
            assert_names(error.value, f"LORAACCEL_FORCE_KERNEL={kernel['name']}", reason)
    assert a.grad is None
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL")


# ---- native frames ---------------------------------------------------------------------------------------------------

FAILING = """
import torch
from loraaccel.ops import lora_linear
one = torch.ones
try:
    lora_linear(one(3, 8), one(6, 8), None, one(2, 8), one(5, 2))
except RuntimeError as error:
    print(error)
assert lora_linear(one(3, 8), one(6, 8), None, one(2, 8), one(6, 2)).eq(24).all()
"""


@pytest.mark.parametrize("value", ["1", "0", None])
def test_traceback_on_request(value: str | None, run_python: Callable[..., Any]) -> None:
    """LORAACCEL_TRACEBACK=1 appends the native frames, ours with the names of their functions."""
    done = run_python(FAILING, LORAACCEL_TRACEBACK=value)
    assert done.returncode == 0, done.stderr
    assert "lora_B has shape [5, 2], expected [6, 2]" in done.stdout
    frames = [line for line in done.stdout.splitlines() if line.startswith("#")]
    if value != "1":
        assert not frames
        assert "native stack" not in done.stdout
        return
    assert "native stack" in done.stdout
    assert frames[0].startswith("#0 ")
    ours = [f for f in frames if "libloraaccel" in f]
    assert len(ours) >= 2, frames
    assert not [f for f in ours if " ?? " in f], frames
    assert any("forward" in f for f in ours), frames


# ---- meta tensors ----------------------------------------------------------------------------------------------------


def test_operands_on_the_meta_device_are_checked_too() -> None:
    """The shapes as in native code; one meta operand among others is an error, not memory that nobody wrote."""
    ops = OPS
    x, w, a, b = torch.randn(8, 16), torch.randn(6, 16), torch.randn(4, 16), torch.randn(6, 4)
    hidden, grad = torch.randn(8, 4), torch.randn(8, 6)

    def backward(hidden: Tensor) -> object:
        return ops.lora_linear_backward(grad, x, w, [a], [b], hidden, [1.0], [0.0], None, [True] * 5)

    with pytest.raises(ValueError, match="hidden is on meta, expected cpu"):
        backward(hidden.to("meta"))
    meta = {name: t.to("meta") for name, t in {"x": x, "w": w, "a": a, "b": b}.items()}
    for name, wrong, words in (
        ("w", meta["w"][0], "two dimensions"),
        ("a", torch.empty(4, 3, device="meta"), r"\[R, 16\]"),
        ("b", torch.empty(1, 2, device="meta"), r"\[6, 4\]"),
    ):
        m = meta | {name: wrong}
        with pytest.raises(RuntimeError, match=words):
            ops.lora_linear(m["x"], m["w"], None, [m["a"]], [m["b"]], [1.0], [0.0], None)
