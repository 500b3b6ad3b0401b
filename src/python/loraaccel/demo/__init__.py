"""`loraaccel demo`: LoRA fine-tuning of a real encoder on real ratings, plain PEFT beside the patched copy.

data.py     rated words and emoticons, split, batches
model.py    MiniLM encoder, mean pooling, linear head, PEFT
train.py    both copies in lock-step, every step timed
check.py    what must hold for exit code 0, and the bounds
result.py   all that one run measured, report.json
report.py   tables, report.png
run.py      the order of it all

This file and settings.py import nothing heavy, so that `loraaccel --help` stays fast.
"""
