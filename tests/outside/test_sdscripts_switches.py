"""Every way to switch loraaccel on in sd-scripts and lora-scripts, and what happens when something is wrong."""

from __future__ import annotations

import platform
from typing import Any

import pytest
from sdscripts_compare import (
    FLOAT32,
    assert_alike,
    assert_all_fused,
    assert_same_bytes,
)
from sdscripts_runs import ACCELERATE, Run, Trainer, saved_file

OURS = "loraaccel.kohya"
SHORT = {"max_train_steps": 4}
# A kernel of another processor: every call of an operator fails.
FOREIGN = {"LORAACCEL_FORCE_KERNEL": "neon" if platform.machine() in ("x86_64", "AMD64") else "avx2"}
FIRST_LAYER = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
# What lora-scripts' form for SD 1.5 fills in beside the paths, as its program writes it to a TOML file.
FORM = {
    "v2": False, "prior_loss_weight": 1, "save_every_n_epochs": 2, "save_precision": "fp16", "max_token_length": 225,
    "shuffle_caption": True, "keep_tokens": 0, "noise_offset": 0.0, "lowram": False, "clip_skip": 2,
    "lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": 0, "lr_scheduler_num_cycles": 1, "unet_lr": 1e-3,
    "text_encoder_lr": 1e-4, "persistent_data_loader_workers": False, "cache_latents": True, "log_prefix": "",
    "network_train_unet_only": False, "network_train_text_encoder_only": False, "mixed_precision": "no",
    "max_train_epochs": 2, "enable_contrastive": False, "network_args": [],
}  # fmt: skip
FORM_ENVIRONMENT = {"ACCELERATE_DISABLE_RICH": "1"}


# ---- the network module ----


def test_network_module(narrow: Trainer) -> None:
    """Saved like networks.lora's, the module's name in the metadata included."""
    plain, ours = narrow(), narrow({"network_module": OURS})
    assert_alike(ours, plain, FLOAT32)
    assert ours.said == [
        "lora_conv2d: 32 of 32 layers fused, 640 calls",
        "lora_linear: 172 of 172 layers fused, 3440 calls",
        "network: saved files, 1 calls",
    ]
    assert saved_file(ours.file)[1]["ss_network_module"] == "networks.lora"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on", "verify"])
def test_network_argument(narrow: Trainer, mode: str) -> None:
    """use_cpp_kernel belongs to us, not to the network: the metadata list the other arguments."""
    given = {"network_args": ["conv_dim=4"]}
    plain = narrow({**SHORT, **given})
    ours = narrow({**SHORT, "network_module": OURS, "network_args": ["conv_dim=4", f"use_cpp_kernel={mode}"]})
    assert bool(ours.said) == (mode != "off")
    if mode == "off":
        assert ours.losses == plain.losses
        assert saved_file(ours.file)[2] == saved_file(plain.file)[2]
    else:
        assert ours.losses == pytest.approx(plain.losses, rel=FLOAT32[0])
    assert saved_file(ours.file)[0] == saved_file(plain.file)[0]
    assert saved_file(ours.file)[1]["ss_network_args"] == saved_file(plain.file)[1]["ss_network_args"]


def test_network_module_under_the_launcher(narrow: Trainer) -> None:
    """Both at once: the layers are patched and reported once, by the launcher."""
    both = narrow({"network_module": OURS}, mode="on")
    assert_same_bytes(both, narrow(mode="on"))
    assert both.said == narrow(mode="on").said
    assert_all_fused(both)


@pytest.mark.parametrize(
    "options", [{"network_args": ["use_cpp_kernal=on"]}, {"network_args": ["use_cpp_kernel=fast"]}]
)
def test_network_argument_misspelt(narrow: Trainer, options: dict[str, Any]) -> None:
    run = narrow({"network_module": OURS, **options}, code=1)
    assert "ValueError: network_args: use_cpp_kern" in run.log
    assert run.losses == []


# ---- lora-scripts ----


def form(narrow: Trainer, **more: Any) -> Any:
    return narrow(config={**FORM, **more}, start=ACCELERATE, environment=FORM_ENVIRONMENT)


def test_lora_scripts(narrow: Trainer) -> None:
    """Its form's file, started as it starts a training: only network_module differs."""
    plain, ours = form(narrow), form(narrow, network_module=OURS)
    assert_alike(ours, plain, FLOAT32)
    assert ours.said == [
        "lora_conv2d: 32 of 32 layers fused, 640 calls",
        "lora_linear: 172 of 172 layers fused, 3440 calls",
    ]
    off = form(narrow, network_module=OURS, network_args=["use_cpp_kernel=off"])
    assert off.losses == plain.losses
    assert saved_file(off.file)[2] == saved_file(plain.file)[2]


# ---- the launcher ----


def test_accelerate(narrow: Trainer) -> None:
    """accelerate launch … -m loraaccel.run, with the script's options in a TOML file, which says on."""
    plain = narrow(config={}, start=ACCELERATE)
    run = narrow(config={"use_cpp_kernel": True}, ours=(), start=ACCELERATE)
    assert_alike(run, plain, FLOAT32)
    assert_all_fused(run)
    assert run.report["mode"] == "on"
    off = narrow(config={"use_cpp_kernel": False}, ours=(), start=ACCELERATE)
    assert_same_bytes(off, plain)


@pytest.mark.parametrize(
    ("ours", "options", "config", "text"),
    [
        (("--use-cpp-kernal", "on"), {}, None, "No such option"),
        (("--use-cpp-kernel", "fast"), {}, None, "'fast' is not one of"),
        ((), {"use_cpp_kernel": True}, None, "stands after the script, expected before it"),
        ((), {}, {"use_cpp_kernal": True}, "use_cpp_kernal, expected use_cpp_kernel"),
    ],
)
def test_misspelt(narrow: Trainer, ours: Any, options: Any, config: Any, text: str) -> None:
    """Exit code 2, before anything of the script runs."""
    run = narrow(options, ours=ours, config=config, code=2)
    assert text in run.log
    assert run.losses == []
    assert "prepare" not in run.log


# (float16: on CPUs accelerate casts nothing to it, so activations and weights have different types.)
@pytest.mark.parametrize("options", [{"network_dim": -1}, {"mixed_precision": "fp16"}])
def test_an_error_of_the_script_stays_its_own(narrow: Trainer, options: dict[str, Any]) -> None:
    plain, run = narrow(options, code=1), narrow(options, mode="on", code=1)
    last = [next(line for line in reversed(r.log.splitlines()) if "Error" in line) for r in (plain, run)]
    assert last[1] == last[0]
    assert run.report["exit_code"] == 1


# ---- errors in native code ----


def test_on_stops_at_a_native_error(narrow: Trainer) -> None:
    run = narrow(SHORT, mode="on", environment=FOREIGN, code=1)
    assert run.losses == []
    assert f"LORAACCEL_FORCE_KERNEL={FOREIGN['LORAACCEL_FORCE_KERNEL']}" in run.log
    # The layer, the operator, the shapes: as a note of the exception.
    assert (
        "loraaccel: in lora_te_text_model_encoder_layers_0_self_attn_q_proj (lora_linear, x [4, 77, 64] torch.float32)"
        in run.log
    )
    assert run.report["exit_code"] == 1


@pytest.mark.parametrize("more", [{}, {"network_dropout": 0.1, "network_args": ["rank_dropout=0.1"]}])
def test_auto_goes_on_after_a_native_error(narrow: Trainer, more: dict[str, Any]) -> None:
    """Every layer gives up at its first call, so the run is the script's own, its random numbers too."""
    options = {**SHORT, **more}
    plain, run = narrow(options), narrow(options, mode="auto", environment=FOREIGN)
    assert_same_bytes(run, plain)
    assert {layer["reason"] for layer in run.report["layers"]} == {"native_error"}
    assert sum(layer["own"] for layer in run.report["layers"]) == 4 * 204
    assert "this layer runs its own forward from now on" in run.log
    assert run.said[-1].endswith("not fused: 172 native_error")


# ---- going on from what was saved ----


@pytest.mark.slow
def test_network_weights(narrow: Trainer) -> None:
    """A file of ours is a start for the plain script, and the other way round."""
    short = {**SHORT, "max_train_steps": 10}
    plain, ours = narrow(short), narrow(short, mode="on")
    expected = narrow({**short, "network_weights": str(plain.file), "seed": 8})
    for start in (plain, ours):
        for mode in (None, "on"):
            again = narrow({**short, "network_weights": str(start.file), "seed": 8}, mode=mode)
            assert_alike(again, expected, FLOAT32, steps=10)
    dim = {
        **short,
        "network_weights": str(ours.file),
        "dim_from_weights": True,
        "network_module": OURS,
        "seed": 8,
    }
    assert_alike(narrow(dim), expected, FLOAT32, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(None, "on"), ("on", None), ("on", "on")])
def test_resume(narrow: Trainer, first: str | None, second: str | None) -> None:
    """Ten steps, the state saved, ten more in another process; compared with both of them plain, as sd-scripts gives
    the images in another order after resuming than one process of twenty steps does."""
    saving = {"save_state": True, "save_every_n_steps": 10, "max_train_steps": 10}

    def resumed(first: str | None, second: str | None) -> Run:
        state = narrow(saving, mode=first).folder / "adapter-step00000010-state"
        return narrow({"resume": str(state)}, mode=second)

    assert_alike(resumed(first, second), resumed(None, None), FLOAT32, steps=10)
    files = [narrow(saving, mode=mode).folder / "adapter-step00000010-state" for mode in (None, first)]
    states = [saved_file(folder / "model.safetensors")[0] for folder in files]
    assert states[0] == states[1]
    assert len(states[0]) == 3 * 204
