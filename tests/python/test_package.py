"""`pip install .` as a user does it: an isolated build, a fresh environment, with and without torch.

Compiled with the dev build's flags, so that the compiler cache has most of it already. The wheel has
operators for two versions of torch: the one that is installed, and its twin, which is the same but for the number.
Where .venv-jax is there, it has the handlers for JAX, too, which one library is for every Python.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv

import pytest
import torch

from evenkeel import _native

pytest.importorskip("pip", reason="needs pip")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
JAX = ROOT / ".venv-jax" / "bin" / "python"
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


TWIN = "2.1.99"


def run(*command, cwd="/", **environment):
    result = subprocess.run(
        command, cwd=cwd, env=CLEAN | environment, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


def packages_of(python):
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return site


def environment(folder, **options):
    venv.create(folder, **options)
    return folder / "bin" / "python"


def twin_of_torch(python):
    """Puts the headers and libraries of torch into an environment, under another version."""
    real, twin = pathlib.Path(torch.__file__).parent, packages_of(python) / "torch"
    twin.mkdir()
    for part in ("include", "lib"):
        (twin / part).symlink_to(real / part)
    (twin / "version.py").write_text(f"__version__ = '{TWIN}'\n")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment that has evenkeel and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    twin = environment(folder / "twin")
    twin_of_torch(twin)
    flags = FLAGS | {"cmake.define.EVENKEEL_TORCH_PYTHON": f"{sys.executable};{twin}"}
    if JAX.exists():
        flags["cmake.define.EVENKEEL_JAX_PYTHON"] = str(JAX)
    settings = [word for name, value in flags.items() for word in ("-C", f"{name}={value}")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    code, output = run(*pip, "wheel", *settings, "--no-deps", "-w", str(folder), str(ROOT))
    if "Installing build dependencies: finished with status 'error'" in output:
        pytest.skip("pip finds no package index to install scikit-build-core from")
    assert code == 0, output
    (wheel,) = folder.glob("evenkeel-*.whl")
    assert "-py3-none-linux_" in wheel.name
    python = environment(folder / "venv", with_pip=True)
    code, output = run(str(python), "-m", "pip", "install", "--no-deps", str(wheel))
    assert code == 0, output
    return python


def test_without_torch_the_core_works(python):
    for command in ([python, "-m", "evenkeel"], [python.parent / "evenkeel"]):
        code, output = run(*command, "info")
        assert code == 0, output
        assert "cpu, reference" in output
    code, output = run(python, "-c", "import evenkeel.torch")
    assert code == 1
    assert "evenkeel.torch needs PyTorch, which is not installed" in output


def test_what_is_installed(python):
    folder = packages_of(python) / "evenkeel"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {path.name for path in folder.glob("*.so*")} == {
        "libevenkeel.so",
        *(["evenkeel_jax.so"] if JAX.exists() else []),
        f"_torch-{_native.minor(TWIN)}{suffix}",
        f"_torch-{_native.minor(torch.__version__)}{suffix}",
    }
    assert (folder / "py.typed").exists()
    (metadata,) = importlib.metadata.distributions(name="evenkeel", path=[str(packages_of(python))])
    assert metadata.metadata["Author"] == "evenkeel maintainers"
    assert "layer norm" in metadata.metadata["Keywords"]
    assert "Typing :: Typed" in metadata.metadata.get_all("Classifier")


def test_with_torch_the_operators_work(python):
    (packages_of(python) / "torch_is_there.pth").write_text(sysconfig.get_paths()["platlib"] + "\n")
    program = """
import torch, evenkeel.torch as ek
x = torch.randn(4, 8, requires_grad=True)
y = ek.LayerNorm(8)(x)
y.sum().backward()
assert torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
print(ek._load.PATH)
"""
    code, output = run(python, "-c", program)
    assert code == 0, output
    folder = packages_of(python) / "evenkeel"
    assert output.strip() == str(next(folder.glob(f"_torch-{_native.minor(torch.__version__)}.*")))


@pytest.mark.skipif(not JAX.exists(), reason="needs .venv-jax")
def test_with_jax_the_handlers_work(python):
    program = """
import evenkeel.jax as ek, numpy as np
assert np.allclose(ek.rms_norm(np.full((2, 8), 3, np.float32)), 1)
print(ek._load.PATH)
"""
    folder = packages_of(python)
    code, output = run(JAX, "-c", program, PYTHONPATH=str(folder), JAX_PLATFORMS="cpu")
    assert (code, output.strip()) == (0, str(folder / "evenkeel" / "evenkeel_jax.so"))


def test_operators_for_any_other_torch_are_made_from_the_package(python, tmp_path):
    """With the wheel's own ones for this torch put aside."""
    folder = packages_of(python) / "evenkeel"
    (ready,) = folder.glob(f"_torch-{_native.minor(torch.__version__)}.*")
    aside = ready.rename(tmp_path / ready.name)
    try:
        code, output = run(python.parent / "evenkeel", "build", XDG_CACHE_HOME=str(tmp_path))
        assert code == 0, output
        path = re.search(r"^ready in \d+ s: (.+)$", output, re.M).group(1)
        assert path.startswith(str(tmp_path))
        program = "import torch, evenkeel.torch as ek; print(ek.layer_norm(torch.ones(2), (2,)))"
        code, output = run(python, "-c", program, XDG_CACHE_HOME=str(tmp_path))
        assert (code, output) == (0, "tensor([0., 0.])\n")
    finally:
        aside.rename(ready)


def test_source_distribution_is_complete(tmp_path):
    """It has every file that is kept in git but for results and pictures, and nothing else."""
    code, output = run("git", "ls-files", cwd=ROOT)
    if code != 0:
        pytest.skip("needs a git checkout")
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    code, log = run(sys.executable, "-c", program, cwd=ROOT)
    assert code == 0, log
    (path,) = tmp_path.glob("evenkeel-*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    left_out = ("benchmarks/results/", "docs/images/")
    kept = {
        name
        for name in output.splitlines()
        if (ROOT / name).exists() and not name.startswith(left_out)
    }
    assert kept - found == set()
    assert found - kept - set(run("git", "ls-files", "--others", cwd=ROOT)[1].split()) == {
        "PKG-INFO"
    }
