"""Derivatives of first and second order: against float64 formulas and against differences.

Differences (tf.test.compute_gradient) know nothing of formulas, the formulas nothing of step sizes.
"""

import numpy as np
import pytest
import tensorflow as tf
from tf_support import (
    DTYPES,
    NORMS,
    check,
    check_same,
    make,
    random,
    second_order,
    wide,
    with_gradients,
)

import evenkeel.tensorflow as ek

OPTIONS = [(norm, {}) for norm in NORMS] + [
    *(("group_norm", {"activation": name}) for name in ("silu", "relu", "gelu", "gelu_tanh")),
    ("group_norm", {"data_format": "channels_first"}),
    ("group_norm", {"data_format": "channels_first", "activation": "silu"}),
]
NAMES = ["-".join([norm, *options.values()]) for norm, options in OPTIONS]


def small(norm, dtype=tf.float64, **options):
    if norm == "group_norm":
        shape = (2, 4, 3) if options.get("data_format") == "channels_first" else (2, 3, 4)
        return make(norm, shape, dtype, groups=2, epsilon=1e-3, **options)
    return make(norm, (3, 5), dtype, epsilon=1e-3, **options)


def assert_jacobians_agree(function, arguments):
    theoretical, numerical = tf.test.compute_gradient(function, arguments, delta=1e-4)
    for ours, differences in zip(theoretical, numerical, strict=True):
        assert np.abs(differences).max() > 1e-3  # else the test is empty
        np.testing.assert_allclose(ours, differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("norm", "options"), OPTIONS, ids=NAMES)
def test_first_order_by_differences(norm, options):
    call = small(norm, **options)
    names = list(call.inputs)
    assert_jacobians_agree(
        lambda *values: call.ours(dict(zip(names, values, strict=True))), list(call.inputs.values())
    )


@pytest.mark.parametrize(("norm", "options"), OPTIONS, ids=NAMES)
def test_second_order_by_differences(norm, options):
    call = small(norm, **options)
    dy = random(call.inputs["x"].shape, tf.float64, seed=9)
    # Without an activation that bends, beta moves no gradient.
    bends = options.get("activation") not in (None, "relu")
    moved = [name for name in call.inputs if name != "beta" or bends]

    def first(dy, *values):
        inputs = call.inputs | dict(zip(moved, values, strict=True))
        results = with_gradients(call.ours, inputs, dy)
        return tf.concat([tf.reshape(results[f"d{name}"], [-1]) for name in inputs], 0)

    assert_jacobians_agree(first, [dy, *(call.inputs[name] for name in moved)])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("norm", NORMS)
def test_second_order_against_float64(norm, dtype, graph):
    """Plain TensorFlow formulas, so the tolerance is that of a few roundings of the type."""
    call = make(norm, dtype=dtype, epsilon=1e-3)
    dy = random(call.inputs["x"].shape, dtype, seed=9)
    directions = {
        name: random(value.shape, dtype, seed=20 + len(name)) for name, value in call.inputs.items()
    }
    run = tf.function(second_order) if graph else second_order
    actual = run(call.ours, call.inputs, dy, directions)
    expected = second_order(
        call.oracle, wide(call.inputs), tf.cast(dy, tf.float64), wide(directions)
    )
    limit = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}[dtype.name]
    for name, value in expected.items():
        if value is None:  # beta adds, so it has no second derivative
            assert name == "beta"
            assert actual[name] is None or not np.any(actual[name])
            continue
        assert actual[name].dtype == dtype, name
        error = np.abs(np.asarray(actual[name], np.float64) - value.numpy()).max()
        assert error <= limit * np.abs(value.numpy()).max(), name


@pytest.mark.parametrize("norm", NORMS)
def test_third_order_is_there(norm):
    call = small(norm)
    x = call.inputs["x"]

    def third(function):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as middle:
                middle.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(tf.cast(function(call.inputs | {"x": x}), tf.float64) ** 3)
                first = tf.reduce_sum(inner.gradient(y, x) ** 2)
            second = tf.reduce_sum(middle.gradient(first, x) ** 2)
        return outer.gradient(second, x)

    actual, expected = third(call.ours).numpy(), third(call.oracle).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_some_inputs_only(norm):
    call = make(norm)
    everything = with_gradients(call.ours, call.inputs)
    for name in call.inputs:
        with tf.GradientTape() as tape:
            tape.watch(call.inputs[name])
            y = call.ours(call.inputs)
        check_same({name: tape.gradient(y, call.inputs[name])}, {name: everything[f"d{name}"]})


@pytest.mark.parametrize("source", ["x", "gamma", "beta"])
@pytest.mark.parametrize("norm", ["layer_norm_fused_custom", "group_norm"])
def test_second_order_through_one_first_gradient(norm, source):
    """What is not asked of the backward operator's other results must not count."""
    call = small(norm)

    def run(function):
        with tf.GradientTape() as outer:
            outer.watch(call.inputs)
            with tf.GradientTape() as inner:
                inner.watch(call.inputs)
                loss = tf.reduce_sum(function(call.inputs) ** 3)
            first = tf.reduce_sum(inner.gradient(loss, call.inputs[source]) ** 2)
        return outer.gradient(first, call.inputs)

    actual, expected = run(call.ours), run(call.oracle)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("norm", NORMS)
def test_second_order_where_dy_is_x(norm):
    call = small(norm)
    x = call.inputs["x"]

    def run(function):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(call.inputs)
            first = tf.reduce_sum(inner.gradient(y, x, output_gradients=x) ** 2)
        return outer.gradient(first, x)

    np.testing.assert_allclose(run(call.ours), run(call.oracle), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_sparse_gradients(norm):
    """That of tf.gather comes as tf.IndexedSlices."""
    call = small(norm)

    def run(function):
        return with_gradients(lambda inputs: tf.gather(function(inputs), [1, 0, 1]), call.inputs)

    actual, expected = run(call.ours), run(call.oracle)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_jacobians():
    call = small("layer_norm_fused_custom")
    x = call.inputs["x"]

    def jacobian(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(call.inputs)
        return tape.jacobian(y, x)

    check(jacobian(call.ours), jacobian(call.oracle), "jacobian")


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_variables(norm):
    call = make(norm)
    variables = {name: tf.Variable(value) for name, value in call.inputs.items()}
    with tf.GradientTape() as tape:
        y = call.ours(variables)
    gradients = tape.gradient(y, variables)
    expected = with_gradients(call.ours, call.inputs)
    check_same({f"d{name}": g for name, g in gradients.items()} | {"y": y}, expected)


def test_a_graph_of_tensorflow_1():
    """tf.gradients in a v1 graph and a session, where fast-LayerNorm-TF was at home."""
    call = make("layer_norm_fused_custom")
    with tf.Graph().as_default():
        inputs = {
            name: tf.compat.v1.placeholder(tf.float32, value.shape)
            for name, value in call.inputs.items()
        }
        y = call.ours(inputs)
        gradients = tf.gradients(y, list(inputs.values()))
        with tf.compat.v1.Session() as session:
            feed = {inputs[name]: value.numpy() for name, value in call.inputs.items()}
            results = session.run([y, *gradients], feed)
    expected = with_gradients(call.ours, call.inputs)
    for actual, value in zip(results, expected.values(), strict=True):
        assert actual.tobytes() == value.numpy().tobytes()


def test_training_lowers_the_loss():
    x, target = random((64, 16)), random((64, 16), seed=1)
    kernel, gamma, beta = (
        tf.Variable(random((16, 16), seed=2)),
        tf.Variable(tf.ones(16)),
        tf.Variable(tf.zeros(16)),
    )

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = ek.layer_norm_fused_custom(x @ kernel, gamma, beta)
            loss = tf.reduce_mean((y - target) ** 2)
        for variable, g in zip(
            (kernel, gamma, beta), tape.gradient(loss, (kernel, gamma, beta)), strict=True
        ):
            variable.assign_sub(0.3 * g)
        return loss

    first = step()
    for _ in range(30):
        last = step()
    assert last < 0.8 * first
