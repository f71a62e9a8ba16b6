"""evenkeel for PyTorch: layer_norm, rms_norm, group_norm, the first two also quantized, the modules LayerNorm, RMSNorm and GroupNorm,
and `fuse`, which makes the norms of an existing model evenkeel's.

What belongs to `fuse` is imported when it is first asked for: most programs build their own models.
"""

from evenkeel.torch import _load as _load  # first: it says what is missing
from evenkeel.torch import exporting, functional
from evenkeel.torch.compiling.report import compile_report
from evenkeel.torch.exporting import decompositions
from evenkeel.torch.functional import group_norm, layer_norm, rms_norm
from evenkeel.torch.modules import GroupNorm, LayerNorm, RMSNorm
from evenkeel.torch.quantized import layer_norm_quantized, rms_norm_quantized

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "Report",
    "apply_fused_layernorm",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "compile_report",
    "decompositions",
    "functional",
    "fuse",
    "group_norm",
    "layer_norm",
    "layer_norm_quantized",
    "rms_norm",
    "rms_norm_quantized",
]

exporting.register()


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evenkeel.torch import surgery

    globals()[name] = getattr(surgery, name)
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__})
