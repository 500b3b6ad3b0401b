"""Losses with their gradients in one native pass, for the CPU; the same formulas in torch everywhere else.

``bce_with_logits``: binary cross entropy, drop-in for torch's. ``diffusion_loss``: the losses of kohya's sd-scripts,
with masks, pseudo-Huber thresholds and factors by signal-to-noise ratio, and without a loop over the samples or a
synchronisation. ``snr_scale``, ``snr_table``, ``huber_threshold`` and the like make what it takes.

Where the native pass does not run, torch computes the same formula: on other devices, in code that torch.compile
compiles (which fuses it), in torch.func transforms and forward-mode differentiation, for tensor subclasses, for
gradients of anything but the predictions, for gradients of gradients, and with loraaccel switched off.
"""

from loraaccel.losses._bce import bce_with_logits
from loraaccel.losses._diffusion import diffusion_loss
from loraaccel.losses._schedules import (
    alphas_cumprod_of,
    huber_threshold,
    scaled_linear_betas,
    sd3_weighting,
    snr_scale,
    snr_table,
    zero_terminal_snr_betas,
)

__all__ = [
    "alphas_cumprod_of",
    "bce_with_logits",
    "diffusion_loss",
    "huber_threshold",
    "scaled_linear_betas",
    "sd3_weighting",
    "snr_scale",
    "snr_table",
    "zero_terminal_snr_betas",
]
