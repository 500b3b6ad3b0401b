"""Our resize against a checkout's networks/resize_lora.py, as its users run it: ranks, alphas, updates, metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from loraaccel import adapters

CHECKOUT = os.environ.get("LORAACCEL_SDSCRIPTS_DIR", "")
STAND_INS = Path(__file__).parent / "stand_ins"
BLOCK = "lora_unet_down_blocks_0_attentions_0_"
LAYERS = {
    f"{BLOCK}transformer_blocks_0_attn1_to_q": (64, 64),
    f"{BLOCK}transformer_blocks_0_attn2_to_k": (64, 96),
    f"{BLOCK}proj_in": (64, 64, 1, 1),
    "lora_unet_down_blocks_0_resnets_0_conv1": (64, 32, 3, 3),
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj": (48, 48),
}


def a_lora(path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for i, (name, (out, *window)) in enumerate(LAYERS.items()):
        rank = 16
        fall = np.geomspace(1, 0.01 * (i + 1), rank)
        tensors[f"{name}.lora_down.weight"] = rng.standard_normal((rank, *window)).astype(np.float32)
        up = (rng.standard_normal((out, rank)) * fall).reshape(out, rank, *[1] * (len(window) - 1))
        tensors[f"{name}.lora_up.weight"] = up.astype(np.float32)
        tensors[f"{name}.alpha"] = np.asarray(8, np.float32)
    save_file(tensors, path, {"ss_network_dim": "16", "ss_training_comment": "mine", "other": "stays"})


def update(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    down = tensors[f"{name}.lora_down.weight"].astype(np.float64)
    up = tensors[f"{name}.lora_up.weight"].astype(np.float64)
    rank = down.shape[0]
    return float(tensors[f"{name}.alpha"]) / rank * up.reshape(len(up), rank) @ down.reshape(rank, -1)


@pytest.mark.skipif(not CHECKOUT, reason="LORAACCEL_SDSCRIPTS_DIR names no checkout of sd-scripts")
@pytest.mark.parametrize(
    ("method", "param"), [(None, None), ("sv_ratio", 6.0), ("sv_fro", 0.9), ("sv_cumulative", 0.7)]
)
def test_resize_is_that_of_sd_scripts(tmp_path: Path, method: str | None, param: float | None) -> None:
    a_lora(tmp_path / "a.safetensors")
    words = [
        "--model",
        "a.safetensors",
        "--save_to",
        "theirs.safetensors",
        "--new_rank",
        "6",
        "--new_conv_rank",
        "3",
    ]
    if method:
        words += ["--dynamic_method", method, "--dynamic_param", str(param)]
    words = [str(tmp_path / w) if w.endswith(".safetensors") else w for w in words]
    environment = {**os.environ, "PYTHONPATH": f"{STAND_INS}{os.pathsep}{CHECKOUT}"}
    script = Path(CHECKOUT).resolve() / "networks" / "resize_lora.py"
    subprocess.run(
        [sys.executable, script, *words], env=environment, cwd=script.parent, check=True, capture_output=True
    )
    adapters.resize(
        tmp_path / "a.safetensors",
        tmp_path / "ours.safetensors",
        6,
        conv_rank=3,
        method=method,
        param=param,
        base="sd15",
    )
    theirs, ours = (load_file(tmp_path / f"{name}.safetensors") for name in ("theirs", "ours"))
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
    for name in LAYERS:
        assert theirs[f"{name}.alpha"] == ours[f"{name}.alpha"]
        expected = update(theirs, name)
        # float32's full SVD is off by some 1e-7 of the largest singular value
        assert np.linalg.norm(update(ours, name) - expected) < 1e-5 * np.linalg.norm(expected)
    metadata = []
    for name in ("theirs", "ours"):
        with safe_open(tmp_path / f"{name}.safetensors", "np") as file:
            metadata.append({k: v for k, v in file.metadata().items() if not k.startswith("sshs_")})
    assert metadata[0] == metadata[1]
