"""The whole family under what training puts around it: dropouts of every place, checkpoints, autocast, torch.func,
torch.compile, torch.export; torch's own checks of every registered operator."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft_models import counted, distance
from test_family import CASES, gradients, operands
from test_peft_forms import FORMS, build, input_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import loraaccel as la
from loraaccel._dropout import seeded_dropout
from reference.tolerance import unit_roundoff

pytestmark = pytest.mark.registered

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DIALECTS = ("kohya", "lycoris", "lycoris_scaled")
W = la.LoraWeights


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp(x: Tensor, g: Tensor, ga: Tensor, gb: Tensor, u: Tensor, d: Tensor, da: Tensor, db: Tensor) -> Tensor:
    return la.lora_mlp(x, W(g, None, ga, gb, 1.5), W(u), W(d, None, da, db, -0.5))


def mlp_formula(
    x: Tensor, g: Tensor, ga: Tensor, gb: Tensor, u: Tensor, d: Tensor, da: Tensor, db: Tensor
) -> Tensor:
    inner = F.silu(F.linear(x, g) + 1.5 * F.linear(F.linear(x, ga), gb)) * F.linear(x, u)
    return F.linear(inner, d) - 0.5 * F.linear(F.linear(inner, da), db)


SPLIT = {"x": (2, 3, 8), "w": (6, 8), "b": (6,), "A": (3, 8), "B": (2, 3), "C": (2, 8), "D": (4, 2)}
GROUPS: dict[str, Any] = {
    "lora_qkv": (
        lambda x, w, v, A, B: torch.cat(la.lora_qkv(x, [w, v], [None, None], [A, None], [B, None], [1.7, 0.0]), -1),
        lambda x, w, v, A, B: torch.cat([F.linear(x, w) + 1.7 * F.linear(F.linear(x, A), B), F.linear(x, v)], -1),
        {"x": (2, 3, 8), "w": (6, 8), "v": (4, 8), "A": (3, 8), "B": (6, 3)},
    ),
    "lora_mlp": (
        mlp, mlp_formula,
        {"x": (2, 3, 8), "g": (6, 8), "ga": (2, 8), "gb": (6, 2), "u": (6, 8), "d": (4, 6), "da": (3, 6), "db": (4, 3)},
    ),
}  # fmt: skip
FAMILY = CASES | GROUPS

# ---- dropouts ----

LINEAR = {"x": (2, 3, 8), "w": (6, 8), "b": (6,), "A": (3, 8), "B": (6, 3)}
DELTA = {"x": (2, 3, 8), "base": (2, 3, 6), "A": (3, 8), "B": (6, 3)}
IMAGE = {"x": (2, 3, 5, 5), "w": (6, 3, 3, 3), "b": (6,), "A": (3, 3, 3, 3), "B": (6, 3, 1, 1)}
TUCKER = {
    "x": (2, 3, 5, 5),
    "w": (6, 3, 3, 3),
    "b": (6,),
    "A": (3, 3, 1, 1),
    "M": (3, 3, 3, 3),
    "B": (6, 3, 1, 1),
}
LOHA = {"x": (2, 3, 8), "w": (6, 8), "b": (6,), "p": (6, 2), "q": (2, 8), "r": (6, 2), "s": (2, 8)}
LOHA_CONV = {
    "x": (2, 3, 5, 5),
    "w": (6, 3, 3, 3),
    "b": (6,),
    "p": (6, 1),
    "q": (1, 27),
    "r": (6, 1),
    "s": (1, 27),
}
LOKR_CONV = {"x": (2, 4, 5, 5), "w": (6, 4, 3, 3), "b": (6,), "p": (3, 2), "q": (2, 2, 3, 3)}
LOKR = {"x": (2, 3, 8), "w": (6, 8), "b": (6,), "p": (3, 2), "q": (2, 4)}


def split_layer(
    x: Tensor, w: Tensor, b: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **p: Any
) -> Tensor:
    return la.lora_linear_split(x, w, b, [A, C], [B, D], 1.7, [2, 4], **p)


def tucker(x: Tensor, w: Tensor, b: Tensor, A: Tensor, M: Tensor, B: Tensor, **p: Any) -> Tensor:
    return la.lora_conv2d(x, w, b, A, B, 1.7, 1, 1, lora_mid=M, **p)


def dora(x: Tensor, w: Tensor, b: Tensor, A: Tensor, B: Tensor, m: Tensor, **p: Any) -> Tensor:
    """(Its norm is a constant to autograd, and must be one to finite differences.)"""
    return la.dora_linear(x, w, b, A, B, m, 1.7, weight_norm=torch.arange(1.0, 7.0), **p)


# Function of operands and dropouts, shapes of the operands, the dropouts that it has.
DROPPING: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], tuple[str, ...]]] = {
    "lora_linear": (
        lambda *t, **p: la.lora_linear(*t, 1.7, **p),
        LINEAR,
        ("input", "hidden", "output", *DIALECTS),
    ),
    "lora_delta": (
        lambda *t, **p: la.lora_delta(*t, 1.7, **p),
        DELTA,
        ("input", "hidden", "output", *DIALECTS),
    ),
    "lora_linear_split": (split_layer, SPLIT, ("input", "hidden", "kohya")),
    "lora_conv2d": (
        lambda *t, **p: la.lora_conv2d(*t, 1.7, 1, 1, **p),
        IMAGE,
        ("input", "hidden", "output", *DIALECTS),
    ),
    "lora_conv2d Tucker": (tucker, TUCKER, ("input", "hidden", "output", *DIALECTS)),
    "dora_linear": (dora, LINEAR | {"m": (6,)}, ("input",)),
    "loha_linear": (lambda *t, **p: la.loha_linear(*t, 1.7, **p), LOHA, ("output", *DIALECTS)),
    "loha_conv2d": (lambda *t, **p: la.loha_conv2d(*t, 1.7, 1, 1, **p), LOHA_CONV, ("output", *DIALECTS)),
    "lokr_linear": (lambda *t, **p: la.lokr_linear(*t, 1.7, **p), LOKR, ("output", *DIALECTS)),
    "lokr_conv2d": (lambda *t, **p: la.lokr_conv2d(*t, 1.7, 1, 1, **p), LOKR_CONV, ("output", *DIALECTS)),
}


def dropouts_of(place: str) -> dict[str, Any]:
    if place not in DIALECTS:
        return {f"{place}_dropout": 0.4}
    return {"rank_dropout": 0.4} | ({} if place == "kohya" else {"rank_dropout_dialect": place})


DROPOUTS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    f"{name} {place}": (functools.partial(f, **dropouts_of(place)), shapes)
    for name, (f, shapes, places) in DROPPING.items()
    for place in places
}


def seeded(f: Callable[..., Tensor], seed: int = 5) -> Callable[..., Tensor]:
    def run(*operands: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return f(*operands)

    return run


@pytest.mark.parametrize("name", DROPOUTS)
def test_gradcheck_of_every_dropout(name: str) -> None:
    f, shapes = DROPOUTS[name]
    assert torch.autograd.gradcheck(seeded(f), operands(shapes, F64))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gradcheck_of_an_mlp(act: str) -> None:
    def run(
        x: Tensor, g: Tensor, gb: Tensor, a: Tensor, b: Tensor, u: Tensor, d: Tensor, da: Tensor, db: Tensor
    ) -> Tensor:
        return la.lora_mlp(x, W(g, gb, a, b, 1.5), W(u), W(d, None, da, db, -0.5), act)

    shapes = {
        "x": (3, 8),
        "g": (6, 8),
        "gb": (6,),
        "a": (2, 8),
        "b": (6, 2),
        "u": (6, 8),
        "d": (4, 6),
        "da": (2, 6),
        "db": (4, 2),
    }
    assert torch.autograd.gradcheck(run, operands(shapes, F64))


def test_gradcheck_of_ggpo() -> None:
    """The perturbation is no part of the gradients, so x and W are constants here."""
    x, w, b, A, B = operands(LINEAR, F64)
    norms = torch.rand(6, dtype=F64), torch.rand(6, dtype=F64)
    f = seeded(
        lambda b, A, B: la.ggpo_linear(
            x.detach(), w.detach(), b, A, B, 1.7, sigma=0.1, beta=0.1, combined_norms=norms[0], grad_norms=norms[1],
            hidden_dropout=0.3,
        )
    )  # fmt: skip
    assert torch.autograd.gradcheck(f, (b, A, B))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DROPOUTS)
def test_vt1_checkpoints_draw_the_same_masks(name: str, reentrant: bool) -> None:
    f, shapes = DROPOUTS[name]
    found = []
    for checkpointed in (False, True):
        leaves = operands(shapes, F32)
        torch.manual_seed(3)
        y = checkpoint(f, *leaves, use_reentrant=reentrant) if checkpointed else f(*leaves)
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves)])
    for a, b in zip(*found, strict=True):
        # (Without gradients LoHa may take its other form.)
        assert torch.equal(a, b) or ("loha" in name and distance(a, b) < 1e-6)


@pytest.mark.parametrize(
    "name", [n for n in DROPOUTS if not n.endswith("lycoris_scaled")]
)  # (no closed form)
def test_the_mean_over_masks_is_the_layer_without_dropout(name: str) -> None:
    """Within 4 sigma, of each entry; LyCORIS's unscaled dialect keeps 1 - p of the update."""
    f, shapes = DROPOUTS[name]
    leaves = [t.detach() for t in operands(shapes, F64)]
    without = f.func(*leaves)
    if name.endswith("lycoris"):
        nothing = f.func(*leaves, rank_dropout=1.0, rank_dropout_dialect="lycoris_scaled")  # the frozen layer
        without = nothing + 0.6 * (without - nothing)
    n = 400
    torch.manual_seed(12)
    samples = torch.stack([f(*leaves) for _ in range(n)])
    error = (samples.mean(0) - without).abs()
    limit = 4 * samples.std(0) / n**0.5 + 1e-12
    assert float(limit.max()) < 0.5 * float(samples.std(0).max())  # it can see a wrong factor
    assert bool((error <= limit).all())


@pytest.mark.parametrize(
    "name", ["lora_conv2d input", "lora_conv2d hidden", "lora_conv2d output", "dora_linear input"]
)
def test_no_mask_is_kept_for_the_backward_pass(name: str) -> None:
    """What autograd keeps is what a call without dropout keeps, and at most one dropped copy of x."""

    def kept(f: Callable[..., Tensor]) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = f(*leaves)
        known = {t.untyped_storage().data_ptr() for t in (*leaves, y)}
        return sum(n for key, n in sizes.items() if key not in known)

    f, shapes = DROPOUTS[name]
    leaves = operands(shapes, F32)
    x = leaves[0].untyped_storage().nbytes()
    assert kept(f) <= kept(f.func) + 2 * x


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_the_mask_is_torchs_own(p: float, dtype: torch.dtype) -> None:
    """Same seed, same values, same gradient, and the generator is where torch would have left it."""
    for x in (torch.randn(3, 5, 40), torch.randn(2, 4, 7, 9).to(memory_format=torch.channels_last)):
        found = []
        for f in (F.dropout, seeded_dropout):
            leaf = x.to(dtype).detach().requires_grad_()
            torch.manual_seed(8)
            y = f(leaf, p)
            found.append([y, torch.autograd.grad(y, leaf, torch.ones_like(y))[0], torch.get_rng_state()])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_parts_and_adapters_have_masks_of_their_own() -> None:
    """Correlation of the masks of two parts of a split layer, over many draws, within 4 sigma of none."""
    x, w = torch.ones(1, 1, 4, dtype=F64), torch.zeros(2, 4, dtype=F64)
    a, b = torch.ones(1, 4, dtype=F64), torch.ones(1, 1, dtype=F64)
    n = 4000
    torch.manual_seed(2)
    for p in ({"hidden_dropout": 0.5}, {"rank_dropout": 0.5}):
        y = torch.stack(
            [la.lora_linear_split(x, w, None, [a, a], [b, b], 1.0, [1, 1], **p).flatten() for _ in range(n)]
        )
        kept = (y != 0).double()
        assert abs(float(kept.mean()) - 0.5) < 4 * (0.25 / (2 * n)) ** 0.5
        correlation = float(((kept[:, 0] - 0.5) * (kept[:, 1] - 0.5)).mean() / 0.25)
        assert abs(correlation) < 4 / n**0.5


# ---- torch.func, autocast ----


def sweep(run: Callable[[Callable[..., Tensor], list[Tensor], int], Any], name: str) -> None:
    """A transform over the first and the last operand: refused by name, or the formula's values."""
    ours, formula, shapes = FAMILY[name]
    leaves = [t.detach() for t in operands(shapes, F64)]
    for at in (0, len(leaves) - 1):
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode):
                found = refused_or(lambda at=at: run(ours, leaves, at))
                if found is not None:
                    assert distance(found, run(formula, leaves, at)) < 1e-11


def refused_or(call: Callable[[], Tensor]) -> Tensor | None:
    """The call's value, or None where it is refused in words of ours (or of torch's about our Function)."""
    try:
        return call()
    except RuntimeError as error:
        if any(word in str(error) for word in ("loraaccel::", "autograd.Function")):
            return None
        raise


def replaced(leaves: list[Tensor], at: int, value: Tensor) -> list[Tensor]:
    return [*leaves[:at], value, *leaves[at + 1 :]]


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], list[Tensor], int], Any]] = {
    "grad": lambda f, t, i: torch.func.grad(lambda v: f(*replaced(t, i, v)).square().sum())(t[i]),
    "jacrev": lambda f, t, i: torch.func.jacrev(lambda v: f(*replaced(t, i, v)))(t[i]),
    "vmap": lambda f, t, i: torch.func.vmap(lambda v: f(*replaced(t, i, v)))(torch.stack([t[i], 2 * t[i]])),
    "jvp": lambda f, t, i: torch.func.jvp(lambda v: f(*replaced(t, i, v)), (t[i],), (torch.ones_like(t[i]),))[
        1
    ],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FAMILY)
def test_transforms_are_refused_or_right(name: str, transform: str) -> None:
    sweep(TRANSFORMS[transform], name)


def tangent_of(y: Tensor) -> Tensor:
    tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if tangent is None else tangent


@pytest.mark.parametrize("name", FAMILY)
def test_forward_mode_is_refused(name: str) -> None:
    """A tangent that silently is zero would be the worst of answers."""
    import torch.autograd.forward_ad as forward_ad

    ours, formula, shapes = FAMILY[name]
    leaves = [t.detach() for t in operands(shapes, F64)]
    for grad_mode in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
            dual = replaced(leaves, 0, forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0])))
            expected = forward_ad.unpack_dual(formula(*dual)).tangent
            tangent = refused_or(lambda dual=dual: tangent_of(ours(*dual)))
            assert tangent is None or distance(tangent, expected) < 1e-11


@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", FAMILY)
def test_vt2_autocast_in_every_combination(name: str, cast: torch.dtype) -> None:
    """Types of output and gradients as in plain torch, and errors no larger than twice its own and a few roundings."""
    ours, formula, shapes = FAMILY[name]
    keys, compared = list(shapes), 0
    for types in itertools.product((F32, BF16, F16), repeat=3):
        of = {"x": types[0], **dict.fromkeys(("w", "b", "base", "v", "g", "u", "d"), types[1])}
        leaves = [
            t.detach().to(of.get(k, types[2])).requires_grad_()
            for k, t in zip(keys, operands(shapes, F32), strict=True)
        ]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        found = [cast_gradients(f, leaves, cast) for f in (ours, formula)]
        ref = gradients(formula, exact)
        if isinstance(found[1], str):  # what plain torch refuses we may refuse
            continue
        compared += 1
        assert not isinstance(found[0], str), (types, found[0])
        for key, g, o, r in zip(("y", *keys), found[0], found[1], ref, strict=True):
            if key == "y":  # a given output, and an embedding's, keep their type
                given = of["base"] if "base" in keys else types[1] if "embedding" in name else cast
                assert g.dtype == given, types
            else:
                assert g.dtype == o.dtype, (types, key)
            limit = 2 * distance(o, r) + 8 * unit_roundoff(cast)
            assert distance(g, r) <= limit, (types, key, distance(g, r), distance(o, r))
    assert compared >= 9


def cast_gradients(f: Callable[..., Tensor], leaves: list[Tensor], cast: torch.dtype) -> list[Tensor] | str:
    try:
        with torch.autocast("cpu", dtype=cast):
            y = f(*leaves)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=F64).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    except RuntimeError as error:
        return str(error)


def test_norms_are_not_rounded_by_autocast() -> None:
    torch.manual_seed(0)
    w, a, b = torch.randn(40, 30), torch.randn(4, 30), torch.randn(40, 4)
    m = torch.linalg.norm(w, dim=1)
    x = torch.randn(6, 30)
    with torch.autocast("cpu", dtype=BF16):
        inside = la.lora_norm(a, b, 0.5), la.lora_row_norms(a, b, 0.5)
        fresh = la.dora_linear(x, w, None, a, torch.zeros_like(b), m, 0.5)
        frozen = la.lora_linear(x, w, None, a, torch.zeros_like(b), 0.5)
        moved = la.dora_linear(x, w, None, a, b, m, 0.5)
    assert torch.equal(inside[0], la.lora_norm(a, b, 0.5))
    assert torch.equal(inside[1], la.lora_row_norms(a, b, 0.5))
    assert torch.equal(fresh, frozen)  # every gain is 1
    gain = m / torch.linalg.norm(w + 0.5 * b @ a, dim=1)
    expected = gain.double() * (x.double() @ (w + 0.5 * b @ a).double().T)
    assert distance(moved, expected) < 4 * unit_roundoff(BF16)


# ---- torch.compile and torch.export ----

STRENGTHS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "lora_linear": (la.lora_linear, LINEAR),
    "lora_delta": (la.lora_delta, DELTA),
    "lora_qkv": (lambda x, w, b, A, B, s: la.lora_qkv(x, [w], [b], [A], [B], [s])[0], LINEAR),
    "lora_linear_batched": (lambda x, w, b, A, B, s: la.lora_linear_batched(x, w, b, [A], [B], [s], [0, -1]), LINEAR),
    "lora_linear_split": (lambda x, w, b, A, B, s: la.lora_linear_split(x, w, b, [A], [B], s, [6]), LINEAR),
    "dora_linear": (lambda x, w, b, A, B, s: la.dora_linear(x, w, b, A, B, b, s), LINEAR),
    "lora_conv2d": (lambda x, w, b, A, B, s: la.lora_conv2d(x, w, b, A, B, s, 1, 1), IMAGE),
    "loha_linear": (la.loha_linear, LOHA),
    "lora_mlp": (lambda x, w, b, A, B, s: la.lora_mlp(x, None, W(w, b, A, B, s), W(w.t().contiguous())), LINEAR),
}  # fmt: skip
NUMBERS = (1.0, 0.5, 2.0, 0.25, 3.0, -1.0, 0.75)


@pytest.mark.parametrize("name", STRENGTHS)
def test_vt4_functions_compile_once_more_at_most(name: str, fresh_dynamo: None) -> None:
    f, shapes = STRENGTHS[name]
    leaves = [t.detach() for t in operands(shapes, F32)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for s in NUMBERS:
        assert distance(compiled(*leaves, s), f(*leaves, s)) < 1e-6
    assert counter.frame_count <= 2
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for s in NUMBERS:
        assert distance(compiled(*leaves, torch.tensor(s)), f(*leaves, s)) < 1e-6
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", FORMS)
def test_vt4_patched_layers_compile_once_more_at_most(name: str, fresh_dynamo: None) -> None:
    layer = build(name, F32, F32).eval()
    la.patch(layer, strict=True)
    x = input_of(layer, F32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    host = next(m for m in layer.modules() if hasattr(m, "scaling"))
    for s in NUMBERS:
        host.scaling["default"] = s
        with torch.no_grad():
            assert distance(compiled(x), layer(x)) < 1e-5
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_export_of_patched_layers_holds_our_operators(name: str, strict: bool) -> None:
    layer = build(name, F32, F32).eval()
    la.patch(layer, strict=True)
    x = input_of(layer, F32)
    program = torch.export.export(layer, (x,), strict=strict)
    assert [n for n in program.graph.nodes if "loraaccel" in str(n.target)]
    assert distance(program.module()(x), layer(x)) < 1e-5


def test_a_hot_swappable_scale_in_every_form() -> None:
    """PEFT keeps it in a tensor then: it is read at each call."""
    for name in FORMS:
        layer = build(name, F32, F32).eval()
        host = next(m for m in layer.modules() if hasattr(m, "scaling"))
        own = host.scaling["default"]
        la.patch(layer, strict=True)
        x = input_of(layer, F32)
        with torch.no_grad(), counted() as calls:
            expected = layer(x)
            host.scaling["default"] = torch.tensor(own)
            assert distance(layer(x), expected) < 1e-6, name
        assert sum(calls.values()) == 2, name


# ---- torch's own checks of what is registered ----


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def plain(*shape: int) -> Tensor:
    return leaf(*shape).detach()


def opchecks() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Name: operator and arguments. Every registered operator is among them, with every kind of mask it has."""
    ops = torch.ops.loraaccel
    seed, ids = torch.tensor([123, 456]), torch.tensor([0, -1])
    x, w, base = plain(2, 3, 8), plain(6, 8), plain(2, 3, 6)
    a, b = [plain(2, 8), plain(3, 8)], [plain(6, 2), plain(6, 3)]
    factors = torch.rand(6, 2)
    ws = [plain(6, 8), plain(4, 8)]
    qa, qb = [plain(2, 8), plain(1, 8)], [plain(6, 2), plain(4, 1)]
    mw, mb = [plain(6, 8), plain(6, 8), plain(4, 6)], [plain(6), plain(6), plain(4)]
    ma, mbs = [plain(2, 8), plain(3, 8), plain(2, 6)], [plain(6, 2), plain(6, 3), plain(4, 2)]
    m = plain(3, 8)
    table: dict[str, tuple[str, tuple[Any, ...]]] = {}

    masks = {
        "plain": ([a[0]], [b[0]], [1.5], [0.0], None, None, [], None, None),
        "dropouts": ([a[0]], [b[0]], [1.5], [0.3], seed, None, [0.2, 0.4], None, None),
        "samples": (a, b, [1.5, 2.0], [0.0, 0.0], None, None, [], ids, None),
        "factors": ([a[0]], [b[0]], [1.5], [0.0], None, None, [], None, factors),
        "packed": ([a[0]], [b[0]], [1.5], [0.0], None, ops.pack_weight(w, False), [], None, None),
    }
    for kind, (la_, lb, s, p, key, packed, ranks, adapters, given) in masks.items():
        grads = [t.clone().requires_grad_() for t in (*la_, *lb)]
        forward = (leaf(2, 3, 8), leaf(6, 8), leaf(6), grads[: len(la_)], grads[len(la_) :], s, p, key)
        table[f"lora_linear {kind}"] = ("lora_linear", (*forward, packed, ranks, adapters, given))
        _, hidden = ops.lora_linear(x, w, None, la_, lb, s, p, key, None, ranks, adapters, given)
        wanted = [True] * (3 + 2 * len(la_))
        table[f"lora_linear_backward {kind}"] = (
            "lora_linear_backward", (base, x, w, la_, lb, hidden, s, p, key, wanted, None, ranks, adapters, given),
        )  # fmt: skip
        if kind == "packed":
            continue
        output = 0.5 if kind == "dropouts" else 0.0
        delta = (leaf(2, 3, 8), leaf(2, 3, 6), grads[: len(la_)], grads[len(la_) :], s, p, key)
        key = seed if output else key
        table[f"lora_delta {kind}"] = ("lora_delta", (*delta[:6], key, ranks, output, adapters, given))
        _, hidden = ops.lora_delta(x, base, la_, lb, s, p, key, ranks, output, adapters, given)
        table[f"lora_delta_backward {kind}"] = (
            "lora_delta_backward",
            (base, x, la_, lb, hidden, s, p, key, [True] * (1 + 2 * len(la_)), ranks, output, adapters, given),
        )  # fmt: skip
    for kind, p, ranks, given in (
        ("plain", [0.0, 0.0], [], None),
        ("dropouts", [0.0, 0.2], [0.1, 0.0, 0.0, 0.3], None),
        ("factors", [0.0, 0.0], [], torch.rand(6, 3)),
    ):
        flat = (x, ws, [plain(6)], [True, False], qa, qb, [1, 1], [1.5, 2.0], p, seed, ranks, given)
        tracked = (leaf(2, 3, 8), [leaf(6, 8), leaf(4, 8)], [leaf(6)], *flat[3:])
        table[f"lora_qkv {kind}"] = ("lora_qkv", tracked)
        _, hidden = ops.lora_qkv(*flat)
        table[f"lora_qkv_backward {kind}"] = (
            "lora_qkv_backward",
            (
                [base, plain(2, 3, 4)], [True, True], x, ws, qa, qb, [1, 1], hidden, [1.5, 2.0], p, seed, [True] * 9,
                ranks, given,
            ),
        )  # fmt: skip
    for kind, p in (("plain", [0.0] * 3), ("dropouts", [0.3, 0.2, 0.1])):
        args = (m, mw, mb, [True] * 3, ma, mbs, [1] * 3, [1.0, 2.0, 0.5], p, seed, 1)
        table[f"lora_mlp {kind}"] = ("lora_mlp", (leaf(3, 8), *args[1:]))
        _, inner, inner_hidden, hidden = ops.lora_mlp(*args)
        table[f"lora_mlp_backward {kind}"] = (
            "lora_mlp_backward",
            (
                plain(3, 4), m, inner, mw, ma, mbs, [1] * 3, inner_hidden, hidden, [1.0, 2.0, 0.5], p, seed, 1,
                [True] * 13,
            ),
        )  # fmt: skip
    image = (leaf(2, 3, 8, 9), leaf(5, 3, 3, 3), leaf(5), leaf(2, 3, 3, 3), leaf(5, 2, 1, 1))
    table["lora_conv2d"] = ("lora_conv2d", (*image, 1.5, [1, 1], [1, 1], [1, 1]))
    table["lora_conv2d strided, without bias"] = (
        "lora_conv2d", (image[0], image[1], None, *image[3:], 1.5, [2, 1], [1, 0], [1, 2]),
    )  # fmt: skip
    for first, shapes in ((False, ((5, 6), (5, 2))), (True, ((2, 6, 5), (2, 2, 5)))):
        table[f"lora_expand {first}"] = (
            "lora_expand",
            (leaf(*shapes[0]), leaf(*shapes[1]), leaf(6, 2), 1.5, first),
        )
        table[f"lora_expand_backward {first}"] = (
            "lora_expand_backward", (plain(*shapes[0]), plain(*shapes[1]), plain(6, 2), 1.5, first, [True, True]),
        )  # fmt: skip
    for centred, bias in ((False, None), (True, leaf(6))):
        table[f"column_gain {centred}"] = ("column_gain", (leaf(5, 6), leaf(6), bias, centred))
        table[f"column_gain_backward {centred}"] = (
            "column_gain_backward",
            (
                plain(5, 6), plain(5, 6), plain(6), None if bias is None else plain(6), centred,
                [True, True, bias is not None],
            ),
        )  # fmt: skip
    table["weight_norms of W"] = ("weight_norms", (leaf(6, 8), [leaf(2, 8)], [leaf(6, 2)], [1.5]))
    table["weight_norms without"] = ("weight_norms", (None, [leaf(2, 8)], [leaf(6, 2)], [1.5]))
    table["pack_weight"] = ("pack_weight", (plain(33, 40), False))
    # Their gradient is one of the outputs, so none of their operands needs one here.
    samples = (plain(3, 4, 6, 5), plain(3, 4, 6, 5), plain(3).abs() + 0.1, plain(3), plain(3, 1, 6, 5), None)
    table["diffusion_loss"] = ("diffusion_loss", (*samples, 2, 1, True, [True, True, True]))
    logits = (plain(33), plain(33).sigmoid(), plain(33), None, None, 0.0, 0.0, float("nan"))
    table["bce_with_logits"] = ("bce_with_logits", (*logits, 1, True, [True, True]))
    snr = (torch.tensor([3, 1]), plain(10).sigmoid())
    table["snr_scale"] = ("snr_scale", (*snr, 5.0, True, 0.5, True, False))
    table["huber_threshold"] = ("huber_threshold", (*snr, 0.1))
    table["area_resize"] = ("area_resize", (plain(3, 1, 9, 7), 3, 2))
    return table


OPCHECKS = opchecks()


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    op, args = OPCHECKS[name]
    torch.library.opcheck(getattr(torch.ops.loraaccel, op).default, args)


def test_every_registered_operator_is_checked() -> None:
    registered = {
        s.name.removeprefix("loraaccel::")
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("loraaccel::")
    }
    assert {op for op, _ in OPCHECKS.values()} == registered


def test_any_name_of_ours_registers_every_formula() -> None:
    """A program that only uses torch.ops after one look-up has fakes and gradients of all of them."""
    script = (
        "import torch, loraaccel; loraaccel.lora_linear\n"
        "from torch._library.simple_registry import singleton\n"
        "names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith('loraaccel::')]\n"
        "assert len(names) > 10\n"
        "for name in names:\n"
        "    assert singleton.find(name).fake_impl.kernel is not None, name\n"
        "    backward = name.endswith('_backward') or name.endswith('pack_weight')\n"
        "    key = torch._C._dispatch_has_kernel_for_dispatch_key(name, 'AutogradCPU') or "
        "torch._C._dispatch_has_kernel_for_dispatch_key(name, 'Autograd')\n"
        "    assert key or backward, name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
