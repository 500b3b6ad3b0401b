"""Trains two copies in lock-step, so that both see the same machine at nearly the same moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .data import Batch

# Note [Calm training]: two runs that differ by a rounding stay together only where training is stable. From weights
# 1e-7 apart, relative, the train curves of 200 steps of 4 texts at rank 64 differ by 0.5 rating points with a rate of
# 2e-3 and no clipping, by 7e-6 with clipping and a fixed lora_alpha, by 1e-6 with half the rate.
LEARNING_RATE = 1e-3
MAX_GRADIENT_NORM = 1.0
WARMUP_FRACTION = 0.1


@dataclass
class Copy:
    """One model in training and what it left behind.

    Losses are root mean squared errors in rating points; the optimizer minimizes their square.
    """

    model: nn.Module
    parameters: list[nn.Parameter]  # those that train
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    train_losses: list[float] = field(default_factory=list)  # [num_steps]
    step_seconds: list[float] = field(default_factory=list)  # [num_steps]
    heldout_losses: list[float] = field(default_factory=list)  # [1 + num_evals], before training and after


def make_copy(model: nn.Module, num_steps: int) -> Copy:
    """AdamW on what requires a gradient (LoRA and head); linear warm-up, then linear decay to zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    num_warmup = max(1, round(WARMUP_FRACTION * num_steps))

    def factor(step: int) -> float:
        return min((step + 1) / num_warmup, (num_steps - step) / max(1, num_steps - num_warmup))

    return Copy(model, parameters, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def predict(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Ratings [rows] of all batches in their order, without dropout; leaves the model in its mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        ratings = torch.cat([model(batch.input_ids, batch.attention_mask) for batch in batches])
    model.train(was_training)
    return ratings


def evaluate(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Root mean squared error over all rows of `batches`, in rating points."""
    target = torch.cat([batch.ratings for batch in batches])
    return float((predict(model, batches) - target).square().mean().sqrt())


def train_step(copy: Copy, batch: Batch, seed: int) -> None:
    """One step from a fixed seed; the time covers forward, backward, optimizer and schedule."""
    torch.manual_seed(seed)
    begin = time.perf_counter()
    rating = copy.model(batch.input_ids, batch.attention_mask)
    loss = (rating - batch.ratings).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(copy.parameters, MAX_GRADIENT_NORM)
    copy.optimizer.step()
    copy.schedule.step()
    copy.optimizer.zero_grad()
    copy.step_seconds.append(time.perf_counter() - begin)
    copy.train_losses.append(float(loss.detach().sqrt()))


def eval_steps(num_steps: int, num_evals: int) -> list[int]:
    """When to evaluate, in steps done: `num_evals` times or fewer, the last after all steps."""
    return sorted({max(1, round(num_steps * i / num_evals)) for i in range(1, num_evals + 1)})


def train_in_lockstep(
    first: Copy,
    second: Copy,
    batches: Iterable[Batch],
    heldout: Sequence[Batch],
    eval_at: Sequence[int],
    seed: int,
    on_step: Callable[[int], None],
) -> None:
    """Both copies do step t on the same batch from the same seed before either does step t + 1.

    Which of them goes first alternates, so that neither always finds the batch in a warm cache.
    `on_step` gets the number of steps done.
    """
    first.model.train()
    second.model.train()
    for step, batch in enumerate(batches):
        pair = (first, second) if step % 2 == 0 else (second, first)
        for copy in pair:
            train_step(copy, batch, seed + step)
        if step + 1 in eval_at:
            for copy in pair:
                copy.heldout_losses.append(evaluate(copy.model, heldout))
        on_step(step + 1)
