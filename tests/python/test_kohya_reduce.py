"""The mean of the gradients over processes in a few buffers: against a reduction for each parameter, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kohya_modules import LoRAModule
from kohya_networks import Network, SummingTrainer, Trainer
from torch import Tensor, nn

import loraaccel as la
from loraaccel.integrations import kohya_network, kohya_reduce
from loraaccel.integrations.kohya_work import HostWork

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Accelerator:
    """`reduce` as accelerate has it: a copy, its sum over the processes, divided by their number."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.calls: list[int] = []

    def reduce(self, tensor: Tensor, reduction: str = "mean", scale: float = 1.0) -> Tensor:
        self.calls.append(tensor.numel())
        tensor = tensor.clone()
        if self.num_processes > 1:
            dist.all_reduce(tensor)
        if reduction == "mean":
            tensor /= self.num_processes
        return tensor


def parameters(rank: int, dtypes: tuple[torch.dtype, ...] = (F32, BF16, F16, F64)) -> list[Any]:
    """Gradients of many sizes and types, one in another order of memory, one with gaps, two that are missing."""
    g = torch.Generator().manual_seed(100 + rank)
    out: list[Any] = []
    for i in range(60):
        shape = ((i % 7 + 1, 3 * i + 1), (5, i % 4 + 1, 3, 3), (i + 1,))[i % 3]
        p: Any = SimpleNamespace(
            grad=torch.randn(shape, generator=g).mul_(10.0 ** (i % 9 - 4)).to(dtypes[i % len(dtypes)])
        )
        if i == 7:
            p.grad = p.grad.to(memory_format=torch.channels_last)
        elif i == 12:
            p.grad = p.grad.t()
        elif i == 15:
            p.grad = torch.randn(4, 12, generator=g)[:, ::3]
        elif i in (20, 41):
            p.grad = None
        out.append(p)
    out[30].grad[0, 0] = math.nan if rank else 1.0
    out[32].grad[0] = math.inf
    return out


def reduced(trainer: Any, accelerator: Any, some: list[Any]) -> list[Any]:
    old = [p.grad for p in some]
    kept = [None if g is None else g.clone() for g in old]
    assert trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: iter(some))) is None
    for p, g, k in zip(some, old, kept, strict=True):
        if g is not None:
            assert p.grad is not g  # a new tensor; the old one is as it was
            assert torch.equal(g.nan_to_num(7), k.nan_to_num(7))
    return [p.grad for p in some]


def same(found: list[Any], expected: list[Any]) -> bool:
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if not torch.equal(a.view(torch.uint8) if a.is_contiguous() else a.nan_to_num(7),
                           b.view(torch.uint8) if b.is_contiguous() else b.nan_to_num(7)):  # fmt: skip
            return False
    return True


def worker(rank: int, processes: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    one_by_one, flat = Accelerator(processes), Accelerator(processes)
    expected = reduced(Trainer(), one_by_one, parameters(rank))
    assert len(one_by_one.calls) == 58
    work = HostWork()
    trainer = Trainer()
    assert kohya_network.take_over_trainer(trainer, work)
    found = reduced(trainer, flat, parameters(rank))
    assert len(flat.calls) == 4  # one a type
    assert sum(flat.calls) == sum(one_by_one.calls)
    alike = same(found, expected)
    assert alike or processes > 2
    for a, b in zip(found, expected, strict=True):
        if a is not None:
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(
                a, b, rtol=4 * eps, atol=4 * eps * float(b.nan_to_num(0, 0, 0).abs().max()), equal_nan=True
            )
    everywhere = [torch.empty_like(found[0]) for _ in range(processes)]
    dist.all_gather(everywhere, found[0].contiguous())
    assert all(torch.equal(e, found[0]) for e in everywhere)

    kohya_reduce.BUFFER_BYTES = 2000  # several buffers, and gradients that are larger than one
    many = Accelerator(processes)
    assert same(reduced(trainer, many, parameters(rank)), expected) or processes > 2
    assert 4 < len(many.calls) < 58
    assert (work.records["mean of gradients"].fused, work.records["mean of gradients"].own) == (2, {})

    trainer = Trainer()
    work = HostWork(verify=1)
    kohya_network.take_over_trainer(trainer, work)
    verified = reduced(trainer, Accelerator(processes), parameters(rank))
    record = work.records["mean of gradients"]
    assert same(verified, expected) or processes > 2
    assert (record.fused, record.verify) == (1, 0)
    assert record.largest_error == 0.0 or processes > 2
    right, kohya_reduce._strides = (
        kohya_reduce._strides,
        lambda g: (0,) * g.dim(),
    )  # every number the first one
    record.verify = 1
    with pytest.warns(RuntimeWarning, match="in mean of gradients"):
        found = reduced(trainer, Accelerator(processes), parameters(rank))
    kohya_reduce._strides = right
    assert same(found, expected)  # the trainer's own
    assert record.own == {"verify_failed": 1}
    dist.destroy_process_group()


@pytest.mark.parametrize("processes", [2, 3])
def test_between_processes(processes: int, tmp_path: Path) -> None:
    mp.spawn(worker, (processes, str(tmp_path)), nprocs=processes)


def taken(trainer: Any) -> tuple[Any, HostWork]:
    work = HostWork()
    assert kohya_network.take_over_trainer(trainer, work)
    return trainer, work


def test_one_process_does_what_it_did() -> None:
    trainer, work = taken(Trainer())
    accelerator = Accelerator(1)
    assert same(
        reduced(trainer, accelerator, parameters(0)), reduced(Trainer(), Accelerator(1), parameters(0))
    )
    assert len(accelerator.calls) == 58
    assert work.records == {}


def test_another_method_stays() -> None:
    """Of several processes (here each alone: nothing is sent)."""
    trainer, work = taken(SummingTrainer())
    accelerator = alone()
    reduced(trainer, accelerator, parameters(0))
    assert len(accelerator.calls) == 58
    assert work.records["mean of gradients"].own == {"unknown_forward": 1}
    assert kohya_reduce.follows(Trainer)
    assert not kohya_reduce.follows(SummingTrainer)


def alone() -> Any:
    """Says that there are two processes, and sends nothing."""
    accelerator = Accelerator(1)
    return SimpleNamespace(num_processes=2, reduce=accelerator.reduce, calls=accelerator.calls)


def test_what_is_declined() -> None:
    trainer, work = taken(Trainer())
    accelerator = alone()
    some = [SimpleNamespace(grad=torch.randn(3)), SimpleNamespace(grad=torch.eye(3).to_sparse())]
    trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: some))
    assert work.records["mean of gradients"].own == {"tensor_subclass": 1}
    some = [SimpleNamespace(grad=torch.randn(3, dtype=torch.complex64))]
    trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: some))
    assert work.records["mean of gradients"].own == {"tensor_subclass": 1, "dtype": 1}
    some = [SimpleNamespace(grad=torch.empty(3, device="meta"))]
    trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: some))
    assert work.records["mean of gradients"].own == {"tensor_subclass": 1, "dtype": 1, "device": 1}
    trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: [SimpleNamespace(grad=None)]))
    with la.disabled():
        trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: parameters(0)))
    assert work.records["mean of gradients"].own["switched_off"] == 1
    assert work.records["mean of gradients"].fused == 0


def test_an_error_in_a_reduction_is_an_error() -> None:
    """Even in auto: another way of reducing would wait for processes that do something else."""
    trainer, work = taken(Trainer())

    def broken(tensor: Tensor, reduction: str) -> Tensor:
        raise RuntimeError("the other process is gone")

    accelerator = SimpleNamespace(num_processes=2, reduce=broken)
    with pytest.raises(RuntimeError, match="is gone"):
        trainer.all_reduce_network(accelerator, SimpleNamespace(parameters=lambda: parameters(0)))
    assert work.records.get("mean of gradients") is None or not work.records["mean of gradients"].own


def test_the_trainer_is_found_and_given_back() -> None:
    """The object that applied the network, wherever its class lives; only this object changes."""
    network = Network({"lora_unet_a": LoRAModule("lora_unet_a", nn.Linear(4, 4))})
    work = HostWork()
    apply_to = network.apply_to

    def applied(*arguments: Any) -> None:
        apply_to(*arguments)
        kohya_network.applied(network, work)
        kohya_network.applied(network, work)

    network.apply_to = applied  # type: ignore[method-assign]
    trainer, other = Trainer(), Trainer()
    trainer.start(network)
    assert list(vars(trainer)) == ["all_reduce_network"]
    assert vars(other) == {}
    assert "all_reduce_network" in Trainer.__dict__
    accelerator = alone()
    reduced(trainer, accelerator, parameters(0))
    assert len(accelerator.calls) == 4
    la.unpatch(network)
    assert vars(trainer) == {}
    assert type(network) is Network
    assert kohya_network.trainer_above(None) is None
