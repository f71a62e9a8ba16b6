"""docs/jax.md says what is true: its blocks run as they stand, one after the other.

tests/python/test_docs.py sees to it that no block is overlooked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import ROOT, api_names, python_blocks, run_document

import evenkeel.jax as ek
import evenkeel.jax.linen
import evenkeel.jax.nnx

GUIDE = ROOT / "docs" / "jax.md"


@pytest.fixture(scope="module")
def scope():
    with jax.enable_x64(False):  # as for its reader
        return run_document(GUIDE, "jax", {})


def test_blocks_are_complete():
    text = "".join(block.text for block in python_blocks(GUIDE, "jax"))
    for name in ek.__all__:
        assert name == "Report" or f"ek.{name}(" in text, name  # fuse returns one


def test_api_page_has_every_name():
    assert api_names("evenkeel.jax") == set(ek.__all__)
    for module in (evenkeel.jax.nnx, evenkeel.jax.linen):
        classes = {name for name in ("LayerNorm", "RMSNorm", "GroupNorm") if hasattr(module, name)}
        assert api_names(module.__name__) >= classes


def test_functions(scope):
    for name in ("dx", "dweight", "dbias"):
        assert np.any(scope[name]), name
    assert scope["y"].dtype == jnp.bfloat16 and scope["total"].dtype == jnp.float32
    with jax.enable_x64(False):
        value = scope["loss"](scope["x"], scope["weight"], scope["bias"])
    np.testing.assert_allclose(scope["value"], value)


def test_fuse(scope):
    assert len(scope["report"].replaced) == 3
    with jax.enable_x64(False):
        assert scope["model"](scope["x"]).shape == scope["x"].shape
