"""Loads the compiled operators, or says plainly why it cannot: _native.py checks the version.

The library is named as fast-LayerNorm-TF names its own, so that programs that load that one by its
name need another path only.
"""

from evenkeel import _native

tf = _native.require("tensorflow", "TensorFlow")
PATH = str(_native.find("layer_norm_fused_op.so"))
operators = tf.load_op_library(PATH)
