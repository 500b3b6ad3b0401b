"""``python -m loraaccel.run``, for ``accelerate launch -m`` and ``torchrun -m``."""

from loraaccel.cli.run import run

if __name__ == "__main__":
    run(prog_name="loraaccel run")
