"""diffusion_loss and what it takes, against the composition of sd-scripts in torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import loraaccel
from loraaccel import losses
from loraaccel.losses import diffusion_loss, huber_threshold, snr_scale, snr_table

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TYPES = ("l2", "l1", "huber", "smooth_l1")
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
registered = pytest.mark.registered


def eager(pred, target, loss_type="l2", c=None, weighting=None, mask=None, scale=None, reduction="mean"):
    """One step at a time, as a training script writes it."""
    dtype = torch.float64 if torch.float64 in (pred.dtype, target.dtype) else torch.float32
    pred, target = pred.to(dtype), target.to(dtype)
    ones = [1] * (pred.dim() - 1)
    if loss_type == "l2":
        loss = F.mse_loss(pred, target, reduction="none")
    elif loss_type == "l1":
        loss = F.l1_loss(pred, target, reduction="none")
    else:
        c = c.reshape(-1, *ones)
        loss = 2 * (torch.sqrt((pred - target) ** 2 + c**2) - c) * (c if loss_type == "huber" else 1)
    if weighting is not None:
        loss = loss * weighting.reshape(-1, *ones)
    if mask is not None:
        loss = loss * mask
    if reduction in ("none", "sum"):
        loss = loss if scale is None else loss * scale.reshape(-1, *ones)
        return loss if reduction == "none" else loss.sum()
    loss = loss.mean(dim=list(range(1, loss.dim()))) if loss.dim() > 1 else loss
    loss = loss if scale is None else loss * scale
    return loss if reduction == "samples" else loss.mean()


def operands(shape=(3, 4, 6, 5), dtype=torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)


def gradients(loss: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    up = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).reshape(loss.shape).to(loss.dtype)
    return loss.detach(), torch.autograd.grad(loss, x, up)[0]


@pytest.mark.parametrize("loss_type", TYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "samples"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_and_gradients(loss_type, reduction, dtype):
    pred, target = operands(dtype=dtype)
    more = {"weighting": torch.rand(3, 1, 1, 1), "mask": torch.rand(3, 1, 6, 5)}
    scale, c = torch.rand(3) + 0.5, torch.rand(3) + 0.1
    ours = gradients(
        diffusion_loss(
            pred, target, loss_type=loss_type, huber_c=c, sample_scale=scale, reduction=reduction, **more
        ),
        pred,
    )
    theirs = gradients(eager(pred, target, loss_type, c, scale=scale, reduction=reduction, **more), pred)
    assert [o.dtype for o in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)
    step = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-6
    torch.testing.assert_close(ours[1], theirs[1], rtol=step, atol=1e-7)


def test_known_vectors():
    """Values of the formulas in double arithmetic."""
    pred = torch.tensor([[1.0, 2, 3, 4]], requires_grad=True)
    loss = diffusion_loss(pred, torch.ones(1, 4))
    assert loss == 3.5
    assert torch.autograd.grad(loss, pred)[0].tolist() == [[0, 0.5, 1, 1.5]]
    all_snr = snr_table(losses.alphas_cumprod_of(losses.scaled_linear_betas()))
    scale = snr_scale(torch.tensor([100]), all_snr, min_snr_gamma=5)
    loss = diffusion_loss(pred, torch.ones(1, 4), sample_scale=scale)
    assert loss.item() == pytest.approx(2.07005205, rel=1e-5)
    expected = torch.tensor([[0, 0.29572172, 0.59144344, 0.88716516]])
    torch.testing.assert_close(torch.autograd.grad(loss, pred)[0], expected, rtol=1e-5, atol=0)


# ---- schedules ----


def test_snr_of_the_schedule():
    cumulative = losses.alphas_cumprod_of(losses.scaled_linear_betas())
    table = snr_table(cumulative)
    at = torch.tensor([0, 100, 500, 999])
    expected = {
        "cumulative": (cumulative[at], [0.99915, 0.894223478, None, 0.004660099]),
        "snr": (table[at], [1175.47, 8.45389371, 0.381850441, 0.00468191671]),
        "min_snr": (snr_scale(at, table, min_snr_gamma=5), [0.00425361557, 0.591443443, 1, 1]),
        "min_snr_v": (
            snr_scale(at, table, min_snr_gamma=5, v_parameterization=True),
            [0.00425, 0.528882612, 0.276332684, None],
        ),
        "debiased": (
            snr_scale(at, table, debiased_estimation_loss=True),
            [0.0316227766, 0.343931226, 1.61827883, 14.6146412],
        ),
        "debiased_v": (
            snr_scale(at, table, debiased_estimation_loss=True, v_parameterization=True),
            [None, 0.105776522, None, None],
        ),
        "s": (
            snr_scale(at, table, scale_v_pred_loss_like_noise_pred=True), [None, 0.894223478, None, None],
        ),
        "huber": (huber_threshold(at, alphas_cumprod=cumulative), [None, None, None, 0.103691293]),
    }  # fmt: skip
    for name, (values, wanted) in expected.items():
        for value, want in zip(values.tolist(), wanted, strict=True):
            assert want is None or value == pytest.approx(want, rel=3e-5), name


@pytest.mark.parametrize("v", [False, True])
def test_min_snr_weights(v, force_kernel):
    """VL1: gamma 5, SNR from next to nothing to infinite; the same from the operator and in torch."""
    snr = torch.tensor([1e-6, 1, 5, 25, math.inf])
    right = [1e-6, 0.5, 5 / 6, 5 / 26, 0] if v else [1, 1, 1, 0.2, 0]
    ours = snr_scale(torch.arange(5), snr, min_snr_gamma=5, v_parameterization=v)
    torch.testing.assert_close(ours, torch.tensor(right))
    with loraaccel.disabled():
        torch.testing.assert_close(
            snr_scale(torch.arange(5), snr, min_snr_gamma=5, v_parameterization=v), torch.tensor(right)
        )
    # The gradient is the weight times that of the plain loss, also for bfloat16 predictions.
    pred, target = operands((5, 4, 3, 3), torch.bfloat16)
    (weighted,) = torch.autograd.grad(diffusion_loss(pred, target, sample_scale=ours), pred)
    expected = 2 * (pred.double() - target.double()) / pred.numel()
    expected = expected * ours.double().reshape(5, 1, 1, 1)
    torch.testing.assert_close(weighted.double(), expected, rtol=2**-8, atol=0)


def test_zero_snr_is_nan_as_in_torch():
    for off in (False, True):
        if off:
            with loraaccel.disabled():
                factor = snr_scale(torch.tensor([0]), torch.zeros(1), min_snr_gamma=5)
        else:
            factor = snr_scale(torch.tensor([0]), torch.zeros(1), min_snr_gamma=5)
        assert factor.isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    gamma=st.none() | st.floats(0, 20), scale=st.booleans(), like=st.none() | st.floats(-2, 2), debiased=st.booleans(),
    v=st.booleans(), seed=st.integers(0, 100), batch=st.integers(0, 9),
    kind=st.sampled_from([torch.int64, torch.int32]),
)  # fmt: skip
def test_factors_are_those_of_torch(gamma, scale, like, debiased, v, seed, batch, kind):
    torch.manual_seed(seed)
    table = snr_table(losses.alphas_cumprod_of(losses.scaled_linear_betas()))
    steps = torch.randint(0, 1000, (batch,)).to(kind)
    given = {
        "min_snr_gamma": gamma, "scale_v_pred_loss_like_noise_pred": scale, "v_pred_like_loss": like,
        "debiased_estimation_loss": debiased, "v_parameterization": v,
    }  # fmt: skip
    ours = snr_scale(steps, table, **given)
    with loraaccel.disabled():
        theirs = snr_scale(steps, table, **given)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_zero_terminal_snr():
    betas = losses.zero_terminal_snr_betas(losses.scaled_linear_betas())
    cumulative = losses.alphas_cumprod_of(betas)
    assert cumulative[-1].abs() < 1e-7
    torch.testing.assert_close(cumulative[0], losses.alphas_cumprod_of(losses.scaled_linear_betas())[0])
    assert betas[-1] == 1


def test_thresholds():
    steps = torch.tensor([0, 500, 999])
    assert huber_threshold(steps, schedule="constant", huber_c=0.2, huber_scale=3).tolist() == pytest.approx(
        [0.6] * 3
    )
    exponential = huber_threshold(steps, schedule="exponential")
    assert exponential.tolist() == pytest.approx([1, 0.316227766, 0.1**0.999], rel=1e-6)
    table = losses.alphas_cumprod_of(losses.scaled_linear_betas())
    with loraaccel.disabled():
        in_torch = huber_threshold(steps, alphas_cumprod=table)
    torch.testing.assert_close(huber_threshold(steps, alphas_cumprod=table), in_torch, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="1000"):
        huber_threshold(torch.tensor([1000]), alphas_cumprod=table)
    assert torch.equal(
        huber_threshold(steps, alphas_cumprod=table, huber_scale=9),
        huber_threshold(steps, alphas_cumprod=table),
    )
    with pytest.raises(ValueError, match="alphas_cumprod"):
        huber_threshold(steps)
    with pytest.raises(ValueError, match="linear"):
        huber_threshold(steps, schedule="linear")


def test_sd3_weighting():
    sigmas = torch.tensor([0.5, 0.1, 1.0])
    assert losses.sd3_weighting(sigmas, "sigma_sqrt").tolist() == pytest.approx([4, 100, 1], rel=1e-6)
    cosmap = losses.sd3_weighting(sigmas, "cosmap").tolist()
    assert cosmap == pytest.approx([1.27323954, 0.776365576, 0.636619772], rel=1e-6)
    assert losses.sd3_weighting(sigmas, "uniform").tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="scheme"):
        losses.sd3_weighting(sigmas, "cosine")


@pytest.mark.parametrize(
    ("steps", "table", "error"),
    [
        (torch.tensor([1000]), torch.ones(1000), RuntimeError), (torch.tensor([-1]), torch.ones(1000), RuntimeError),
        (torch.tensor(1), torch.ones(1000), ValueError), (torch.tensor([1]), torch.ones(2, 2), ValueError),
        ([1], torch.ones(4), TypeError), (torch.tensor([1], device="meta"), torch.ones(4), ValueError),
    ],
)  # fmt: skip
def test_snr_errors(steps, table, error):
    with pytest.raises(error):
        snr_scale(steps, table, min_snr_gamma=5)


# ---- thresholds, masks and factors in the loss ----


@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (3, 2, 4, 2, 5), (3, 7), (3,)])
@pytest.mark.parametrize("loss_type", ["huber", "smooth_l1"])
def test_threshold_of_each_sample(shape, loss_type):
    """VL2: c is of the sample, whatever the rank of the predictions."""
    c = torch.tensor([0.1, 0.5, 1.0])
    for d in (0.0, 0.1, 10.0):
        pred = torch.full(shape, d, requires_grad=True)
        of_samples = diffusion_loss(
            pred, torch.zeros(shape), loss_type=loss_type, huber_c=c, reduction="samples"
        )
        root = (d * d + c.double() ** 2).sqrt()
        outer = 2 * c.double() if loss_type == "huber" else 2
        torch.testing.assert_close(of_samples.double(), outer * (root - c.double()), rtol=1e-5, atol=1e-9)
        (grad,) = torch.autograd.grad(of_samples.sum(), pred)
        expected = (outer * d / root).reshape(3, *[1] * (len(shape) - 1)) / (pred[0].numel())
        torch.testing.assert_close(grad.double(), expected.expand(shape).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("huber_c", "error"),
    [
        (None, ValueError), (0.0, RuntimeError), (-1.0, RuntimeError), (torch.ones(2), ValueError),
        (torch.tensor([1.0, 0.0, 1.0]), RuntimeError), (torch.tensor([1.0, float("nan"), 1.0]), RuntimeError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loss_type", ["huber", "smooth_l1"])
def test_threshold_errors(huber_c, error, loss_type):
    """VL2"""
    pred, target = operands()
    with pytest.raises(error, match="huber_c"):
        diffusion_loss(pred, target, loss_type=loss_type, huber_c=huber_c)
    diffusion_loss(pred, target, huber_c=huber_c)  # not read


def test_mean_of_all_and_of_kept():
    """VL3"""
    pred = torch.tensor([[1.0, 2, 3, 4]], requires_grad=True)
    target = torch.zeros(1, 4)
    mask = torch.tensor([[1.0, 1, 0, 0]])
    for mean_of, value, slope in (("all", 0.75, 0.25), ("kept", 1.5, 0.5)):
        for off in (False, True):
            with loraaccel.disabled() if off else torch.enable_grad():
                loss = diffusion_loss(pred, target, loss_type="l1", mask=mask, mean_of=mean_of)
                empty = diffusion_loss(pred, target, loss_type="l1", mask=0 * mask, mean_of=mean_of)
            assert loss == value
            assert torch.autograd.grad(loss, pred)[0].tolist() == [[slope, slope, 0, 0]]
            assert empty == 0
            assert torch.autograd.grad(empty, pred)[0].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("kept", [1, 2, 4096])
@pytest.mark.parametrize("mean_of", ["all", "kept"])
def test_few_kept_positions(kept, mean_of):
    """VL3: against plain autograd over what is kept."""
    pred, target = operands((1, 4096))
    mask = torch.zeros(1, 4096)
    mask[0, -kept:] = 1
    (ours,) = torch.autograd.grad(diffusion_loss(pred, target, mask=mask, mean_of=mean_of), pred)
    divisor = 4096 if mean_of == "all" else kept
    (theirs,) = torch.autograd.grad(((pred - target)[0, -kept:] ** 2).sum() / divisor, pred)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert (ours[0, -kept:] != 0).all()


@pytest.mark.parametrize(
    "mask", [(3, 1, 6, 5), (3, 6, 5), (3, 4, 6, 5), (1, 1, 6, 5), (6, 5), (3, 1, 1, 1), (4, 1, 1)]
)
@pytest.mark.parametrize("mean_of", ["all", "kept"])
def test_masks_of_any_shape(mask, mean_of):
    pred, target = operands()
    given = torch.rand(mask)
    full = (given.unsqueeze(1) if len(mask) == 3 and mask[0] == 3 else given).expand(pred.shape)
    ours = gradients(diffusion_loss(pred, target, mask=given, mean_of=mean_of, reduction="samples"), pred)
    of_samples = eager(pred, target, mask=full, reduction="samples")
    if mean_of == "kept":
        of_samples = of_samples * 120 / full.sum((1, 2, 3))
    torch.testing.assert_close(ours, gradients(of_samples, pred), rtol=1e-5, atol=1e-7)


def test_mask_is_resized_by_area():
    """A mask of an image's size is averaged over the pixels of each latent."""
    pred, target = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    mask = torch.tensor([0.0, 1, 1, 0, 1]).reshape(1, 1, 1, 5)
    ours = diffusion_loss(pred, target, mask=mask, reduction="none")
    torch.testing.assert_close(ours.flatten(), torch.tensor([2 / 3, 2 / 3]))
    torch.testing.assert_close(diffusion_loss(pred, target, mask=mask[:, 0], reduction="none"), ours)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 2), to=st.tuples(*[st.integers(2, 12)] * 2),
    dtype=st.sampled_from(FLOATS), step=st.sampled_from([1, 2]),
)  # fmt: skip
def test_resized_masks_are_those_of_torch(sizes, to, dtype, step):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, sizes[0] * step, sizes[1]).to(dtype)[:, :, ::step]
    pred = torch.zeros(2, 3, *to)
    ours = diffusion_loss(pred, pred + 1, mask=mask, reduction="none")
    expected = F.interpolate(mask.double(), size=to, mode="area") if sizes != to else mask
    if not all(n in (1, m) for n, m in zip(sizes, to, strict=True)):
        torch.testing.assert_close(ours.double(), expected.double().expand(2, 3, *to), rtol=1e-6, atol=1e-6)


def test_mask_errors():
    pred, target = operands()
    for shape in ((3, 2, 6, 5), (2, 1, 6, 5), (5, 6), (1, 3, 4, 6, 5), (7,)):
        with pytest.raises(ValueError, match="mask"):
            diffusion_loss(pred, target, mask=torch.ones(shape))


def test_factor_errors():
    pred, target = operands()
    for name in ("sample_scale", "weighting"):
        for shape in ((2,), (3, 4, 6, 5), (3, 4), (1, 3), (3, 1, 1, 1, 1)):
            with pytest.raises(ValueError, match=name):
                diffusion_loss(pred, target, **{name: torch.ones(shape)})
        with pytest.raises(TypeError, match=name):
            diffusion_loss(pred, target, **{name: 2.0})
        one = diffusion_loss(pred, target, **{name: torch.tensor(2.0)})
        torch.testing.assert_close(one, 2 * diffusion_loss(pred, target))


def test_losses_of_the_samples():
    pred, target = operands()
    scale = torch.rand(3)
    for off in (False, True):
        with loraaccel.disabled() if off else torch.enable_grad():
            loss, of_samples = diffusion_loss(pred, target, sample_scale=scale, return_per_sample=True)
        assert loss.requires_grad
        assert not of_samples.requires_grad
        torch.testing.assert_close(of_samples, eager(pred, target, scale=scale, reduction="samples").detach())
        torch.testing.assert_close(of_samples.mean(), loss.detach())


# ---- precision ----


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=5), loss_type=st.sampled_from(TYPES),
    reduction=st.sampled_from(["none", "mean", "sum", "samples"]), spread=st.floats(1e-3, 1e3), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_against_torch(shape, loss_type, reduction, spread, seed, dtype):
    torch.manual_seed(seed)
    pred, target = (spread * torch.randn(2, *shape)).to(dtype)
    pred.requires_grad_()
    c = torch.rand(shape[0]) + 0.05
    ours = gradients(diffusion_loss(pred, target, loss_type=loss_type, huber_c=c, reduction=reduction), pred)
    exact = gradients(eager(pred.double(), target.double(), loss_type, c.double(), reduction=reduction), pred)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=3e-6, atol=1e-9, equal_nan=True)
    step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(ours[1], exact[1], rtol=step, atol=1e-9, equal_nan=True)


def test_sums_keep_their_digits():
    """VL4: 2^22 elements in bfloat16; equal numbers have themselves as mean; threads change nothing."""
    torch.manual_seed(0)
    pred, target = torch.randn(2, 4, 1 << 20).bfloat16()
    exact = F.mse_loss(pred.double(), target.double())
    threads, seen = torch.get_num_threads(), []
    try:
        for n in (1, 2, 8):
            torch.set_num_threads(n)
            seen.append(diffusion_loss(pred, target))
    finally:
        torch.set_num_threads(threads)
    assert abs(seen[0].double() / exact - 1) < 1e-6
    assert all(torch.equal(s, seen[0]) for s in seen)
    same = torch.full((1, 10_000_000), 0.1)
    assert diffusion_loss(same, torch.zeros(1, 1).expand(1, 10_000_000), loss_type="l1") == torch.tensor(0.1)


def test_broadcast_gradient_from_above():
    """VL4"""
    pred, target = operands()
    scale = torch.rand(3)
    for reduction, shape in (("none", pred.shape), ("samples", (3,))):
        up = torch.tensor(0.25).expand(shape)
        (ours,) = torch.autograd.grad(
            diffusion_loss(pred, target, sample_scale=scale, reduction=reduction), pred, up
        )
        (theirs,) = torch.autograd.grad(eager(pred, target, scale=scale, reduction=reduction), pred, up)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [65536.0, 0.3, 1.0, 0.25])
def test_gradients_of_halves_are_rounded_once(dtype, scale):
    pred, target = operands((4, 4, 64, 64), dtype)
    (grad,) = torch.autograd.grad(diffusion_loss(pred, target) * scale, pred)
    exact = scale * 2 * (pred.double() - target.double()) / pred.numel()
    step = (
        torch.finfo(dtype).eps * exact.abs() * 0.51
        + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    assert ((grad.double() - exact).abs() <= step).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel, force_kernel, kernel_calls):
    pred, target = operands()
    c, mask = torch.rand(3) + 0.1, torch.rand(3, 1, 6, 5)
    expected = gradients(eager(pred, target, "huber", c, mask=mask), pred)
    force_kernel(kernel)
    ours = gradients(diffusion_loss(pred, target, loss_type="huber", huber_c=c, mask=mask), pred)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)
    assert set(kernel_calls()) == {kernel}


# ---- gradients ----


@pytest.mark.parametrize("loss_type", TYPES)
def test_gradcheck(loss_type):
    pred, target = operands((2, 3, 2), torch.float64)
    more = {
        "huber_c": torch.tensor([0.3, 0.7], dtype=torch.float64), "sample_scale": torch.rand(2, dtype=torch.float64),
        "mask": torch.rand(2, 1, 2, dtype=torch.float64),
    }  # fmt: skip
    for reduction in ("none", "mean", "sum", "samples"):
        for mean_of in ("all", "kept"):

            def function(x, r=reduction, m=mean_of):
                return diffusion_loss(x, target, loss_type=loss_type, reduction=r, mean_of=m, **more)

            assert torch.autograd.gradcheck(function, (pred,))
            if loss_type != "l1":
                assert torch.autograd.gradgradcheck(function, (pred,))


def test_backward_twice():
    pred, target = operands()
    loss = diffusion_loss(pred, target)
    (first,) = torch.autograd.grad(loss, pred, retain_graph=True)
    expected = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, pred)
    torch.testing.assert_close(second, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, pred)


def test_gradients_of_other_operands():
    pred, target = operands()
    given = {"mask": torch.rand(3, 1, 6, 5), "sample_scale": torch.rand(3), "huber_c": torch.rand(3) + 0.1}
    variables = [pred, target.requires_grad_(), *(v.requires_grad_() for v in given.values())]
    loss = diffusion_loss(pred, target, loss_type="huber", **given)
    theirs = eager(pred, target, "huber", given["huber_c"], mask=given["mask"], scale=given["sample_scale"])
    torch.testing.assert_close(
        torch.autograd.grad(loss, variables), torch.autograd.grad(theirs, variables), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    """The formula is in float32 with or without it."""
    pred, target = operands(dtype=dtype)
    plain = gradients(diffusion_loss(pred, target), pred)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients(diffusion_loss(pred, target), pred)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    assert plain[0].dtype == torch.float32


@registered
def test_compiled():
    """torch.compile takes the formula, which it fuses itself: no break in the graph."""
    table = snr_table(losses.alphas_cumprod_of(losses.scaled_linear_betas()))

    def step(pred, target, steps, c, mask):
        scale = snr_scale(steps, table, min_snr_gamma=5)
        return diffusion_loss(pred, target, loss_type="huber", huber_c=c, mask=mask, sample_scale=scale)

    pred, target = operands()
    given = torch.tensor([1, 500, 999]), torch.rand(3) + 0.1, torch.rand(3, 1, 6, 5)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = gradients(compiled(pred, target, *given), pred)
    torch.testing.assert_close(ours, gradients(step(pred, target, *given), pred), rtol=1e-5, atol=1e-8)


@registered
def test_operator_checks():
    pred, target = operands()
    pred = pred.detach()
    c, mask = torch.rand(3) + 0.1, torch.rand(3, 1, 6, 5)
    op = torch.ops.loraaccel.diffusion_loss.default
    for reduction in range(4):
        args = (pred, target, c, c, mask, None, 2, reduction, True, [True, True, True])
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    args = (torch.tensor([3]), torch.rand(10), 5.0, True, 0.5, True, False)
    torch.library.opcheck(
        torch.ops.loraaccel.snr_scale.default, args, test_utils=("test_schema", "test_faketensor")
    )
    torch.library.opcheck(
        torch.ops.loraaccel.huber_threshold.default,
        (torch.tensor([3]), torch.rand(10), 0.1),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.loraaccel.area_resize.default, (mask, 3, 2), test_utils=("test_schema", "test_faketensor")
    )
    loss = op(pred.requires_grad_(), target, None, None, None, None, 0, 1, False, [True, False, False])
    with pytest.raises(RuntimeError, match="not differentiable"):
        loss[0].backward()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"target": torch.zeros(3, 4, 6, 4)}, ValueError),
        ({"target": torch.zeros(3, 4, 6, 5, device="meta")}, ValueError),
        ({"target": torch.zeros(3, 4, 6, 5, dtype=torch.int64)}, TypeError), ({"target": 1.0}, TypeError),
        ({"pred": torch.tensor(1.0), "target": torch.tensor(1.0)}, ValueError), ({"loss_type": "l3"}, ValueError),
        ({"reduction": "batch"}, ValueError), ({"mean_of": "some"}, ValueError), ({"mask": 1.0}, TypeError),
    ],
)  # fmt: skip
def test_errors(change, error):
    pred, target = operands()
    with pytest.raises(error, match="diffusion_loss: "):
        diffusion_loss(**({"pred": pred, "target": target} | change))


def test_other_devices_do_not_wait():
    """On a device whose values nobody can read yet, everything is queued."""
    pred, target = (t.to("meta") for t in operands())
    steps = torch.zeros(3, dtype=torch.int64, device="meta")
    scale = snr_scale(steps, torch.ones(10, device="meta"), min_snr_gamma=5, debiased_estimation_loss=True)
    c = huber_threshold(steps, alphas_cumprod=torch.ones(10, device="meta"))
    mask = torch.ones(3, 48, 40, device="meta")
    loss = diffusion_loss(pred, target, loss_type="huber", huber_c=c, sample_scale=scale, mask=mask)
    assert (loss.device.type, loss.shape) == ("meta", ())
