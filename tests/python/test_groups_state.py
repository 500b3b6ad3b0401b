"""Groups of LoRA layers over one input: in checkpoints, threads, copies, compiled code; patch and unpatch."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import (
    APART,
    SELF,
    Attn,
    attend,
    block,
    check,
    crossed,
    gradients,
    own_context,
    patched,
    processor,
    tensor,
    ungrouped,
    without_keys,
)
from peft_models import config, counted, distance
from test_patch import same, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel.integrations import group_scope

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


pytestmark = pytest.mark.usefixtures("small_groups")


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

    def run(m: nn.Module, *given: Tensor) -> Any:
        return sum(checkpoint(m, t, use_reentrant=reentrant) for t in given)

    for _ in range(3):
        got, want = (gradients(m, functools.partial(run, m), xs) for m in (model, own))
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


def test_with_a_torch_that_cannot_tell_of_checkpoints_layers_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.7 and older."""
    monkeypatch.setattr(group_scope, "saved_tensors_hooks", None)
    model = patched()
    assert type(model.attn) is Attn
    check(model, [tensor(2, 5, 16)], APART)
    assert loraaccel.unpatch(model) == 4


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
