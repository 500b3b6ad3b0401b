"""Losses, forward and backward, against the ways that they are computed with today.

    python benchmarks/losses.py                 # everything
    python benchmarks/losses.py bce             # binary cross entropy; diffusion: the other one

Diffusion: a batch's loss with pseudo-Huber thresholds by timestep, a mask, weights of samples and min-SNR factors.
Rivals: the steps of sd-scripts in torch's own functions, one after the other ("eager"), and torch.compile of the same
steps, with the look-up of the samples' SNR as one indexing. Binary cross entropy: torch's function, and torch.compile
of it. All make the loss and leave the gradient in `grad`, which is None before. Medians of interleaved rounds; ratios
are medians of the ratio within a round: rival time / ours, above 1 ours is faster. Results: README.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel import losses
from loraaccel.timing import interleave, ratio

ALPHAS = losses.alphas_cumprod_of(losses.scaled_linear_betas())
ALL_SNR = losses.snr_table(ALPHAS)
HUBER_C, GAMMA = 0.1, 5.0


def step(
    pred: Tensor,
    target: Tensor,
    steps: Tensor,
    mask: Tensor,
    weights: Tensor,
    look_up: Callable[[Tensor], Tensor],
) -> Tensor:
    """One after the other, as a training script does it."""
    alphas = torch.index_select(ALPHAS, 0, steps)
    sigmas = ((1.0 - alphas) / alphas) ** 0.5
    c = ((1 - HUBER_C) / (1 + sigmas) ** 2 + HUBER_C).view(-1, 1, 1, 1)
    loss = 2 * c * (torch.sqrt((pred.float() - target.float()) ** 2 + c**2) - c)
    loss = loss * F.interpolate(mask.unsqueeze(1), size=loss.shape[2:], mode="area")
    loss = loss.mean(dim=[1, 2, 3]) * weights
    snr = look_up(steps)
    loss = loss * torch.div(torch.minimum(snr, torch.full_like(snr, GAMMA)), snr).float()
    return loss.mean()


def eager(pred: Tensor, target: Tensor, steps: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return step(pred, target, steps, mask, weights, lambda steps: torch.stack([ALL_SNR[t] for t in steps]))


def vectorised(pred: Tensor, target: Tensor, steps: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return step(pred, target, steps, mask, weights, lambda steps: ALL_SNR[steps])


def ours(pred: Tensor, target: Tensor, steps: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    c = losses.huber_threshold(steps, alphas_cumprod=ALPHAS, huber_c=HUBER_C)
    scale = losses.snr_scale(steps, ALL_SNR, min_snr_gamma=GAMMA)
    return losses.diffusion_loss(
        pred, target, loss_type="huber", huber_c=c, mask=mask, sample_scale=scale, weighting=weights
    )


def both_ways(function: Callable[..., Tensor], x: Tensor, *args: Tensor) -> Callable[[], None]:
    def call() -> None:
        x.grad = None
        function(x, *args).backward()

    return call


def compare(
    text: str, functions: dict[str, Callable[..., Tensor]], rounds: int, x: Tensor, *args: Tensor
) -> None:
    calls, gradients = {}, {}
    for name, function in functions.items():
        calls[name] = both_ways(function, x, *args)
        calls[name]()
        assert x.grad is not None
        gradients[name] = x.grad.float()
    for name, gradient in gradients.items():
        error = (gradient - gradients["ours"]).abs().max() / gradients["ours"].abs().max()
        if not error < 0.02:
            raise SystemExit(f"{text}: the gradients of {name} differ by {error:.1e} of the largest")
    results = interleave(calls, rounds=rounds, warmup=20)
    line = f"{text:44} ours {results['ours'].median * 1e6:6.0f} us"
    for name in functions:
        if name != "ours":
            r = ratio(results[name], results["ours"])
            line += (
                f"   {name} {results[name].median * 1e6:6.0f} us, / ours {r.median:.2f} "
                f"[{r.first_quartile:.2f}, {r.third_quartile:.2f}]"
            )
    print(line, flush=True)


def diffusion(rounds: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for size, pixels in ((128, 128), (128, 1024), (64, 64)):
            pred, target = torch.randn(2, 4, 4, size, size).to(dtype)
            args = target, torch.randint(0, 1000, (4,)), torch.rand(4, pixels, pixels), torch.rand(4)
            functions = {"ours": ours, "eager": eager, "compiled": torch.compile(vectorised, dynamic=False)}
            text = f"diffusion {str(dtype)[6:]} [4, 4, {size}, {size}], mask of {pixels}"
            compare(text, functions, rounds, pred.clone().requires_grad_(), *args)


def bce(rounds: int) -> None:
    torch_function = F.binary_cross_entropy_with_logits
    for dtype in (torch.float32, torch.bfloat16):
        for shape, weighted in (((1 << 20,), False), ((1 << 14, 64), True)):
            x = torch.randn(shape).to(dtype).requires_grad_()
            target = torch.rand(shape).round().to(dtype)
            p = (torch.rand(64) + 0.5).to(dtype) if weighted else None

            def theirs(x: Tensor, target: Tensor, p: Tensor | None = p) -> Tensor:
                return torch_function(x, target, pos_weight=p)

            def native(x: Tensor, target: Tensor, p: Tensor | None = p) -> Tensor:
                return losses.bce_with_logits(x, target, pos_weight=p)

            functions = {"ours": native, "eager": theirs, "compiled": torch.compile(theirs, dynamic=False)}
            text = f"bce {str(dtype)[6:]} {list(shape)}{', pos_weight' if weighted else ''}"
            compare(text, functions, rounds, x, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="?", choices=("bce", "diffusion"))
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.which != "bce":
        diffusion(options.rounds)
    if options.which != "diffusion":
        bce(options.rounds)


if __name__ == "__main__":
    main()
