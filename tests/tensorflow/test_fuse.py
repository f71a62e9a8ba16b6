"""fuse(model): a clone with evenkeel's layers, the same weights and results, and a report.

Weights are random and not the initial ones, so that one that is lost or swapped shows.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import random

import evenkeel.tensorflow as ek

L = keras.layers
OURS = (ek.LayerNormalization, ek.RMSNormalization, ek.GroupNormalization)


def with_random_weights(model):
    model.set_weights(
        [random(w.shape, seed=i, shift=0.5).numpy() for i, w in enumerate(model.weights)]
    )
    return model


def sequential():
    return keras.Sequential(
        [
            keras.Input((4, 4, 6)),
            L.Conv2D(12, 3, padding="same"),
            L.GroupNormalization(groups=3, name="group"),
            L.Dense(12, activation="relu"),
            L.LayerNormalization(epsilon=1e-5, name="layer"),
            L.RMSNormalization(name="rms"),
            L.Dense(2),
        ]
    )


def branching():
    """A residual network whose two branches share a norm."""
    x = keras.Input((5, 8))
    shared = L.LayerNormalization(name="shared")
    a = L.Dense(8)(shared(x))
    b = shared(a)
    a = L.Add()([a, L.MultiHeadAttention(2, 4)(b, b)])
    return keras.Model(x, [L.RMSNormalization(name="out")(a), L.Dense(3)(b)])


def nested():
    inner = keras.Sequential([keras.Input((8,)), L.Dense(8), L.LayerNormalization(name="inner")])
    x = keras.Input((8,))
    return keras.Model(x, L.LayerNormalization(name="outer")(inner(x)))


def norms(model):
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if "Normalization" in type(layer).__name__
    ]


def names(entries):
    return sorted(entry.name.split("/")[-1] for entry in entries)


@pytest.mark.parametrize(
    ("build", "replaced"),
    [
        (sequential, ["group", "layer", "rms"]),
        (branching, ["out", "shared"]),
        (nested, ["inner", "outer"]),
    ],
)
def test_results_stay(build, replaced, request):
    if build is sequential:
        request.getfixturevalue("cudnn")
    model = with_random_weights(build())
    report = ek.fuse(model)
    assert names(report.replaced) == replaced
    assert not report.skipped
    assert all(isinstance(norm, OURS) for norm in norms(report.model))
    x = random((3, *model.input_shape[1:]))
    for actual, expected in zip(
        tf.nest.flatten(report.model(x)), tf.nest.flatten(model(x)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("build", [sequential, branching, nested])
def test_weights_stay(build):
    model = with_random_weights(build())
    fused = ek.fuse(model).model
    assert [(w.path, w.trainable) for w in fused.weights] == [
        (w.path, w.trainable) for w in model.weights
    ]
    for actual, expected in zip(fused.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_model_itself_is_left_alone():
    model = sequential()
    kinds = [type(layer) for layer in model.layers]
    before = model.get_weights()
    fused = ek.fuse(model).model
    fused.set_weights([w + 1 for w in before])
    assert [type(layer) for layer in model.layers] == kinds
    for actual, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_configurations_stay():
    model = sequential()
    for ours, theirs in zip(norms(ek.fuse(model).model), norms(model), strict=True):
        assert ours.get_config() == theirs.get_config()


def test_a_shared_norm_stays_shared():
    fused = ek.fuse(branching()).model
    assert len(norms(fused)) == 2
    assert len(fused.get_layer("shared")._inbound_nodes) == 2


def test_frozen_norms_stay_frozen():
    model = sequential()
    model.get_layer("layer").trainable = False
    fused = ek.fuse(model).model
    assert not fused.get_layer("layer").trainable
    assert fused.get_layer("rms").trainable


def test_dtype_policies_stay():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            L.LayerNormalization(dtype="mixed_bfloat16"),
            L.RMSNormalization(dtype="float64"),
        ]
    )
    fused = ek.fuse(model).model
    assert [layer.dtype_policy.name for layer in fused.layers] == ["mixed_bfloat16", "float64"]


def test_what_is_left_alone_has_a_reason():
    class Mine(L.LayerNormalization):
        def call(self, inputs):
            return super().call(inputs) * 2

    x = keras.Input((6, 8))
    y = L.LayerNormalization(axis=1, name="other_axis")(x)
    y = Mine(name="mine")(y)
    y = L.BatchNormalization(name="batch")(y)
    y = L.LayerNormalization(name="plain")(y)
    model = with_random_weights(keras.Model(x, y))
    report = ek.fuse(model)
    assert names(report.replaced) == ["plain"]
    reasons = {entry.name: entry.outcome for entry in report.skipped}
    assert reasons.keys() == {"other_axis", "mine", "batch"}
    assert "axis is [1]" in reasons["other_axis"]
    assert "class" in reasons["mine"]
    assert "BatchNormalization" in reasons["batch"]
    for name, reason in reasons.items():
        assert re.search(f"{name} .*{re.escape(reason)}", str(report))
    assert type(report.model.get_layer("other_axis")) is L.LayerNormalization
    assert type(report.model.get_layer("mine")) is Mine
    value = random((2, 6, 8))
    np.testing.assert_allclose(report.model(value), model(value), rtol=1e-4, atol=1e-3)


def test_the_report_prints():
    report = ek.fuse(sequential())
    text = str(report)
    for name in ("group", "layer", "rms"):
        assert name in text
    assert "3 replaced, 0 skipped" in text


def test_a_model_without_norms():
    with pytest.warns(UserWarning, match="no norm was replaced"):
        report = ek.fuse(keras.Sequential([keras.Input((3,)), L.Dense(2)]))
    assert not report.replaced
    assert report.model(tf.ones((1, 3))).shape == (1, 2)


@pytest.mark.usefixtures("cudnn")
def test_twice_is_once():
    once = ek.fuse(with_random_weights(sequential())).model
    report = ek.fuse(once)
    assert not report.replaced
    assert {entry.outcome for entry in report.skipped} == {"already evenkeel's"}
    x = random((2, 4, 4, 6))
    np.testing.assert_array_equal(report.model(x), once(x))


@pytest.mark.usefixtures("cudnn")
def test_training_goes_on_alike():
    """From the same weights, the fused model learns what the model learns."""
    x, y = random((16, 4, 4, 6)).numpy(), random((16, 4, 4, 2), seed=1).numpy()
    model = sequential()
    fused = ek.fuse(model).model
    losses = []
    for each in (model, fused):
        each.compile(keras.optimizers.SGD(0.05), "mse")
        losses.append(
            each.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.usefixtures("cudnn")
def test_fused_models_can_be_saved(tmp_path):
    fused = ek.fuse(with_random_weights(sequential())).model
    fused.save(tmp_path / "fused.keras")
    again = keras.models.load_model(tmp_path / "fused.keras")
    x = random((2, 4, 4, 6))
    np.testing.assert_array_equal(again(x), fused(x))


@pytest.mark.usefixtures("cudnn")
def test_compiled_models_stay_compiled():
    """The optimizer's state too: the next step of the copy is the next step of the model."""
    x, y = random((16, 4, 4, 6)).numpy(), random((16, 4, 4, 2), seed=1).numpy()
    model = sequential()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, epochs=2, verbose=0, shuffle=False)
    fused = ek.fuse(model).model
    assert int(fused.optimizer.iterations) == 2
    for each in (model, fused):
        each.fit(x, y, epochs=1, verbose=0, shuffle=False)
    for actual, expected in zip(fused.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_norms_inside_layers_are_reported():
    class Block(L.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.norm = L.LayerNormalization(name="hidden")

        def build(self, shape):
            self.norm.build(shape)

        def call(self, x):
            return self.norm(x)

    model = keras.Sequential([keras.Input((8,)), Block(name="block"), L.LayerNormalization()])
    report = ek.fuse(model)
    assert len(report.replaced) == 1
    (entry,) = report.skipped
    assert entry.name == "block/hidden"
    assert "Block" in entry.outcome


def test_subclassed_models_are_an_error():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = L.LayerNormalization()

        def call(self, x):
            return self.norm(x)

    with pytest.raises(ValueError, match="Mine"):
        ek.fuse(Mine())
