"""`pip install .` as a user does it: an isolated build, a fresh environment, with and without torch.

Compiled with the dev build's flags, so that the compiler cache has most of it already.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import pytest

pytest.importorskip("pip", reason="needs pip")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FLAGS = {
    "cmake.build-type": "RelWithDebInfo",
    "cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG",
    "cmake.define.EVENKEEL_WERROR": "ON",
    # Its kernels take minutes to compile, and are part of the other builds.
    "cmake.define.EVENKEEL_CUDA": "OFF",
}
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "EVENKEEL_LIBRARY_PATH")
}


def run(*command):
    result = subprocess.run(
        command, cwd="/", env=CLEAN, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment that has evenkeel and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    settings = [word for name, value in FLAGS.items() for word in ("-C", f"{name}={value}")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    code, output = run(*pip, "wheel", *settings, "--no-deps", "-w", str(folder), str(ROOT))
    if "Installing build dependencies: finished with status 'error'" in output:
        pytest.skip("pip finds no package index to install scikit-build-core from")
    assert code == 0, output
    (wheel,) = folder.glob("evenkeel-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    code, output = run(str(python), "-m", "pip", "install", "--no-deps", str(wheel))
    assert code == 0, output
    return python


def test_without_torch_the_core_works(python):
    code, output = run(str(python), "-m", "evenkeel", "info")
    assert code == 0, output
    assert "cpu, reference" in output
    code, output = run(str(python), "-c", "import evenkeel.torch")
    assert code == 1
    assert "evenkeel.torch needs PyTorch, which is not installed" in output


def test_with_torch_the_operators_work(python):
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    assert [
        path.name for path in (site / "evenkeel").glob("*.so*") if "_torch" not in path.name
    ] == ["libevenkeel.so"]
    assert (site / "evenkeel" / "py.typed").exists()
    (site / "torch_is_there.pth").write_text(sysconfig.get_paths()["platlib"] + "\n")
    program = """
import torch, evenkeel.torch as ek
x = torch.randn(4, 8, requires_grad=True)
y = ek.LayerNorm(8)(x)
y.sum().backward()
assert torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
print(ek.__file__)
"""
    code, output = run(str(python), "-c", program)
    assert code == 0, output
    assert str(python.parent.parent) in output
