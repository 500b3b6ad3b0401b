"""`loraaccel demo`: LoRA fine-tuning of a real encoder on real ratings, plain PEFT beside the patched copy.

data.py     rated words and emoticons, split, batches
model.py    MiniLM encoder, mean pooling, linear head, PEFT
train.py    both copies in lock-step, every step timed
check.py    the bounds, the curves, and the reload with plain PEFT
report.py   table, report.png, report.json
run.py      the order of it all

This file and settings.py import nothing heavy, so that `loraaccel --help` stays fast.
"""
