"""The backward pass written out in TensorFlow's own operations, which it can differentiate.

Slower than the kernels, and used only where a gradient is differentiated again.
"""

import math

import tensorflow as tf


def _silu_slope(z):
    s = tf.sigmoid(z)
    return s * (1 + z * (1 - s))


def _relu_slope(z):
    return tf.where(z <= 0, tf.zeros_like(z), tf.ones_like(z))


def _gelu_slope(z):
    density = tf.exp(-tf.square(z) / 2) / math.sqrt(2 * math.pi)
    return tf.math.erfc(-z / math.sqrt(2)) / 2 + z * density


def _gelu_tanh_slope(z):
    z = tf.clip_by_value(z, -24.0, 24.0)  # where the slope is 0 or 1, and z**3 finite
    u = 2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    s = tf.sigmoid(u)
    return s * (1 + z * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2))


SLOPES = {
    "silu": _silu_slope,
    "relu": _relu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
}


def backward(
    dy, x, weight, bias, *, norm, epsilon, groups=1, channels_last=True, activation="none"
):
    """dx, dweight and dbias, as EvenkeelNormGrad returns them.

    weight and bias may be None; dweight and dbias are there all the same, in the type of x then.
    """
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    compute = tf.float64 if tf.float64 in {tensor.dtype for tensor in given} else tf.float32
    shape = tf.shape(x)
    if norm != "group_norm":
        split, vector = shape, [-1]
        normalized_axes, summed_axes = [-1], tf.range(tf.rank(x) - 1)
    elif channels_last:
        split = [shape[0], tf.reduce_prod(shape[1:-1]), groups, shape[-1] // groups]
        vector = [groups, -1]
        normalized_axes, summed_axes = [1, 3], [0, 1]
    else:
        split = [shape[0], groups, shape[1] // groups, tf.reduce_prod(shape[2:])]
        vector = [groups, -1, 1]
        normalized_axes, summed_axes = [2, 3], [0, 3]

    def wide(tensor, shape):
        return tf.reshape(tf.cast(tensor, compute), shape)

    def mean(tensor):
        return tf.reduce_mean(tensor, normalized_axes, keepdims=True)

    def folded(gradient, parameter):
        total = tf.reshape(tf.reduce_sum(gradient, summed_axes), [-1])
        return tf.cast(total, x.dtype if parameter is None else parameter.dtype)

    values = wide(x, split)
    if norm != "rms_norm":
        values -= mean(values)
    rstd = tf.math.rsqrt(mean(tf.square(values)) + tf.cast(epsilon, compute))
    normalized = values * rstd
    scale = None if weight is None else wide(weight, vector)

    dz = wide(dy, split)
    if activation != "none":
        z = normalized if scale is None else normalized * scale
        if bias is not None:
            z += wide(bias, vector)
        dz *= SLOPES[activation](z)
    g = dz if scale is None else dz * scale
    dx = g - normalized * mean(g * normalized)
    if norm != "rms_norm":
        dx -= mean(g)
    dx = tf.cast(tf.reshape(dx * rstd, shape), x.dtype)
    return dx, folded(dz * normalized, weight), folded(dz, bias)
