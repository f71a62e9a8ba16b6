"""The functions and the operators beneath them against float64, in all types and many shapes.

The number of threads is fixed when TensorFlow starts, so that comparison takes two processes.
"""

import hashlib

import numpy as np
import pytest
import tensorflow as tf
from commands import program
from tf_support import (
    CUSTOM,
    DEVICE,
    DTYPES,
    NORMS,
    ON_CPU,
    ROW_NORMS,
    Call,
    check,
    check_call,
    check_same,
    formula,
    make,
    random,
    with_gradients,
)

import evenkeel.tensorflow as ek

OPS = tf.load_op_library(ek.op_library())

# Prints a digest of values and gradients; all have more elements than one thread takes alone.
THREADS = """
import hashlib, sys
import numpy as np
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
tf.config.threading.set_inter_op_parallelism_threads(1)
import evenkeel.tensorflow as ek

def random(shape, dtype, seed):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)

def digest(function, x, *parameters):
    with tf.GradientTape() as tape:
        tape.watch([x, *parameters])
        y = function(x, *parameters)
    results = [y, *tape.gradient(y, [x, *parameters], output_gradients=random(x.shape, x.dtype, 3))]
    bits = b"".join(result.numpy().tobytes() for result in results)
    print(x.shape, x.dtype, hashlib.sha256(bits).hexdigest())

for dtype in (tf.float32, tf.bfloat16, tf.float64):
    for shape in ((999, 384), (31, 5121), (9, 20000), (20000, 7)):
        x = random(shape, dtype, 0)
        gamma, beta = random(shape[-1:], dtype, 1), random(shape[-1:], dtype, 2)
        digest(ek.layer_norm_custom, x)
        digest(ek.layer_norm_bias_add_custom, x, beta)
        digest(ek.layer_norm_fused_custom, x, gamma, beta)
        digest(ek.rms_norm, x, gamma)
    image = random((3, 64, 40, 32), dtype, 4)
    gamma = random((32,), dtype, 5)
    digest(lambda x, gamma: ek.group_norm(x, 8, gamma), image, gamma)
"""


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients(norm, dtype, graph):
    check_call(make(norm, dtype=dtype), graph=graph)


@pytest.mark.parametrize("norm", NORMS)
def test_operators_run_on_the_device_that_is_tested(norm):
    call = make(norm)
    for name, value in with_gradients(call.ours, call.inputs).items():
        assert value.device.endswith(DEVICE), name


def test_the_oracle_is_the_textbook_formula():
    call = make("layer_norm_fused_custom", dtype=tf.float64)
    x, gamma, beta = (call.inputs[name].numpy() for name in ("x", "gamma", "beta"))
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * gamma + beta
    np.testing.assert_allclose(formula(x, gamma, beta, 1e-6), y, rtol=1e-12, atol=1e-14)
    check(call.ours(call.inputs), tf.constant(y))


@pytest.mark.parametrize("last", [1, 7, 5121, 20000])
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_any_last_dimension(norm, last):
    for dtype in (tf.float32, tf.bfloat16):
        check_call(make(norm, (3, last), dtype))


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 4, 24), (2, 1, 2, 1, 2, 24)], ids=str)
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_any_rank(norm, shape):
    check_call(make(norm, shape))


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (3, 0)], ids=str)
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_no_rows(norm, shape):
    actual = check_call(make(norm, shape))
    for name in ("dgamma", "dbeta"):
        assert not np.any(actual.get(name, 0)), name


@pytest.mark.parametrize(
    "shape", [(3, 12), (3, 7, 12), (2, 3, 4, 2, 12), (0, 4, 4, 12), (2, 0, 12)], ids=str
)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_group_norm_of_any_image(shape, data_format):
    shape = shape if data_format == "channels_last" else (shape[0], 12, *shape[1:-1])
    for groups in (1, 3, 12):
        # One element in a group has no deviation.
        if len(shape) > 2 or groups < 12:
            check_call(make("group_norm", shape, groups=groups, data_format=data_format))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_tanh"])
def test_group_norm_with_activation(activation, data_format, dtype):
    shape = (3, 5, 2, 12) if data_format == "channels_last" else (3, 12, 5, 2)
    options = {"data_format": data_format, "activation": activation}
    check_call(make("group_norm", shape, dtype, **options), graph=True)


@pytest.mark.parametrize(
    "parameters", [[], ["gamma"], ["beta"]], ids=lambda p: "+".join(p) or "none"
)
def test_parameters_of_group_norm_are_optional(parameters):
    check_call(make("group_norm", parameters=parameters))


def test_gamma_of_rms_norm_is_optional():
    check_call(make("rms_norm", parameters=[]))


@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [*((norm, 1e-7) for norm in CUSTOM), ("rms_norm", 1e-6), ("group_norm", 1e-5)],
)
def test_default_epsilon(norm, epsilon):
    """Rows as small as the epsilon tell it from any other."""
    call = make(norm, dtype=tf.float64)
    inputs = call.inputs | {"x": call.inputs["x"] * epsilon**0.5}
    call = Call(norm, inputs, call.options)
    options = {name: value for name, value in call.options.items() if name != "epsilon"}
    actual = getattr(ek, norm)(**inputs, **options)
    call.options["epsilon"] = epsilon
    # The operators hold epsilon as a float.
    np.testing.assert_allclose(actual, call.oracle(inputs), rtol=1e-6, atol=1e-6)


def test_a_large_mean_costs_nothing():
    call = make("layer_norm_custom", (8, 1000))
    call.inputs["x"] += 1e4
    check(call.ours(call.inputs), call.oracle(call.inputs))


def test_nan_stays_in_its_row():
    x = random((4, 9)).numpy()
    x[2, 3] = np.nan
    y = ek.layer_norm_custom(x).numpy()
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize("norm", ROW_NORMS)
def test_rows_do_not_depend_on_the_others(norm):
    call = make(norm, (70, 100))
    part = call.inputs | {"x": call.inputs["x"][30:45]}
    check_same({"y": call.ours(part)}, {"y": call.ours(call.inputs)[30:45]})


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_bits_from_run_to_run(norm):
    call = make(norm, (33, 4, 300) if norm != "group_norm" else (5, 8, 8, 12))
    check_same(with_gradients(call.ours, call.inputs), with_gradients(call.ours, call.inputs))


def test_the_same_bits_for_one_thread_and_two():
    one, two = program(THREADS, 1, **ON_CPU), program(THREADS, 2, **ON_CPU)
    assert one.count("\n") == 3 * (4 * 4 + 1)
    assert one == two


def test_digests_tell_results_apart():
    x = random((4, 9)).numpy()
    digests = {hashlib.sha256(np.float32(x + d).tobytes()).hexdigest() for d in (0, 1e-6)}
    assert len(digests) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_the_operators_by_their_names(dtype):
    """As programs for fast-LayerNorm-TF call them: positional inputs, epsilon last."""
    call = make("layer_norm_fused_custom", dtype=dtype, epsilon=1e-5)
    x, gamma, beta = call.inputs["x"], call.inputs["gamma"], call.inputs["beta"]
    dy = random(x.shape, dtype, seed=9)
    plain = check_call(Call("layer_norm_custom", {"x": x}, call.options), dy)
    check_same({"y": OPS.layer_norm_custom(x, 1e-5)}, {"y": plain["y"]})
    check_same({"dx": OPS.layer_norm_backprop_custom(x, dy, 1e-5)}, {"dx": plain["dx"]})

    biased = check_call(
        Call("layer_norm_bias_add_custom", {"x": x, "beta": beta}, call.options), dy
    )
    check_same({"y": OPS.layer_norm_bias_add_custom(x, beta, 1e-5)}, {"y": biased["y"]})
    back = OPS.layer_norm_bias_add_backprop_custom(x, dy, beta, 1e-5)
    assert back._fields == ("in_back", "beta_back")
    check_same(
        dict(zip(("dx", "dbeta"), back, strict=True)),
        {"dx": biased["dx"], "dbeta": biased["dbeta"]},
    )

    fused = check_call(call, dy)
    check_same({"y": OPS.layer_norm_fused_custom(x, gamma, beta, 1e-5)}, {"y": fused["y"]})
    back = OPS.layer_norm_fused_backprop_custom(x, dy, gamma, 1e-5)
    assert back._fields == ("in_back", "gamma_back", "beta_back")
    check_same(
        dict(zip(("dx", "dgamma", "dbeta"), back, strict=True)),
        {name: fused[name] for name in ("dx", "dgamma", "dbeta")},
    )


@pytest.mark.parametrize("norm", CUSTOM)
def test_shapes_are_known_in_graphs(norm):
    call = make(norm, (6, 24))

    @tf.function(input_signature=[tf.TensorSpec([None, None, 24], tf.float32)])
    def shape(x):
        y = call.ours(call.inputs | {"x": x})
        (dx,) = tf.gradients(y, [x])
        shapes.extend([y.shape.as_list(), dx.shape.as_list()])
        return y

    shapes = []
    shape.get_concrete_function()
    assert shapes == [[None, None, 24]] * 2


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_x_and_parameters_of_different_types(dtype):
    """Half x with float32 weights in one pass of the general operator, and its statistics."""
    x, dy = random((6, 40), dtype, shift=0.5), random((6, 40), dtype, 9)
    gamma, beta = random((40,), seed=1, shift=1.0), random((40,), seed=2)
    attributes = {"norm": "layer_norm", "epsilon": 1e-6}
    y, mean, rstd = OPS.evenkeel_norm(x, [gamma], [beta], **attributes)
    assert (y.dtype, mean.dtype, rstd.dtype) == (dtype, tf.float32, tf.float32)
    call = Call(
        "layer_norm_fused_custom", {"x": x, "gamma": gamma, "beta": beta}, {"epsilon": 1e-6}
    )
    expected = with_gradients(call.oracle, call.inputs, dy)
    check(y, expected["y"], "y")
    x64 = tf.cast(x, tf.float64)
    check(tf.reshape(mean, [-1]), tf.reduce_mean(x64, -1), "mean")
    check(tf.reshape(rstd, [-1]), 1 / tf.sqrt(tf.math.reduce_variance(x64, -1) + 1e-6), "rstd")
    dx, dgamma, dbeta = OPS.evenkeel_norm_grad(dy, x, [gamma], [beta], mean, rstd, **attributes)
    check(dx, tf.cast(expected["dx"], tf.float64), "dx")
    assert dgamma[0].dtype == dbeta[0].dtype == tf.float32
    check(dgamma[0], tf.cast(expected["dgamma"], tf.float64), "dgamma", scale=10.0)
    check(dbeta[0], tf.cast(expected["dbeta"], tf.float64), "dbeta", scale=10.0)
