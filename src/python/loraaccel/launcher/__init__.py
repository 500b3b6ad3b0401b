"""`loraaccel run`: starts a training script with the LoRA modules of the packages that it imports patched."""
