"""OFF: disabled() and LORAACCEL=0 leave everything as if loraaccel did not exist."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import (
    Mlp,
    check_layer,
    counted,
    lora_host,
    lora_model,
    the_layer,
)
from torch import Tensor

import loraaccel


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def test_off_disabled_is_bit_identical_to_peft() -> None:
    model = lora_model(Mlp)
    x = x_of(12).requires_grad_()
    own = model(x)
    own.sum().backward()
    own_grad, x.grad = x.grad, None
    loraaccel.patch(model)
    with loraaccel.disabled(), counted() as calls:
        assert loraaccel.info()["switch"] == "off"
        got = model(x)
        got.sum().backward()
    assert calls == {"switched_off": 2}
    assert torch.equal(got, own)
    assert torch.equal(x.grad, own_grad)
    assert loraaccel.info()["switch"] == "on"


def test_off_disabled_nests_and_survives_exceptions() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)

    def fails() -> None:
        with loraaccel.disabled():
            with contextlib.suppress(ValueError), loraaccel.disabled():
                raise ValueError
            layer(x_of())
            raise ZeroDivisionError

    with counted() as calls, pytest.raises(ZeroDivisionError):
        fails()
    assert calls == {"switched_off": 1}
    check_layer(layer, x_of())


def test_off_disabled_holds_in_other_threads() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    with loraaccel.disabled(), counted() as calls:
        thread = threading.Thread(target=layer, args=(x_of(),))
        thread.start()
        thread.join()
    assert calls == {"switched_off": 1}


OFF_SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:]
import torch
from peft_models import Mlp, lora_model
model = lora_model(Mlp, lora_dropout=0.5)
import loraaccel
x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
torch.manual_seed(4); own = model(x)
keys = [list(m.__dict__) for m in model.modules()]
report = loraaccel.patch(model, verify=1)
torch.manual_seed(4); got = model(x)
strict = "passes"
try: loraaccel.patch(model, strict=True)
except RuntimeError as error: strict = str(error)
print(json.dumps({
    "equal": torch.equal(own, got), "keys": keys == [list(m.__dict__) for m in model.modules()],
    "reasons": report.reasons, "fused": report.num_fused, "switch": loraaccel.info()["switch"],
    "calls": loraaccel.info()["calls"], "kernel_calls": loraaccel.info()["kernel_calls"],
    "unpatched": loraaccel.unpatch(model), "strict": strict,
}))
"""


FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # where peft_models and reference are


@pytest.fixture(scope="module", params=["0", "off"])
def switched_off(request: pytest.FixtureRequest) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", OFF_SCRIPT, *FOLDERS],
        capture_output=True, text=True, check=True, env={**os.environ, "LORAACCEL": request.param},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_off_by_environment(switched_off: dict[str, Any]) -> None:
    """LORAACCEL=0: as if loraaccel did not exist, down to the masks; and the report says why."""
    assert {k: v for k, v in switched_off.items() if k != "strict"} == {
        "equal": True, "keys": True, "reasons": {"switched_off": 2}, "fused": 0, "switch": "off",
        "calls": {"fused": {}, "fallback": {}}, "kernel_calls": {}, "unpatched": 0,
    }  # fmt: skip


def test_off_by_environment_does_not_make_strict_programs_fail(switched_off: dict[str, Any]) -> None:
    assert switched_off["strict"] == "passes"
