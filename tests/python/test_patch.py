"""patch, unpatch and disabled: the report, the switches, what is left behind (nothing)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_models import (
    LoraLinear,
    Mlp,
    bert,
    config,
    counted,
    lora_host,
    lora_layers,
    lora_model,
    the_layer,
)
from torch import Tensor, nn

import loraaccel
from loraaccel.integrations.reasons import REASONS


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def snapshot(model: nn.Module) -> list[Any]:
    """All that patching could change about a model, without copying what is only referred to."""
    state = []
    for name, m in model.named_modules():
        hooks = [
            list(getattr(m, h).items())
            for h in vars(m)
            if h.endswith("_hooks") and isinstance(getattr(m, h), dict)
        ]
        parameters = [
            (n, p, p.requires_grad, p.dtype, p._version, p.grad) for n, p in m.named_parameters(recurse=False)
        ]
        state.append(
            (
                name,
                type(m),
                dict(vars(m)),
                dict(vars(type(m))),
                hooks,
                parameters,
                m.forward,
                list(m._modules),
            )
        )
    return [state, list(model.state_dict())]


def same(before: Any, after: Any) -> bool:
    """Equal in structure, and the same objects at the leaves."""
    if isinstance(before, (list, tuple, dict)):
        if type(before) is not type(after) or len(before) != len(after):
            return False
        if isinstance(before, dict):
            return list(before) == list(after) and all(before[k] is after[k] for k in before)
        return all(map(same, before, after))
    return before is after or (not isinstance(before, Tensor) and before == after)


# ---- the report ------------------------------------------------------------------------------------------------------


class Packed(nn.Linear):
    """Stands for a quantised layer."""


class Varied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.plain, self.other, self.replaced, self.untouched = (
            nn.Linear(8, 8, bias=i > 1) for i in range(4)
        )
        self.packed = Packed(8, 8)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.replaced(self.packed(self.other(self.plain(self.embed(ids)))))
        return self.untouched(self.conv(x[:, None])[:, 0])


@pytest.fixture
def varied() -> peft.PeftModel:
    targets = ["embed", "plain", "other", "packed", "conv", "replaced"]
    return lora_model(Varied, target_modules=targets, lora_dropout=0.1)


def test_vt7_report(varied: peft.PeftModel) -> None:
    base = varied.base_model.model
    base.replaced.forward = base.replaced.forward  # by somebody else
    base.other.lora_dropout["default"] = nn.FeatureAlphaDropout(0.1)
    report = loraaccel.patch(varied)
    prefix = "base_model.model."
    assert {m.name: (m.kind, m.fused, m.reason) for m in report.modules} == {
        prefix + "embed": ("lora_embedding", True, ""),
        prefix + "plain": ("lora_linear", True, ""),
        prefix + "other": ("lora_linear", False, "dropout_class"),
        prefix + "replaced": ("lora_linear", False, "forward_replaced"),
        prefix + "packed": ("lora_linear", True, ""),
        prefix + "conv": ("lora_conv2d", True, ""),
    }
    layers = lora_layers(varied)
    assert [m.name for m in report.modules] == list(layers)
    assert all(varied.get_submodule(m.name) is layers[m.name] for m in report.modules)
    assert (report.num_fused, report.num_fallback) == (4, 2)
    assert report.num_fused + sum(report.reasons.values()) == len(layers) == 6
    assert report.reasons == {"dropout_class": 1, "forward_replaced": 1}
    assert set(report.reasons) <= set(REASONS)
    assert json.loads(json.dumps(report.to_dict())) == {
        "num_fused": 4, "num_fallback": 2, "reasons": report.reasons,
        "modules": [{"name": m.name, "kind": m.kind, "fused": m.fused, "reason": m.reason} for m in report.modules],
    }  # fmt: skip
    assert "4 of 6" in str(report)
    assert all(reason in str(report) for reason in report.reasons)


def test_vt7_outputs_of_a_mixed_model_are_pefts(varied: peft.PeftModel) -> None:
    varied.eval()
    ids = torch.tensor([[1, 2, 3]])
    own = varied(ids)
    loraaccel.patch(varied)
    with counted() as calls:
        got = varied(ids)
    assert calls == {"lora_linear": 3, "lora_delta": 1, "lora_embedding": 1, "lora_conv2d": 1}
    torch.testing.assert_close(got, own)


def test_vt7_dropout_does_not_keep_a_layer_from_being_fused() -> None:
    model = lora_model(bert, lora_dropout=0.1)
    assert loraaccel.patch(model, strict=True).num_fused == 12


def test_strict_names_the_modules_and_changes_nothing(varied: peft.PeftModel) -> None:
    base = varied.base_model.model
    base.embed.lora_embedding_A["default"] = nn.Parameter(torch.ones(4, 10, dtype=torch.float64))
    base.conv.merge()
    base.packed.lora_dropout["default"] = nn.Hardtanh()
    before = snapshot(varied)
    with pytest.raises(RuntimeError) as error:
        loraaccel.patch(varied, strict=True)
    for text in ("embed: dtype", "packed: dropout_class", "conv: merged"):
        assert text in str(error.value)
    assert "plain" not in str(error.value)
    assert same(before, snapshot(varied))


def test_strict_passes_where_everything_is_fused() -> None:
    assert str(loraaccel.patch(lora_model(Mlp), strict=True)) == "2 of 2 LoRA modules fused"


def test_model_without_lora() -> None:
    model = Mlp()
    before = snapshot(model)
    report = loraaccel.patch(model, strict=True)
    assert (report.modules, report.num_fused, report.num_fallback, report.reasons) == ((), 0, 0, {})
    assert same(before, snapshot(model))
    assert loraaccel.unpatch(model) == 0


def test_kinds(varied: peft.PeftModel) -> None:
    report = loraaccel.patch(varied, kinds=["lora_linear"])
    assert report.reasons == {"kind_excluded": 2}  # which form a linear layer takes is seen at the call
    with counted() as calls:
        varied(torch.tensor([[1, 2]]))
    assert calls == {"lora_linear": 3, "kind_excluded": 3}
    with counted() as calls:
        loraaccel.patch(varied, kinds=["lora_conv2d", "lora_delta"])
        varied(torch.tensor([[1, 2]]))
    assert calls == {"lora_conv2d": 1, "lora_delta": 1, "kind_excluded": 4}
    loraaccel.unpatch(varied)
    report = loraaccel.patch(varied, kinds=())
    assert report.reasons == {"kind_excluded": 6}
    with counted() as calls:
        varied(torch.tensor([[1, 2]]))
    assert calls == report.reasons


def test_kinds_excluded_once_can_be_asked_for_later() -> None:
    """What the second report says is what happens."""
    model = lora_model(Mlp)
    loraaccel.patch(model, kinds=())
    report = loraaccel.patch(model)
    with counted() as calls:
        model(x_of(12))
    assert report.num_fused == 2
    assert calls == {"lora_linear": 2}


def test_verify_can_be_asked_for_later() -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    loraaccel.patch(model, verify=3)
    assert [vars(m)["_loraaccel"].verify for m in lora_layers(model).values()] == [3, 3]
    loraaccel.patch(model)
    assert [vars(m)["_loraaccel"].verify for m in lora_layers(model).values()] == [3, 3]


def test_errors() -> None:
    model = lora_model(Mlp)
    before = snapshot(model)
    for wrong in (model.state_dict(), None, "model", Mlp):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            loraaccel.patch(wrong)
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            loraaccel.unpatch(wrong)
    with pytest.raises(ValueError, match="lora_conv"):
        loraaccel.patch(model, kinds=["lora_linear", "lora_conv"])
    assert same(before, snapshot(model))


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_calls_are_counted_exactly() -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    x = x_of(12)
    with counted() as calls:
        for _ in range(5):
            model(x).sum().backward()
        with model.disable_adapter():
            model(x)
        with loraaccel.disabled():
            model(x)
        with pytest.raises(RuntimeError):
            model(x[:, :5])
        model.merge_adapter()
        model(x)
    assert calls == {"lora_linear": 10, "disabled": 2, "switched_off": 2, "merged": 2}
    with counted() as calls:
        loraaccel.info()
        lora_model(Mlp)(x)
    assert calls == {}


def test_operators_ran_as_often_as_calls_were_counted() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    before = sum(loraaccel.info()["kernel_calls"].values())
    layer(x_of()).sum().backward()
    assert sum(loraaccel.info()["kernel_calls"].values()) == before + 2  # forward and backward


def test_pefts_forward_does_not_run_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    ran: list[nn.Module] = []
    own = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda m, *a, **k: ran.append(m) or own(m, *a, **k))
    model(x_of(12))
    assert ran == []
    with loraaccel.disabled():
        model(x_of(12))
    assert len(ran) == 2


# ---- VA4: patch and unpatch ------------------------------------------------------------------------------------------


def mixed() -> peft.PeftModel:
    model = lora_model(Varied, target_modules=["embed", "plain", "other", "packed", "conv"])
    model.add_adapter("b", config(target_modules=["plain", "conv"], r=2, use_dora=True))
    model.base_model.model.plain.register_forward_hook(lambda *_: None)
    model.base_model.model.other.register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("make", [mixed, lambda: lora_model(bert)], ids=["mixed", "bert"])
def test_va4_unpatch_restores_every_object(make: Any) -> None:
    model = make()
    x = torch.tensor([[1, 2, 3]])
    out = lambda: getattr(y := model(x), "last_hidden_state", y)  # noqa: E731
    before, own = snapshot(model), out()
    layers = len(lora_layers(model))
    assert len(loraaccel.patch(model).modules) == layers
    assert not same(before, snapshot(model))
    out().sum().backward()
    model.zero_grad()
    assert loraaccel.unpatch(model) == layers
    assert same(before, snapshot(model))
    assert all(m.forward.__func__ is type(m).forward for m in lora_layers(model).values())
    assert torch.equal(out(), own)
    assert loraaccel.unpatch(model) == 0


def test_va4_patching_changes_only_the_forward_of_the_layers() -> None:
    model = lora_model(Mlp)
    before = snapshot(model)
    loraaccel.patch(model)
    after = snapshot(model)
    for old, new in zip(before[0], after[0], strict=True):
        is_layer = issubclass(old[1], LoraLinear)
        assert list(new[2]) == list(old[2]) + ["_loraaccel"] * is_layer
        assert all(new[2][k] is old[2][k] for k in old[2])
        assert new[1] is old[1] or (is_layer and new[1].__bases__ == (old[1],))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(new[1], name) == getattr(old[1], name)
        assert same(
            old[:1] + old[4:6] + old[7:], new[:1] + new[4:6] + new[7:]
        )  # names, hooks, parameters, children
    assert before[1] == after[1]


def test_va4_patching_twice_is_patching_once() -> None:
    model = lora_model(Mlp)
    first = loraaccel.patch(model)
    before, own = snapshot(model), model(x_of(12))
    assert loraaccel.patch(model) == first
    assert same(before, snapshot(model))
    with counted() as calls:
        assert torch.equal(model(x_of(12)), own)
    assert calls == {"lora_linear": 2}
    assert loraaccel.unpatch(model) == 2
    assert not any("_loraaccel" in vars(m) or hasattr(m, "_loraaccel_base") for m in model.modules())


def test_va4_other_instances_are_not_touched() -> None:
    one, other = lora_model(Mlp), lora_model(Mlp)
    before, own = snapshot(other), other(x_of(12))
    loraaccel.patch(one)
    assert same(before, snapshot(other))
    with counted() as calls:
        assert torch.equal(other(x_of(12)), own)
    assert calls == {}
    loraaccel.patch(other)
    loraaccel.unpatch(one)
    with counted() as calls:
        one(x_of(12))
        other(x_of(12))
    assert calls == {"lora_linear": 2}


def test_va4_parts_of_a_model_can_be_patched_alone() -> None:
    model = lora_model(Mlp)
    report = loraaccel.patch(model.base_model.model.up)
    assert [m.name for m in report.modules] == [""]
    with counted() as calls:
        model(x_of(12))
    assert calls == {"lora_linear": 1}
    assert [m.fused for m in loraaccel.patch(model).modules] == [True, True]
    assert loraaccel.unpatch(model.base_model.model.down) == 1
    assert loraaccel.unpatch(model) == 1


def test_reading_the_model_while_patched() -> None:
    """What tools ask of a module: repr, signature of forward, parameters by name, moving and casting."""
    model = lora_model(Mlp)
    before = repr(model), [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()]
    loraaccel.patch(model)
    assert (
        repr(model),
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_modules()],
    ) == before
    assert callable(model.base_model.model.up.forward)
    assert next(model.double().parameters()).dtype == torch.float64
    model.requires_grad_(False).eval().train().zero_grad()


def test_VT7_the_readme_has_every_reason() -> None:
    """Its table and the code say the same, in the same order."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    table = text.split("| reason | meaning |\n|---|---|\n")[1].split("\n\n")[0]
    rows = dict(line.strip("| ").split("` | ") for line in table.splitlines())
    assert {key.strip("`"): meaning for key, meaning in rows.items()} == REASONS
    assert [key.strip("`") for key in rows] == list(REASONS)
