"""kohya's network modules with loraaccel's operators, for ``network_module = "loraaccel.kohya"``.

Nothing of the networks is ours: the module of sd-scripts that belongs to the model is imported, makes the network and
saves it, and only what its LoRA modules compute with is replaced. Saved files are those of that module, whose name is
also what their metadata says.

``network_args`` that are read here and not handed on:

``base_module=networks.lora_fa``
    the module of sd-scripts to use; without it networks.lora, or the one for Flux, SD3, Lumina or HunyuanImage models
``use_cpp_kernel=auto``
    true or on: a native error ends the training; auto (default): the layer goes back to its own forward; false or off:
    nothing is replaced; verify: the first calls of every layer are compared with its own forward
``factored=true``
    with ``base_module=lycoris.kohya``: networks outside LyCORIS's bypass mode are computed from their factors, rounded
    in other places; without it they run their own forward, and report ``rebuilt``
"""

from __future__ import annotations

import atexit
import difflib
import functools
import importlib
import json
import sys
from types import ModuleType
from typing import Any

from loraaccel.launcher import session
from loraaccel.launcher.options import KEY, MODES

# Which of sd-scripts' network modules a model is for, by the name of its class.
BASE_MODULES = {
    "Flux": "networks.lora_flux",
    "Chroma": "networks.lora_flux",
    "MMDiT": "networks.lora_sd3",
    "NextDiT": "networks.lora_lumina",
    "HYImageDiffusionTransformer": "networks.lora_hunyuan_image",
    "Anima": "networks.lora_anima",
}
DEFAULT_MODULE = "networks.lora"
# Names of ours in network_args, and how alike a name must be to be taken for a slip (LyCORIS has a `factor`).
OWN_ARGUMENTS = {KEY: 0.8, "base_module": 0.8, "factored": 0.9}


def create_network(
    multiplier: float,
    network_dim: int | None,
    network_alpha: float | None,
    vae: Any,
    text_encoder: Any,
    unet: Any,
    neuron_dropout: float | None = None,
    **kwargs: Any,
) -> Any:
    """A new network for the model, as sd-scripts' own ``create_network`` makes it."""
    base, run, kwargs = _own_arguments(unet, kwargs)
    network = base.create_network(
        multiplier,
        network_dim,
        network_alpha,
        vae,
        text_encoder,
        unet,
        neuron_dropout=neuron_dropout,
        **kwargs,
    )
    return _adopted(network, base.__name__, run)


def create_network_from_weights(
    multiplier: float,
    file: str | None,
    vae: Any,
    text_encoder: Any,
    unet: Any,
    weights_sd: Any = None,
    for_inference: bool = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """The network of a saved file, as sd-scripts' own function makes it, and the file's weights."""
    base, run, kwargs = _own_arguments(unet, kwargs)
    network, weights = base.create_network_from_weights(
        multiplier, file, vae, text_encoder, unet, weights_sd, for_inference, **kwargs
    )
    return _adopted(network, base.__name__, run), weights


def _own_arguments(
    unet: Any, arguments: dict[str, Any]
) -> tuple[ModuleType, session.Session, dict[str, Any]]:
    """sd-scripts' module, a session in the mode that is asked for, and the arguments that are not ours. ValueError for
    what is nearly one of ours."""
    rest = dict(arguments)
    name = rest.pop("base_module", None) or base_module_for(unet)
    given = str(rest.pop(KEY, "auto")).lower()
    mode = {"true": "on", "1": "on", "false": "off", "0": "off"}.get(given, given)
    if mode not in MODES:
        raise ValueError(
            f"network_args: {KEY} is {given!r}, expected true, false or one of {', '.join(MODES)}"
        )
    factored = str(rest.pop("factored", "false")).lower()
    if factored not in ("true", "1", "false", "0"):
        raise ValueError(f"network_args: factored is {factored!r}, expected true or false")
    for key in rest:
        for ours, limit in OWN_ARGUMENTS.items():
            if difflib.SequenceMatcher(None, key, ours).ratio() > limit:
                raise ValueError(f"network_args: {key}, expected {ours}")
    return importlib.import_module(name), session.Session(mode, factored in ("true", "1")), rest


def base_module_for(unet: Any) -> str:
    """Name of sd-scripts' network module for a model, by the names of its class and of those it derives from."""
    for cls in type(unet).__mro__:
        if cls.__name__ in BASE_MODULES:
            return BASE_MODULES[cls.__name__]
    return DEFAULT_MODULE


def _adopted(network: Any, base: str, run: session.Session) -> Any:
    """The network, which patches its modules when they are applied, and names sd-scripts' module in what it saves."""
    if network is None:
        return None
    apply_to = network.apply_to

    @functools.wraps(network.save_weights)
    def save(file: Any, dtype: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(metadata, dict) and metadata.get("ss_network_module") == __name__:
            _name_base_module(metadata, base)
        # (Its class changes when the network is applied: kohya_network.py.)
        return type(network).save_weights(network, file, dtype, metadata, *args, **kwargs)

    network.save_weights = save
    if run.mode == "off":
        return network

    @functools.wraps(apply_to)
    def apply(*args: Any, **kwargs: Any) -> Any:
        result = apply_to(*args, **kwargs)
        run.created(network)
        run.applied(network)
        return result

    network.apply_to = apply
    atexit.register(_report, run)
    return network


def _name_base_module(metadata: dict[str, str], base: str) -> None:
    """Writes the metadata of a run with sd-scripts' own module: its name, and no arguments of ours."""
    metadata["ss_network_module"] = base
    try:
        arguments = json.loads(metadata["ss_network_args"])
    except (KeyError, ValueError):
        return
    kept = {key: value for key, value in arguments.items() if key not in OWN_ARGUMENTS}
    # sd-scripts adds its own "dropout", a number or null, to the arguments if there are any; a user's is a string.
    if set(kept) <= {"dropout"} and not isinstance(kept.get("dropout"), str):
        del metadata["ss_network_args"]
    elif len(kept) < len(arguments):
        metadata["ss_network_args"] = json.dumps(kept)


def _report(run: session.Session) -> None:
    if session.active is None:  # the launcher says it all
        for line in run.lines():
            sys.stderr.write(f"loraaccel: {line}\n")
