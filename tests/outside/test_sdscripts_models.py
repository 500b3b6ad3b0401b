"""Networks of sd-scripts for Flux and SD3 models of its own classes, made small: a few training steps, plain and ours.

Their scripts read models of one size, of billions of parameters, which is too much for a test. The network is made by
the create_network that the script calls: that of sd-scripts, and that of loraaccel.kohya, which has to find the other.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loraaccel.kohya
from loraaccel.integrations import patched

CHECKOUT = os.environ.get("LORAACCEL_SDSCRIPTS_DIR", "")
if not CHECKOUT:
    pytest.skip("LORAACCEL_SDSCRIPTS_DIR names no checkout of sd-scripts", allow_module_level=True)
sys.path.insert(0, CHECKOUT)
sys.path.append(str(Path(__file__).parent / "stand_ins" / "no_torchvision"))

DROPOUTS = {"dropout": 0.1, "rank_dropout": "0.1", "module_dropout": "0.1"}
STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Layers are small: two threads that wait for each other on a busy machine take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def clip(width: int) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        vocab_size=64, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=62, eos_token_id=63, pad_token_id=63,
    ))  # fmt: skip


def t5(width: int) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(
        vocab_size=64, d_model=width, d_kv=8, d_ff=40, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
    ))  # fmt: skip


def flux(double: int, single: int) -> tuple[list[nn.Module], nn.Module, Callable[[], Tensor]]:
    """Text encoders, model, and a function that predicts something from new noise."""
    models = importlib.import_module("library.flux_models")
    model = models.Flux(models.FluxParams(
        in_channels=16, vec_in_dim=24, context_in_dim=32, hidden_size=64, mlp_ratio=4.0, num_heads=4, depth=double,
        depth_single_blocks=single, axes_dim=[4, 6, 6], theta=10_000, qkv_bias=True, guidance_embed=True,
    ))  # fmt: skip
    encoders = [clip(24), t5(32)]
    tokens = torch.arange(12).reshape(2, 6)

    def predict() -> Tensor:
        pooled = encoders[0](tokens).pooler_output
        text = encoders[1](tokens).last_hidden_state
        return model(
            img=torch.randn(2, 9, 16), img_ids=torch.zeros(2, 9, 3), txt=text, txt_ids=torch.zeros(2, 6, 3),
            timesteps=torch.rand(2), y=pooled, guidance=torch.ones(2), txt_attention_mask=None,
        )  # fmt: skip

    return encoders, model, predict


def sd3() -> tuple[list[nn.Module], nn.Module, Callable[[], Tensor]]:
    models = importlib.import_module("library.sd3_models")
    model = models.create_sd3_mmdit(models.SD3Params(
        patch_size=2, depth=2, num_patches=64, pos_embed_max_size=8, adm_in_channels=48, qk_norm="rms",
        x_block_self_attn_layers=[0], context_embedder_in_features=32, context_embedder_out_features=128,
        model_type="sd3m",
    ))  # fmt: skip
    for name, p in (*model.named_parameters(), ("pos_embed", model.pos_embed)):  # (made without values)
        nn.init.normal_(p, 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0, 0.05)
    encoders = [clip(24), clip(24), t5(32)]
    tokens = torch.arange(12).reshape(2, 6)

    def predict() -> Tensor:
        pooled = torch.cat([encoder(tokens).pooler_output for encoder in encoders[:2]], -1)
        text = encoders[2](tokens).last_hidden_state
        return model(torch.randn(2, 16, 8, 8), torch.rand(2) * 1000, y=pooled, context=text)

    return encoders, model, predict


def trained(
    module: Any, made: tuple[list[nn.Module], nn.Module, Callable[[], Tensor]], file: Path, dtype: torch.dtype,
    train_text: bool, arguments: dict[str, Any],
) -> tuple[list[float], dict[str, Tensor], Any, Tensor]:  # fmt: skip
    """Losses, the saved tensors, the network and the generator's state after STEPS steps, as the script makes them."""
    from safetensors.torch import load_file

    encoders, model, predict = made
    for part in (*encoders, model):
        part.requires_grad_(False).eval()
    arguments = dict(arguments)
    network = module.create_network(
        1.0, 4, 2.0, None, encoders, model, neuron_dropout=arguments.pop("dropout", None), **arguments
    )
    network.apply_to(encoders, model, train_text, True)
    network.train()
    for name, p in network.named_parameters():
        if "lora_up" in name:
            nn.init.normal_(p, std=0.05)  # (random models change little with B = 0)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            prediction = predict()
        loss = (prediction.float() - torch.randn(prediction.shape)).square().mean()
        loss.backward()
        if hasattr(network, "update_grad_norms"):
            network.update_grad_norms()
            network.update_norms()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    network.save_weights(str(file), torch.float32, {"ss_network_module": module.__name__})
    return losses, load_file(file), network, torch.get_rng_state()


CASES: dict[str, tuple[str, Callable[[], Any], bool, dict[str, Any]]] = {
    "Flux": ("lora_flux", lambda: flux(2, 2), False, {}),
    "Flux, text encoders": ("lora_flux", lambda: flux(1, 1), True, {"train_t5xxl": "True"}),
    "Flux, dropouts": ("lora_flux", lambda: flux(1, 2), False, DROPOUTS),
    "Flux, GGPO": ("lora_flux", lambda: flux(1, 1), False, {"ggpo_beta": "0.01", "ggpo_sigma": "0.03"}),
    "Flux, split": ("lora_flux", lambda: flux(0, 2), False, {"split_qkv": "True"}),
    "Flux, ranks by place": (
        "lora_flux", lambda: flux(1, 1), False, {"img_attn_dim": "2", "single_dim": "6", "in_dims": "[2,2,2,2,2]"},
    ),
    "SD3": ("lora_sd3", sd3, False, {}),
    "SD3, text encoders, dropouts": ("lora_sd3", sd3, True, {"train_t5xxl": "True", **DROPOUTS}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_networks(case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make, train_text, arguments = CASES[case]
    base = importlib.import_module(f"networks.{name}")
    if "split" in case:  # its widths are those of the real model
        monkeypatch.setattr(
            base.LoRANetwork, "get_qkv_mlp_split_dims", classmethod(lambda cls: [64, 64, 64, 256])
        )
    found = []
    for module in (base, loraaccel.kohya):
        torch.manual_seed(5)
        found.append(
            trained(module, make(), tmp_path / f"{len(found)}.safetensors", dtype, train_text, arguments)
        )
    (losses, weights, _, state), (our_losses, our_weights, network, our_state) = found
    assert torch.equal(state, our_state)
    exact = dtype == torch.float32
    assert our_losses == pytest.approx(losses, rel=1e-5 if exact else 5e-3)
    assert list(our_weights) == list(weights)
    for key, value in weights.items():
        assert our_weights[key].dtype == value.dtype
        error = float((our_weights[key] - value).norm() / value.norm())
        assert error <= (1e-3 if exact else 0.1), key
    states = [patched.state_of(lora) for lora in (*network.text_encoder_loras, *network.unet_loras)]
    assert all(s is not None and s.fused > 0 and not s.own for s in states)
    read = [_metadata(tmp_path / f"{i}.safetensors") for i in (0, 1)]
    assert read[0]["ss_network_module"] == read[1]["ss_network_module"] == f"networks.{name}"


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found
