"""The real networks and the real trainer of a checkout of kohya's sd-scripts: what they do at each step, plain and
taken over. As test_sdscripts.py; the trainer's class is cut out of its file, which imports much that is not needed."""

from __future__ import annotations

import ast
import copy
import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sdscripts import BF16, CHECKOUT, F32, class_of
from torch import Tensor, nn

from loraaccel.integrations import kohya_network, kohya_reduce
from loraaccel.integrations.kohya_work import HostWork, relative_error

LIMITED = ("lora", "lora_fa", "lora_flux", "lora_sd3", "lora_lumina", "lora_anima")
# The host's float32 norm of a large matrix is off by up to 5e-4; bfloat16: its last bit, through a root and a product.
BOUND = {F32: 5e-4, BF16: 1e-2}


def network_of(name: str, dtype: torch.dtype, split: bool = False, **arguments: Any) -> Any:
    """A network of the checkout's class over layers of our own: made without its constructor, which wants a model."""
    try:
        cls, module_cls = class_of(name, "LoRANetwork"), class_of(name)
    except ModuleNotFoundError:
        pytest.skip(f"this checkout of sd-scripts has no networks.{name}")
    torch.manual_seed(0)
    network = object.__new__(cls)
    nn.Module.__init__(network)
    network.text_encoder_loras, network.unet_loras, network.split_qkv = [], [], split
    layers: dict[str, Any] = {
        "te1_a": nn.Linear(64, 64), "unet_b": nn.Linear(320, 1280),
        "unet_double_blocks_0_img_attn_qkv": nn.Linear(16, 96),
    }  # fmt: skip
    if "ggpo_sigma" not in arguments:
        layers |= {
            "unet_c": nn.Conv2d(32, 48, 3),
            "unet_d": nn.Conv2d(32, 48, 1),
            "unet_e": nn.Linear(40, 40),
        }
    for i, (key, layer) in enumerate(layers.items()):
        more = {"split_dims": [32] * 3} if split and "qkv" in key else {}
        module = module_cls(f"lora_{key}", layer, 1.0, 8, 4 if i % 2 else 3.0, **arguments, **more)
        for parameter_name, p in module.named_parameters():
            if "lora_up" in parameter_name:
                nn.init.normal_(p, std=0.1 * i)
        module.apply_to()
        del module.org_forward
        network.add_module(f"lora_{key}", module)
        (network.text_encoder_loras if "te1" in key else network.unet_loras).append(module)
    if split:
        network.get_qkv_mlp_split_dims = lambda: [32, 32, 32, 0]
    return network.to(dtype).train()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", LIMITED)
def test_the_limit_on_norms(name: str, dtype: torch.dtype) -> None:
    host = network_of(name, dtype)
    ours, work = network_of(name, dtype), HostWork(verify=1)
    assert kohya_network.take_over(ours, work)
    for limit in (1.0, 0.5, 50.0):
        expected, found = (n.apply_max_norm_regularization(limit, torch.device("cpu")) for n in (host, ours))
        assert found[0] == expected[0]
        assert found[1:] == pytest.approx(expected[1:], rel=BOUND[dtype])
        for key, value in host.state_dict().items():
            assert relative_error(ours.state_dict()[key], value) <= BOUND[dtype]
    assert (work.records["max norm"].fused, work.records["max norm"].own) == (3, {})
    assert kohya_network.give_back(ours)
    assert type(ours) is type(host)


def test_split_layers_stay_as_the_host_leaves_them() -> None:
    host, ours, work = network_of("lora_flux", F32, True), network_of("lora_flux", F32, True), HostWork()
    assert kohya_network.take_over(ours, work)
    before = copy.deepcopy(dict(ours.named_parameters()))
    expected, found = (n.apply_max_norm_regularization(0.1, torch.device("cpu")) for n in (host, ours))
    assert found[0] == expected[0]
    assert found[1:] == pytest.approx(expected[1:], rel=BOUND[F32])
    changed = {name for name, p in ours.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in host.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert not [name for name in changed if "qkv" in name]
    assert work.records["max norm"].fused == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(value: float) -> None:
    networks = [network_of("lora", F32), network_of("lora", F32)]
    assert kohya_network.take_over(networks[1], HostWork())
    for network in networks:
        with torch.no_grad():
            network.lora_unet_b.lora_up.weight[0, 0] = value
    expected, found = (n.apply_max_norm_regularization(1.0, torch.device("cpu")) for n in networks)
    assert repr(found) == repr(expected)
    for a, b in zip(*(n.state_dict().values() for n in networks), strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("ggpo", [True, False])
def test_norms_of_flux(ggpo: bool, dtype: torch.dtype) -> None:
    arguments = {"ggpo_sigma": 0.03, "ggpo_beta": 0.01}
    host, ours = (network_of("lora_flux", dtype, **arguments) for _ in range(2))
    work = HostWork(verify=1)
    assert kohya_network.take_over(ours, work)
    for network in (host, ours):
        generator = torch.Generator().manual_seed(5)
        for p in network.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        for module in network.unet_loras if not ggpo else ():
            module.ggpo_sigma = None
        for _ in range(2):
            network.update_grad_norms()
            network.update_norms()
    for a, b in zip(ours.unet_loras, host.unet_loras, strict=True):
        assert relative_error(a.grad_norms, b.grad_norms) < 1.2e-2  # (the host's are made in bfloat16)
        for name in ("weight_norms", "combined_weight_norms"):
            theirs = getattr(b, name, None)
            if theirs is None:
                assert getattr(a, name, None) is None
            else:
                assert relative_error(getattr(a, name), theirs) < (2e-6 if dtype == F32 else 8e-3)
    assert {n: (r.fused, r.own) for n, r in work.records.items()} == {
        "norms of gradients": (2, {}), "norms of weights": (2, {}),
    }  # fmt: skip
    assert torch.equal(torch.isfinite(ours.grad_norms()), torch.isfinite(host.grad_norms()))


def test_norms_of_split_layers_are_the_hosts() -> None:
    """The host's update_norms fails on them; the norms of their gradients it leaves out."""
    network, work = network_of("lora_flux", F32, True), HostWork()
    network.unet_loras = [network.lora_unet_double_blocks_0_img_attn_qkv]
    network.text_encoder_loras = []
    network.unet_loras[0].ggpo_beta = network.unet_loras[0].ggpo_sigma = 0.1
    assert kohya_network.take_over(network, work)
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    network.update_grad_norms()
    assert not hasattr(network.unet_loras[0], "grad_norms")
    with pytest.raises(AttributeError):
        network.update_norms()
    assert {n: (r.fused, r.own) for n, r in work.records.items()} == {
        "norms of weights": (0, {"tensor_subclass": 1}),
    }  # fmt: skip


def trainer_class() -> Any:
    """NetworkTrainer with the one method that is asked for."""
    tree = ast.parse((Path(CHECKOUT) / "train_network.py").read_text(encoding="utf-8"))
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "NetworkTrainer"]
    cls.body = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "all_reduce_network"]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([cls], []), "train_network.py", "exec"), names)
    return names["NetworkTrainer"]


def test_the_mean_of_gradients() -> None:
    """With accelerate's own reduce, which copies in a single process; that there are two is only said."""
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    trainer, work = trainer_class()(), HostWork()
    assert kohya_reduce.follows(type(trainer))
    assert kohya_network.take_over_trainer(trainer, work)
    calls = []

    def reduce(tensor: Tensor, reduction: str) -> Tensor:
        calls.append(tensor.numel())
        return accelerator.reduce(tensor, reduction=reduction)

    network = network_of("lora", F32)
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in network.parameters()]
    trainer.all_reduce_network(SimpleNamespace(num_processes=2, reduce=reduce), network)
    assert calls == [sum(g.numel() for g in grads)]
    assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), grads, strict=True))
    trainer.all_reduce_network(accelerator, network)  # one process: as it was
    assert work.records["mean of gradients"].fused == 1
