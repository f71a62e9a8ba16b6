"""Wrong calls, in eager mode, while a graph is made and while it runs; imports without a library.

An error names the input, so every check asks for the name and the shape in the message.
"""

import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from tf_support import CUSTOM, make, random

import evenkeel.tensorflow as ek

OPS = tf.load_op_library(ek.op_library())
INVALID = (tf.errors.InvalidArgumentError, ValueError, TypeError)

X = random((3, 4, 24))
GOOD, SHORT, MATRIX = random((24,)), random((23,)), random((24, 1))

SHAPES = [
    ("layer_norm_custom", [tf.constant(1.0)], r"input has shape \[\].*rank 1 or more"),
    (
        "layer_norm_bias_add_custom",
        [tf.constant(1.0), GOOD],
        r"input has shape \[\].*rank 1 or more",
    ),
    ("layer_norm_bias_add_custom", [X, SHORT], r"beta has shape \[23\].*\[24\]"),
    ("layer_norm_bias_add_custom", [X, MATRIX], r"beta has shape \[24,1\].*\[24\]"),
    ("layer_norm_bias_add_custom", [X, GOOD[0]], r"beta has shape \[\].*\[24\]"),
    ("layer_norm_fused_custom", [X, SHORT, GOOD], r"gamma has shape \[23\].*\[24\]"),
    ("layer_norm_fused_custom", [X, GOOD, SHORT], r"beta has shape \[23\].*\[24\]"),
    ("layer_norm_fused_custom", [X, MATRIX, GOOD], r"gamma has shape \[24,1\].*\[24\]"),
    ("layer_norm_backprop_custom", [X, X[:2]], r"out_back has shape \[2,4,24\].*\[3,4,24\]"),
    ("layer_norm_backprop_custom", [X, GOOD], r"out_back has shape \[24\].*\[3,4,24\]"),
    ("layer_norm_bias_add_backprop_custom", [X, X, SHORT], r"beta has shape \[23\].*\[24\]"),
    ("layer_norm_fused_backprop_custom", [X, X, SHORT], r"gamma has shape \[23\].*\[24\]"),
    ("layer_norm_fused_backprop_custom", [X, X[:, :2], GOOD], r"out_back has shape \[3,2,24\]"),
]


@pytest.mark.parametrize(("operator", "inputs", "message"), SHAPES)
def test_wrong_shapes_eager(operator, inputs, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        getattr(OPS, operator)(*inputs)


@pytest.mark.parametrize(("operator", "inputs", "message"), SHAPES)
def test_wrong_shapes_while_a_graph_is_made(operator, inputs, message):
    with pytest.raises(ValueError, match=message):
        tf.function(getattr(OPS, operator)).get_concrete_function(
            *(tf.TensorSpec(value.shape, value.dtype) for value in inputs)
        )


@pytest.mark.parametrize(("operator", "inputs", "message"), SHAPES)
def test_wrong_shapes_while_a_graph_runs(operator, inputs, message):
    """Shapes that only the values tell."""
    unknown = [tf.TensorSpec(None, value.dtype) for value in inputs]
    run = tf.function(getattr(OPS, operator), input_signature=unknown)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run(*inputs)


@pytest.mark.parametrize("dtype", [tf.int32, tf.complex64, tf.bool, tf.uint8], ids=lambda d: d.name)
@pytest.mark.parametrize("norm", CUSTOM)
def test_wrong_types(norm, dtype):
    call = make(norm, (3, 24))
    inputs = {name: tf.cast(value, dtype) for name, value in call.inputs.items()}
    with pytest.raises(INVALID, match=dtype.name):
        call.ours(inputs)


@pytest.mark.parametrize("name", ["gamma", "beta"])
def test_types_that_do_not_match(name):
    call = make("layer_norm_fused_custom", (3, 24))
    call.inputs[name] = tf.cast(call.inputs[name], tf.float64)
    with pytest.raises(INVALID, match="expected to be a float tensor but is a double"):
        call.ours(call.inputs)


def test_rms_norm():
    with pytest.raises(INVALID, match=r"\[23\].*\[24\]"):
        ek.rms_norm(X, SHORT)
    with pytest.raises(INVALID, match=r"rank 1 or more"):
        ek.rms_norm(tf.constant(1.0))
    with pytest.raises(INVALID, match="int32"):
        ek.rms_norm(tf.ones((3, 4), tf.int32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 5}, "groups.*5|5.*groups"),
        ({"groups": 0}, "groups.*0|0.*groups"),
        ({"groups": -1}, "groups.*-1|-1.*groups"),
        ({"groups": 48}, "groups.*48|48.*groups"),
        ({"gamma": SHORT}, r"\[23\].*\[24\]"),
        ({"beta": SHORT}, r"\[23\].*\[24\]"),
        ({"x": GOOD}, "rank 2 or more"),
        ({"x": tf.ones((2, 24), tf.int32)}, "int32"),
        ({"data_format": "NHWC"}, "data_format.*NHWC"),
        ({"activation": "tanh"}, "activation.*tanh"),
    ],
    ids=str,
)
def test_group_norm(arguments, message):
    with pytest.raises(INVALID, match=message):
        ek.group_norm(**{"x": X, "groups": 4} | arguments)


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf")])
def test_wrong_epsilons(epsilon):
    for norm in CUSTOM:
        call = make(norm, (3, 24), epsilon=epsilon)
        with pytest.raises(tf.errors.InvalidArgumentError, match="eps"):
            call.ours(call.inputs)


def test_more_than_one_weight():
    with pytest.raises(tf.errors.InvalidArgumentError, match="weight is a list of 2"):
        OPS.evenkeel_norm(X, [GOOD, GOOD], [], norm="layer_norm", epsilon=1e-5)


def test_statistics_of_another_call():
    y, mean, rstd = OPS.evenkeel_norm(X, [], [], norm="layer_norm", epsilon=1e-5)
    for name, statistics in {"mean": (mean[:2], rstd), "rstd": (mean, rstd[:2])}.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{name} has shape \[2,4\]"):
            OPS.evenkeel_norm_grad(y, X, [], [], *statistics, norm="layer_norm", epsilon=1e-5)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("LayerNormalization", 1),
        ("LayerNormalization", [1, 2]),
        ("LayerNormalization", [-2, -1]),
        ("RMSNormalization", 1),
        ("RMSNormalization", [-2, -1]),
        ("GroupNormalization", 2),
    ],
)
def test_layers_of_another_axis(name, axis):
    arguments = {"groups": 2} if name == "GroupNormalization" else {}
    layer = getattr(ek, name)(axis=axis, **arguments)
    with pytest.raises(ValueError, match="axis"):
        layer.build((3, 4, 6, 8))


def test_layers_say_what_keras_says():
    with pytest.raises(ValueError, match="Number of groups"):
        ek.GroupNormalization(groups=5).build((3, 24))
    with pytest.raises(TypeError, match="axis"):
        ek.LayerNormalization(axis="last")
    layer = ek.LayerNormalization()
    layer.build((None, 24))
    with pytest.raises(INVALID, match="23"):
        layer(tf.ones((3, 23)))


def test_fuse_takes_models_only():
    for wrong in (keras.layers.Dense(3), tf.ones(3), None):
        with pytest.raises(TypeError, match="Model"):
            ek.fuse(wrong)


# Importing without what it needs.


def import_error(prologue="", **environment):
    source = f"{prologue}\nimport evenkeel.tensorflow"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def test_without_tensorflow():
    message = import_error("import sys; sys.modules['tensorflow'] = None")
    assert message.startswith("ImportError: evenkeel.tensorflow needs TensorFlow")


@pytest.fixture
def folder(tmp_path):
    """Of libraries, with nothing for TensorFlow."""
    core = pathlib.Path(ek.op_library()).parent / "libevenkeel.so"
    (tmp_path / core.name).symlink_to(core.resolve())
    return tmp_path


def test_built_without_tensorflow(folder):
    message = import_error(EVENKEEL_LIBRARY_PATH=str(folder))
    assert message.startswith("ImportError: This evenkeel was built without TensorFlow")


def test_built_for_another_version(folder):
    (folder / "tensorflow_version.txt").write_text("2.1.3\n")
    message = import_error(EVENKEEL_LIBRARY_PATH=str(folder))
    assert message.startswith(
        "ImportError: evenkeel's operators were built against tensorflow 2.1.3"
    )
    assert tf.__version__ in message
