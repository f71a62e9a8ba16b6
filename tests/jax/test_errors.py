"""Wrong calls fail while tracing, with the argument's name; imports that cannot work say what to do."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_support import random

import evenkeel.jax as ek
from evenkeel.jax import _load, calls
from evenkeel.jax.norm import Norm

LIBRARY = "libevenkeel.so"

X, GOOD, SHORT = random((3, 4, 24)), random((24,)), random((23,))

WRONG = [
    ("layer_norm", {"x": jnp.float32(1)}, ValueError, r"x has shape \(\), but must have rank 1"),
    ("layer_norm", {"x": jnp.ones(4, int)}, TypeError, "x has dtype int64, but must have one of"),
    ("layer_norm", {"x": "text"}, TypeError, "x must be an array, but is 'text'"),
    ("layer_norm", {"x": X, "weight": SHORT}, ValueError, r"weight has shape \(23,\).*\(24,\)"),
    ("layer_norm", {"x": X, "bias": GOOD[None]}, ValueError, r"bias has shape \(1, 24\).*\(24,\)"),
    ("rms_norm", {"x": X, "weight": jnp.ones(24, bool)}, TypeError, "weight has dtype bool"),
    ("rms_norm", {"x": X, "axis": (0, 2)}, ValueError, r"axis is \(0, 2\).*trailing.*rank 3"),
    ("rms_norm", {"x": X, "axis": 3}, ValueError, "axis is 3, but must name axes of x.*rank 3"),
    ("rms_norm", {"x": X, "axis": "last"}, ValueError, "axis is 'last'"),
    ("rms_norm", {"x": X, "eps": -1.0}, ValueError, "eps is -1.0, but must be finite and not"),
    ("rms_norm", {"x": X, "eps": float("nan")}, ValueError, "eps is nan"),
    ("rms_norm", {"x": X, "eps": None}, TypeError, "eps must be a number.*None"),
    ("rms_norm", {"x": X, "casting": "liger"}, ValueError, "casting must be one of.*'liger'"),
    ("rms_norm", {"x": X, "weight_offset": 1.0}, ValueError, "weight_offset is 1.0.*no weight"),
    ("layer_norm", {"x": X, "activation": "tanh"}, ValueError, "activation must be one of.*'tanh'"),
    ("layer_norm", {"x": X, "out_dtype": "int8"}, TypeError, "out_dtype must be one of.*int8"),
    ("layer_norm", {"x": X, "out_dtype": "half a byte"}, TypeError, "out_dtype must be one of"),
    ("layer_norm", {"x": X, "residual": X[:2]}, ValueError, r"residual has shape \(2, 4, 24\)"),
    ("layer_norm", {"x": X, "sum_dtype": "float32"}, ValueError, "sum_dtype.*no residual"),
    ("layer_norm", {"x": X, "donate_residual": True}, ValueError, "donate_residual.*no residual"),
    (
        "layer_norm",
        {
            "x": X,
            "residual": X.astype(jnp.bfloat16),
            "sum_dtype": "float32",
            "donate_residual": True,
        },
        ValueError,
        "donate_residual is True, but the sum is float32 and the residual bfloat16",
    ),
    (
        "layer_norm",
        {"x": X, "residual": X.astype(float), "sum_dtype": "float32"},
        ValueError,
        "sum_dtype is float32, but must be float64",
    ),
    ("group_norm", {"x": GOOD, "num_groups": 2}, ValueError, r"x has shape \(24,\).*rank 2"),
    (
        "group_norm",
        {"x": X, "num_groups": 5},
        ValueError,
        "num_groups is 5.*divide the 24 channels",
    ),
    ("group_norm", {"x": X, "num_groups": 0}, ValueError, "num_groups is 0"),
    ("group_norm", {"x": X, "num_groups": 2.0}, TypeError, "num_groups must be an int.*2.0"),
    ("group_norm", {"x": X, "num_groups": 2, "weight": SHORT}, ValueError, r"weight.*\(24,\)"),
    (
        "group_norm",
        {"x": X, "num_groups": 2, "data_format": "NHWC"},
        ValueError,
        "data_format must be one of 'channels_last', 'channels_first', but is 'NHWC'",
    ),
]


@pytest.mark.parametrize(("norm", "arguments", "kind", "message"), WRONG)
def test_wrong_arguments(norm, arguments, kind, message):
    with pytest.raises(kind, match=f"^evenkeel: {message}"):
        getattr(ek, norm)(**arguments)


def test_wrong_shapes_fail_while_tracing():
    with pytest.raises(ValueError, match=r"evenkeel: weight has shape \(23,\)"):
        jax.jit(ek.rms_norm).trace(X, SHORT)


def test_eps_must_be_known_while_tracing():
    with pytest.raises(TypeError, match="eps must be a number that is known while tracing"):
        jax.jit(lambda eps: ek.rms_norm(X, eps=eps))(1e-5)


def test_float64_needs_jax_enable_x64():
    message = "out_dtype is float64, but jax_enable_x64 is off"
    with jax.enable_x64(False), pytest.raises(ValueError, match=message):
        ek.rms_norm(X.astype(jnp.float32), out_dtype="float64")


def test_unknown_sizes_are_refused():
    (size,) = jax.export.symbolic_shape("size")
    x = jax.ShapeDtypeStruct((size, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"x has shape .*sizes must be known"):
        jax.export.export(jax.jit(ek.rms_norm))(x)


@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        ({"weight": (7,)}, {}),
        ({"y": (2, 7)}, {}),
        ({"rstd": (3,)}, {}),
        ({}, {"lead": 3}),
        ({}, {"lead": -1}),
        ({}, {"has_bias": True}),
        ({}, {"has_weight": False}),
        ({}, {"op": 7}),
    ],
)
def test_calls_that_evenkeel_did_not_make_do_not_crash(sizes, attributes):
    norm = Norm("rms_norm", 1, 1e-6, np.dtype("float32"), np.dtype("float32"))
    operands, results = ("x", "weight"), ("y", "rstd")
    found = calls.attributes("forward", norm, operands, results)
    found |= {name: found[name].dtype.type(value) for name, value in attributes.items()}
    shapes = {"x": (2, 8), "weight": (8,), "y": (2, 8), "rstd": (2,)} | sizes
    call = jax.ffi.ffi_call(
        "evenkeel_forward", [jax.ShapeDtypeStruct(shapes[n], np.float32) for n in ("y", "rstd")]
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="evenkeel: "):
        jax.block_until_ready(call(*(jnp.ones(shapes[n], jnp.float32) for n in operands), **found))


def imported(**environment):
    done = subprocess.run(
        [sys.executable, "-c", "import evenkeel.jax"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax here')")
    error = imported(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert error.startswith("ImportError: evenkeel.jax needs JAX, which is not installed.")


def test_without_handlers(tmp_path):
    folders = map(pathlib.Path, os.environ["EVENKEEL_LIBRARY_PATH"].split(os.pathsep))
    shutil.copy(
        next(folder for folder in folders if (folder / LIBRARY).exists()) / LIBRARY, tmp_path
    )
    error = imported(EVENKEEL_LIBRARY_PATH=str(tmp_path))
    assert "built without jaxlib's headers" in error and "pip install" in error


@pytest.mark.parametrize(("built", "there"), [((0, 4), (0, 3)), ((0, 3), (1, 3)), ((1, 0), (0, 9))])
def test_versions_that_do_not_fit(built, there):
    text = re.escape("built for version {}.{} of XLA's foreign".format(*built))
    with pytest.raises(ImportError, match=f"{text}.*has version {there[0]}\\.{there[1]}.*again"):
        _load.check_version(built, there)


def test_versions_that_fit():
    for there in ((0, 3), (0, 4), (0, 9)):
        _load.check_version((0, 3), there)
