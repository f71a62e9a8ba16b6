"""The modules for trainers: what importing them takes, and what they say where that is missing."""

import os
import subprocess
import sys

import pytest

PACKAGES = ["composer", "lightning", "pytorch_lightning", "transformers"]


def python(program, path=()):
    path = os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_is_imported_that_was_not_asked_for():
    result = python(
        "import sys, evenkeel, evenkeel.torch; "
        f"print(*[name for name in {PACKAGES} if name in sys.modules])"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    ("module", "install"),
    [
        ("composer", "pip install mosaicml"),
        ("lightning", "pip install lightning"),
        ("transformers", "pip install transformers"),
    ],
)
def test_missing_package_is_named(module, install, tmp_path):
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    result = python(f"import evenkeel.{module}", [tmp_path])
    assert result.returncode == 1
    assert f"ImportError: evenkeel.{module} needs" in result.stderr
    assert install in result.stderr
