"""The norms as functions of tensors.

The first three are fast-LayerNorm-TF's, which recompute the statistics in the backward pass. The
others go through one operator that keeps them, and takes parameters of another type than x.
"""

import tensorflow as tf

from evenkeel.tensorflow._load import operators

CHANNELS_LAST = {"channels_last": True, "channels_first": False}
ACTIVATIONS = {None: "none"} | {name: name for name in ("silu", "relu", "gelu", "gelu_tanh")}


def layer_norm_custom(x, epsilon=1e-7, name=None):
    """Layer norm over the last axis, without parameters."""
    return operators.layer_norm_custom(x, epsilon=epsilon, name=name)


def layer_norm_bias_add_custom(x, beta, epsilon=1e-7, name=None):
    """Layer norm over the last axis, plus beta."""
    return operators.layer_norm_bias_add_custom(x, beta, epsilon=epsilon, name=name)


def layer_norm_fused_custom(x, gamma, beta, epsilon=1e-7, name=None):
    """Layer norm over the last axis, times gamma, plus beta."""
    return operators.layer_norm_fused_custom(x, gamma, beta, epsilon=epsilon, name=name)


def rms_norm(x, gamma=None, epsilon=1e-6):
    """RMS norm over the last axis, times gamma. gamma may have another type than x."""
    return norm(x, gamma, None, norm="rms_norm", epsilon=epsilon)


def group_norm(
    x,
    groups,
    gamma=None,
    beta=None,
    epsilon=1e-5,
    data_format="channels_last",
    activation=None,
):
    """Group norm of x (samples, ..., channels), or (samples, channels, ...) for "channels_first".

    gamma and beta may have another type than x. activation: None, "silu", "relu",
    "gelu" or "gelu_tanh", in the same pass.
    """
    return norm(
        x,
        gamma,
        beta,
        norm="group_norm",
        epsilon=epsilon,
        groups=groups,
        channels_last=_chosen("data_format", data_format, CHANNELS_LAST),
        activation=_chosen("activation", activation, ACTIVATIONS),
    )


def norm(x, gamma, beta, **attributes):
    """EvenkeelNorm's y. gamma and beta may be None; attributes: those of the operator."""
    x = tf.convert_to_tensor(x)
    y, _, _ = operators.evenkeel_norm(
        x,
        _listed(gamma, x),
        _listed(beta, x),
        S=tf.float64 if x.dtype == tf.float64 else tf.float32,
        **attributes,
    )
    return y


def _listed(parameter, x):
    if parameter is None:
        return []
    return [tf.convert_to_tensor(parameter, dtype_hint=x.dtype)]


def _chosen(argument, value, known):
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"evenkeel: {argument} must be one of {names}, but is {value!r}")
    return known[value]
