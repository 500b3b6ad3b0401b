"""Why a LoRA module runs its own forward: one code each."""

from __future__ import annotations

REASONS: dict[str, str] = {
    # of the module or its state
    "unsupported_module": "no operator stands for this class (convolution, embedding, attention, ...)",
    "kind_excluded": "patch(kinds=...) leaves this operator out",
    "forward_replaced": "something else has already replaced the module's forward",
    "base_class": "the frozen layer is not exactly torch.nn.Linear (quantised, Conv1D, another adapter, parametrised)",
    "adapter_class": "lora_A or lora_B is not exactly torch.nn.Linear",
    "variant": "a LoRA variant (DoRA, aLoRA, ...) computes the active adapter",
    "lora_bias": "lora_B has a bias",
    "dropout_class": "the dropout is neither torch.nn.Dropout nor torch.nn.Identity",
    "hooks": "the layer, the frozen layer or an adapter has hooks, or there are global ones",
    "merged": "the adapter is merged into the frozen layer",
    "disabled": "the adapters are disabled",
    "no_active_adapter": "none of the active adapters is on this layer",
    "zero_scaling": "every active adapter has scaling 0, so the frozen layer's own output is wanted",
    "scaling_type": "the scaling is not a finite number",
    # of the call
    "switched_off": "LORAACCEL=0, or inside loraaccel.disabled()",
    "extra_arguments": "the call has more arguments than x (mixed batches, for one)",
    "tensor_subclass": "x or a weight is not a plain, dense tensor",
    "dtype": "a combination of dtypes that the operator does not take, or that the layer itself refuses",
    "device": "x or a weight is not on the CPU",
    "transform": "inside torch.func, forward-mode differentiation or torch.jit tracing",
    "verify_failed": "verify found a difference above its bound",
}
