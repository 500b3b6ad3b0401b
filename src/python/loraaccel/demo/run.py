"""The demo from lexicon to result, in order."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import peft
import torch
import transformers

import loraaccel

from . import check, data, model, train
from .report import draw
from .result import Curve, Layer, Result, to_json
from .settings import DemoError, Settings


def run_demo(settings: Settings, on_phase: Callable[[str], None], on_step: Callable[[int], None]) -> Result:
    """Trains both copies and writes adapter, report.json and report.png into `settings.out`.

    `on_phase` gets a few words at the start of each phase, `on_step` the number of steps done.
    Leaves the thread counts of torch and loraaccel as `settings` asks.
    """
    begin = time.perf_counter()
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot create {settings.out}: {error.strerror}") from error
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
        loraaccel.set_num_threads(settings.num_threads)

    on_phase("loading")
    train_rows, heldout_rows = data.split(
        data.load_lexicon(data.lexicon_path()), data.HELDOUT_FRACTION, settings.seed
    )
    tokenizer = model.load_tokenizer()
    batches = list(
        data.train_batches(
            data.encode(tokenizer, train_rows), settings.batch_size, settings.num_steps, settings.seed
        )
    )
    heldout = data.heldout_batches(data.encode(tokenizer, heldout_rows))
    plain_model, patched_model = (model.build_peft(settings.rank, settings.seed) for _ in range(2))
    patch_report = loraaccel.patch(patched_model)
    plain = train.make_copy(plain_model, settings.num_steps)
    patched = train.make_copy(patched_model, settings.num_steps)

    on_phase("evaluating")
    calls = [check.snapshot_calls()]
    plain.heldout_losses.append(train.evaluate(plain.model, heldout))
    calls.append(check.snapshot_calls())
    patched.heldout_losses.append(train.evaluate(patched.model, heldout))

    on_phase("training")
    eval_at = train.eval_steps(settings.num_steps, settings.num_evals)
    train.train_in_lockstep(plain, patched, batches, heldout, eval_at, settings.seed, on_step)

    on_phase("reloading")
    patched_model.save_pretrained(str(settings.out))
    patched_ratings = train.predict(patched_model, heldout)
    calls.append(check.snapshot_calls())
    reloaded_model = model.load_adapter(settings.out, head_seed=settings.seed + 1)
    reloaded_ratings = train.predict(reloaded_model, heldout)
    calls.append(check.snapshot_calls())

    plain_calls = [check.calls_since(calls[0], calls[1]), check.calls_since(calls[2], calls[3])]
    patched_calls = check.calls_since(calls[1], calls[2])
    result = Result(
        settings={**asdict(settings), "learning_rate": train.LEARNING_RATE},
        machine=describe_machine(),
        num_train_rows=len(train_rows),
        num_heldout_rows=len(heldout_rows),
        eval_at=[0, *eval_at],
        plain=Curve(plain.train_losses, plain.heldout_losses, plain.step_seconds),
        patched=Curve(patched.train_losses, patched.heldout_losses, patched.step_seconds),
        num_warmup=min(5, settings.num_steps // 10),
        layers=[Layer(each.name, each.kind, each.fused, each.reason) for each in patch_report.modules],
        calls=patched_calls,
        checks=[
            *check.check_curves(plain, patched),
            *check.check_calls(patched_calls, plain_calls),
            *check.check_states(*map(model.adapter_state, (plain_model, patched_model, reloaded_model))),
            check.check_ratings(patched_ratings, reloaded_ratings),
        ],
        total_seconds=time.perf_counter() - begin,
    )
    draw(result, settings.out / "report.png")
    (settings.out / "report.json").write_text(to_json(result) + "\n", encoding="utf-8")
    return result


def describe_machine() -> dict[str, Any]:
    """What the step times depend on: processor, threads and versions."""
    return {
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "loraaccel": loraaccel.__version__,
    }
