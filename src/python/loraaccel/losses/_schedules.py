"""What depends on the timestep: noise schedules, signal-to-noise ratios, factors and thresholds of the losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._operators import operator, register_autograd, register_fake
from loraaccel.losses._native import check_choice, check_tensors, serves

_op = operator("snr_scale")
_threshold_op = operator("huber_threshold")
_MOST_SNR = 1000.0


def scaled_linear_betas(
    beta_start: float = 0.00085, beta_end: float = 0.012, num_train_timesteps: int = 1000
) -> Tensor:
    """β of Stable Diffusion's schedule, float32 [T]: the squares of equally spaced numbers from √start to √end."""
    return torch.linspace(beta_start**0.5, beta_end**0.5, num_train_timesteps, dtype=torch.float32) ** 2


def alphas_cumprod_of(betas: Tensor) -> Tensor:
    """The running product a = Π (1 - β), [T]."""
    return torch.cumprod(1.0 - betas, dim=0)


def zero_terminal_snr_betas(betas: Tensor) -> Tensor:
    """β [T] of the schedule whose √a is shifted to 0 at the last timestep and scaled back at the first.

    Source: Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023.
    """
    root = alphas_cumprod_of(betas).sqrt()
    first, last = root[0], root[-1]
    cumulative = ((root - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([cumulative[:1], cumulative[1:] / cumulative[:-1]])


def snr_table(alphas_cumprod: Tensor) -> Tensor:
    """The signal-to-noise ratio a / (1 - a) of each timestep [T], as sd-scripts computes it: (√a / √(1 - a))².

    sd-scripts makes its table before it changes the schedule to a terminal SNR of zero; pass `noise_scheduler.all_snr`
    on to `snr_scale` where there is one, and do not make it anew.
    """
    return (torch.sqrt(alphas_cumprod) / torch.sqrt(1.0 - alphas_cumprod)) ** 2


def snr_scale(
    timesteps: Tensor,
    all_snr: Tensor,
    *,
    min_snr_gamma: float | None = None,
    scale_v_pred_loss_like_noise_pred: bool = False,
    v_pred_like_loss: float | None = None,
    debiased_estimation_loss: bool = False,
    v_parameterization: bool = False,
) -> Tensor:
    """Factors of the losses of samples [B] by their timesteps, the product of those that are asked for, as sd-scripts
    applies its options of the same names. With snr = all_snr[timestep], q = min(snr, 1000), s = q / (q + 1):

    min_snr_gamma g (None and 0: off): min(snr, g) / snr, for v-prediction min(snr, g) / (snr + 1).
    scale_v_pred_loss_like_noise_pred: s. v_pred_like_loss v: 1 + v / s.
    debiased_estimation_loss: 1 / √q, for v-prediction 1 / (q + 1).

    timesteps: integers [B]; all_snr [T] on the same device (`snr_table`); the result has its dtype. Nothing waits for a
    device. Raises ValueError for other shapes, RuntimeError on the CPU for a timestep that is not in the table.
    """
    for name, t in (("timesteps", timesteps), ("all_snr", all_snr)):
        if not isinstance(t, Tensor):
            raise TypeError(f"snr_scale: {name} is a {type(t).__name__}, expected a torch.Tensor")
        if t.dim() != 1:
            raise ValueError(f"snr_scale: {name} has shape {list(t.shape)}, expected one dimension")
    check_tensors("snr_scale", {"timesteps": timesteps}, all_snr)
    gamma, like = min_snr_gamma or 0.0, v_pred_like_loss or 0.0
    steps = timesteps if timesteps.dtype == torch.int64 else timesteps.to(torch.int64)
    if serves(all_snr):
        with _autograd._below_autograd():
            return _op(
                steps,
                all_snr,
                gamma,
                scale_v_pred_loss_like_noise_pred,
                like,
                debiased_estimation_loss,
                v_parameterization,
            )
    snr = all_snr[steps]
    limited = snr.clamp(max=_MOST_SNR)
    scale = limited / (limited + 1)
    factors = torch.ones_like(snr)
    if gamma > 0:
        factors = factors * (snr.clamp(max=gamma) / (snr + 1 if v_parameterization else snr))
    if scale_v_pred_loss_like_noise_pred:
        factors = factors * scale
    if like:
        factors = factors * (1 + like / scale)
    if debiased_estimation_loss:
        factors = factors * (1 / (limited + 1) if v_parameterization else limited.rsqrt())
    return factors


def huber_threshold(
    timesteps: Tensor,
    *,
    schedule: str = "snr",
    huber_c: float = 0.1,
    huber_scale: float = 1.0,
    alphas_cumprod: Tensor | None = None,
    num_train_timesteps: int = 1000,
) -> Tensor:
    """c of each sample [B] for `diffusion_loss`, by sd-scripts' schedules:

    "constant": c · scale. "exponential": e^(ln(c) / T · t) · scale. "snr": (1 - c) / (1 + s)² + c with
    s = √((1 - a) / a), which takes alphas_cumprod [T] and, as in sd-scripts, no scale.
    Raises ValueError for another schedule or a missing alphas_cumprod.
    """
    check_choice("huber_threshold", "schedule", schedule, ("constant", "exponential", "snr"))
    if schedule == "constant":
        return torch.full(
            (timesteps.shape[0],), huber_c * huber_scale, dtype=torch.float32, device=timesteps.device
        )
    if schedule == "exponential":
        return torch.exp(math.log(huber_c) / num_train_timesteps * timesteps) * huber_scale
    if alphas_cumprod is None:
        raise ValueError(
            "huber_threshold: alphas_cumprod is None, expected a table [T] for the schedule 'snr'"
        )
    steps = timesteps.to(device=alphas_cumprod.device, dtype=torch.int64)
    if serves(alphas_cumprod) and steps.dim() == 1:
        with _autograd._below_autograd():
            return _threshold_op(steps, alphas_cumprod, huber_c).to(timesteps.device)
    chosen = alphas_cumprod[steps]
    sigmas = ((1.0 - chosen) / chosen) ** 0.5
    return ((1 - huber_c) / (1 + sigmas) ** 2 + huber_c).to(timesteps.device)


def sd3_weighting(sigmas: Tensor, scheme: str) -> Tensor:
    """Weighting of rectified-flow losses by their sigma s: "sigma_sqrt" s⁻², "cosmap" 2 / (π (1 - 2s + 2s²)), and 1 for
    "uniform", "mode", "logit_normal" and "none". ValueError for another scheme."""
    choices = ("sigma_sqrt", "cosmap", "uniform", "mode", "logit_normal", "none")
    check_choice("sd3_weighting", "scheme", scheme, choices)
    if scheme == "sigma_sqrt":
        return (sigmas**-2.0).float()
    if scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


@register_fake("snr_scale")
def _fake(
    timesteps: Tensor,
    table: Tensor,
    min_snr_gamma: float,
    scale_v_pred_like_noise_pred: bool,
    v_pred_like_loss: float,
    debiased_estimation: bool,
    v_prediction: bool,
) -> Tensor:
    return table.new_empty(timesteps.shape)


@register_fake("huber_threshold")
def _threshold_fake(timesteps: Tensor, table: Tensor, huber_c: float) -> Tensor:
    return table.new_empty(timesteps.shape)


def _not_differentiable(ctx: object, *grads: object) -> None:
    raise RuntimeError("loraaccel: the operators of schedules are not differentiable")


register_autograd("snr_scale", _not_differentiable)
register_autograd("huber_threshold", _not_differentiable)
