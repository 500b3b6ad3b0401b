"""kohya's factors of a sample's loss by its timestep: min-SNR, the v-prediction ones and the debiased estimation.

The host looks its table up sample by sample, once for each option, and multiplies the losses each time. Here one
operator makes the product of the factors for all samples. Trainers of flow models have the same method, which does
nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loraaccel.integrations.kohya_work import (
    Compared,
    Plan,
    Task,
    relative_error,
    uses_only,
    why_not_tensors,
)
from loraaccel.losses import snr_scale

_METHOD = "post_process_loss"
# The trainer's options, and of each the host's function that it has the losses go through.
_FUNCTIONS = {
    "min_snr_gamma": "apply_snr_weight",
    "scale_v_pred_loss_like_noise_pred": "scale_v_prediction_loss_like_noise_prediction",
    "v_pred_like_loss": "add_v_prediction_like_loss",
    "debiased_estimation_loss": "apply_debiased_estimation",
}
_NAMES = frozenset([*_FUNCTIONS, *_FUNCTIONS.values(), "v_parameterization"])
_BOUND = 1e-5  # the factors are multiplied with one another first


def present(cls: Any) -> bool:
    """Has the trainer's method any of these factors?"""
    code = getattr(getattr(cls, _METHOD, None), "__code__", None)
    return code is not None and not set(code.co_names).isdisjoint(_FUNCTIONS.values())


def follows(cls: Any) -> bool:
    """True where the method multiplies the losses by the product of the factors that are chosen, and does no more."""
    if not uses_only(cls, _METHOD, _NAMES):
        return False
    names = getattr(cls, _METHOD).__globals__
    return _proved(cls, tuple(names.get(name) for name in _FUNCTIONS.values()))


@functools.lru_cache(maxsize=64)
def _proved(cls: Any, functions: tuple[Any, ...]) -> bool:
    """The class with those functions of its module, on a table of five numbers with every choice of options."""
    if not all(isinstance(function, FunctionType) for function in functions):
        return False
    scheduler = SimpleNamespace(all_snr=torch.tensor([float("inf"), 1500.0, 7.0, 2.5, 0.01]))
    timesteps = torch.tensor([3, 4, 2, 1, 2])
    losses = torch.tensor([0.5, 2.0, 0.25, 3.0, 1.0])
    for gamma, scaled, like, debiased, v in itertools.product(
        (None, 0, 5.0), (False, True), (None, 0.5), (False, True), (False, True)
    ):
        options = SimpleNamespace(
            min_snr_gamma=gamma,
            scale_v_pred_loss_like_noise_pred=scaled,
            v_pred_like_loss=like,
            debiased_estimation_loss=debiased,
            v_parameterization=v,
        )
        given = losses.clone()
        try:
            found = getattr(cls, _METHOD)(object(), given, options, timesteps, scheduler)
        except Exception:  # noqa: BLE001  whatever it needs, we do not know it
            return False
        if not isinstance(found, Tensor) or not torch.equal(given, losses):
            return False
        expected = losses * snr_scale(timesteps, scheduler.all_snr, **vars(options))
        if relative_error(found, expected) > 1e-6:
            return False
    return True


def _plan(trainer: Any, args: tuple[Any, ...]) -> Plan | str:
    losses, options, timesteps, scheduler = args
    chosen = {name: getattr(options, name) for name in _FUNCTIONS}
    if not any(chosen.values()):
        return ""
    table = scheduler.all_snr
    reason = why_not_tensors(losses, table)
    if reason:
        return reason
    if losses.dtype != torch.float32 or table.dtype != torch.float32:
        return "dtype"
    if type(timesteps) is not Tensor or timesteps.is_floating_point() or timesteps.device != table.device:
        return "dtype"
    if losses.dim() != 1 or table.dim() != 1 or timesteps.shape != losses.shape:
        return "shape"
    chosen["v_parameterization"] = options.v_parameterization
    return Plan(
        functools.partial(_run, losses, timesteps, table, chosen),
        functools.partial(_compare, trainer, args),
    )


def _run(losses: Tensor, timesteps: Tensor, table: Tensor, chosen: dict[str, Any]) -> Tensor:
    return losses * snr_scale(timesteps, table, **chosen)


def _compare(trainer: Any, args: tuple[Any, ...], host: Callable[..., Any]) -> Compared:
    expected = host(trainer, *args)
    return Compared(lambda found: relative_error(found.detach(), expected.detach()), _BOUND, lambda: expected)


TASK = Task(
    "loss factors",
    _METHOD,
    follows,
    _plan,
    ("loss", "args", "timesteps", "noise_scheduler"),
    repeatable=True,
    present=present,
)
