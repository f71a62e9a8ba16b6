"""Results may be written over inputs that nobody else needs, and over no others.

In a graph a sum has one user, so TensorFlow lets the kernel have its memory. The operators that
compute the statistics again read x and dy after they wrote, and must not take it.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from tf_support import DTYPES, random

import evenkeel.tensorflow as ek

OPERATORS = tf.load_op_library(ek.op_library())
ROWS, COLS = 64, 300


def general(x, dy, w, b, lend, norm, **options):
    attributes = {"norm": norm, "epsilon": 1e-5, **options}
    statistics = tf.float64 if x.dtype == tf.float64 else tf.float32
    y, mean, rstd = OPERATORS.evenkeel_norm(lend(x), [w], [b], S=statistics, **attributes)
    parameters = [w], [b], mean, rstd
    over_dy = OPERATORS.evenkeel_norm_grad(lend(dy), x, *parameters, **attributes)
    over_x = OPERATORS.evenkeel_norm_grad(dy, lend(x), *parameters, **attributes)
    return y, mean, rstd, over_dy, over_x


def fused(x, dy, w, b, lend):
    return (
        OPERATORS.layer_norm_custom(lend(x)),
        OPERATORS.layer_norm_bias_add_custom(lend(x), b),
        OPERATORS.layer_norm_fused_custom(lend(x), w, b),
        OPERATORS.layer_norm_backprop_custom(lend(x), lend(dy)),
        OPERATORS.layer_norm_bias_add_backprop_custom(lend(x), lend(dy), b),
        OPERATORS.layer_norm_fused_backprop_custom(lend(x), lend(dy), w),
    )


CASES = {
    "fused": (fused, (ROWS, COLS), {}),
    "layer_norm": (general, (ROWS, COLS), {"norm": "layer_norm"}),
    "rms_norm": (general, (ROWS, COLS), {"norm": "rms_norm"}),
    "group_norm": (general, (4, 9, 9, 32), {"norm": "group_norm", "groups": 4}),
    "silu": (
        general,
        (4, 32, 9, 9),
        {"norm": "group_norm", "groups": 4, "channels_last": False, "activation": "silu"},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("case", CASES)
def test_graphs_that_lend_their_memory_give_eager_results(case, dtype):
    function, shape, options = CASES[case]
    channels = 32 if len(shape) == 4 else COLS
    x, dy = random(shape, dtype, seed=1), random(shape, dtype, seed=2)
    w, b = random((channels,), dtype, seed=3), random((channels,), dtype, seed=4)
    before = x.numpy().tobytes(), dy.numpy().tobytes()

    @tf.function
    def graph(zeros, *inputs):  # inputs, each used once: no optimizer drops or merges the sums
        count = itertools.count()
        return function(*inputs, lend=lambda tensor: tensor + zeros[next(count)], **options)

    ours = graph(tf.zeros([9], dtype), x, dy, w, b)
    expected = function(x, dy, w, b, lend=lambda tensor: tensor, **options)
    assert (x.numpy().tobytes(), dy.numpy().tobytes()) == before
    for each, other in zip(tf.nest.flatten(ours), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(each.numpy(), other.numpy())
