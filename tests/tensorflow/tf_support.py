"""What the TensorFlow tests share: calls with their tensors, a float64 oracle, and comparisons.

The oracle is the written-out formula in float64; TensorFlow differentiates it. Tolerances are those
of tests/python/support.py.
"""

import functools
import math
import os
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

import evenkeel.tensorflow as ek

CUSTOM = ["layer_norm_custom", "layer_norm_bias_add_custom", "layer_norm_fused_custom"]
ROW_NORMS = [*CUSTOM, "rms_norm"]
NORMS = [*ROW_NORMS, "group_norm"]
DTYPES = [tf.float64, tf.float32, tf.float16, tf.bfloat16]
HALVES = [tf.float16, tf.bfloat16]
PARAMETERS = {
    "layer_norm_custom": [],
    "layer_norm_bias_add_custom": ["beta"],
    "layer_norm_fused_custom": ["gamma", "beta"],
    "rms_norm": ["gamma"],
    "group_norm": ["gamma", "beta"],
}

# How far a result may be from the oracle, relative to its largest element.
RELATIVE = {tf.float64: 1e-12, tf.float32: 1e-6}
DEVICE = "GPU:0" if os.environ["EVENKEEL_TEST_DEVICE"] == "cuda" else "CPU:0"
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # for a program


@dataclass
class Call:
    """One call of a function of evenkeel.tensorflow; inputs: x and the parameters, by name."""

    norm: str
    inputs: dict
    options: dict = field(default_factory=dict)

    def ours(self, inputs):
        return getattr(ek, self.norm)(**inputs, **self.options)

    def oracle(self, inputs):
        centered = self.norm != "rms_norm"
        return formula(**inputs, centered=centered, **self.options)

    @property
    def dtype(self):
        return self.inputs["x"].dtype


ACTIVATIONS = {
    None: tf.identity,
    "silu": tf.nn.silu,
    "relu": tf.nn.relu,
    # TensorFlow's own rounds the constants to float32.
    "gelu": lambda z: z * tf.math.erfc(-z / math.sqrt(2)) / 2,
    "gelu_tanh": lambda z: z * (1 + tf.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
}


def formula(
    x,
    gamma=None,
    beta=None,
    epsilon=1e-7,
    centered=True,
    groups=None,
    data_format="channels_last",
    activation=None,
):
    """The result in float64, differentiable as often as one likes."""
    x = tf.cast(x, tf.float64)
    epsilon = float(np.float32(epsilon))  # as the attribute of an operator holds it
    axes = [-1]
    shape = tf.shape(x)
    first = groups and data_format == "channels_first"
    if groups:
        y = tf.experimental.numpy.moveaxis(x, 1, -1) if first else x
        shape = tf.shape(y)
        y = tf.reshape(y, [shape[0], -1, groups, shape[-1] // groups])
        axes = [1, 3]
    else:
        y = x
    if centered:
        y = y - tf.reduce_mean(y, axes, keepdims=True)
    y = y / tf.sqrt(tf.reduce_mean(y * y, axes, keepdims=True) + epsilon)
    y = tf.reshape(y, shape)
    if gamma is not None:
        y = y * tf.cast(gamma, tf.float64)
    if beta is not None:
        y = y + tf.cast(beta, tf.float64)
    y = tf.experimental.numpy.moveaxis(y, -1, 1) if first else y
    return ACTIVATIONS[activation](y)


def random(shape, dtype=tf.float32, seed=0, scale=1.0, shift=0.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return tf.cast(tf.constant(values * scale + shift), dtype)


def make(norm, shape=None, dtype=tf.float32, seed=0, parameters=None, **options):
    """A call with ordinary random values, and with all parameters unless some are named."""
    if norm == "group_norm":
        shape = shape or (3, 5, 2, 12)
        options = {"groups": 4, "epsilon": 1e-5} | options
    else:
        shape = shape or (6, 5, 40)
        options = {"epsilon": 1e-6} | options
    channels = shape[1 if options.get("data_format") == "channels_first" else -1]
    inputs = {"x": random(shape, dtype, seed, scale=1.5, shift=0.25)}
    for name in PARAMETERS[norm] if parameters is None else parameters:
        shift = 1.0 if name == "gamma" else 0.0
        inputs[name] = random((channels,), dtype, seed + len(name), scale=0.5, shift=shift)
    return Call(norm, inputs, options)


def with_gradients(function, inputs, dy=None):
    """The result and the gradients by name of a function of a dictionary of tensors."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(inputs)
    dy = None if dy is None else tf.cast(dy, y.dtype)
    gradients = tape.gradient(y, inputs, output_gradients=dy)
    return {"y": y} | {f"d{name}": value for name, value in gradients.items()}


def second_order(function, inputs, dy, directions):
    """The gradients of <first gradients, directions> for the inputs and dy, by nested tapes."""
    with tf.GradientTape() as outer:
        outer.watch([inputs, dy])
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            y = function(inputs)
        first = inner.gradient(y, inputs, output_gradients=tf.cast(dy, y.dtype))
        product = tf.add_n(
            [
                tf.reduce_sum(
                    tf.cast(first[name] * tf.cast(directions[name], value.dtype), tf.float64)
                )
                for name, value in inputs.items()
            ]
        )
    return outer.gradient(product, inputs | {"dy": dy})


def wide(inputs):
    return {name: tf.cast(value, tf.float64) for name, value in inputs.items()}


def ordered(values):
    """The numbers of a half-precision array as integers: neighbours differ by one."""
    bits = values.view(np.int16).astype(np.int64)
    return np.where(bits >= 0, bits, -0x8000 - bits)


def check(actual, expected, what="result", dtype=None, scale=0.0):
    """Asserts that `actual` is `expected` (of the oracle), as well as its dtype can hold it.

    dtype: of the arithmetic, where it is not float32 or, for float64 results, float64.
    scale: the size of what the result is made of, where it is larger than the result.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    result = actual.dtype
    actual, expected = actual.numpy(), expected.numpy().astype(np.float64)
    if actual.size == 0:
        return
    dtype = dtype or (tf.float64 if result == tf.float64 else tf.float32)
    error = np.abs(actual.astype(np.float64) - expected)
    scale = max(np.abs(expected).max(), scale)
    allowed = RELATIVE[dtype] * scale
    if result == tf.float32:
        allowed = allowed + np.abs(expected) * np.finfo(np.float32).eps
    good = error <= allowed
    if result in HALVES:
        good |= np.abs(ordered(actual) - ordered(expected.astype(actual.dtype))) <= 1
    if good.all():
        return
    worst = np.unravel_index(
        np.where(good, -1.0, np.nan_to_num(error, nan=np.inf)).argmax(), error.shape
    )
    raise AssertionError(
        f"{what} ({result.name}): {(~good).sum()} of {good.size} elements are wrong; the worst at "
        f"{tuple(map(int, worst))}: {actual[worst]!r}, not {expected[worst]!r}, "
        f"at a scale of {scale:.3g}"
    )


def terms_of_dx(call, dy):
    """The size of what is summed to dx: where it cancels, dx is much smaller."""
    x = np.asarray(call.inputs["x"], np.float64)
    if call.norm == "group_norm":
        first = call.options.get("data_format") == "channels_first"
        x = np.moveaxis(x, 1, -1) if first else x
        x = x.reshape(x.shape[0], -1, call.options["groups"], x.shape[-1] // call.options["groups"])
        axes = (1, 3)
    else:
        axes = (-1,)
    power = (x**2).mean(axes) if call.norm == "rms_norm" else x.var(axes)
    gamma = np.abs(np.asarray(call.inputs.get("gamma", 1.0), np.float64)).max()
    return float(
        gamma
        * np.abs(np.asarray(dy, np.float64)).max()
        / np.sqrt(power + call.options["epsilon"]).min()
    )


def check_call(call, dy=None, graph=False):
    """Checks values, gradients, dtypes and shapes of a call against the oracle; returns them."""
    dy = random(call.inputs["x"].shape, call.dtype, seed=9) if dy is None else dy
    run = tf.function(with_gradients) if graph else with_gradients
    actual = run(call.ours, call.inputs, dy)
    expected = with_gradients(call.oracle, wide(call.inputs), dy)
    for name, value in actual.items():
        source = call.inputs["x" if name == "y" else name[1:]]
        assert value.dtype == source.dtype, name
        # Means and inverse deviations are kept in float32 where x is not float64.
        dtype = tf.float64 if call.dtype == tf.float64 else tf.float32
        scale = terms_of_dx(call, dy) if name == "dx" and value.shape.num_elements() else 0.0
        check(value, expected[name], name, dtype, scale)
    return actual


def check_same(actual, expected):
    """Asserts that two dictionaries of tensors are equal, bit by bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        assert value.numpy().tobytes() == expected[name].numpy().tobytes(), name


@functools.cache
def lacks_cudnn():
    """Why TensorFlow cannot convolve on this device; empty where it can."""
    try:
        tf.nn.conv2d(tf.ones((1, 4, 4, 1)), tf.ones((3, 3, 1, 1)), 1, "SAME")
    except tf.errors.OpError as error:
        return f"needs cuDNN, for convolutions and LSTMs: {error.message.splitlines()[0][:80]}"
    return ""
