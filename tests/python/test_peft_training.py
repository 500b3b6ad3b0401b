"""The training stack around a patched model: checkpointing, accumulation, DDP, FSDP, optimisers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import (
    Attention,
    Mlp,
    Varied,
    add_adapter,
    bert,
    counted,
    distance,
    llama,
    lora_host,
    lora_layers,
    lora_model,
    results,
    the_layer,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def x_of(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def patched_pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice: plain, and patched."""
    own = lora_model(make, **options)
    model = copy.deepcopy(own)
    loraaccel.patch(model, strict=True)
    return own, model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


# ---- VT1: checkpointing ----------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.reentrant: bool | None = None
        self.needs_grad = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.needs_grad:
            x.requires_grad_()
        for block in self.blocks:
            x = x + (
                block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return x


def blocks(reentrant: bool | None, **options: Any) -> nn.Module:
    model = lora_model(Blocks, target_modules=["up", "down"], **options)
    model.requires_grad_(False)
    for layer in lora_layers(model).values():
        layer.set_adapter("default")
    host = model.base_model.model
    host.reentrant, host.needs_grad = reentrant, reentrant is True
    loraaccel.patch(model, strict=True)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_vt1_checkpointing_with_frozen_inputs(reentrant: bool, dropout: float) -> None:
    """Gradients are those without checkpointing, masks included: the second forward pass draws the same ones."""
    ids = torch.arange(6).view(2, 3)
    found = []
    for mode in (None, reentrant):
        model = blocks(mode, lora_dropout=dropout)
        torch.manual_seed(3)
        with counted() as calls:
            model(ids).square().sum().backward()
        assert set(calls) == {"lora_linear"}
        assert (calls["lora_linear"] > 4) == (mode is not None)  # the forward pass ran again
        found.append(gradients(model))
    for name, g in found[0].items():
        assert g.any(), name
        torch.testing.assert_close(found[1][name], g, msg=name)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_vt1_three_steps_move_every_b(reentrant: bool) -> None:
    model = blocks(reentrant, init_lora_weights=True)  # B is 0 at the start
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.arange(6).view(2, 3)) - 1).square().sum().backward()
        optimizer.step()
        assert all(layer.lora_B["default"].weight.any() for layer in lora_layers(model).values()), step


def test_vt1_lost_gradients_are_said_once_by_the_name_of_the_module() -> None:
    """Re-entrant checkpointing and no input that requires grad: PyTorch gives the adapters nothing."""
    model = lora_model(Mlp)
    loraaccel.patch(model)
    x = x_of(4, 3, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not checkpoint(model, x, use_reentrant=True).requires_grad
    said = [str(w.message) for w in caught if "loraaccel" in str(w.message)]
    assert [next(n for n in ("model.up", "model.down") if n in text) for text in said] == [
        "model.up",
        "model.down",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loraaccel.unpatch(model)
        loraaccel.patch(model)
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
        with torch.no_grad():
            model(x)
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_vt1_transformers_gradient_checkpointing() -> None:
    own, model = patched_pair(llama)
    for m in (own, model):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.enable_input_require_grads()
        m.train()
        m(input_ids=torch.arange(8).view(2, 4)).logits.square().mean().backward()
    for name, g in gradients(own).items():
        assert g.any(), name
        assert distance(gradients(model)[name], g) < 1e-4, name


def test_saved_tensors_hooks() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    x = x_of(5, 24)
    own = results(layer, layer, x)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        got = results(layer, layer, x)
    assert packed
    assert all(torch.equal(got[n], own[n]) for n in own)


# ---- VT3, VT9: backward passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_vt3_second_backward_gives_the_same_again(dtype: torch.dtype) -> None:
    model = lora_model(Mlp, dtype=dtype)
    loraaccel.patch(model)
    x = x_of(5, 12, dtype=dtype).requires_grad_()
    kept = x.detach().clone()
    y = model(x) + 0 * x.sum()
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in (x, *model.parameters()) if p.requires_grad]
    y.sum().backward()
    second = [p.grad for p in (x, *model.parameters()) if p.requires_grad]
    assert all(torch.equal(b, 2 * a) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, kept)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_vt3_gradient_of_a_gradient_raises_and_is_never_silently_zero() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    x = x_of(5, 24).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        g.square().sum().backward()
    with loraaccel.disabled():  # as the message says
        (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
    assert x.grad.any()


def in_place(layer: nn.Module, dtype: torch.dtype, change: str) -> None:
    leaf = x_of(5, 24, dtype=dtype).requires_grad_()
    x = leaf * 1
    y = layer(x)
    if change == "y":
        y.add_(1)
    elif change == "x":
        x.add_(1)
    y.sum().backward()


def test_output_may_be_changed_in_place() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    in_place(layer, F32, "y")


def test_x_may_be_changed_in_place_where_peft_does_not_keep_it() -> None:
    """With frozen adapters nothing needs x in the backward pass; keeping it costs memory and refuses `x += ...`."""
    layer = the_layer(lora_host())
    layer.requires_grad_(False)
    in_place(layer, F32, "x")
    loraaccel.patch(layer, strict=True)
    in_place(layer, F32, "x")


def test_vt3_x_changed_in_place_where_it_is_needed_raises() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place(layer, F32, "x")


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (4,), (1, 1, 1, 1)], ids=str)
def test_vt9_accumulation(sizes: tuple[int, ...]) -> None:
    model = lora_model(Mlp, bias="lora_only")
    loraaccel.patch(model, strict=True)
    x = x_of(4, 3, 12)
    x[3] = 0  # padding contributes through biases alone
    model(x).square().sum().backward()
    whole = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    for part in x.split(list(sizes)):
        model(part).square().sum().backward()
    for name, g in gradients(model).items():
        assert g.any(), name
        torch.testing.assert_close(g, whole[name], rtol=1e-5, atol=1e-5, msg=name)


def test_vt9_rows_of_zeros_contribute_nothing() -> None:
    layer = the_layer(lora_host(bias=False))
    loraaccel.patch(layer)
    x = x_of(5, 24)
    own = results(layer, layer, x, x_of(5, 16))
    padded = torch.cat([x, torch.zeros(3, 24)])
    got = results(layer, layer, padded, torch.cat([x_of(5, 16), x_of(3, 16, seed=2)]))
    for name in ("lora_A.default.weight", "lora_B.default.weight"):
        torch.testing.assert_close(got[name], own[name])
    assert not got["y"][5:].any()


# ---- VT5: who gets a gradient ----------------------------------------------------------------------------------------


def test_vt5_parameters_with_a_gradient_are_those_that_require_one() -> None:
    model = lora_model(Mlp)
    add_adapter(model, "b", r=2)
    loraaccel.patch(model, strict=True)
    for active in ("default", "b", "default"):
        model.set_adapter(active)
        model.zero_grad()
        model(x_of(3, 12)).sum().backward()
        wanted = {n for n, p in model.named_parameters() if p.requires_grad}
        assert wanted == {n for n, p in model.named_parameters() if p.grad is not None}
        assert wanted
        assert all(f".{active}." in n for n in wanted)


DDP_SCRIPT = """
import sys
rank, folder = int(sys.argv[1]), sys.argv[2]
sys.path[:0] = sys.argv[3:]
import torch, torch.distributed as dist
torch.set_num_threads(1)
from peft_models import Mlp, add_adapter, lora_model
import loraaccel
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = lora_model(Mlp)
add_adapter(model, "b", r=2)
loraaccel.patch(model, strict=True)
report = []
for active in ("default", "b"):
    model.set_adapter(active)
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(2):
        model.zero_grad()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(2 * step + rank))
        ddp(x).square().mean().backward()
        got = {n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        report.append(sorted(got ^ {n for n, p in model.named_parameters() if p.requires_grad}))
        optimizer.step()
    del ddp
torch.save({"wrong": report, "state": model.state_dict(), "calls": loraaccel.info()["calls"]}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_vt5_two_process_ddp(tmp_path: Path) -> None:
    """find_unused_parameters=False, two steps with each of two adapters; equal to one process on the whole batch."""
    folders = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
    ]  # where peft_models and reference are
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", DDP_SCRIPT, str(r), str(tmp_path), *folders], env=env)
        for r in (0, 1)
    ]
    assert [p.wait(timeout=120) for p in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)]
    model = lora_model(Mlp)
    add_adapter(model, "b", r=2)
    for active in ("default", "b"):
        model.set_adapter(active)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.cat(
                [torch.randn(4, 12, generator=torch.Generator().manual_seed(2 * step + r)) for r in (0, 1)]
            )
            model(x).square().mean().backward()
            optimizer.step()
    for one in found:
        assert one["wrong"] == [[]] * 4
        assert one["calls"] == {"fused": {"lora_linear": 8}, "fallback": {}}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(one["state"][name], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(found[0]["state"][n], v) for n, v in found[1]["state"].items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["FSDP1 original parameters", "FSDP1 flat parameters", "FSDP2"])
def test_vt8_one_process_fsdp(kind: str, tmp_path: Path) -> None:
    """Sharding replaces the weights by views, attributes or DTensors between the calls."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    own = lora_model(Mlp)
    if kind == "FSDP1 flat parameters":
        own.requires_grad_(True)  # flattening wants all alike
    model = copy.deepcopy(own)
    loraaccel.patch(model, strict=True)
    x = x_of(3, 12)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        outputs = []
        for m in (own, model):
            if kind == "FSDP2":
                fully_shard(m, mesh=init_device_mesh("cpu", (1,)))
                wrapped = m
            else:
                original = kind == "FSDP1 original parameters"
                wrapped = FullyShardedDataParallel(m, use_orig_params=original, device_id=torch.device("cpu"))
            y = wrapped(x)
            y.square().sum().backward()
            grads = torch.cat(
                [
                    getattr(p.grad, "_local_tensor", p.grad).flatten()
                    for p in wrapped.parameters()
                    if p.grad is not None
                ]
            )
            outputs.append((y.detach(), grads))
    finally:
        dist.destroy_process_group()
    for want, got in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- VT8: dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "adapters"), [(BF16, BF16), (BF16, F32), (F16, F32), (F32, F32), (F32, BF16)], ids=str
)
def test_vt8_dtype_census(dtype: torch.dtype, adapters: torch.dtype) -> None:
    """Patching, training, merging never change a parameter's dtype; every gradient has its parameter's."""
    model = lora_model(Mlp, dtype=dtype, adapter_dtype=adapters)
    census = {n: p.dtype for n, p in model.named_parameters()}
    assert set(census.values()) == {dtype, adapters}
    loraaccel.patch(model, strict=True)
    model(x_of(3, 12, dtype=dtype)).float().square().sum().backward()
    for n, p in model.named_parameters():
        assert p.grad is None or p.grad.dtype == p.dtype, n
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert {n: p.dtype for n, p in model.named_parameters()} == census
    model.merge_adapter()
    model.unmerge_adapter()
    loraaccel.unpatch(model)
    assert {n: p.dtype for n, p in model.named_parameters()} == census


def test_vt8_gradient_scaler() -> None:
    """fp16 autocast over float32 parameters, scaled loss: as PEFT, an overflow is found and the step skipped."""
    own, model = patched_pair(Mlp)
    scale_after = []
    for m in (own, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=F16):
                loss = m(x_of(4, 12, seed=step)).float().square().mean() * (1e9 if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scale_after.append(scaler.get_scale())
    assert scale_after == [2.0**9] * 2
    for (n, p), q in zip(own.named_parameters(), model.parameters(), strict=True):
        assert q.dtype == F32
        assert distance(q, p) < 2e-3, n


# ---- training --------------------------------------------------------------------------------------------------------


def loss_curve(
    model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int, dtype: torch.dtype
) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    target = x_of(4, 5, width, seed=9)
    curve = []
    for step in range(50):
        optimizer.zero_grad()
        loss = (call(model, x_of(4, 5, width, dtype=dtype, seed=step % 4)).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "attention", "bert"])
def test_fifty_steps_of_training_agree(name: str, dtype: torch.dtype) -> None:
    make, width, call = {
        "mlp": (Mlp, 12, lambda m, x: m(x)),
        "attention": (Attention, 16, lambda m, x: m(x)),
        "bert": (bert, 32, lambda m, x: m(inputs_embeds=x).last_hidden_state),
    }[name]
    own, model = patched_pair(make, dtype=dtype, adapter_dtype=F32, init_lora_weights=True)
    with counted() as calls:
        got = loss_curve(model, call, width, dtype)
    assert calls == {"lora_linear": 50 * len(lora_layers(model))}
    expected = loss_curve(own, call, width, dtype)
    assert sum(expected[-4:]) < 0.999 * sum(expected[:4])  # it learns
    assert got == pytest.approx(expected, rel=1e-4 if dtype == F32 else 1e-2)


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}], ids=str
)
def test_fifty_steps_of_every_kind_of_layer(options: dict[str, Any]) -> None:
    linear = ["up", "down"]
    targets = linear if options.get("use_dora") or options.get("lora_bias") else [*linear, "embed", "conv"]
    models = [lora_model(Varied, target_modules=targets, init_lora_weights=True, **options) for _ in range(2)]
    loraaccel.patch(models[1], strict=True)
    curves = []
    for model in models:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        curve = []
        for step in range(50):
            generator = torch.Generator().manual_seed(step % 4)
            ids = torch.randint(0, 10, (6, 5), generator=generator)
            target = torch.randn(6, 5, 4, generator=generator)
            optimizer.zero_grad()
            loss = (model(ids) - target).square().mean()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert sum(curves[0][-4:]) < 0.99 * sum(curves[0][:4])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


TORCHRUN_SCRIPT = """
import copy, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
sys.path[:0] = sys.argv[2:]
import loraaccel
from peft_models import Varied, lora_model
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))

def train(model, wrap, checkpointed):
    parts = [p for n, p in model.base_model.model.named_children()]
    if wrap == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=False)
    else:
        for part in parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(50):
        generator = torch.Generator().manual_seed(2 * (step % 4) + rank)
        ids = torch.randint(0, 10, (6, 5), generator=generator)
        target = torch.randn(6, 5, 4, generator=generator)
        optimizer.zero_grad()
        y = checkpoint(model, ids, use_reentrant=False) if checkpointed else model(ids)
        loss = (y - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = {n.removeprefix("module."): p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
             for n, p in model.named_parameters() if p.requires_grad}
    return losses, whole

found = {}
for options in ({}, {"use_dora": True}):
    targets = ["up", "down"] if options else ["up", "down", "embed", "conv"]
    for wrap, checkpointed in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        own = lora_model(Varied, target_modules=targets, init_lora_weights=True, **options)
        model = copy.deepcopy(own)
        loraaccel.patch(model, strict=True)
        before = dict(loraaccel.info()["calls"]["fused"])
        pair = [train(m, wrap, checkpointed) for m in (own, model)]
        after = loraaccel.info()["calls"]["fused"]
        calls = {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}
        found[f"{wrap} {checkpointed} {options}"] = (*pair, calls)
torch.save({"found": found, "fallback": loraaccel.info()["calls"]["fallback"]}, f"{sys.argv[1]}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_by_torchrun(tmp_path: Path) -> None:
    """VT5: DistributedDataParallel (no unused parameters) and FSDP2, each layer a unit of its own, with checkpoints or
    not, on every kind of layer: fifty steps as with PEFT's own forward."""
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
        str(tmp_path), *folders,
    ]  # fmt: skip
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=400, check=True)
    for rank in (0, 1):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert saved["fallback"] == {}
        assert len(saved["found"]) == 6
        for name, ((own_losses, own), (losses, got), calls) in saved["found"].items():
            n = 100 if "True {" in name else 50
            kinds = {"dora_linear": 2 * n}
            if "dora" not in name:
                kinds = {"lora_linear": 2 * n, "lora_embedding": n, "lora_conv2d": n}
            assert calls.keys() == kinds.keys(), name
            for kind, most in kinds.items():  # (a recomputation stops where nothing more is needed)
                assert (most // 2 < calls[kind] <= most) if n == 100 else calls[kind] == most, name
            assert sum(losses[-4:]) < 0.995 * sum(losses[:4]), name
            assert losses == pytest.approx(own_losses, rel=1e-4), name
            assert own.keys() == got.keys()
            for key, value in own.items():
                torch.testing.assert_close(got[key], value, rtol=2e-2, atol=2e-4, msg=f"{name} {key}")


def test_twenty_steps_with_dropout_get_as_far() -> None:
    """Other masks, the same training: the last losses agree within their spread over seeds."""
    ends: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(6):
        own, model = patched_pair(Mlp, lora_dropout=0.3, init_lora_weights=True)
        for patched, m in ((False, own), (True, model)):
            torch.manual_seed(seed)
            ends[patched].append(sum(loss_curve(m, lambda m, x: m(x), 12, F32)[-4:]) / 4)
    mine, theirs = torch.tensor(ends[True]), torch.tensor(ends[False])
    assert mine.std() > 0
    assert abs(mine.mean() - theirs.mean()) <= 4 * (mine.var() / 6 + theirs.var() / 6).sqrt()
