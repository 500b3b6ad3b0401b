"""The packages whose LoRA modules patch() knows, and what it asks of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from loraaccel.integrations import kohya, lycoris, peft, peft_forms
from loraaccel.integrations.peft_forms import Form


def _nothing(module: nn.Module) -> None:
    pass


def _never(module: nn.Module) -> bool:
    return False


def _always(module: nn.Module) -> bool:
    return True


class Host(NamedTuple):
    """One kind of modules, and the functions of `integrations` that look at them."""

    name: str
    # The operator that stands for a module, its class name where there is none, None for anything else.
    kind_of: Callable[[nn.Module], str | None]
    # Reason code for a module as it stands; empty where it can be fused.
    why_not_module: Callable[[nn.Module], str]
    # What to run for a call (module, args, kwargs, compiling), or a reason code.
    form_of: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], bool], Form | str]
    # False where the module's forward is called in a way that cannot be found.
    is_reachable: Callable[[nn.Module], bool] = _always
    # To be called when the module got another class: its bound forward may be somewhere.
    rebind: Callable[[nn.Module], None] = _nothing
    # True for a module whose results the operators give with other roundings: only for those who ask for it.
    rebuilds: Callable[[nn.Module], bool] = _never
    counted: bool = True  # calls of the module's own forward are counted, by reason


HOSTS = (
    Host("peft", peft.kind_of, peft.why_not_module, peft_forms.form_of),
    # (Before kohya's, which LyCORIS's modules resemble.)
    Host(
        "lycoris", lycoris.kind_of, lycoris.why_not_module, lycoris.form_of, lycoris.is_reachable, lycoris.rebind,
        lycoris.rebuilds,
    ),
    Host("kohya", kohya.kind_of, kohya.why_not_module, kohya.form_of, kohya.is_reachable, kohya.rebind),
)  # fmt: skip


def host_of(module: nn.Module) -> tuple[Host, str] | None:
    """The host whose LoRA module this is, and its kind."""
    for host in HOSTS:
        kind = host.kind_of(module)
        if kind is not None:
            return host, kind
    return None
