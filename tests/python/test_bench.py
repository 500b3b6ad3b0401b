"""`loraaccel bench`: formulas, the model's structure, the checks. No test looks at how long anything takes."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import loraaccel  # noqa: E402
from loraaccel.bench import ceilings, qkv, run, unet  # noqa: E402
from loraaccel.bench.compare import compare, relative_error  # noqa: E402
from loraaccel.bench.flops import backward_flops, forward_flops  # noqa: E402
from loraaccel.cli.bench import bench  # noqa: E402

TINY_WIDTH, TINY_TOKENS = 64, 16
# SDXL's unet/config.json, what makes its structure
SDXL = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "addition_embed_type": "text_time",
    "use_linear_projection": True,
    "in_channels": 4,
    "out_channels": 4,
}


@pytest.fixture
def tiny_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run measures one small projection, and the bandwidth of a small buffer."""
    monkeypatch.setattr(ceilings, "READ_MBYTES", 8)
    monkeypatch.setattr(run, "families", lambda settings: [qkv.QkvFamily(TINY_WIDTH, (TINY_TOKENS,))])


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["--rows", "qkv", "--rounds", "2", "--no-compile", "--json", *arguments])


def test_flops_by_hand() -> None:
    # M = 2, K = 3, N = 5, R = 1: base 2*2*3*5 = 60, down 2*2*3*1 = 12, up 2*2*1*5 = 20.
    assert forward_flops(2, 3, 5, 1) == 60 + 12 + 20
    # dx = dy W 60; dh = dy B 20, dB = dy^T h 20, dA = dh^T x 12, dh A 12.
    assert backward_flops(2, 3, 5, 1) == 60 + 20 + 20 + 12 + 12
    assert forward_flops(2, 3, 5, 0) == backward_flops(2, 3, 5, 0) == 60
    assert qkv.QkvWorkload(4, 2, backward=False).flops(1) == 3 * (2 * 2 * 4 * 4 + 2 * 2 * 8)
    assert qkv.QkvWorkload(4, 2, backward=True).flops(0) == 2 * 3 * 2 * 2 * 4 * 4


def test_unet_has_the_structure_of_sdxl() -> None:
    config = unet.unet_config(unet.UNetSize())
    assert {
        name: list(v) if isinstance(v, tuple) else v for name, v in config.items() if name in SDXL
    } == SDXL
    channels, heads = config["block_out_channels"], config["attention_head_dim"]
    assert isinstance(channels, tuple)
    assert isinstance(heads, tuple)
    assert [c / channels[0] for c in channels] == [1, 2, 4]  # 320, 640, 1280
    assert [c / h for c, h in zip(channels, heads, strict=True)] == [64, 64, 64]  # heads 5, 10, 20


def test_unet_builds_and_every_target_is_found() -> None:
    pytest.importorskip("diffusers")
    from loraaccel.bench.variants import PRECISIONS, attach_lora, num_parameters

    family = unet.UNetFamily(size=unet.QUICK_SIZE)
    frozen = family.build().requires_grad_(False)
    model: Any = attach_lora(frozen, family.targets, family.rank, PRECISIONS["fp32"])
    assert model.config.time_cond_proj_dim is None
    adapted = {
        name.partition(".lora_A")[0].rpartition(".")[2]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }
    assert adapted == {"to_q", "to_k", "to_v", "0", "proj", "2"}
    assert num_parameters(model, trainable=False) == num_parameters(frozen, trainable=False)
    (forward, epoch) = family.workloads
    assert [forward.trains, epoch.trains] == [False, True]
    groups = epoch.observe(model, torch.float32)
    assert {
        "prediction",
        "grad attn1.to_q.lora_A",
        "grad attn2.to_out.0.lora_B",
        "grad ff.net.2.lora_A",
    } <= set(groups)
    assert len(groups) == 1 + 2 * (4 + 4 + 2)
    assert all(bool(torch.isfinite(value).all()) for value in groups.values())


def test_comparison_measures_against_pefts_own_error() -> None:
    reference = {"y": torch.ones(100, dtype=torch.float64)}
    peft = {"y": torch.full((100,), 1.001)}
    within, wrong = {"y": torch.full((100,), 0.9985)}, {"y": torch.full((100,), 1.003)}
    assert compare(within, peft, reference, 1e-7).ok
    assert not compare(wrong, peft, reference, 1e-7).ok
    assert not compare({"y": torch.full((100,), math.nan)}, peft, reference, 1e-7).ok
    half = {"x": torch.zeros(3, dtype=torch.float64), **reference}
    assert not compare({"x": torch.zeros(3), **wrong}, {"x": torch.zeros(3), **peft}, half, 1e-7).ok
    assert relative_error(torch.ones(5), reference["y"]) == math.inf


@pytest.mark.usefixtures("tiny_qkv")
def test_json_has_everything() -> None:
    result = invoke("--dtype", "fp32,bf16,bf16-uniform")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["failures"] == []
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert data["versions"]["torch"]
    assert data["reported_elsewhere"]["rows"]["qkv"]["gain"] == 1.84
    for name in ("fp32", "bf16"):
        assert data["ceilings"]["fma"][name]["all_threads_gflops"] > 0
        assert data["ceilings"]["fma"][name]["isa"]
    assert data["ceilings"]["read_gbytes"] > 0
    assert [model["dtype"] for model in data["models"]] == ["fp32", "bf16", "bf16-uniform"]
    for model in data["models"]:
        assert model["base_parameters"] == 3 * (TINY_WIDTH * TINY_WIDTH + TINY_WIDTH)
        assert model["lora_parameters"] == 3 * 2 * 8 * TINY_WIDTH
        assert len(model["cases"]) == 2
        for case in model["cases"]:
            assert case["fused_calls"] > 0
            assert case["ratios"]["peft/loraaccel"]["median"] > 0
            assert case["variants"]["peft-compile"]["skipped"] == "left out by --no-compile"
            for name in ("frozen", "peft", "loraaccel"):
                variant = case["variants"][name]
                assert len(variant["seconds"]) >= 2
                assert (
                    0 < variant["minimum_seconds"] <= variant["median_seconds"] <= variant["maximum_seconds"]
                )
                assert variant["gflops"] > 0
                assert variant["share_of_fma_ceiling"] > 0


@pytest.mark.usefixtures("tiny_qkv")
def test_a_wrong_variant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = loraaccel.patch

    def patch_wrongly(model: torch.nn.Module) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(1.01)
        return patch(model)

    monkeypatch.setattr(loraaccel, "patch", patch_wrongly)
    result = invoke("--dtype", "fp32")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    failures = data["failures"]
    assert data["models"][0]["cases"][0]["variants"]["loraaccel"]["error"] > 1e-4
    assert len(failures) == 2  # forward, and forward and backward
    assert all("loraaccel is wrong: relative error" in failure for failure in failures)


@pytest.mark.usefixtures("tiny_qkv")
def test_a_fast_path_that_did_not_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class NothingFused:
        num_fused, num_fallback = 0, 3
        reasons = {"test": 3}

    monkeypatch.setattr(loraaccel, "patch", lambda model: NothingFused())
    result = invoke("--dtype", "fp32")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["models"][0]["patch"] == {"num_fused": 0, "num_fallback": 3, "reasons": {"test": 3}}
    assert all("loraaccel fused no forward call" in failure for failure in data["failures"])


@pytest.mark.usefixtures("tiny_qkv")
def test_a_baseline_that_is_patched_too_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraaccel.bench import variants

    attach = variants.attach_lora

    def attach_patched(*arguments: Any) -> Any:
        model = attach(*arguments)
        loraaccel.patch(model)
        return model

    monkeypatch.setattr(variants, "attach_lora", attach_patched)
    result = invoke("--dtype", "fp32")
    assert result.exit_code == 1
    assert any("peft ran" in failure for failure in json.loads(result.stdout)["failures"])


@pytest.mark.usefixtures("tiny_qkv")
def test_a_compiler_that_fails_is_reported_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_compile(family: qkv.QkvFamily, module: torch.nn.Module) -> None:
        def forward(*arguments: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        module.forward = forward

    monkeypatch.setattr(qkv.QkvFamily, "compile_model", broken_compile)
    result = CliRunner().invoke(bench, ["--rows", "qkv", "--rounds", "2", "--dtype", "fp32", "--json"])
    assert result.exit_code == 0, result.output
    for case in json.loads(result.stdout)["models"][0]["cases"]:
        assert (
            case["variants"]["peft-compile"]["skipped"]
            == "torch.compile failed: RuntimeError: no C++ compiler"
        )


@pytest.mark.usefixtures("tiny_qkv")
def test_table_plot_and_file(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    plot, out = tmp_path / "bench.png", tmp_path / "bench.json"
    arguments = ["--rows", "qkv", "--rounds", "2", "--no-compile", "--dtype", "fp32"]
    result = CliRunner().invoke(bench, [*arguments, "--plot", str(plot), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Reported elsewhere, another machine (NVIDIA A100" in result.stdout
    assert "FMA ceiling fp32" in result.stdout
    assert "36,864" not in result.stdout  # parameters are counted, not written down
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["failures"] == []


@pytest.mark.parametrize(
    "arguments", [["--rows", "nothing"], ["--dtype", "fp8"], ["--rounds", "0"], ["--out", "no/such/f"]]
)
def test_bad_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(bench, arguments).exit_code == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    result = CliRunner().invoke(bench, ["--rows", "forward"])
    assert result.exit_code == 1
    assert 'needs diffusers, not installed here: pip install "loraaccel[bench]"' in result.stderr


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(bench, ["--help"])
    assert result.exit_code == 0
    assert "Example: loraaccel bench" in result.stdout
