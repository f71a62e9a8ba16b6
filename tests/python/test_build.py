"""The operators for torch: which ones of several are taken, and `python -m evenkeel build`, which makes them."""

import re

import pytest
import torch
from commands import run

from evenkeel import _binding, _native

WORKS = """
import torch, evenkeel.torch as ek
x = torch.randn(4, 8, requires_grad=True)
y = ek.LayerNorm(8)(x)
y.sum().backward()
assert torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
try:
    ek.layer_norm(x, (9,))  # an exception of torch's, thrown here, caught there
except RuntimeError as error:
    print(ek._load.PATH)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of libraries, with the core alone; the user's cache is empty."""
    core = _native.find("libevenkeel.so").resolve()
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "libevenkeel.so").symlink_to(core)
    monkeypatch.setenv("EVENKEEL_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return libraries


def test_each_torch_and_python_has_its_own(folder):
    names = [
        f"_torch-{version}{suffix}"
        for version in ("2.9", "2.11", "2.13")
        for suffix in (_binding.SUFFIX, ".cpython-399-x86_64-linux-gnu.so")
    ]
    for name in names:
        (folder / name).touch()
    for version, minor in {"2.9.1": "2.9", "2.11.0+cu130": "2.11", "2.13.0a0+git1": "2.13"}.items():
        assert _binding.find(version) == folder / f"_torch-{minor}{_binding.SUFFIX}"
    assert _binding.find("2.1.0") is None


def test_other_sources_have_another_folder(folder, monkeypatch, tmp_path):
    before = _binding.cache_folder()
    assert tmp_path in before.parents
    changed = tmp_path / "ops.cc"
    changed.write_text("// changed")
    sources = [*_binding.sources(), changed]
    monkeypatch.setattr(_binding, "sources", lambda: sources)
    assert _binding.cache_folder() != before


def test_build(folder):
    assert "python -m evenkeel build" in run("-c", WORKS).stderr
    built = run("-m", "evenkeel", "build")
    assert built.returncode == 0, built.stderr
    path = re.search(r"^ready in \d+ s: (.+)$", built.stdout, re.M).group(1)
    assert path == str(_binding.find(torch.__version__))
    # OpenMP is torch's own.
    assert b"libgomp" not in _binding.find(torch.__version__).read_bytes()
    # Where the library itself is: nothing of its path is written into the operators.
    works = run("-c", WORKS)
    assert works.returncode == 0, works.stderr
    assert works.stdout.strip() == path
    assert list(_binding.cache_folder().iterdir()) == [_binding.find(torch.__version__)]


def test_nothing_is_built_that_is_there():
    done = run("-m", "evenkeel", "build")
    assert done.returncode == 0, done.stderr
    assert "already" in done.stdout


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "there is no compiler no-such-compiler"), ("false", "false failed")],
)
def test_a_compiler_that_fails_is_named(folder, compiler, message):
    done = run("-m", "evenkeel", "build", CXX=compiler)
    assert done.returncode == 1
    assert message in done.stderr
    assert _binding.find(torch.__version__) is None
