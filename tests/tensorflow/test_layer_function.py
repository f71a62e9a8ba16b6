"""The layer function of fast-LayerNorm-TF: the operator it picks, and its variables.

Every test has a scope of its own: scopes live as long as the process.
"""

import numpy as np
import pytest
import tensorflow as tf
from tf_support import check, formula, random

from evenkeel.tensorflow.layer_norm_fused_layer import layer_norm_custom


@pytest.mark.parametrize(
    ("center", "scale", "operator"),
    [
        (True, True, "LayerNormFusedCustom"),
        (True, False, "LayerNormBiasAddCustom"),
        (False, True, "LayerNormFusedCustom"),
        (False, False, "LayerNormCustom"),
    ],
)
def test_layer_function(center, scale, operator):
    scope = f"picks_{center}_{scale}"
    x = random((3, 24))

    def run(x):
        return layer_norm_custom(x, center=center, scale=scale, reuse=True, scope=scope)

    y = layer_norm_custom(x, center=center, scale=scale, scope=scope)
    check(y, formula(x, epsilon=1e-12))  # its default; gamma of ones and beta of zeros
    graph = tf.function(run).get_concrete_function(x).graph
    assert operator in {operation.type for operation in graph.get_operations()}


def test_layer_function_applies_the_activation():
    x = random((3, 24))
    plain = layer_norm_custom(x, scope="plain")
    active = layer_norm_custom(x, activation_fn=tf.nn.relu, scope="active")
    np.testing.assert_array_equal(active, tf.nn.relu(plain))


def test_layer_function_trains_and_reuses_its_variables():
    x = random((3, 24))
    with tf.GradientTape() as tape:
        y = layer_norm_custom(x, scope="trained")
    variables = {v.name.split("/")[-1].split(":")[0]: v for v in tape.watched_variables()}
    assert variables.keys() == {"gamma", "beta"}
    np.testing.assert_array_equal(variables["gamma"], np.ones(24))
    np.testing.assert_array_equal(variables["beta"], np.zeros(24))
    assert all(g is not None for g in tape.gradient(y, list(variables.values())))

    variables["gamma"].assign(np.full(24, 2.0))
    again = layer_norm_custom(x, reuse=True, scope="trained")
    np.testing.assert_allclose(again, 2 * y, rtol=1e-6)


def test_layer_function_can_be_frozen():
    with tf.GradientTape() as tape:
        layer_norm_custom(random((3, 24)), trainable=False, scope="frozen")
    assert tape.watched_variables() == ()


def test_layer_function_accepts_every_old_argument():
    y = layer_norm_custom(
        random((3, 24)),
        center=True,
        scale=True,
        activation_fn=None,
        reuse=None,
        variables_collections=["variables"],
        outputs_collections=["outputs"],
        trainable=True,
        epsilon=1e-12,
        scope="old",
    )
    assert y.shape == (3, 24)


def test_layer_function_does_not_share_variables_by_accident():
    x = random((3, 24))
    layer_norm_custom(x, scope="taken")
    with pytest.raises(ValueError, match="'taken' exist already"):
        layer_norm_custom(x, scope="taken")
    with pytest.raises(ValueError, match="no scope 'nobody'"):
        layer_norm_custom(x, reuse=True, scope="nobody")
    with pytest.raises(ValueError, match=r"gamma|beta"):
        layer_norm_custom(random((3, 23)), reuse=True, scope="taken")


def test_layer_function_inside_a_traced_function():
    """A function is traced again for other shapes; its variables are made once."""

    @tf.function
    def run(x):
        return layer_norm_custom(x, reuse=tf.compat.v1.AUTO_REUSE, scope="traced")

    variables = set()
    for rows in (2, 3, 3):
        x = random((rows, 24))
        with tf.GradientTape() as tape:
            y = run(x)
        check(y, formula(x, epsilon=1e-12))
        variables |= {id(variable) for variable in tape.watched_variables()}
    assert run.experimental_get_tracing_count() > 1
    assert len(variables) == 2
