"""Where the bytes of torch tensors come from when they are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loraaccel.safetensors._save import Sources, check_name
from loraaccel.safetensors._torch_tensors import DTYPES, FILE_DTYPES

CHUNK_BYTES = 4 << 20  # the core asks for at most that much at a time


def float_dtype(dtype: torch.dtype | str | None) -> str | None:
    """A file's name for a type of torch's; other names are the core's to judge."""
    if isinstance(dtype, torch.dtype):
        if dtype not in FILE_DTYPES:
            raise ValueError(f"dtype is {dtype}, which safetensors has no type for")
        return FILE_DTYPES[dtype]
    return dtype


def sources(tensors: Mapping[str, Tensor]) -> Sources:
    """Checks them. ValueError for what cannot be written, RuntimeError for names that share memory."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"expected a dict of str to torch.Tensor, found {type(tensors).__name__}")
    held = dict(tensors)
    for name, tensor in held.items():
        _check(name, tensor)
    groups = shared_groups(held)
    if groups:
        text = "; ".join(", ".join(sorted(group)) for group in groups)
        raise RuntimeError(
            f"these tensors share memory: {text}. A file would hold each by itself. Save one of each group, clone "
            "them, or use save_model."
        )
    result = Sources()
    stager: Stager | None = None
    for name, tensor in held.items():
        dtype, shape = FILE_DTYPES[tensor.dtype], tuple(tensor.shape)
        if dtype == "F4":
            shape = (*shape[:-1], shape[-1] * 2)
        tensor = tensor.detach()
        if tensor.numel() == 0:
            result.add(name, dtype, shape, 0, tensor)
        elif tensor.device.type == "cpu" and _is_dense(tensor):
            result.add(name, dtype, shape, tensor.data_ptr(), tensor)
        elif tensor.device.type == "cpu" or not _is_dense(tensor):
            result.add_gathered(name, dtype, shape, _gather(tensor))
        else:
            stager = stager or Stager(pinned_buffer)
            result.add_fetched(name, dtype, shape, stager.source(tensor))
    return result


def _check(name: Any, tensor: Any) -> None:
    check_name(name)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"tensor {name!r} is {type(tensor).__name__}, expected torch.Tensor")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"tensor {name!r} is sparse ({tensor.layout}), expected a dense one (use .to_dense())"
        )
    if tensor.is_quantized or tensor.dtype not in FILE_DTYPES:
        raise ValueError(f"tensor {name!r}: safetensors has no type for {tensor.dtype}")
    if tensor.device.type == "meta" or (tensor.numel() > 0 and tensor.data_ptr() == 0):
        raise ValueError(f"tensor {name!r} ({type(tensor).__name__} on {tensor.device}) has no memory")
    if FILE_DTYPES[tensor.dtype] == "F4" and tensor.ndim == 0:
        raise ValueError(f"tensor {name!r}: a scalar of {tensor.dtype} cannot be written")


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _gather(tensor: Tensor) -> Callable[[], tuple[int, Any]]:
    def gather() -> tuple[int, Any]:
        dense = tensor.resolve_conj().resolve_neg().contiguous().cpu()
        return dense.data_ptr(), dense

    return gather


def shared_groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors whose memory overlaps. Tensors that interleave (columns of a matrix) do not."""
    by_storage: dict[Any, list[tuple[int, int, bool, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        begin = tensor.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (reach + 1) * tensor.element_size()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        by_storage[storage].append((begin, end, tensor.is_contiguous(), name))
    groups = []
    for places in by_storage.values():
        if len(places) < 2:
            continue
        places.sort()
        group = [places[0]]
        for place in places[1:]:
            overlaps = [
                other
                for other in group
                if place[0] < other[1] and (place[2] or other[2] or place[0] == other[0])
            ]
            if overlaps:
                group.append(place)
                continue
            groups.append([name for *_, name in group])
            group = [place]
        groups.append([name for *_, name in group])
    return [group for group in groups if len(group) > 1]


def pinned_buffer() -> Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)


class Stager:
    """Brings tensors of another device to the host in pieces, through two buffers: while one is written, the device
    fills the other."""

    def __init__(self, make_buffer: Callable[[], Tensor]) -> None:
        self._buffers = [make_buffer(), make_buffer()]
        # What each holds: the tensor's number, first byte, bytes, and an event that says when it is there.
        self._held: list[tuple[int, int, int, Any]] = [(-1, 0, 0, None)] * 2
        self._next = 0
        self._tensors = 0

    def source(self, tensor: Tensor) -> Callable[[int, int], int]:
        number = self._tensors
        self._tensors += 1
        flat = tensor.reshape(-1).view(torch.uint8)
        total = flat.numel()

        def fetch(offset: int, size: int) -> int:
            slot = self._slot_with(number, offset, size)
            if slot is None:
                slot = self._start(number, flat, offset, min(CHUNK_BYTES, total - offset))
            _, first, count, event = self._held[slot]
            if event is not None:
                event.synchronize()
            follows = first + count
            if follows < total and self._slot_with(number, follows, 1) is None:
                self._next = 1 - slot
                self._start(number, flat, follows, min(CHUNK_BYTES, total - follows))
            return self._buffers[slot].data_ptr() + (offset - first)

        return fetch

    def _slot_with(self, number: int, offset: int, size: int) -> int | None:
        for slot, (held, first, count, _) in enumerate(self._held):
            if held == number and first <= offset and offset + size <= first + count:
                return slot
        return None

    def _start(self, number: int, flat: Tensor, offset: int, count: int) -> int:
        slot = self._next
        self._next = 1 - slot
        self._buffers[slot][:count].copy_(flat[offset : offset + count], non_blocking=True)
        event = None
        if flat.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flat.device))
        self._held[slot] = (number, offset, count, event)
        return slot


__all__ = ["DTYPES", "FILE_DTYPES", "Stager", "float_dtype", "shared_groups", "sources"]
