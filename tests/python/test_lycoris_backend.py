"""loraaccel as a kernel back end of LyCORIS 4.1: what it serves, what it leaves alone, and that it leaves no trace."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import loraaccel
from loraaccel.integrations import lycoris_backend
from loraaccel.lycoris import register_backend, unregister_backend

pytest.importorskip("lycoris.kernels", reason="LyCORIS 4 (pip install lycoris-lora) is not installed")

from lycoris.functional import diag_oft, locon, loha, lokr
from lycoris.kernels import dispatch, library, ops, select

if not importlib.metadata.version("lycoris-lora").startswith("4.1."):
    pytest.skip("the back end is for LyCORIS 4.1", allow_module_level=True)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
MODULES: list[ModuleType] = [dispatch, select, ops, library, locon, loha, lokr, diag_oft]


@pytest.fixture
def registered() -> Iterator[None]:
    register_backend()
    yield
    unregister_backend()


def traces() -> dict[str, Any]:
    """All that the modules hold, and which of lycoris's modules there are."""
    held = {f"{m.__name__}.{k}": v for m in MODULES for k, v in vars(m).items() if k != "_available"}
    return held | {name: None for name in sys.modules if name.startswith("lycoris.")}


def operands(dtype: torch.dtype = F32, rank: int = 3, shape: tuple[int, ...] = (2, 5, 48)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = shape, (rank, 48), (40, rank), (rank, 48), (40, rank)
    return [(torch.randn(size, generator=generator) * 0.3).to(dtype).requires_grad_() for size in sizes]


def bypass(given: list[Tensor], backend: str | None = None, gamma: float = 0.7) -> list[Tensor]:
    """The output and the gradients of x and the factors."""
    x, *factors = given
    scale = torch.tensor(gamma, dtype=x.dtype)
    y = loha.bypass_forward_diff(x, None, *factors, None, None, gamma=scale, backend=backend)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


def picked(given: list[Any], supported: bool = True, backend: str | None = None) -> str:
    chosen: str = loha.choose(tuple(given), supported=supported, backend=backend)
    return chosen


@pytest.mark.parametrize("shape", [(2, 5, 48), (7, 48), (48,), (0, 48)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_values_and_gradients(registered: None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """No further from float64 than LyCORIS's own torch code."""
    given = operands(dtype, shape=shape)
    if 0 not in shape:
        assert picked(given) == "loraaccel"
    exact = bypass([t.detach().double().requires_grad_() for t in given], "torch")
    own, ours = bypass(given, "torch"), bypass(given, "loraaccel")
    for a, b, e in zip(ours, own, exact, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        size = max(float(e.norm()), 1e-30)
        error, theirs = (float((t.double() - e).norm()) / size for t in (a, b))
        assert error <= 1.25 * theirs + 0.5 * torch.finfo(dtype).eps


def test_the_operator_really_runs(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = loraaccel._delta.forward_op
    monkeypatch.setattr(loraaccel._delta, "forward_op", lambda *a: calls.append("ran") or original(*a))
    bypass(operands())
    assert calls == ["ran"]
    bypass(operands(), "torch")
    assert calls == ["ran"]


def test_it_steps_aside(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever asks for plain torch, and for operands that it does not take or would not speed up."""
    given = operands()
    assert picked(given) == "loraaccel"
    assert picked(given, backend="torch") == "torch"
    assert picked(given, supported=False) == "torch"
    assert picked([*given, None]) == "torch"  # the rebuild
    assert picked(operands(F64)) == "torch"
    assert picked([given[0].to(BF16), *given[1:]]) == "torch"
    assert picked(operands(rank=30)) == "torch"
    with torch.autocast("cpu", BF16):
        assert picked(given) == "torch"
    with loraaccel.disabled():
        assert picked(given) == "torch"
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "torch")
    assert picked(given) == "torch"
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "loraaccel")
    assert picked(given) == "loraaccel"
    assert picked(operands(F64)) == "torch"
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "no such")
    with pytest.raises(RuntimeError, match="not available"):
        picked(given)
    monkeypatch.delenv("LYCORIS_KERNEL_BACKEND")
    monkeypatch.setattr(dispatch, "_demoted", {})
    dispatch.demote("loraaccel", torch.device("cpu"))
    assert picked(given) == "torch"


def test_other_functions_and_devices_are_left_to_LyCORIS(registered: None) -> None:
    """Bit for bit what they gave before, and no other device is offered the back end."""
    assert "loraaccel" in dispatch.available_backends(torch.device("cpu"))
    for device in ("cuda", "mps"):
        assert "loraaccel" not in dispatch.available_backends(torch.device(device, 0))
        assert dispatch.resolve_backend(None, torch.device(device, 0)) != "loraaccel"

    def others() -> list[Tensor]:
        torch.manual_seed(0)
        down, up, mid = torch.randn(3, 8), torch.randn(10, 3), torch.randn(3, 3, 3, 3)
        x = torch.randn(4, 8)
        return [
            locon.diff_weight(down, up, None, gamma=0.5),
            locon.diff_weight(down[:, :, None, None], up[:, :, None, None], mid, gamma=0.5),
            locon.bypass_forward_diff(x, None, down, up, None, gamma=0.5),
            loha.diff_weight(down, up, down, up, None, None, gamma=torch.tensor(0.5)),
            lokr.kron_weight(torch.randn(2, 2), None, None, torch.randn(5, 4), None, None, scale=0.5),
            lokr.kron_bypass(x, torch.randn(2, 2), None, None, torch.randn(5, 4), None, None, scale=0.5),
        ]

    with_it = others()
    unregister_backend()
    for a, b in zip(with_it, others(), strict=True):
        assert torch.equal(a, b)


def test_it_goes_without_a_trace() -> None:
    before, given = traces(), operands()
    expected = bypass(given)
    for _ in range(2):
        register_backend()
        register_backend()
        assert ops.get_ops("loraaccel").loha_bypass_fwd is not None
        assert traces() != before
        assert unregister_backend()
        assert not unregister_backend()
        assert traces() == before
    assert picked(given) == "torch"
    assert "loraaccel" not in dispatch.available_backends()
    for a, b in zip(bypass(given), expected, strict=True):
        assert torch.equal(a, b)
    x, down, up, *_ = given
    with pytest.raises(NotImplementedError):
        library.loha_bypass_fwd(x[0], up, down, up, down, 1.0, "loraaccel")
    with pytest.raises(RuntimeError, match="not available"):
        bypass(given, "loraaccel")


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in lycoris_backend._TOUCHED.items() for n in names]
)
def test_a_name_that_is_missing_is_said_and_nothing_changed(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"{module}.{name}")
    before = traces()
    with pytest.raises(RuntimeError, match=rf"register_backend: LyCORIS 4\.1\.\d+: {module} has no {name}"):
        register_backend()
    assert traces() == before
    assert not unregister_backend()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.2.0")
    with pytest.raises(RuntimeError, match=r"LyCORIS is 4\.2\.0, expected 4\.1\.x"):
        register_backend()
    assert traces() == before


def test_compiled_code_sees_plain_torch(registered: None) -> None:
    given = operands()
    explained = torch.compile(
        lambda *a: loha.bypass_forward_diff(a[0], None, *a[1:], None, None), backend="eager"
    )
    torch.testing.assert_close(explained(*given), bypass(given, "torch", 1.0)[0], rtol=1e-5, atol=1e-6)
