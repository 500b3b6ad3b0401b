"""Whether two runs of a training script learned the same and saved the same kind of file.

How far two runs may differ, relative: (loss of a step, weights of the middle tensor, weights of the worst tensor). Adam
divides by the size of the gradient, so it makes differences of 1e-7 between sums into larger ones where gradients are
near zero, from step to step more. Measured after 20 steps on the narrow model, against plain sd-scripts:

    float32    plain with torch's AVX2 kernels instead of AVX-512    (1e-7, 1e-6, 1e-4)
               with loraaccel                                        (1e-7, 6e-7, 3e-5)
    bfloat16   plain with torch's AVX2 kernels                       (4e-4, 1e-2, 2e-1)
               with loraaccel                                        (8e-4, 8e-3, 1e-1)

A layer that lost its adapter would differ by 1 in its own weights.
"""

from __future__ import annotations

import statistics

import torch
from sdscripts_runs import Run, saved_file

FLOAT32 = (1e-5, 1e-4, 1e-2)
SIXTEEN_BITS = (2e-3, 0.1, 0.8)
# Metadata of the one run: its times, its number, and what follows from the bytes of the weights.
OWN = {
    "ss_session_id", "ss_training_started_at", "ss_training_finished_at", "modelspec.date",
    "sshs_model_hash", "sshs_legacy_hash",
}  # fmt: skip


def assert_same_bytes(found: Run, expected: Run) -> None:
    """Losses, and the file but for the times in its metadata."""
    assert found.losses == expected.losses
    assert_same_kind_of_file(found, expected)
    assert saved_file(found.file)[2] == saved_file(expected.file)[2]
    metadata = [saved_file(run.file)[1] for run in (found, expected)]
    assert metadata[0]["sshs_model_hash"] == metadata[1]["sshs_model_hash"]


def assert_alike(found: Run, expected: Run, bounds: tuple[float, float, float], steps: int = 20) -> None:
    loss, middle, worst = bounds
    assert len(found.losses) == len(expected.losses) == steps
    for step, (ours, plain) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(ours - plain) <= loss * abs(plain), f"step {step}: loss {ours} instead of {plain}"
    assert_same_kind_of_file(found, expected)
    errors = weight_errors(found, expected)
    assert statistics.median(errors.values()) <= middle
    name = max(errors, key=lambda key: errors[key])
    assert errors[name] <= worst, f"{name}: {errors[name]}"


def assert_same_kind_of_file(found: Run, expected: Run) -> None:
    """Keys, their order, shapes, dtypes, places in the file; metadata."""
    (entries, metadata, data), (plain_entries, plain_metadata, plain_data) = map(
        saved_file, (found.file, expected.file)
    )
    assert entries
    assert list(entries.items()) == list(plain_entries.items())
    assert len(data) == len(plain_data)
    assert metadata.keys() == plain_metadata.keys()
    other = {key for key in metadata.keys() - OWN if metadata[key] != plain_metadata[key]}
    assert not other, {key: (metadata[key], plain_metadata[key]) for key in other}


def weight_errors(found: Run, expected: Run) -> dict[str, float]:
    """Relative difference of each tensor that is trained (not the alphas, which must be equal)."""
    from safetensors.torch import load_file

    ours, plain = load_file(found.file), load_file(expected.file)
    errors = {}
    for key, value in plain.items():
        if key.endswith(".alpha"):
            assert torch.equal(ours[key], value), key
            continue
        size = float(value.double().norm())
        if size == 0:  # (a layer whose output is left out, by clip_skip)
            assert not ours[key].any(), key
            continue
        error = float((ours[key].double() - value.double()).norm()) / size
        errors[key] = error if error == error else float("inf")
    return errors


def assert_all_fused(run: Run, calls: int | None = 20) -> None:
    """Every LoRA module of the saved file ran in an operator, `calls` times where that is given."""
    layers = run.report["layers"]
    assert all(layer["fused"] > 0 and layer["own"] == 0 for layer in layers), run.said
    assert calls is None or {layer["fused"] for layer in layers} == {calls}
    names = {key.split(".")[0] for key in saved_file(run.file)[0]}
    assert sorted(layer["name"] for layer in layers) == sorted(names)
