"""LyCORIS as the network module of sd-scripts' train_network.py, plain and under the launcher.

LORAACCEL_LYCORIS_DIRS names folders, each with an installed LyCORIS (`pip install --no-deps --target`), so that several
versions can be tested; without it the version of this environment is used.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from sdscripts_compare import FLOAT32, SIXTEEN_BITS, assert_alike, assert_same_bytes
from sdscripts_runs import Trainer

FOLDERS = [
    os.path.abspath(folder)
    for folder in os.environ.get("LORAACCEL_LYCORIS_DIRS", "").split(os.pathsep)
    if folder
]
if not FOLDERS and importlib.util.find_spec("lycoris") is None:
    pytest.skip("no LyCORIS here, and LORAACCEL_LYCORIS_DIRS names none", allow_module_level=True)
ALGORITHMS = {
    "locon": ["algo=locon", "conv_dim=4", "conv_alpha=2"],
    "loha": ["algo=loha", "conv_dim=4", "conv_alpha=2"],
    "lokr": ["algo=lokr", "conv_dim=4", "conv_alpha=2", "factor=4"],
}
MORE = {
    "locon with dropouts": ["algo=locon", "dropout=0.1", "rank_dropout=0.1", "module_dropout=0.1"],
    "DoRA": ["algo=locon", "dora_wd=True"],
}


def version(folder: str) -> str:
    names = [path.name.split("-")[1] for path in Path(folder).glob("lycoris_lora-*.dist-info")]
    return names[0].removesuffix(".dist") if names else folder


# What is trained. (The preset that LyCORIS 4.1.3 takes by itself names the time embedding's layers twice, and an
# assertion of its own then ends every training of SD 1.5.)
PRESET = """
enable_conv = true
unet_target_module = ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"]
unet_target_name = ["conv_in", "conv_out"]
text_encoder_target_module = ["CLIPAttention", "CLIPSdpaAttention", "CLIPMLP"]
text_encoder_target_name = []
"""


def options_of(narrow: Trainer, name: str, precision: str = "no") -> dict[str, object]:
    preset = narrow.work / "lycoris.toml"
    preset.write_text(PRESET)
    arguments = [*{**ALGORITHMS, **MORE}[name], f"preset={preset}"]
    return {"network_module": "lycoris.kohya", "network_args": arguments, "mixed_precision": precision}


@pytest.fixture(params=FOLDERS or [""], ids=version)
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"PYTHONPATH": request.param} if request.param else {}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "locon")) for n in ALGORITHMS]
)
def test_off_is_the_script_alone(narrow: Trainer, name: str, environment: dict[str, str]) -> None:
    off = narrow(options_of(narrow, name), mode="off", environment=environment)
    assert_same_bytes(off, narrow(options_of(narrow, name), environment=environment))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "no") for name in (*ALGORITHMS, *MORE)), ("locon", "bf16")]
)
def test_auto(narrow: Trainer, name: str, precision: str, environment: dict[str, str]) -> None:
    """However its layers run, the run says it, learns the same and saves the same kind of file."""
    options = options_of(narrow, name, precision)
    plain, auto = (narrow(options, mode=mode, environment=environment) for mode in (None, "auto"))
    assert_alike(auto, plain, FLOAT32 if precision == "no" else SIXTEEN_BITS)
    assert auto.said
    layers = auto.report["layers"]
    if all(layer["fused"] == 0 for layer in layers):
        assert_same_bytes(auto, plain)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "locon")) for n in ALGORITHMS]
)
def test_factored(narrow: Trainer, name: str, environment: dict[str, str]) -> None:
    """Rebuilt weights computed from their factors: fused, and in float32 the same learning."""
    options = options_of(narrow, name)
    plain = narrow(options, environment=environment)
    fused = narrow(options, ours=("--use-cpp-kernel", "on", "--factored"), environment=environment)
    assert_alike(fused, plain, FLOAT32)
    layers = fused.report["layers"]
    assert layers
    assert {layer["reason"] for layer in layers} == {""}
    assert all(layer["fused"] > 0 and layer["own"] == 0 for layer in layers)
