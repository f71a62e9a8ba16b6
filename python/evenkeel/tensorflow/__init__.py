"""evenkeel for TensorFlow: fast-LayerNorm-TF's three functions, rms_norm and group_norm, the Keras
layers LayerNormalization, RMSNormalization and GroupNormalization, and `fuse`, which makes the
norms of an existing Keras model evenkeel's.

Importing this registers the operators and their gradients; a program that loads a SavedModel with
evenkeel's norms in it has to do so first. XLA takes no custom operators: with jit_compile=True,
TensorFlow says so in an error.
"""

from evenkeel.tensorflow import _load  # first: it says what is missing
from evenkeel.tensorflow import gradients as gradients
from evenkeel.tensorflow.functional import (
    group_norm,
    layer_norm_bias_add_custom,
    layer_norm_custom,
    layer_norm_fused_custom,
    rms_norm,
)
from evenkeel.tensorflow.layers import GroupNormalization, LayerNormalization, RMSNormalization
from evenkeel.tensorflow.surgery import Report, fuse

__all__ = [
    "GroupNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "Report",
    "fuse",
    "group_norm",
    "layer_norm_bias_add_custom",
    "layer_norm_custom",
    "layer_norm_fused_custom",
    "op_library",
    "rms_norm",
]


def op_library():
    """The path of the library with the operators, for tf.load_op_library.

    Their gradients are registered already: a program must not register its own as well.
    """
    return _load.PATH
