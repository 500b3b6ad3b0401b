"""Writes what a training run of sd-scripts reads, from a seed and without a network: a random SD 1.5 model in the
layout of diffusers, its tokenizer, and eight captioned images.

    python sdscripts_model.py FOLDER [--widths 64,64,96,96]

Only the U-Net has to be as wide as SD 1.5's: sd-scripts takes its widths from constants of its own. Its file is float16
(1.7 GB), which diffusers loads as float32. With other widths `stand_ins/sitecustomize.py` sets those constants. The
text encoder and the VAE may be of any size; here they have a few layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SD15 = (320, 640, 1280, 1280)
TOKENIZER = "openai_clip-vit-large-patch14"  # what sd-scripts looks for in --tokenizer_cache_dir
FIRST, LAST = "<|startoftext|>", "<|endoftext|>"
SUBJECTS = ("ring", "bar", "disc", "grid")
REPEATS = 5  # 40 images in an epoch: 20 batches of two, or 10 of four


def write_tokenizer(folder: Path) -> int:
    """CLIP's byte-level vocabulary without merged pairs, so that each letter is a token. Returns its size."""
    from transformers import CLIPTokenizer
    from transformers.models.clip.tokenization_clip import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), FIRST, LAST]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)
    tokenizer.save_pretrained(folder)
    return len(tokens)


def write_images(folder: Path) -> None:
    """Four shapes in two colours, half of them square, in the layout REPEATS_NAME of kohya's folders."""
    import numpy as np
    from PIL import Image

    folder = folder / f"{REPEATS}_shapes"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    for i in range(8):
        height, width = ((64, 64), (128, 64))[i // 2 % 2]
        row, column = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        radius = np.hypot(row, column)
        inside = {
            "ring": abs(radius - 0.6) < 0.2, "bar": abs(row - column) < 0.3, "disc": radius < 0.7,
            "grid": (np.sin(9 * row) > 0) ^ (np.sin(9 * column) > 0),
        }[SUBJECTS[i % 4]]  # fmt: skip
        colour = np.array([230, 60, 40] if i < 4 else [40, 90, 220])
        pixels = np.where(inside[..., None], colour, 128) + generator.normal(0, 6, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"{'red' if i < 4 else 'blue'} {SUBJECTS[i % 4]}, number {i}\n")


def write_model(folder: Path, widths: tuple[int, ...], vocabulary: int) -> None:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(2)
    text_width = 768 if widths == SD15 else 64
    unet = UNet2DConditionModel(
        sample_size=64, block_out_channels=widths, attention_head_dim=8, cross_attention_dim=text_width
    )
    text = CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=text_width, intermediate_size=2 * text_width, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16,) * 4, norm_num_groups=8, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    pipeline = StableDiffusionPipeline(
        unet=unet.half(), vae=vae, text_encoder=CLIPTextModel(text), scheduler=scheduler,
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizers" / TOKENIZER),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--widths", default=",".join(map(str, SD15)))
    arguments = parser.parse_args()
    vocabulary = write_tokenizer(arguments.folder / "tokenizers" / TOKENIZER)
    write_images(arguments.folder / "images")
    write_model(arguments.folder, tuple(map(int, arguments.widths.split(","))), vocabulary)


if __name__ == "__main__":
    main()
