"""The rows of `loraaccel bench`: this machine's ceilings, and LoRA by the Python tools and by loraaccel side by side."""
