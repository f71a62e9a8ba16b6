"""README.md says what is true: the snippets for TensorFlow run as they stand, one after the other.

tests/python/test_readme.py sees to it that every snippet belongs to a section that is run.
"""

import numpy as np
import pytest
import tensorflow as tf
from readme import run, snippets
from tf_support import check, formula

import evenkeel.tensorflow as ek

SNIPPETS = snippets("From TensorFlow")


@pytest.fixture(scope="module")
def scope():
    scope = {}
    for snippet in SNIPPETS:
        run(snippet, scope)
    return scope


def test_snippets_are_complete():
    text = "".join(SNIPPETS)
    for name in (
        "load_op_library",
        "layer_norm_custom",
        "layer_norm_bias_add_custom",
        "layer_norm_fused_custom",
        "rms_norm",
        "group_norm",
        "layer_norm_fused_layer",
        "LayerNormalization",
        "fuse",
    ):
        assert name in text, name


def test_operators(scope):
    check(scope["normalized_output"], formula(scope["inputs"], epsilon=1e-7))


def test_functions(scope):
    for name in ("dgamma", "dbeta"):
        assert scope[name].shape == (128,)
        assert np.any(scope[name]), name
    assert scope["y"].shape == (32, 512, 128)
    assert float(tf.reduce_min(scope["y"])) == 0  # the layer function's relu


def test_fuse(scope):
    report = scope["report"]
    # Its first norm was evenkeel's already.
    assert len(report.replaced) == 1
    assert [type(layer) for layer in report.model.layers[1:]] == [ek.LayerNormalization] * 2
    x, y = np.zeros((4, 64, 128), np.float32), np.ones((4, 64, 128), np.float32)
    report.model.fit(x, y, verbose=0)
