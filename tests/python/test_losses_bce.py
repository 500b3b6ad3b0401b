"""bce_with_logits and nn.BCEWithLogitsLoss against torch's and against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import loraaccel
from loraaccel.losses import bce_with_logits
from loraaccel.nn import BCEWithLogitsLoss

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
registered = pytest.mark.registered


def operands(shape=(7, 33), dtype=torch.float32, seed=0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return (3 * torch.randn(shape)).to(dtype).requires_grad_(), torch.rand(shape).round().to(dtype)


def with_gradient(function, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = function(x, *args, **kwargs)
    up = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).reshape(loss.shape).to(loss.dtype)
    (grad,) = torch.autograd.grad(loss, x, up)
    return loss.detach(), grad


def assert_not_worse(x: Tensor, *args: Tensor | None, **kwargs) -> None:
    """Values and gradients at most as far from float64 as torch's own, or within its rounding."""
    wide = [a if a is None else a.double() for a in args]
    exact = with_gradient(F.binary_cross_entropy_with_logits, x.double(), *wide, **kwargs)
    theirs = with_gradient(F.binary_cross_entropy_with_logits, x, *args, **kwargs)
    ours = with_gradient(bce_with_logits, x, *args, **kwargs)
    for e, t, o in zip(exact, theirs, ours, strict=True):
        assert (o.dtype, o.shape) == (t.dtype, t.shape)
        step = torch.finfo(o.dtype).eps * e.abs() + torch.finfo(o.dtype).smallest_normal
        # (Where the terms of torch's formula cancel, its error is of their size, and "exact" is torch's too.)
        slack = step + 1e-6 * e.abs().max() if o.dtype.itemsize == 4 else step + 1e-14 * e.abs().max()
        assert ((o.double() - e).abs() <= torch.maximum((t.double() - e).abs(), slack)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["", "w", "p", "wp"])
def test_values_and_gradients(dtype, reduction, weights):
    x, t = operands(dtype=dtype)
    w = torch.rand(7, 1).to(dtype) if "w" in weights else None
    p = (torch.rand(33) + 0.5).to(dtype) if "p" in weights else None
    wide = [None if a is None else a.double() for a in (w, p)]
    exact = with_gradient(bce_with_logits, x.double(), t.double(), *wide, reduction)
    torch.testing.assert_close(
        exact,
        with_gradient(
            F.binary_cross_entropy_with_logits, x.double(), t.double(), wide[0], None, None, reduction, wide[1]
        ),
        rtol=1e-12, atol=1e-14,
    )  # fmt: skip
    assert_not_worse(x, t, w, pos_weight=p, reduction=reduction)


def test_known_vectors():
    """Values of the formula in double arithmetic."""
    x, t = torch.tensor([0.0, 2, -2, 1]), torch.tensor([0.0, 1, 1, 0])
    torch.testing.assert_close(
        bce_with_logits(x, t, reduction="sum"), torch.tensor(4.26026489), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(bce_with_logits(x, t), torch.tensor(1.06506622), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("x", "w", "p"),
    [
        ((), (), ()), ((5,), (5,), (1,)), ((5,), (), (5,)), ((4, 3), (4, 3), (3,)), ((4, 3, 5), (3, 1), (4, 1, 1)),
        ((4, 3, 5), (4, 1, 5), (5,)), ((2, 3, 4, 5), (3, 1, 5), (2, 1, 4, 1)), ((2, 0), (2, 1), (1,)), ((0,), (1,), ()),
    ],
)  # fmt: skip
def test_weights_of_any_shape(x, w, p):
    torch.manual_seed(0)
    given = torch.randn(x), torch.rand(x)
    weights = torch.rand(w) + 0.5, torch.rand(p) + 0.5
    for reduction in ("none", "sum", "mean"):
        ours = with_gradient(bce_with_logits, *given, *weights, reduction)
        theirs = with_gradient(
            F.binary_cross_entropy_with_logits, *given, weights[0], None, None, reduction, weights[1]
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_memory_in_any_order():
    x, t = torch.randn(6, 10), torch.rand(6, 10)
    w = torch.rand(10, 6)
    views = [
        (x.T, t.T, w), (x[::2], t[::2], w.T[::2]), (x.expand(3, 6, 10), t.expand(3, 6, 10), w.T),
        (x[:, 1::3], t[:, 1::3], w.T[:, 1::3]), (x.flip(0), t.flip(1), w.T[:, :1]),
    ]  # fmt: skip
    for a, b, c in views:
        ours = with_gradient(bce_with_logits, a, b, c)
        torch.testing.assert_close(ours, with_gradient(F.binary_cross_entropy_with_logits, a, b, c))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        bce_with_logits(image, image.sigmoid()), F.binary_cross_entropy_with_logits(image, image.sigmoid())
    )


@pytest.mark.parametrize(("x", "t"), list(itertools.product(FLOATS, FLOATS)))
def test_mixed_types(x, t):
    a, b = operands()
    theirs = with_gradient(F.binary_cross_entropy_with_logits, a.to(x), b.to(t))
    ours = with_gradient(bce_with_logits, a.to(x), b.to(t))
    for o, e in zip(ours, theirs, strict=True):
        assert o.dtype == e.dtype
        assert torch.allclose(o.double(), e.double(), rtol=0.02, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    x=st.floats(-200, 200),
    spread=st.floats(0, 50),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    soft=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_against_torch(shape, x, spread, reduction, soft, seed):
    torch.manual_seed(seed)
    logits = x + spread * torch.randn(shape)
    target = torch.rand(shape) if soft else torch.rand(shape).round()
    ours = with_gradient(bce_with_logits, logits, target, reduction=reduction)
    theirs = with_gradient(F.binary_cross_entropy_with_logits, logits, target, reduction=reduction)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel, force_kernel, kernel_calls):
    x, t = operands((3, 70))
    exact = with_gradient(F.binary_cross_entropy_with_logits, x.double(), t.double())
    force_kernel(kernel)
    ours = with_gradient(bce_with_logits, x, t)
    torch.testing.assert_close([o.double() for o in ours], list(exact), rtol=1e-6, atol=1e-8)
    assert set(kernel_calls()) == {kernel}


# ---- options ----


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gamma", [0.0, 2.0, 0.5])
def test_options(reduction, smoothing, gamma):
    x, t = operands()
    t[0, ::3] = -100
    p = torch.rand(33) + 0.5
    soft = t * (1 - smoothing) + smoothing / 2

    def formula(x: Tensor) -> Tensor:
        q = (soft * torch.sigmoid(-x) + (1 - soft) * torch.sigmoid(x)).clamp(min=0)
        loss = q**gamma * F.binary_cross_entropy_with_logits(x, soft, pos_weight=p, reduction="none")
        loss = loss[t != -100]
        return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()

    ours = x.detach().requires_grad_()
    loss = bce_with_logits(
        ours, t, None, p, reduction, label_smoothing=smoothing, focal_gamma=gamma, ignore_index=-100
    )
    if reduction == "none":
        assert (loss[t == -100] == 0).all()
    torch.testing.assert_close(
        loss[t != -100] if reduction == "none" else loss, formula(x), rtol=1e-5, atol=2e-6
    )
    loss.sum().backward()
    (expected,) = torch.autograd.grad(formula(x).sum(), x)
    torch.testing.assert_close(ours.grad, expected, rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("kept", [1, 2, 4096])
def test_few_kept_positions(kept):
    """VL3: gradients of the kept ones are those of a loss over them alone."""
    torch.manual_seed(0)
    x = torch.randn(4096, requires_grad=True)
    t = torch.full((4096,), -1.0)
    t[-kept:] = 1.0
    for mean_of, divisor in (("kept", kept), ("all", 4096)):
        (ours,) = torch.autograd.grad(bce_with_logits(x, t, ignore_index=-1, mean_of=mean_of), x)
        (expected,) = torch.autograd.grad(
            F.binary_cross_entropy_with_logits(x[-kept:], t[-kept:], reduction="sum") / divisor, x
        )
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
        assert (ours[-kept:] != 0).all()


def test_nothing_kept():
    """VL3: a loss of 0 with gradients of 0, also where the logits are none."""
    x = torch.tensor([float("nan"), float("inf"), 1.0], requires_grad=True)
    loss = bce_with_logits(x, torch.full((3,), -1.0), ignore_index=-1)
    loss.backward()
    assert loss == 0
    assert (x.grad == 0).all()


# ---- precision ----


def test_sums_keep_their_digits():
    """VL4: bfloat16 in, sums in float32 and better; threads change nothing."""
    torch.manual_seed(0)
    x, t = torch.randn(1 << 20).bfloat16(), torch.rand(1 << 20)
    exact = F.binary_cross_entropy_with_logits(x.double(), t.double())
    threads, seen = torch.get_num_threads(), []
    try:
        for n in (1, 2, 8):
            torch.set_num_threads(n)
            seen.append(bce_with_logits(x, t))
    finally:
        torch.set_num_threads(threads)
    assert abs(seen[0].double() / exact - 1) < 1e-6
    assert all(torch.equal(s, seen[0]) for s in seen)


def test_broadcast_gradient_from_above():
    """VL4: an expanded gradient is read as what it says."""
    x, t = operands()
    up = torch.tensor(0.25).expand(7, 33)
    (ours,) = torch.autograd.grad(bce_with_logits(x, t, reduction="none"), x, up)
    (theirs,) = torch.autograd.grad(F.binary_cross_entropy_with_logits(x, t, reduction="none"), x, up)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [65536.0, 0.3, 1.0, 0.25])
def test_gradients_of_halves_are_rounded_once(dtype, scale):
    """A scaled loss has gradients within half a step, however small the unscaled ones are."""
    x, t = operands((1 << 10, 64), dtype)
    t = t.float()  # so that the loss, and what it is multiplied by, are too
    (grad,) = torch.autograd.grad(bce_with_logits(x, t) * scale, x)
    exact = scale * (torch.sigmoid(x.double()) - t.double()) / x.numel()
    step = (
        torch.finfo(dtype).eps * exact.abs() * 0.51
        + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    assert ((grad.double() - exact).abs() <= step).all()


# ---- gradients ----


def test_gradcheck():
    x, t = operands((3, 4), torch.float64)
    w, p = torch.rand(3, 1, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    for reduction in ("none", "mean", "sum"):
        for options in ({}, {"label_smoothing": 0.2, "focal_gamma": 2.0}, {"ignore_index": 1.0}):
            assert torch.autograd.gradcheck(
                lambda x, r=reduction, o=options: bce_with_logits(x, t, w, p, r, **o), (x,)
            )
            if "focal_gamma" not in options:
                assert torch.autograd.gradgradcheck(
                    lambda x, r=reduction, o=options: bce_with_logits(x, t, w, p, r, **o), (x,)
                )


def test_gradient_of_the_gradient():
    x, t = operands()
    results = []
    for function in (bce_with_logits, F.binary_cross_entropy_with_logits):
        (grad,) = torch.autograd.grad(function(x * 2, t), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*results)


def test_backward_twice():
    """The second pass makes the gradient anew: the first one's may have been changed by then."""
    x, t = operands()
    loss = bce_with_logits(x, t)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    expected = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(second, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_gradients_of_other_operands():
    x, t = operands()
    for wants in ("target", "weight", "pos_weight"):
        more = {"weight": torch.rand(33), "pos_weight": torch.rand(33)}
        more = {name: v.requires_grad_(name == wants) for name, v in more.items()}
        target = t.clone().requires_grad_(wants == "target")
        if wants != "target":  # torch has no such gradient
            with pytest.raises(RuntimeError, match="not differentiable"):
                bce_with_logits(x, target, **more)
            continue
        loss = bce_with_logits(x, target, **more)
        ours = torch.autograd.grad(loss, (x, target))
        theirs = torch.autograd.grad(F.binary_cross_entropy_with_logits(x, target, **more), (x, target))
        torch.testing.assert_close(ours, theirs)


def test_no_gradient_wanted(kernel_calls):
    x, t = operands()
    with torch.no_grad():
        loss = bce_with_logits(x, t)
    assert not loss.requires_grad
    assert not bce_with_logits(x.detach(), t).requires_grad
    assert sum(kernel_calls().values()) == 2


def test_transforms():
    x, t = operands((5,))
    x = x.detach()
    ours = torch.func.grad(lambda x: bce_with_logits(x, t))(x)
    torch.testing.assert_close(ours, torch.func.grad(lambda x: F.binary_cross_entropy_with_logits(x, t))(x))
    x.requires_grad_()
    rows = torch.autograd.functional.jacobian(
        lambda x: bce_with_logits(x, t, reduction="none"), x, vectorize=True
    )
    torch.testing.assert_close(rows.diagonal(), torch.sigmoid(x.detach()) - t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast(dtype, kernel_calls):
    x, t = operands(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = bce_with_logits(x, t)
        theirs = F.binary_cross_entropy_with_logits(x, t)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x), rtol=1e-2, atol=1e-7
    )
    assert kernel_calls()


@registered
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    """torch.compile takes the formula, which it fuses itself: no break in the graph."""
    compiled = torch.compile(
        lambda x, t, w: bce_with_logits(x, t, w, reduction=reduction), fullgraph=True, backend="aot_eager"
    )
    x, t = operands()
    w = torch.rand(33)
    torch.testing.assert_close(
        with_gradient(compiled, x, t, w), with_gradient(bce_with_logits, x, t, w, reduction=reduction)
    )


@registered
def test_operator_checks():
    x, t = operands()
    x = x.detach()
    for reduction, mask in ((0, [True, True]), (1, [True, False]), (2, [False, True])):
        args = (x, t, torch.rand(33), None, None, 0.0, 0.0, float("nan"), reduction, True, mask)
        torch.library.opcheck(torch.ops.loraaccel.bce_with_logits.default, args, test_utils="test_schema")
        torch.library.opcheck(torch.ops.loraaccel.bce_with_logits.default, args, test_utils="test_faketensor")
    loss = torch.ops.loraaccel.bce_with_logits(
        x.requires_grad_(), t, None, None, None, 0.0, 0.0, float("nan"), 1, True, [True, False]
    )
    with pytest.raises(RuntimeError, match="not differentiable"):
        loss[0].backward()


# ---- the switch, other devices, the module, errors ----


def test_switched_off(kernel_calls):
    x, t = operands()
    with loraaccel.disabled():
        ours = with_gradient(bce_with_logits, x, t)
    theirs = with_gradient(F.binary_cross_entropy_with_logits, x, t)
    assert all(torch.equal(o, e) for o, e in zip(ours, theirs, strict=True))
    assert not kernel_calls()


def test_other_devices():
    x, t = operands()
    assert bce_with_logits(x.to("meta"), t.to("meta")).device.type == "meta"


def test_module_is_a_drop_in():
    torch.manual_seed(0)
    x, t = operands()
    w, p = torch.rand(33), torch.rand(33)
    theirs = torch.nn.BCEWithLogitsLoss(w, reduction="sum", pos_weight=p)
    ours = BCEWithLogitsLoss(w, reduction="sum", pos_weight=p)
    assert isinstance(ours, torch.nn.BCEWithLogitsLoss)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x, t), theirs(x, t))
    assert repr(ours) == repr(theirs)
    with pytest.warns(UserWarning, match="size_average"):
        assert BCEWithLogitsLoss(size_average=False).reduction == "sum"
    focal = BCEWithLogitsLoss(focal_gamma=2.0, label_smoothing=0.1, ignore_index=-1, mean_of="all")
    expected = bce_with_logits(x, t, focal_gamma=2.0, label_smoothing=0.1, ignore_index=-1, mean_of="all")
    assert torch.equal(focal(x, t), expected)
    assert not BCEWithLogitsLoss().state_dict()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"target": torch.zeros(7, 32)}, ValueError), ({"target": torch.zeros(7, 33, dtype=torch.int64)}, RuntimeError),
        ({"target": torch.zeros(7, 33, dtype=torch.bool)}, RuntimeError), ({"target": [1.0]}, TypeError),
        ({"target": torch.zeros(7, 33, device="meta")}, ValueError), ({"weight": torch.zeros(5)}, RuntimeError),
        ({"weight": torch.zeros(2, 7, 33)}, RuntimeError), ({"pos_weight": torch.zeros(7)}, RuntimeError),
        ({"pos_weight": 2.0}, TypeError), ({"reduction": "median"}, ValueError), ({"mean_of": "some"}, ValueError),
        ({"label_smoothing": 1.5}, RuntimeError), ({"label_smoothing": float("nan")}, RuntimeError),
        ({"focal_gamma": -1.0}, RuntimeError), ({"input": 3}, TypeError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("off", [False, True])
def test_errors(change, error, off):
    """One sentence; the same kinds as torch's where torch has them."""
    x, t = operands()
    given = {"input": x, "target": t} | change
    context = loraaccel.disabled() if off else torch.enable_grad()
    with context, pytest.raises(error) as raised:
        bce_with_logits(**given)
    assert not off or raised.value
    if set(change) <= {"target", "weight"} and isinstance(next(iter(change.values())), Tensor):
        kind = RuntimeError if error is RuntimeError else ValueError
        if next(iter(change.values())).device.type == "cpu":
            with pytest.raises(kind):
                F.binary_cross_entropy_with_logits(**given)
