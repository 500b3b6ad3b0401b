"""Groups of LoRA layers over one input: what is computed together, wrong guesses, state changes between two calls."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_models import Attn, attend, block, check, gradients, processor, second_adapter, tensor
from peft_models import config, counted, distance
from test_patch import same, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel.integrations import group_scope

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SELF = {"lora_qkv": 3, "lora_linear": 1}
CROSS = {"lora_qkv": 2, "lora_linear": 2}
APART = {"lora_linear": 4}


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group_scope, "MIN_WORK", 0)
    yield
    assert group_scope.current.get() is None


def patched(*args: Any, **options: Any) -> Any:
    model = block(*args, **options)
    assert loraaccel.patch(model, strict=True).num_fused == 4
    return model


def ungrouped() -> dict[str, int]:
    return dict(loraaccel.info()["ungrouped"])


def other_inputs() -> int:
    return ungrouped().get("other_input", 0)


# ---- what is computed together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1,), (2, 5), (3, 40)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "adapters"),
    [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F32, BF16)],
    ids=str,
)
def test_self_attention(dtype: torch.dtype, adapters: torch.dtype, rows: tuple[int, ...]) -> None:
    model = patched(dtype=dtype, adapters=adapters)
    check(model, [tensor(*rows, 16, dtype=dtype)], SELF)


@pytest.mark.parametrize("context", [16, 12, 24])
def test_cross_attention(context: int) -> None:
    model = patched(16, context)
    before = other_inputs()
    check(model, [tensor(2, 5, 16), tensor(2, 7, context, seed=2)], CROSS)
    assert other_inputs() == before  # the guess was right at once


def test_second_input_by_name_or_the_first_once_more() -> None:
    model = patched()
    x, context = tensor(2, 5, 16), tensor(2, 7, 16, seed=2)
    check(model, [x, context], CROSS, lambda m, a, b: m(hidden_states=a, encoder_hidden_states=b))
    check(model, [x], SELF, lambda m, a: m(a, a))
    check(model, [x], SELF, lambda m, a: m(a, encoder_hidden_states=a))


def test_no_rows() -> None:
    model = patched()
    with counted() as calls:
        y = model.attn.to_q(tensor(0, 16))
        out = model(tensor(2, 0, 16))
    assert (y.shape, out.shape) == ((0, 16), (2, 0, 16))
    assert calls == {"lora_qkv": 3, "lora_linear": 2}


def test_several_adapters_and_ranks() -> None:
    model = block(rank_pattern={"to_k": 7})
    second_adapter(model, ["to_q", "to_v"], r=3, lora_alpha=9)
    for name in ("to_q", "to_k", "to_v"):
        getattr(model.attn, name).set_adapter(["default", "b"])
    loraaccel.patch(model, strict=True)
    check(model, [tensor(2, 5, 16)], SELF)


@pytest.mark.parametrize("cast", [BF16, F16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast(dtype: torch.dtype, cast: torch.dtype) -> None:
    model = patched(dtype=dtype, adapters=F32)

    def call(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=cast, enabled=x.dtype != F64):
            return m(x)

    check(model, [tensor(2, 5, 16, dtype=dtype)], SELF, call)


def test_without_gradients() -> None:
    model, x = patched(), tensor(2, 5, 16)
    with loraaccel.disabled():
        own = model(x)
    with torch.no_grad(), counted() as calls:
        y = model(x)
    assert calls == SELF
    assert distance(y, own) < 1e-6
    with torch.inference_mode(), counted() as calls:
        y = model(tensor(2, 5, 16))
    assert calls == APART  # such a tensor does not tell whether it was changed
    assert distance(y, own) < 1e-6


def test_dropout_masks_differ_between_the_layers_and_fit_the_gradients() -> None:
    model = patched(lora_dropout=0.5)
    for name in ("to_q", "to_k", "to_v"):  # the adapter alone, the same in all three
        layer = getattr(model.attn, name)
        layer.base_layer.weight.data.zero_()
        layer.lora_A["default"].weight.data = tensor(4, 16)
        layer.lora_B["default"].weight.data = tensor(16, 4, seed=2)
    model.attn.to_v.base_layer.bias.data.zero_()
    seen: dict[str, Tensor] = {}

    def watching(attn: Any, x: Tensor, context: Any) -> Tensor:
        seen.update(q=attn.to_q(x), k=attn.to_k(x), v=attn.to_v(x))
        return attend(attn, seen["q"], seen["k"], seen["v"])

    model.attn.processor = watching
    x = tensor(2, 5, 16).requires_grad_()
    torch.manual_seed(3)
    with counted() as calls:
        model(x)
    assert calls == SELF
    first = dict(seen)
    assert not torch.allclose(first["q"], first["k"])
    assert not torch.allclose(first["k"], first["v"])
    # Each is linear in x, with the mask of its own forward pass: <x, dx> is <y, y>.
    for y in first.values():
        (gx,) = torch.autograd.grad(y, x, y.detach(), retain_graph=True)
        torch.testing.assert_close((gx * x).sum(), y.square().sum())
    torch.manual_seed(3)
    model(x)
    assert all(torch.equal(seen[n], first[n]) for n in first)
    total = torch.zeros(2, 5, 16)
    with torch.no_grad():
        for _ in range(2000):
            model(x)
            total += seen["k"]
        with loraaccel.disabled():
            model.eval()(x)
    assert distance(total / 2000, seen["k"]) < 0.1


# ---- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["to_q", "to_k", "to_v"])
def test_a_member_that_cannot_take_part(name: str) -> None:
    """The two others go on together, and the one runs as it did before."""
    model, x = patched(), tensor(2, 5, 16)
    layer = getattr(model.attn, name)
    layer.merge()
    check(model, [x], {"lora_qkv": 2, "lora_linear": 1, "merged": 1})
    layer.unmerge()
    layer.enable_adapters(False)
    check(model, [x], {"lora_qkv": 2, "lora_linear": 1, "disabled": 1})
    layer.enable_adapters(True)
    for p in model.parameters():
        p.requires_grad_(True)
    layer.base_layer.register_forward_hook(lambda *_: None)
    check(model, [x], {"lora_qkv": 2, "lora_linear": 1, "lora_delta": 1})


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
@pytest.mark.parametrize("name", ["to_k", "to_v"])
def test_hooks_on_a_member_see_its_own_call(name: str, register: str) -> None:
    model, fired = patched(), []
    getattr(getattr(model.attn, name), register)(lambda *_: fired.append(name))
    check(model, [tensor(2, 5, 16)], {"lora_qkv": 2, "lora_linear": 2})
    assert fired


def test_a_member_whose_forward_is_wrapped() -> None:
    model = patched()
    layer = model.attn.to_k
    own = layer.forward
    layer.forward = lambda x: own(x) * 2
    with loraaccel.disabled():
        want = model(tensor(2, 5, 16))
    with counted() as calls:
        got = model(tensor(2, 5, 16))
    assert calls == {"lora_qkv": 2, "lora_linear": 2}
    assert distance(got, want) < 1e-6


def test_dora_and_other_kinds_stay_by_themselves() -> None:
    model = block(use_dora=True, target_modules=["to_k"])
    import peft

    peft.inject_adapter_in_model(config(target_modules=["to_q", "to_v", "to_out"]), model)
    loraaccel.patch(model, strict=True)
    check(model, [tensor(2, 5, 16)], {"lora_qkv": 2, "lora_linear": 1, "dora_linear": 1})


def test_switches() -> None:
    x = tensor(2, 5, 16)
    model = block()
    loraaccel.patch(model, kinds=["lora_linear"])
    check(model, [x], APART)
    loraaccel.patch(model)
    check(model, [x], SELF)
    loraaccel.patch(model, kinds=["lora_qkv"])
    check(model, [x], {"lora_qkv": 3, "kind_excluded": 1})
    loraaccel.patch(model, kinds=["lora_linear", "lora_delta"])
    check(model, [x], APART)
    assert "_loraaccel_group" not in vars(model.attn)
    loraaccel.patch(model)
    with counted() as calls, loraaccel.disabled():
        model(x)
    assert calls == {"switched_off": 4}


def test_packed_weights_are_used_one_by_one() -> None:
    model = patched()
    try:
        loraaccel.set_packing("always")
        check(model, [tensor(2, 40, 16)], APART)
    finally:
        loraaccel.set_packing("auto")


def test_one_adapted_projection_is_no_group() -> None:
    model = block(target_modules=["to_q", "to_out"])
    loraaccel.patch(model)
    assert "_loraaccel_group" not in vars(model.attn)
    check(model, [tensor(2, 5, 16)], {"lora_linear": 2})


# ---- wrong guesses ---------------------------------------------------------------------------------------------------


def crossed(attn: Any, x: Tensor, context: Any) -> Tensor:
    """v reads something else than q and k."""
    return attend(attn, attn.to_q(x), attn.to_k(x), attn.to_v(x * 2))


def own_context(attn: Any, x: Tensor, context: Any) -> Tensor:
    """k and v read a tensor of which the module's arguments say nothing."""
    other = x.flip(0)
    return attend(attn, attn.to_q(x), attn.to_k(other), attn.to_v(other))


def equal_values(attn: Any, x: Tensor, context: Any) -> Tensor:
    return attend(attn, attn.to_q(x), attn.to_k(x.clone()), attn.to_v(x.clone()))


def without_keys(attn: Any, x: Tensor, context: Any) -> Tensor:
    return attn.to_q(x) + attn.to_v(x)


def values_first(attn: Any, x: Tensor, context: Any) -> Tensor:
    v = attn.to_v(x)
    k = attn.to_k(x)
    return attend(attn, attn.to_q(x), k, v)


def twice(attn: Any, x: Tensor, context: Any) -> Tensor:
    """Two rounds of all three, and one more of v, as with perturbed guidance."""
    first = processor(attn, x, None)
    return first + processor(attn, x * 2, None) + attn.to_v(x * 3)


# First call, every later one, splits.
GUESSES = {
    crossed: (SELF | {"lora_qkv": 2, "lora_linear": 2}, {"lora_qkv": 2, "lora_linear": 2}, 1),
    own_context: ({"lora_qkv": 3, "lora_linear": 1}, {"lora_qkv": 2, "lora_linear": 2}, 1),
    equal_values: ({"lora_qkv": 2, "lora_linear": 2}, APART, 2),
    without_keys: ({"lora_qkv": 2, "lora_linear": 1}, {"lora_qkv": 2, "lora_linear": 1}, 1),
    values_first: ({"lora_linear": 4}, {"lora_linear": 4}, 0),
    twice: ({"lora_qkv": 6, "lora_linear": 2}, {"lora_qkv": 6, "lora_linear": 2}, 0),
}


@pytest.mark.parametrize("guess", GUESSES, ids=lambda f: f.__name__)
def test_wrong_guesses_are_right_and_learned_from(guess: Callable[..., Tensor]) -> None:
    first, later, splits = GUESSES[guess]
    model, x, before = patched(), tensor(2, 5, 16), other_inputs()
    model.attn.processor = guess
    check(model, [x], first)
    for _ in range(3):
        with counted() as calls:
            model(x)
    assert calls == later
    check(model, [x], later)
    assert other_inputs() == before + splits


def test_calls_with_one_and_with_two_inputs_are_learned_apart() -> None:
    model, x, context = patched(), tensor(2, 5, 16), tensor(2, 7, 16, seed=2)
    for _ in range(3):
        check(model, [x], SELF)
        check(model, [x, context], CROSS)


def test_input_changed_in_place_between_two_members() -> None:
    model = patched()

    def changing(attn: Any, x: Tensor, context: Any) -> Tensor:
        x = x.clone()
        q = attn.to_q(x)
        x.mul_(2)
        return attend(attn, q, attn.to_k(x), attn.to_v(x))

    model.attn.processor = changing
    with torch.no_grad():
        x = tensor(2, 5, 16)
        with loraaccel.disabled():
            own = model(x)
        for _ in range(3):
            assert distance(model(x), own) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.scaling.update(default=5.0),
        lambda layer: layer.merge(),
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.set_adapter("b"),
        lambda layer: setattr(layer.lora_A["default"], "weight", nn.Parameter(tensor(4, 16))),
        lambda layer: setattr(layer.base_layer, "weight", nn.Parameter(tensor(16, 16))),
    ],
    ids=["scale", "merge", "disable", "set_adapter", "A", "W"],
)
def test_state_that_changes_between_two_members(change: Callable[[Any], Any]) -> None:
    """k is computed with q, and then its layer changes before it is called: what counts is what it is at its call."""
    model, x = block(), tensor(2, 5, 16)
    second_adapter(model, ["to_k"], r=3)
    loraaccel.patch(model)
    other = copy.deepcopy(model)
    loraaccel.unpatch(other)

    def changing(attn: Any, x: Tensor, context: Any) -> Tensor:
        q = attn.to_q(x)
        change(attn.to_k)
        return attend(attn, q, attn.to_k(x), attn.to_v(x))

    model.attn.processor = other.attn.processor = changing
    with torch.no_grad():
        assert distance(model(x), other(x)) < 1e-6


def test_gradients_switched_on_between_two_members() -> None:
    model, x = patched(), tensor(2, 5, 16)

    def mixed(attn: Any, x: Tensor, context: Any) -> Tensor:
        with torch.no_grad():
            q = attn.to_q(x)
        return attend(attn, q, attn.to_k(x), attn.to_v(x))

    model.attn.processor = mixed
    own = copy.deepcopy(model)
    loraaccel.unpatch(own)
    want, got = gradients(own, own, [x]), gradients(model, model, [x])
    assert got.keys() == want.keys()
    assert "attn.to_k.lora_A.default.weight" in got
    assert "attn.to_q.lora_A.default.weight" not in got
    assert all(distance(got[n], want[n]) < 1e-5 for n in got)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_outputs_may_be_changed_in_place() -> None:
    """Rotary embeddings are written into q and k in some of diffusers' processors."""

    def rotary(attn: Any, x: Tensor, context: Any) -> Tensor:
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k = q.view(2, -1, 2, 8).transpose(1, 2), k.view(2, -1, 2, 8).transpose(1, 2)
        q[:, :, 1:] = q[:, :, 1:].roll(1, -1) * 2
        k[:, :, 1:] = k[:, :, 1:].roll(1, -1) * 3
        v.mul_(2)
        v = v.view(2, -1, 2, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    model = patched()
    model.attn.processor = rotary
    check(model, [tensor(2, 5, 16)], SELF)


def flat(attn: Any, x: Tensor, context: Any) -> Tensor:
    """Reads rows and columns as one."""
    q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    return attend(attn, q, k, v) + k.view(k.shape[0], -1).roll(1, -1).view(k.shape)


def test_a_processor_that_needs_one_block_of_memory() -> None:
    before = ungrouped().get("layout", 0)
    model, x = patched(), tensor(2, 5, 16)
    model.attn.processor = flat
    check(model, [x], {"lora_qkv": 3, "lora_linear": 4})  # once in vain
    check(model, [x], APART)
    assert ungrouped()["layout"] == before + 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_same_in_a_checkpoint_raises_once(reentrant: bool) -> None:
    model, x = patched(), tensor(2, 5, 16)
    model.attn.processor = flat
    run = lambda m, t: checkpoint(m, t, use_reentrant=reentrant)  # noqa: E731
    with pytest.raises(RuntimeError, match="view size"):
        run(model, x.clone().requires_grad_())
    check(model, [x], {"lora_linear": 8 if reentrant else 7}, run)  # (the other kind stops inside the last)


def test_an_error_of_the_host_is_its_own() -> None:
    model, x = patched(), tensor(2, 5, 16)
    kept: list[weakref.ref[Tensor]] = []

    def failing(attn: Any, x: Tensor, context: Any) -> Tensor:
        kept.append(weakref.ref(attn.to_q(x)))
        raise ValueError("processor")

    model.attn.processor = failing
    with pytest.raises(ValueError, match="processor"):
        model(x)
    gc.collect()
    assert kept[0]() is None
    model.attn.processor = processor
    check(model, [x], SELF)


def test_nothing_is_kept_alive() -> None:
    """Neither results that nobody asked for nor the input outlive the attention module's call."""
    model, seen = patched(), []

    def half(attn: Any, x: Tensor, context: Any) -> Tensor:
        q = attn.to_q(x)
        ready = group_scope.current.get()._ready.values()  # type: ignore[union-attr]
        seen.extend([weakref.ref(x), weakref.ref(q), *(weakref.ref(r.y) for r in ready)])
        return torch.zeros(2, 5, 16)

    model.attn.processor = half
    gc.disable()
    try:
        model(tensor(2, 5, 16))
        assert len(seen) == 4
        assert [r() for r in seen] == [None] * 4
    finally:
        gc.enable()


# ---- checkpoints, threads, copies, compiled code ---------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("guess", [processor, crossed, own_context, without_keys], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_repeat_what_was_computed(
    reentrant: bool, guess: Callable[..., Tensor], dropout: float
) -> None:
    """From the first step on, where a wrong guess is found out; with dropout the masks must be the same again."""
    model, x = patched(lora_dropout=dropout), tensor(2, 5, 16)
    twin = copy.deepcopy(model)
    model.attn.processor = twin.attn.processor = guess
    for step in range(4):
        torch.manual_seed(step)
        want = gradients(twin, twin, [x])
        torch.manual_seed(step)
        got = gradients(model, lambda t: checkpoint(model, t, use_reentrant=reentrant), [x])
        assert got.keys() == want.keys()
        if dropout and guess is not processor and step:
            continue  # they learn at different times, and draw other numbers then
        for name in got:
            assert torch.equal(got[name], want[name]), (step, name)
    blocks = vars(model.attn)["_loraaccel_group"].blocks
    assert blocks == vars(twin.attn)["_loraaccel_group"].blocks


@pytest.mark.parametrize("reentrant", [True, False])
def test_several_checkpointed_calls_before_one_backward_pass(reentrant: bool) -> None:
    model, xs = patched(), [tensor(2, 5, 16, seed=i) for i in range(3)]
    model.attn.processor = own_context
    own = copy.deepcopy(model)
    loraaccel.unpatch(own)
    run = lambda m: lambda *given: sum(checkpoint(m, t, use_reentrant=reentrant) for t in given)  # noqa: E731
    for _ in range(3):
        got, want = gradients(model, run(model), xs), gradients(own, run(own), xs)
        assert all(distance(got[n], want[n]) < 1e-5 for n in want)
    with counted() as calls:
        model(xs[0])
    assert calls == {"lora_qkv": 2, "lora_linear": 2}


def test_va5_threads_do_not_mix() -> None:
    """One module, two threads, each with inputs of its own; calls are interleaved by the processor."""
    model = patched()
    barrier = threading.Barrier(2, timeout=30)

    def waiting(attn: Any, x: Tensor, context: Any) -> Tensor:
        q = attn.to_q(x)
        barrier.wait()
        k = attn.to_k(x)
        barrier.wait()
        return attend(attn, q, k, attn.to_v(x))

    model.attn.processor = waiting
    inputs = [tensor(2, 5, 16, seed=i) for i in range(2)]
    leaves = [p for p in model.parameters() if p.requires_grad]
    found: dict[int, list[tuple[Tensor, ...]]] = {0: [], 1: []}

    def work(i: int) -> None:
        for _ in range(20):
            y = model(inputs[i])
            found[i].append((y, *torch.autograd.grad(y.square().sum(), leaves)))

    with counted() as calls:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert calls == {"lora_qkv": 120, "lora_linear": 40}
    model.attn.processor = processor
    for i in range(2):
        assert len(found[i]) == 20
        work(i)
        *in_threads, want = found[i]
        assert all(torch.equal(*pair) for got in in_threads for pair in zip(got, want, strict=True))


def test_a_member_called_from_another_thread_or_from_outside() -> None:
    model, x = patched(), tensor(2, 5, 16)

    def elsewhere(attn: Any, x: Tensor, context: Any) -> Tensor:
        found: list[Tensor] = []
        q = attn.to_q(x)
        thread = threading.Thread(target=lambda: found.append(attn.to_k(x)))
        thread.start()
        thread.join()
        return attend(attn, q, found[0], attn.to_v(x))

    model.attn.processor = elsewhere
    check(model, [x], {"lora_qkv": 2, "lora_linear": 2})
    with counted() as calls:
        model.attn.to_k(x)
    assert calls == {"lora_linear": 1}


def test_attention_inside_attention() -> None:
    outer, inner = patched(), patched()
    outer.attn.processor = lambda attn, x, context: (
        inner(processor(attn, x, context)) + processor(attn, x * 2, None)
    )
    x = tensor(2, 5, 16)
    with loraaccel.disabled():
        own = gradients(outer, outer, [x])
    with counted() as calls:
        got = gradients(outer, outer, [x])
    assert calls == {"lora_qkv": 9, "lora_linear": 2}
    assert all(distance(got[n], own[n]) < 1e-5 for n in own)


def test_va4_patch_and_unpatch_leave_no_trace() -> None:
    loraaccel.unpatch(patched())  # (the classes now know their subclasses)
    model = block()
    model.attn.processor = crossed
    before = snapshot(model)
    loraaccel.patch(model)
    changed = type(model.attn)
    assert changed is not Attn
    assert isinstance(model.attn, Attn)
    assert (changed.__name__, changed.__module__, changed.__qualname__) == ("Attn", Attn.__module__, "Attn")
    assert model.attn.processor is crossed
    loraaccel.patch(model)
    assert type(model.attn) is changed
    model(tensor(2, 5, 16))
    assert loraaccel.unpatch(model) == 4
    assert type(model.attn) is Attn
    assert same(before, snapshot(model))
    assert loraaccel.unpatch(model) == 0
    loraaccel.patch(model.attn)
    loraaccel.unpatch(model)
    assert same(before, snapshot(model))


def test_strict_refusal_changes_nothing() -> None:
    model = block()
    model.attn.to_q.merge()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="strict"):
        loraaccel.patch(model, strict=True)
    assert same(before, snapshot(model))


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_va4_copies_are_patched_and_independent(make: Callable[[Any], Any]) -> None:
    model, x = patched(), tensor(2, 5, 16)
    model(x)
    if make is copy.copy:
        other = copy.copy(model)
        other._modules = dict(model._modules)
        other.attn = copy.copy(model.attn)
        other.attn._modules = dict(model.attn._modules)
    else:
        other = make(model)
    check(other, [x], SELF)
    loraaccel.unpatch(other.attn if make is copy.copy else other)
    assert type(other.attn) is Attn
    if make is not copy.copy:
        check(model, [x], SELF)
        with counted() as calls:
            other(x)
        assert calls == {}


def test_a_forward_that_something_else_replaced_before() -> None:
    model = block()
    model.attn.forward = functools.partial(model.attn.forward)
    before = ungrouped().get("forward_replaced", 0)
    loraaccel.patch(model, strict=True)
    assert ungrouped()["forward_replaced"] == before + 1
    assert type(model.attn) is Attn
    with counted() as calls:
        model(tensor(2, 5, 16))
    assert calls == APART


def test_a_bound_forward_that_somebody_kept() -> None:
    model, x = patched(), tensor(2, 5, 16)
    kept = model.attn.forward
    loraaccel.unpatch(model)
    with counted() as calls:
        kept(x)
    assert calls == {}


def test_an_adapter_on_another_projection_needs_a_patch_and_gets_into_the_group() -> None:
    import peft

    model, x = block(target_modules=["to_q", "to_v", "to_out"]), tensor(2, 5, 16)
    loraaccel.patch(model)
    check(model, [x], {"lora_qkv": 2, "lora_linear": 1})
    peft.inject_adapter_in_model(config(target_modules=["to_k"]), model)
    check(model, [x], {"lora_qkv": 2, "lora_linear": 1})
    loraaccel.patch(model)
    check(model, [x], SELF)


def test_verify_compares_every_member() -> None:
    x = tensor(2, 5, 16)
    model = block()
    loraaccel.patch(model, verify=2)
    for left in (1, 0, 0):
        with counted() as calls:
            model(x)
        assert calls == SELF
        states = [vars(getattr(model.attn, n))["_loraaccel"] for n in ("to_q", "to_k", "to_v")]
        assert [s.verify for s in states] == [left] * 3
    assert all(0 < s.largest_error < 1e-5 for s in states)


@pytest.mark.parametrize("wrong", ["to_q", "to_k", "to_v"])
def test_verify_takes_a_wrong_member_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = tensor(2, 5, 16), block()
    loraaccel.patch(model, verify=1)
    index, honest = ["to_q", "to_k", "to_v"].index(wrong), group_scope.lora_qkv_adapters

    def lying(*args: Any) -> tuple[Tensor, ...]:
        outputs = list(honest(*args))
        if len(outputs) == 3:
            outputs[index] = outputs[index] * 1.01
        return tuple(outputs)

    monkeypatch.setattr(group_scope, "lora_qkv_adapters", lying)
    with pytest.warns(RuntimeWarning, match=f"attn.{wrong}"):
        y = model(x)
    with loraaccel.disabled():
        assert distance(y, model(x)) < 1e-5
    for _ in range(2):
        with counted() as calls:
            model(x)
    assert calls["verify_failed"] == 1
    assert calls["lora_linear"] + calls["lora_qkv"] == 3


def test_native_error_names_the_layer_and_the_launcher_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("native")

    model, x = patched(), tensor(2, 5, 16)
    monkeypatch.setattr(group_scope, "lora_qkv_adapters", broken)
    with pytest.raises(RuntimeError, match="native"):
        model(x)
    for layer in (model.attn.to_q, model.attn.to_k):
        vars(layer)["_loraaccel"].roll_back = True
    with pytest.warns(RuntimeWarning, match="lora_qkv"):
        y = model(x)
    with loraaccel.disabled():
        assert distance(y, model(x)) < 1e-5


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_vt3_compiled_without_a_graph_break(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model, x = patched(dtype=dtype), tensor(2, 5, 16, dtype=dtype)
    eager = gradients(model, model, [x])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = gradients(model, compiled, [x])
    limit = 1e-5 if dtype == F32 else 3e-2
    assert all(distance(got[n], eager[n]) < limit for n in eager)
    check(model, [x], SELF)
    torch._dynamo.reset()


def test_vt3_a_compiled_member_in_an_eager_module() -> None:
    torch._dynamo.reset()
    model, x = patched(), tensor(2, 5, 16)
    model.attn.to_k.compile(fullgraph=True, backend="aot_eager")
    with loraaccel.disabled():
        own = model(x)
    for _ in range(3):
        assert distance(model(x), own) < 1e-5
    torch._dynamo.reset()


def test_the_launchers_hook_finds_groups() -> None:
    from loraaccel.launcher.session import Session

    model, x = block(), tensor(2, 5, 16)
    session = Session("auto")
    session.created(model)
    check(model, [x], SELF)
    assert [layer.fused for layer in session.layers()] == [1, 1, 1, 1]
    session.created(model)
    check(model, [x], SELF)
