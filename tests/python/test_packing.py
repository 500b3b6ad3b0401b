"""set_packing: packed copies of weights that are kept between calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import loraaccel

ROWS, INPUTS, OUTPUTS, RANK = 40, 64, 48, 4
HEADER = 64


@pytest.fixture(autouse=True)
def _back_to_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL", raising=False)
    yield
    loraaccel.set_packing()


class Layer:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.x = torch.randn(ROWS, INPUTS, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=dtype), requires_grad=False)
        self.a = torch.randn(RANK, INPUTS, dtype=dtype)
        self.b = torch.randn(OUTPUTS, RANK, dtype=dtype)

    def __call__(self, x: Tensor | None = None) -> Tensor:
        return loraaccel.lora_linear(self.x if x is None else x, self.weight, None, self.a, self.b, 0.5)

    def step(self) -> Tensor:
        """The gradient of x."""
        x = self.x.clone().requires_grad_()
        self(x).sum().backward()
        assert x.grad is not None
        return x.grad


def counts() -> dict[str, int]:
    report = loraaccel.info()["packing"]
    return {name: report[name] for name in ("hits", "packed", "dropped", "over_budget")}


def change(before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in counts().items() if n != before[name]}


def test_nothing_is_kept_by_default() -> None:
    layer, before = Layer(), counts()
    layer.step()
    assert change(before) == {}
    report = loraaccel.info()["packing"]
    assert (report["policy"], report["budget_bytes"], report["bytes"], report["weights"]) == (
        "auto",
        None,
        0,
        0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_bits_from_a_kept_copy(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    y, dx = layer(), layer.step()
    loraaccel.set_packing("always")
    before = counts()
    for _ in range(3):
        assert torch.equal(layer(), y)
    assert change(before) == {"packed": 1, "hits": 2}
    for _ in range(2):
        assert torch.equal(layer.step(), dx)
    assert change(before) == {"packed": 2, "hits": 2 + 2 + 1}
    # Panels of up to 32 columns: 48 and 64 of them, as words of 4 bytes or of two bfloat16.
    words = INPUTS * 64 + OUTPUTS * 64
    report = loraaccel.info()["packing"]
    assert report["weights"] == 2
    assert 2 * HEADER + 2 * OUTPUTS * INPUTS * 2 <= report["bytes"] <= 2 * HEADER + 4 * words


def test_few_rows_need_no_copy() -> None:
    loraaccel.set_packing("always")
    layer, before = Layer(), counts()
    layer(layer.x[:16])
    assert change(before) == {}
    layer(layer.x[:17])
    assert change(before) == {"packed": 1}


@pytest.mark.parametrize("how", ["in place", "data", "data of another tensor", "one element"])
def test_changed_weight_gives_the_new_result(how: str) -> None:
    loraaccel.set_packing("always")
    layer = Layer()
    old = layer()
    before = counts()
    with torch.no_grad():
        if how == "in place":
            layer.weight.add_(1)
        elif how == "data":  # torch's version counter does not see it
            layer.weight.data += 1
        elif how == "data of another tensor":
            layer.weight.data = layer.weight + 1
        else:
            layer.weight[5, 7] += 1
    new = layer()
    assert change(before) == {"packed": 1, "dropped": 1}
    assert not torch.equal(new, old)
    loraaccel.set_packing("never")
    assert torch.equal(new, layer())


def test_budget() -> None:
    size = HEADER + INPUTS * 64 * 4
    loraaccel.set_packing("always", budget_bytes=size)
    first, second, before = Layer(), Layer(), counts()
    assert torch.equal(first(), second())
    first()
    assert change(before) == {"packed": 1, "over_budget": 1, "hits": 1}
    assert 0 < loraaccel.info()["packing"]["bytes"] <= size


def test_copies_die_with_their_weight_and_with_the_policy() -> None:
    loraaccel.set_packing("always")
    layer = Layer()
    layer()
    assert loraaccel.info()["packing"]["weights"] == 1
    del layer
    gc.collect()
    assert loraaccel.info()["packing"]["bytes"] == 0
    layer = Layer()
    layer()
    loraaccel.set_packing("always")
    assert loraaccel.info()["packing"]["bytes"] == 0


def test_a_cast_weight_is_not_kept() -> None:
    """Autocast makes another tensor in each call: its copy would never be found again."""
    loraaccel.set_packing("always")
    layer, before = Layer(), counts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.step()
    assert change(before) == {}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="policy is 'sometimes', expected one of auto, always, never"):
        loraaccel.set_packing("sometimes")
    with pytest.raises(ValueError, match="budget_bytes is -1, expected 0 or more"):
        loraaccel.set_packing("always", budget_bytes=-1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LORAACCEL_PACKING": "always", "LORAACCEL_PACKING_BYTES": "1000"}, "('always', 1000)"),
        ({}, "('auto', None)"),
        ({"LORAACCEL_PACKING": "all"}, "LORAACCEL_PACKING=all, expected one of auto, always, never"),
        ({"LORAACCEL_PACKING_BYTES": "2G"}, "LORAACCEL_PACKING_BYTES=2G, expected a number of bytes"),
    ],
)
def test_environment(environment: dict[str, str], expected: str) -> None:
    script = "import loraaccel; r = loraaccel.info()['packing']; print((r['policy'], r['budget_bytes']))"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in run.stdout + run.stderr
    assert (run.returncode == 0) == expected.startswith("(")
