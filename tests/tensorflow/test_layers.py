"""The Keras layers are Keras's own, but for the arithmetic: arguments, weights, saved models.

So they are compared with Keras's, and to the last digit with float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import Call, check, random, with_gradients

import evenkeel.tensorflow as ek

LAYERS = ["LayerNormalization", "RMSNormalization", "GroupNormalization"]
ARGUMENTS = {"LayerNormalization": {}, "RMSNormalization": {}, "GroupNormalization": {"groups": 4}}
IMAGE = (3, 5, 2, 12)


def pair(name, shape=IMAGE, seed=3, **options):
    """Keras's layer and ours, with the same random weights."""
    options = ARGUMENTS[name] | options
    theirs, ours = getattr(keras.layers, name)(**options), getattr(ek, name)(**options)
    theirs.build(shape)
    ours.build(shape)
    weights = [
        random(w.shape, seed=seed + i, scale=0.5, shift=1.0).numpy()
        for i, w in enumerate(theirs.weights)
    ]
    theirs.set_weights(weights)
    ours.set_weights(weights)
    return theirs, ours


def results(layer, x, dy):
    """The output and the gradients of a layer by name, x's first."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    sources = [x, *(variable.value for variable in layer.trainable_variables)]
    names = ["dx", *(variable.name for variable in layer.trainable_variables)]
    gradients = tape.gradient(y, sources, output_gradients=tf.cast(dy, y.dtype))
    return {"y": y} | dict(zip(names, gradients, strict=True))


def assert_layers_agree(theirs, ours, x, limit=2e-5):
    dy = random(x.shape, seed=9)
    expected, actual = results(theirs, x, dy), results(ours, x, dy)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        a, b = np.asarray(value, np.float64), np.asarray(expected[name], np.float64)
        assert a.shape == b.shape, name
        assert np.abs(a - b).max(initial=0) <= limit * max(np.abs(b).max(initial=0), 1), name


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_keras(name, dtype):
    theirs, ours = pair(name, dtype=dtype, epsilon=2.0**-10)
    limit = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    assert_layers_agree(theirs, ours, random(IMAGE, dtype), limit)


@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name):
    """Keras is no oracle to the last digit."""
    _, ours = pair(name, epsilon=1e-4)
    x, dy = random(IMAGE, scale=1.5, shift=0.25), random(IMAGE, seed=9)
    norm = {"L": "layer_norm_fused_custom", "R": "rms_norm", "G": "group_norm"}[name[0]]
    weights = dict(zip(("gamma", "beta"), (w.value for w in ours.weights), strict=False))
    options = {"epsilon": 1e-4} | ARGUMENTS[name]
    expected = with_gradients(Call(norm, {}, options).oracle, {"x": x} | weights, dy)
    for actual, value in zip(results(ours, x, dy).values(), expected.values(), strict=True):
        check(actual, tf.cast(value, tf.float64), scale=10.0)


@pytest.mark.parametrize("shape", [(4, 24), (2, 3, 24), (2, 2, 3, 3, 24), (0, 24)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_ranks(name, shape):
    theirs, ours = pair(name, shape)
    if 0 in shape:
        assert ours(tf.zeros(shape)).shape == shape
    else:
        assert_layers_agree(theirs, ours, random(shape))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("name", ["LayerNormalization", "GroupNormalization"])
def test_center_and_scale(name, scale, center):
    theirs, ours = pair(name, center=center, scale=scale)
    assert len(ours.weights) == scale + center
    assert_layers_agree(theirs, ours, random(IMAGE))


@pytest.mark.parametrize("axis", [-1, 3, [-1], [3]], ids=str)
@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_all_names_of_the_last_axis(name, axis):
    assert_layers_agree(*pair(name, axis=axis), random(IMAGE))


@pytest.mark.parametrize("groups", [1, 3, 12, -1])
def test_groups(groups):
    assert_layers_agree(*pair("GroupNormalization", groups=groups), random(IMAGE))


@pytest.mark.parametrize("axis", [1, -1, 3])
def test_channels_of_group_norm(axis):
    shape = (3, 12, 5, 2) if axis == 1 else IMAGE
    assert_layers_agree(*pair("GroupNormalization", shape, axis=axis), random(shape))


@pytest.mark.parametrize("name", LAYERS)
def test_is_keras_layer_with_its_weights(name):
    theirs, ours = pair(name)
    assert isinstance(ours, getattr(keras.layers, name))
    assert [(w.name, w.shape, w.dtype) for w in ours.weights] == [
        (w.name, w.shape, w.dtype) for w in theirs.weights
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_config(name):
    layer = getattr(ek, name)(epsilon=0.125, name="mine", dtype="float64", **ARGUMENTS[name])
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.epsilon, again.name, again.compute_dtype) == (0.125, "mine", "float64")


def test_initializers_regularizers_and_constraints():
    arguments = {
        "gamma_initializer": keras.initializers.Constant(2.0),
        "beta_initializer": keras.initializers.Constant(0.5),
        "gamma_regularizer": "l2",
        "beta_constraint": "non_neg",
    }
    theirs, ours = keras.layers.LayerNormalization(**arguments), ek.LayerNormalization(**arguments)
    x = random((4, 6))
    np.testing.assert_allclose(theirs(x), ours(x), atol=1e-5)
    np.testing.assert_allclose(ours.gamma, np.full(6, 2.0))
    np.testing.assert_allclose(float(ours.losses[0]), float(theirs.losses[0]))
    assert ours.beta.constraint is not None


@pytest.mark.usefixtures("cudnn")
def test_masks_pass_through():
    model = keras.Sequential(
        [
            keras.layers.Embedding(9, 8, mask_zero=True),
            ek.LayerNormalization(),
            keras.layers.LSTM(4),
        ]
    )
    y = model(np.array([[1, 2, 0, 0]]))
    np.testing.assert_allclose(y, model(np.array([[1, 2, 0, 0, 0]])), atol=1e-6)


def stack(layers, shape=(4, 4, 12)):
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Dense(12),
            layers.LayerNormalization(name="ln"),
            layers.RMSNormalization(name="rms"),
            layers.GroupNormalization(groups=3, name="gn"),
            keras.layers.Dense(2, name="last"),
        ]
    )


def with_random_weights(model):
    model.set_weights([random(w.shape, seed=i).numpy() for i, w in enumerate(model.weights)])
    return model


def test_weights_move_both_ways(tmp_path):
    x = random((2, 4, 4, 12))
    for source, target in ((keras.layers, ek), (ek, keras.layers)):
        saved, loaded = with_random_weights(stack(source)), stack(target)
        saved.save_weights(tmp_path / "all.weights.h5")
        loaded.load_weights(tmp_path / "all.weights.h5")
        np.testing.assert_allclose(saved(x), loaded(x), atol=2e-4)


def test_a_saved_model_loads(tmp_path):
    model = with_random_weights(stack(ek))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in model.layers]
    x = random((2, 4, 4, 12))
    np.testing.assert_array_equal(model(x), again(x))


@pytest.mark.parametrize("autocast", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_mixed_precision(name, autocast):
    """x in half and the float32 weights as they are: the only rounding is that of the result."""
    _, ours = pair(name, dtype=autocast, epsilon=1e-4)
    half = autocast.removeprefix("mixed_")
    x, dy = random(IMAGE, half), random(IMAGE, half, seed=9)
    assert all(w.dtype == "float32" for w in ours.weights)
    actual = results(ours, x, dy)
    norm = {"L": "layer_norm_fused_custom", "R": "rms_norm", "G": "group_norm"}[name[0]]
    weights = dict(zip(("gamma", "beta"), (w.value for w in ours.weights), strict=False))
    options = {"epsilon": 1e-4} | ARGUMENTS[name]
    expected = with_gradients(Call(norm, {}, options).oracle, {"x": x} | weights, dy)
    assert [value.dtype.name for value in actual.values()] == [half, half] + ["float32"] * len(
        weights
    )
    for value, wanted in zip(actual.values(), expected.values(), strict=True):
        check(value, tf.cast(wanted, tf.float64), scale=10.0)


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_precision_casts_nothing(name):
    _, ours = pair(name, dtype="mixed_bfloat16")

    @tf.function(input_signature=[tf.TensorSpec([None, *IMAGE[1:]], tf.bfloat16)])
    def run(x):
        return ours(x)

    operations = run.get_concrete_function().graph.get_operations()
    assert "Cast" not in {operation.type for operation in operations}
    assert any(operation.type == "EvenkeelNorm" for operation in operations)


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_precision_of_a_float32_input(name):
    theirs, ours = pair(name, dtype="mixed_bfloat16")
    x = random(IMAGE)
    assert ours(x).dtype == theirs(x).dtype == tf.bfloat16
    np.testing.assert_allclose(
        np.asarray(ours(x), np.float32), np.asarray(theirs(x), np.float32), atol=0.06
    )
