"""`python -m evenkeel info`, and what it says where something is missing."""

import importlib.metadata
import os

import pytest
from commands import run


def info_lines(**environment):
    result = run("-m", "evenkeel", "info", **environment)
    assert result.returncode == 0, result.stderr
    return dict(line.split(None, 1) for line in result.stdout.splitlines())


def test_info_names_what_is_built():
    import torch

    lines = info_lines()
    assert "cpu, reference" in lines["backends"]
    assert lines["evenkeel.torch"] == f"ready, built against torch {torch.__version__}"
    assert lines["torch"] == importlib.metadata.version("torch")


def test_unknown_command_lists_the_known_ones():
    result = run("-m", "evenkeel", "inform")
    assert result.returncode == 2
    for command in ("info", "bench", "check"):
        assert command in result.stderr


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ("raise ImportError('no torch here')", ["needs PyTorch", "not installed"]),
        ("__version__ = '2.9.1'", ["built against torch", "2.9.1 is installed", "Build"]),
    ],
    ids=["without torch", "another torch"],
)
def test_torch_that_does_not_fit_is_named(tmp_path, stub, words):

    (tmp_path / "torch.py").write_text(stub)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    core = run("-c", "import evenkeel; print(evenkeel.__version__)", PYTHONPATH=path)
    assert core.returncode == 0, core.stderr
    result = run("-c", "import evenkeel.torch", PYTHONPATH=path)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    for word in words:
        assert word in result.stderr
    assert info_lines(PYTHONPATH=path)["evenkeel.torch"].startswith("not available")


def test_build_without_torch_says_so(tmp_path):
    from evenkeel import _native

    (tmp_path / "libevenkeel.so").symlink_to(_native.find("libevenkeel.so").resolve())
    result = run("-c", "import evenkeel.torch", EVENKEEL_LIBRARY_PATH=str(tmp_path))
    assert result.returncode == 1
    assert "built without PyTorch" in result.stderr
