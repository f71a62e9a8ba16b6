"""evenkeel for JAX: layer_norm, rms_norm and group_norm, which every transformation of JAX takes.

`evenkeel.jax.nnx` and `evenkeel.jax.linen` have flax's norm layers with evenkeel's kernels, and `fuse`
makes the norms of an existing nnx model evenkeel's.
"""

from evenkeel.jax import _load as _load  # first: it says what is missing
from evenkeel.jax.functional import group_norm, layer_norm, rms_norm

__all__ = ["group_norm", "layer_norm", "rms_norm"]
