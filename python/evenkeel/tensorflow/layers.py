"""Keras's norm layers with evenkeel's call: arguments, weights, names and saved models are Keras's.

Parameters are read in the type that they are stored in, also under a mixed policy: the operator
takes x and parameters of different types in one pass. Keras stores those of its layer norm and
group norm with autocast=False; RMSNormalization does the same here.
"""

import keras
import tensorflow as tf

from evenkeel.tensorflow import functional


def unfit(layer, rank):
    """Why evenkeel cannot do what one of Keras's norm layers does, or None.

    rank: that of its input, or None where it is not known yet.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        return f"Keras's backend must be tensorflow, but is {backend}"
    if getattr(layer, "rms_scaling", False):
        return "rms_scaling=True divides by the variance, which evenkeel does not do"
    if is_last(layer.axis, rank):
        return None
    shown = f"but axis is {layer.axis}" + ("" if rank is None else f" of {rank}")
    if not isinstance(layer, keras.layers.GroupNormalization):
        return f"axis must be the last one, {shown}"
    return None if layer.axis == 1 else f"axis must be the last one or 1, {shown}"


def is_last(axis, rank):
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return len(axes) == 1 and (axes[0] == -1 or axes[0] + 1 == rank)


class Fused:
    """What the three have in common."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # or Keras would have XLA compile the model, which cannot

    def build(self, input_shape):
        reason = unfit(self, len(input_shape))
        if reason is not None:
            kind = type(self).__name__
            raise ValueError(
                f"evenkeel: {kind} '{self.name}': {reason}. Use keras.layers.{kind} instead"
            )
        super().build(input_shape)

    def normalized(self, x, gamma, beta, **attributes):
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            x = tf.cast(x, self.compute_dtype)
        y = functional.norm(x, gamma, beta, epsilon=self.epsilon, **attributes)
        return tf.cast(y, self.compute_dtype)


@keras.saving.register_keras_serializable(package="evenkeel")
class LayerNormalization(Fused, keras.layers.LayerNormalization):
    """keras.layers.LayerNormalization over the last axis, in one pass."""

    def call(self, inputs):
        return self.normalized(inputs, self.gamma, self.beta, norm="layer_norm")


@keras.saving.register_keras_serializable(package="evenkeel")
class RMSNormalization(Fused, keras.layers.RMSNormalization):
    """keras.layers.RMSNormalization over the last axis, in one pass."""

    def add_weight(self, *args, **kwargs):
        return super().add_weight(*args, **{**kwargs, "autocast": False})

    def call(self, x):
        return self.normalized(x, self.scale, None, norm="rms_norm")


@keras.saving.register_keras_serializable(package="evenkeel")
class GroupNormalization(Fused, keras.layers.GroupNormalization):
    """keras.layers.GroupNormalization for channels in the last axis or in axis 1, in one pass."""

    def call(self, inputs):
        return self.normalized(
            inputs,
            self.gamma,
            self.beta,
            norm="group_norm",
            groups=self.groups,
            channels_last=is_last(self.axis, inputs.shape.rank),
        )
