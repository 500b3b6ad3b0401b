"""LyCORIS: loraaccel as one of its kernel back ends. (Its modules are patched by `loraaccel.patch`.)"""

from __future__ import annotations

from loraaccel.integrations import lycoris_backend

__all__ = ["register_backend", "unregister_backend"]


def register_backend() -> None:
    """Adds the back end "loraaccel" to LyCORIS 4.1's, for float32, bfloat16 and float16 tensors on the CPU.

    It serves `lycoris.functional.loha.bypass_forward_diff` on linear layers, the one function whose native form is
    faster than LyCORIS's own on CPUs; LyCORIS goes on choosing at every call: LYCORIS_KERNEL_BACKEND=torch,
    ``backend="torch"`` and ``lycoris.kernels.dispatch.demote("loraaccel")`` lead back to plain torch, and
    ``loraaccel.disabled()`` too. Registering twice changes nothing.

    RuntimeError, with nothing changed, for another release of LyCORIS or one that lacks a name that this needs.
    """
    lycoris_backend.register()


def unregister_backend() -> bool:
    """Takes `register_backend` back; False where nothing was registered."""
    return lycoris_backend.unregister()
