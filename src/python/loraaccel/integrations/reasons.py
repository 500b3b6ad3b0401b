"""Why a LoRA module runs its own forward: one code each."""

from __future__ import annotations

REASONS: dict[str, str] = {
    # of the module or its state
    "unsupported_module": "no operator stands for this class (attention, 1-D and 3-D convolution, ...)",
    "kind_excluded": "patch(kinds=...) leaves this operator out",
    "forward_replaced": "something else has already replaced the module's forward",
    "base_class": "the frozen layer is of a class for which this call has no form (mixed batches, scaled embeddings)",
    "adapter_class": "lora_A or lora_B is not exactly torch.nn.Linear (torch.nn.Conv2d), or its forward was replaced",
    "variant": "a LoRA variant other than DoRA on a linear layer (aLoRA, ...), or several, compute the adapters",
    "lora_bias": "lora_A has a bias, or lora_B where the form has none (convolution, foreign frozen layer)",
    "dropout_class": "the dropout is neither torch.nn.Dropout nor torch.nn.Identity",
    "hooks": "an adapter has hooks, or there are global ones",
    "merged": "the adapter is merged into the frozen layer",
    "disabled": "the adapters are disabled",
    "no_active_adapter": "none of the active adapters is on this layer",
    "zero_scaling": "every active adapter has scaling 0, so the frozen layer's own output is wanted",
    "scaling_type": "the scaling is not a finite number",
    "unknown_forward": "the class, or a network's method, is not its host's formula, or draws other numbers",
    "rebuilt": "LyCORIS outside bypass mode makes a weight at each call; factored=True computes it, rounded elsewhere",
    "regional": "the network applies its adapters to regions of the image or to parts of the prompt",
    # of the call
    "values": "a network's method on numbers that are not finite, or a limit that makes no sense",
    "switched_off": "LORAACCEL=0, or inside loraaccel.disabled()",
    "extra_arguments": "the call has more arguments than x, or other ones than adapter_names",
    "tensor_subclass": "x or a weight is not a plain, dense tensor",
    "shape": "the host's own forward has no result for an input of this number of dimensions, or another one",
    "compiled": "torch.compile compiles this host's own forward",
    "dtype": "a combination of dtypes that the operator does not take, or that the layer itself refuses",
    "device": "x or a weight is not on the CPU",
    "transform": "inside torch.func, forward-mode differentiation or torch.jit tracing",
    "native_error": "an operator raised an error once, and the launcher's auto mode gave the layer up",
    "verify_failed": "verify found a difference above its bound",
}
