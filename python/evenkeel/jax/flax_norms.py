"""What the norm layers of flax's two interfaces have in common (nnx.py, linen.py).

A layer is flax's own with another call: the same arguments, parameters and names. Parameters are read in
the dtype that they are stored in; the result has the dtype that flax's has. Statistics are always those of
x as it comes, in float32 or float64: use_fast_variance and force_float32_reductions change nothing.
"""

import jax.numpy as jnp

from evenkeel.jax import functional


def unfit(layer):
    """Why evenkeel cannot do what one of flax's norm layers does, or None."""
    if layer.axis_name is not None:
        return f"axis_name is {layer.axis_name!r}, but statistics over devices are not supported"
    if hasattr(layer, "feature_axes"):
        for name in ("reduction_axes", "feature_axes"):
            if _axes(getattr(layer, name)) != (-1,):
                return f"{name} is {getattr(layer, name)!r}, but must be -1"
    elif layer.reduction_axes is not None:
        return f"reduction_axes is {layer.reduction_axes!r}, but must be None"
    return None


def _axes(given):
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def require_fit(layer, reason):
    if reason is not None:
        kind = type(layer)
        raise ValueError(f"evenkeel: {kind.__name__}: {reason}. Use flax's {kind.__name__} instead")


def normalized(layer, num_groups, x, scale, bias, mask):
    """The result of a layer; num_groups: of a GroupNorm, or None."""
    if mask is not None:
        kind = type(layer).__name__
        raise ValueError(f"evenkeel: mask must be None for {kind}. Use flax's {kind} with masks")
    x = jnp.asarray(x)
    out_dtype = layer.dtype
    if out_dtype is None:
        out_dtype = jnp.result_type(*(each for each in (x, scale, bias) if each is not None))
        if not jnp.issubdtype(out_dtype, jnp.inexact):  # flax's own result for integers
            out_dtype = jnp.promote_types(jnp.float32, out_dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(out_dtype)
    options = {"eps": layer.epsilon, "out_dtype": out_dtype}
    if num_groups is not None:
        return functional.group_norm(x, num_groups, scale, bias, **options)
    if hasattr(layer, "use_bias"):
        return functional.layer_norm(x, scale, bias, **options)
    return functional.rms_norm(x, scale, **options)
