"""``python -m loraaccel``."""

from loraaccel.cli import main

main()
