"""kohya's save_weights, which trainers call for each checkpoint: state dict to the type asked for, two hashes into the
metadata, and the file.

The host copies every tensor, makes the file in memory to hash it, and makes it again to write it. Here the core casts,
hashes and writes in one pass (loraaccel.safetensors), and the target is the old file until the new one is complete. The
file has the host's tensors, types, order, hashes and metadata; the keys of the metadata, whose order is another one at
each save of the host's library, are sorted.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loraaccel import safetensors
from loraaccel.integrations.kohya_work import Compared, Plan, Task, uses_only
from loraaccel.safetensors._save import Options, SaveReport, save_to_file
from loraaccel.safetensors._torch_sources import float_dtype, shared_groups, sources

_METHOD = "save_weights"
_KNOWN = """
len state_dict list keys detach clone to os path splitext safetensors.torch save_file library train_util
precalculate_safetensors_hashes torch save
"""
_NAMES = frozenset(_KNOWN.split())
_HASHES = ("sshs_model_hash", "sshs_legacy_hash")
# Casts of the core that give torch's bits. (From float64 torch rounds twice, and integers are not the core's to cast.)
_CAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
_CAST_TO = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")


def save(
    state: dict[str, Tensor], file: str, dtype: torch.dtype | None, metadata: dict[str, str]
) -> SaveReport:
    """Writes the file as the host does. (Like the host, it does not wait for the disk.)"""
    tensors = state if dtype is None else {name: _prepared(tensor, dtype) for name, tensor in state.items()}
    native = float_dtype(dtype) if dtype in _CAST_TO else None
    return save_to_file(sources(tensors), file, metadata, Options(native, write_hashes=True), sync=False)


def _prepared(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, cast already where torch has to do that."""
    if tensor.dtype == dtype or (tensor.dtype in _CAST_FROM and dtype in _CAST_TO):
        return tensor
    return tensor.detach().to("cpu").to(dtype)


def why_not(state: Any, file: Any, dtype: Any, metadata: Any) -> str:
    """Reason code for what is left to the host: its errors are the host's to raise."""
    if not isinstance(file, str) or not isinstance(state, dict):
        return "values"
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return "dtype"
    if metadata is not None and (
        type(metadata) is not dict or not all(isinstance(s, str) for item in metadata.items() for s in item)
    ):
        return "values"
    for name, tensor in state.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, torch.nn.Parameter):
            return "tensor_subclass"
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            return "values"
        if tensor.device.type not in DEVICES:
            return "device"
    return "values" if shared_groups(state) else ""


def _plan(network: Any, args: tuple[Any, ...]) -> Plan | str:
    file, dtype, metadata = args
    if isinstance(file, str) and os.path.splitext(file)[1] != ".safetensors":
        return ""  # torch.save
    state = network.state_dict()
    reason = why_not(state, file, dtype, metadata)
    if reason:
        return reason

    def run() -> None:
        report = save(state, file, dtype, metadata or {})
        _tell(metadata, report.model_hash, report.legacy_hash)

    return Plan(run, functools.partial(_compare, state, file, dtype, metadata))


def _tell(metadata: dict[str, str] | None, *hashes: str) -> None:
    """As the host does: an empty dictionary stays empty."""
    if metadata:
        metadata.update(zip(_HASHES, hashes, strict=True))


def _compare(
    state: dict[str, Tensor], file: str, dtype: Any, metadata: dict[str, str] | None, host: Callable[..., Any]
) -> Compared:
    """The host's file goes into a folder of its own beside the target."""
    folder = tempfile.TemporaryDirectory(
        dir=os.path.dirname(os.path.abspath(file)), prefix=".loraaccel-verify-"
    )
    theirs, told = os.path.join(folder.name, "x.safetensors"), copy.deepcopy(metadata)
    result = host(SimpleNamespace(state_dict=lambda: dict(state)), theirs, dtype, told)

    def error(found: Any) -> float:
        same = found == result and told == metadata and same_files(file, theirs)
        if same:
            folder.cleanup()
        return 0.0 if same else 1.0

    def adopt() -> Any:
        os.replace(theirs, file)
        folder.cleanup()
        if metadata is not None and told is not None:
            metadata.clear()
            metadata.update(told)
        return result

    return Compared(error, 0.0, adopt)


def same_files(a: str, b: str) -> bool:
    """The same tensors, metadata and bytes."""
    with safetensors.safe_open(a, "pt") as first, safetensors.safe_open(b, "pt") as second:
        if first.metadata() != second.metadata() or first.offset_keys() != second.offset_keys():
            return False
        kinds = [
            [(part.get_dtype(), part.get_shape()) for part in map(file.get_slice, file.offset_keys())]
            for file in (first, second)
        ]
        starts = [file._file.data_offset for file in (first, second)]
    if kinds[0] != kinds[1]:
        return False
    with open(a, "rb") as one, open(b, "rb") as other:
        one.seek(starts[0])
        other.seek(starts[1])
        while True:
            piece = one.read(1 << 20)
            if piece != other.read(1 << 20):
                return False
            if not piece:
                return True


@functools.lru_cache(maxsize=256)
def follows(cls: Any) -> bool:
    """True where the class's method writes tiny state dicts as we do, into the file and into the metadata."""
    if not uses_only(cls, _METHOD, _NAMES):
        return False
    cases: list[tuple[torch.dtype | None, dict[str, str] | None]] = [
        (None, None),
        (None, {}),
        (torch.float16, {"ss_a": "1", "modelspec.title": "t", "sshs_model_hash": "old"}),
        (torch.bfloat16, {"ss_a": "1"}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        return all(_gives(getattr(cls, _METHOD), Path(folder), *case) for case in cases)


def _gives(
    host: Callable[..., Any], folder: Path, dtype: torch.dtype | None, metadata: dict[str, str] | None
) -> bool:
    state, file = _probe(), str(folder / "ours.safetensors")
    try:
        expected = _compare(state, file, dtype, metadata, host)
        report = save(state, file, dtype, metadata or {})
        _tell(metadata, report.model_hash, report.legacy_hash)
        same = expected.error(None) == 0.0
    except Exception:  # noqa: BLE001  whatever it needs, we do not know it
        return False
    untouched = _probe()
    return same and all(torch.equal(state[name], untouched[name]) for name in untouched)


def _probe() -> dict[str, Tensor]:
    """Layers of several types; long enough for the second hash, which is about bytes from 1 MiB on."""
    count = torch.arange(600_000, dtype=torch.float32)
    return {
        "lora_b.lora_down.weight": (count.sin() * 3).reshape(-1, 4),
        "lora_b.alpha": torch.tensor(4),
        "lora_a.lora_up.weight": torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4) ** 3,
        "lora_a.alpha": torch.tensor(1.5),
        "lora_a.lora_down.weight": torch.linspace(-1, 1, 6).to(torch.bfloat16),
    }


TASK = Task("saved files", _METHOD, follows, _plan, ("file", "dtype", "metadata"), repeatable=True)
