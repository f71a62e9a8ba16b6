"""docs/tensorflow.md says what is true: its blocks run as they stand, one after the other.

tests/python/test_docs.py sees to it that no block is overlooked.
"""

import numpy as np
import pytest
import tensorflow as tf
from documents import ROOT, api_names, python_blocks, run_document
from tf_support import check, formula

import evenkeel.tensorflow as ek

GUIDE = ROOT / "docs" / "tensorflow.md"


@pytest.fixture(scope="module")
def scope():
    return run_document(GUIDE, "tensorflow", {})


def test_blocks_are_complete():
    text = "".join(block.text for block in python_blocks(GUIDE, "tensorflow"))
    for name in ("load_op_library", "layer_norm_fused_layer", *ek.__all__):
        assert name == "Report" or name in text, name  # fuse returns one


def test_api_page_has_every_name():
    assert api_names("evenkeel.tensorflow") == set(ek.__all__)


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
