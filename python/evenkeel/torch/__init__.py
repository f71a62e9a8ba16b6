"""evenkeel for PyTorch: layer_norm, rms_norm, group_norm, and the modules LayerNorm, RMSNorm, GroupNorm."""

from evenkeel.torch import _load as _load  # first: it says what is missing
from evenkeel.torch import functional
from evenkeel.torch.functional import group_norm, layer_norm, rms_norm
from evenkeel.torch.modules import GroupNorm, LayerNorm, RMSNorm

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "functional",
    "group_norm",
    "layer_norm",
    "rms_norm",
]
