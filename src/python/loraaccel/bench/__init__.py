"""The rows of `loraaccel bench`: what this machine can do, and LoRA by the Python tools and by loraaccel in turn."""
