"""Groups of LoRA layers over one input: what is computed together and what is not, wrong guesses, outputs."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import (
    APART,
    CROSS,
    SELF,
    attend,
    block,
    check,
    crossed,
    gradients,
    other_inputs,
    own_context,
    patched,
    processor,
    second_adapter,
    tensor,
    ungrouped,
    without_keys,
)
from peft_models import config, counted, distance
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel.integrations import group_scope

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


pytestmark = pytest.mark.usefixtures("small_groups")


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


def equal_values(attn: Any, x: Tensor, context: Any) -> Tensor:
    return attend(attn, attn.to_q(x), attn.to_k(x.clone()), attn.to_v(x.clone()))


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
    run = functools.partial(checkpoint, use_reentrant=reentrant)
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
        scope = group_scope.current.get()
        assert scope is not None
        ready = scope._ready.values()
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
