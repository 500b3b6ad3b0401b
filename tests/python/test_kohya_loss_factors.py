"""The trainer's factors of losses by timestep, all in one call: against one look-up for each sample and option."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kohya_networks import Trainer
from torch import Tensor

import loraaccel as la
from loraaccel import losses
from loraaccel.integrations import kohya_loss_factors, kohya_network
from loraaccel.integrations.kohya_work import HostWork

WORK = "loss factors"


def of_samples(timesteps: Tensor, scheduler: Any, most: float | None = None) -> Tensor:
    values = [scheduler.all_snr[t] for t in timesteps]
    return torch.stack(values if most is None else [v.clamp(max=most) for v in values])


def apply_snr_weight(loss, timesteps, scheduler, gamma, v_prediction=False):
    snr = of_samples(timesteps, scheduler)
    return loss * (snr.clamp(max=gamma) / (snr + 1 if v_prediction else snr)).float()


def scale_v_prediction_loss_like_noise_prediction(loss, timesteps, scheduler):
    snr = of_samples(timesteps, scheduler, 1000)
    return loss * (snr / (snr + 1))


def add_v_prediction_like_loss(loss, timesteps, scheduler, v_pred_like_loss):
    snr = of_samples(timesteps, scheduler, 1000)
    return loss + loss / (snr / (snr + 1)) * v_pred_like_loss


def apply_debiased_estimation(loss, timesteps, scheduler, v_prediction=False):
    snr = of_samples(timesteps, scheduler, 1000)
    return loss * (1 / (snr + 1) if v_prediction else 1 / torch.sqrt(snr))


class LossTrainer(Trainer):
    def post_process_loss(self, loss, args, timesteps, noise_scheduler):
        if args.min_snr_gamma:
            loss = apply_snr_weight(
                loss, timesteps, noise_scheduler, args.min_snr_gamma, args.v_parameterization
            )
        if args.scale_v_pred_loss_like_noise_pred:
            loss = scale_v_prediction_loss_like_noise_prediction(loss, timesteps, noise_scheduler)
        if args.v_pred_like_loss:
            loss = add_v_prediction_like_loss(loss, timesteps, noise_scheduler, args.v_pred_like_loss)
        if args.debiased_estimation_loss:
            loss = apply_debiased_estimation(loss, timesteps, noise_scheduler, args.v_parameterization)
        return loss


class FlowTrainer(Trainer):
    def post_process_loss(self, loss, args, timesteps, noise_scheduler):
        return loss


class OtherTrainer(Trainer):
    """Not the formula: the weight is squared."""

    def post_process_loss(self, loss, args, timesteps, noise_scheduler):
        loss = apply_snr_weight(loss, timesteps, noise_scheduler, args.min_snr_gamma, args.v_parameterization)
        return apply_snr_weight(loss, timesteps, noise_scheduler, args.min_snr_gamma, args.v_parameterization)


def options(**more: Any) -> SimpleNamespace:
    chosen = {
        "min_snr_gamma": None,
        "scale_v_pred_loss_like_noise_pred": False,
        "v_pred_like_loss": None,
        "debiased_estimation_loss": False,
        "v_parameterization": False,
    }
    return SimpleNamespace(**(chosen | more))


def scheduler() -> SimpleNamespace:
    return SimpleNamespace(all_snr=losses.snr_table(losses.alphas_cumprod_of(losses.scaled_linear_betas())))


def sample(count: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    timesteps = torch.randint(0, 1000, (count,), generator=g)
    timesteps[0], timesteps[-1] = 0, 999
    return torch.rand(count, generator=g, requires_grad=True), timesteps


def taken_over(**more: Any) -> tuple[LossTrainer, HostWork]:
    trainer, work = LossTrainer(), HostWork(**more)
    assert kohya_network.take_over_trainer(trainer, work)
    return trainer, work


@pytest.mark.parametrize(
    ("gamma", "scaled", "like", "debiased", "v"),
    list(itertools.product((None, 5), (False, True), (None, 0.3), (False, True), (False, True))),
)
def test_factors_are_the_trainer_s(gamma, scaled, like, debiased, v) -> None:
    chosen = options(
        min_snr_gamma=gamma,
        scale_v_pred_loss_like_noise_pred=scaled,
        v_pred_like_loss=like,
        debiased_estimation_loss=debiased,
        v_parameterization=v,
    )
    trainer, work = taken_over()
    loss, timesteps = sample()
    found = trainer.post_process_loss(loss, chosen, timesteps, scheduler())
    expected = LossTrainer().post_process_loss(loss, chosen, timesteps, scheduler())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found.mean(), loss)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.mean(), loss)[0], rtol=1e-6, atol=0)
    anything = any((gamma, scaled, like, debiased))
    assert (found is loss) == (not anything)  # the trainer gives back what it was given
    counts = {name: (r.fused, dict(r.own)) for name, r in work.records.items()}
    assert counts == ({WORK: (1, {})} if anything else {})


def test_by_name_and_with_int32_timesteps() -> None:
    trainer, work = taken_over()
    loss, timesteps = sample()
    chosen = options(min_snr_gamma=5)
    found = trainer.post_process_loss(loss, chosen, timesteps=timesteps.int(), noise_scheduler=scheduler())
    expected = LossTrainer().post_process_loss(loss, chosen, timesteps, scheduler())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert work.records[WORK].fused == 1


@pytest.mark.parametrize("cls", [FlowTrainer, Trainer])
def test_a_trainer_without_factors_keeps_its_method(cls) -> None:
    trainer, work = cls(), HostWork()
    assert kohya_network.take_over_trainer(trainer, work)
    assert "post_process_loss" not in vars(trainer)


def test_another_formula_stays_the_trainer_s() -> None:
    trainer, work = OtherTrainer(), HostWork()
    assert kohya_network.take_over_trainer(trainer, work)
    loss, timesteps = sample()
    arguments = (loss, options(min_snr_gamma=5), timesteps, scheduler())
    assert torch.equal(trainer.post_process_loss(*arguments), OtherTrainer().post_process_loss(*arguments))
    assert (work.records[WORK].fused, work.records[WORK].own) == (0, {"unknown_forward": 1})


def test_a_function_that_the_script_replaces_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, work = taken_over()
    loss, timesteps = sample()
    arguments = (loss, options(min_snr_gamma=5), timesteps, scheduler())
    trainer.post_process_loss(*arguments)

    def constant(loss, timesteps, scheduler, gamma, v_prediction=False):
        return loss * 3

    monkeypatch.setitem(globals(), "apply_snr_weight", constant)
    assert torch.equal(trainer.post_process_loss(*arguments), loss * 3)
    assert (work.records[WORK].fused, work.records[WORK].own) == (1, {"unknown_forward": 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda loss, t, s: (loss.double(), t, s), "dtype"),
        (lambda loss, t, s: (loss, t, SimpleNamespace(all_snr=s.all_snr.double())), "dtype"),
        (lambda loss, t, s: (loss, list(t), s), "dtype"),
        (lambda loss, t, s: (loss, t[:1], s), "shape"),
        (lambda loss, t, s: (torch.nn.Parameter(loss.detach()).as_subclass(Sub), t, s), "tensor_subclass"),
    ],
)
def test_what_is_left_to_the_trainer(change, reason: str) -> None:
    trainer, work = taken_over()
    changed = change(*sample(), scheduler())
    arguments = (changed[0], options(min_snr_gamma=5), *changed[1:])
    expected = LossTrainer().post_process_loss(*arguments)
    assert torch.equal(trainer.post_process_loss(*arguments), expected)
    assert (work.records[WORK].fused, work.records[WORK].own) == (0, {reason: 1})


class Sub(Tensor):
    pass


def test_a_timestep_beyond_the_table_is_the_trainer_s_error() -> None:
    loss, timesteps = sample()
    arguments = (loss, options(min_snr_gamma=5), timesteps + 1, scheduler())
    trainer, _ = taken_over()
    with pytest.warns(RuntimeWarning, match="timestep 1000"), pytest.raises(IndexError):
        trainer.post_process_loss(*arguments)
    trainer, _ = taken_over(roll_back=False)
    with pytest.raises(RuntimeError, match="timestep 1000 of sample 5"):
        trainer.post_process_loss(*arguments)


def test_verify_compares_with_the_trainer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, work = taken_over(verify=1)
    loss, timesteps = sample()
    arguments = (loss, options(min_snr_gamma=5), timesteps, scheduler())
    trainer.post_process_loss(*arguments)
    trainer.post_process_loss(*arguments)
    assert work.records[WORK].fused == 2
    assert 0 <= work.records[WORK].largest_error < 1e-6

    trainer, work = taken_over(verify=1)
    monkeypatch.setattr(kohya_loss_factors, "snr_scale", lambda *a, **k: torch.full((6,), 2.0))
    kohya_loss_factors.follows(LossTrainer)  # proved before, with the operator
    with pytest.warns(RuntimeWarning, match=r"verify found .* in loss factors"):
        found = trainer.post_process_loss(*arguments)
    assert torch.equal(found, LossTrainer().post_process_loss(*arguments))
    assert work.records[WORK].own == {"verify_failed": 1}


def test_switched_off_and_given_back() -> None:
    trainer, work = taken_over()
    loss, timesteps = sample()
    arguments = (loss, options(min_snr_gamma=5), timesteps, scheduler())
    with la.disabled():
        trainer.post_process_loss(*arguments)
    assert work.records[WORK].own == {"switched_off": 1}
    assert not kohya_network.take_over_trainer(trainer, work)  # it is already
    network = torch.nn.Linear(1, 1)
    network.__dict__[kohya_network._ATTRIBUTE] = work
    assert kohya_network.give_back(network)
    assert vars(trainer) == {}
