"""flax.nnx's LayerNorm, RMSNorm and GroupNorm with evenkeel's kernels."""

from flax import nnx
from flax.nnx.nn import dtypes

from evenkeel.jax import flax_norms

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm"]


def unfit(layer):
    """Why evenkeel cannot do what one of flax's norm layers does, or None."""
    if layer.promote_dtype is not dtypes.promote_dtype:
        return "promote_dtype is not flax's own"
    return flax_norms.unfit(layer)


def _check(layer):
    flax_norms.require_fit(layer, unfit(layer))


def _normalized(layer, x, mask):
    scale, bias = (getattr(layer, name, None) for name in ("scale", "bias"))
    return flax_norms.normalized(
        layer,
        getattr(layer, "num_groups", None),
        x,
        scale[...] if scale else None,
        bias[...] if bias else None,
        mask,
    )


# Flax's class is the only base: Python lets an object change its class for one of the same layout.


class LayerNorm(nnx.LayerNorm):
    """flax.nnx.LayerNorm over the last axis, in one pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _check(self)

    def __call__(self, x, *, mask=None):
        return _normalized(self, x, mask)


class RMSNorm(nnx.RMSNorm):
    """flax.nnx.RMSNorm over the last axis, in one pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _check(self)

    def __call__(self, x, mask=None):
        return _normalized(self, x, mask)


class GroupNorm(nnx.GroupNorm):
    """flax.nnx.GroupNorm, in one pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _check(self)

    def __call__(self, x, *, mask=None):
        return _normalized(self, x, mask)
