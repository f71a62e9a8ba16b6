"""evenkeel for JAX: layer_norm, rms_norm and group_norm, which every transformation of JAX takes.

`evenkeel.jax.nnx` and `evenkeel.jax.linen` have flax's norm layers with evenkeel's kernels, and `fuse`
makes the norms of an existing nnx model evenkeel's. These need flax; the functions do not.
"""

from evenkeel.jax import _load as _load  # first: it says what is missing
from evenkeel.jax.functional import group_norm, layer_norm, rms_norm

__all__ = ["Report", "fuse", "group_norm", "layer_norm", "rms_norm"]


def __getattr__(name):
    if name not in ("Report", "fuse"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evenkeel import _native

    _native.framework("flax", "flax", "Install it for evenkeel.jax.fuse and its modules.")
    from evenkeel.jax import surgery

    return getattr(surgery, name)
