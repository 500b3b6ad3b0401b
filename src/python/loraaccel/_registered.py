"""Every operator's fake and formula: importing this module registers them all, for direct users of torch.ops."""

from loraaccel import _conv_product, _dora, _expand, losses, ops

__all__ = ["_conv_product", "_dora", "_expand", "losses", "ops"]
