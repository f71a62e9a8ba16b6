"""`python -m evenkeel info`, and what it says where something is missing."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re

import pytest
from commands import run

from evenkeel import _native


def info_lines(**environment):
    result = run("-m", "evenkeel", "info", **environment)
    assert result.returncode == 0, result.stderr
    return dict(line.split(None, 1) for line in result.stdout.splitlines())


def test_info_names_what_is_built():
    import torch

    lines = info_lines()
    assert "cpu, reference" in lines["backends"]
    ready, path = lines["evenkeel.torch"].split(": ")
    assert ready == "ready"
    assert pathlib.Path(path).name.startswith(f"_torch-{_native.minor(torch.__version__)}.cpython-")
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["torch.compile"] == "norms are fused with their neighbours"
    off = info_lines(EVENKEEL_FUSE_COMPILED="0")["torch.compile"]
    assert off == "norms are not fused: EVENKEEL_FUSE_COMPILED is 0"


def test_unknown_command_lists_the_known_ones():
    result = run("-m", "evenkeel", "inform")
    assert result.returncode == 2
    for command in ("info", "build", "bench", "check"):
        assert command in result.stderr


def error_without_torch_that_fits(stub, folder, **environment):
    """What importing evenkeel.torch says where torch is a stub; the core works beside it."""
    (folder / "torch.py").write_text(stub)
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    core = run("-c", "import evenkeel; print(evenkeel.__version__)", **environment)
    assert core.returncode == 0, core.stderr
    assert info_lines(**environment)["evenkeel.torch"].startswith("not available")
    result = run("-c", "import evenkeel.torch", **environment)
    assert result.returncode == 1
    return result.stderr.splitlines()[-1]


def test_missing_torch_is_named(tmp_path):
    error = error_without_torch_that_fits("raise ImportError('no torch here')", tmp_path)
    assert error.startswith("ImportError: evenkeel.torch needs PyTorch, which is not installed")


def test_another_torch_is_named_with_the_remedy(tmp_path):
    error = error_without_torch_that_fits(
        "__version__ = '2.9.1+cu128'", tmp_path, XDG_CACHE_HOME=str(tmp_path)
    )
    assert error.startswith("ImportError: evenkeel has no operators for torch 2.9.1+cu128")
    assert f"but _torch-{_native.minor(importlib.metadata.version('torch'))}.cpy" in error
    assert error.endswith("run: python -m evenkeel build")


def test_a_benchmark_without_jax():
    if importlib.util.find_spec("jax") is not None:
        pytest.skip("JAX is installed")
    done = run("-m", "evenkeel", "bench-jax")
    assert done.returncode == 1
    assert re.search(r"bench-jax needs (\w+), which is not installed: pip install \1$", done.stderr)
