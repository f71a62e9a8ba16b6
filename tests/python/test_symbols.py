"""What the compiled modules export: their entries and nothing else.

A C++ standard library that was linked statically and is exported mixes with the one of the process: then
formatting a number ends the process.
"""

import os
import pathlib
import shutil
import subprocess

import pytest

FOLDERS = [pathlib.Path(folder) for folder in os.environ["EVENKEEL_LIBRARY_PATH"].split(":")]
PLATFORMS = ("cpu", "cuda", "cuda_scratch")
HANDLERS = {f"ek_jax_{name}_{p}" for name in ("forward", "backward") for p in PLATFORMS}
HANDLERS |= {"ek_jax_ffi_version"}


def found(pattern):
    return [path for folder in FOLDERS for path in sorted(folder.glob(pattern))]


def exported(path):
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(path)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.parametrize(
    ("pattern", "entries"),
    [
        ("_torch*.so", {"PyInit__torch"}),
        ("layer_norm_fused_op.so", set()),
        ("evenkeel_jax.so", HANDLERS),
    ],
    ids=["torch", "tensorflow", "jax"],
)
def test_exported(pattern, entries):
    paths = found(pattern)
    if not paths:
        pytest.skip(f"{pattern} was not built")
    for path in paths:
        assert exported(path) == entries, path


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_the_library_exports_its_interface():
    (path,) = found("libevenkeel.so")
    names = exported(path)
    assert "ek_forward" in names
    assert all(name.startswith("ek_") for name in names)
