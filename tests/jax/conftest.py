"""Tests of evenkeel.jax, against the dev build unless EVENKEEL_LIBRARY_PATH says otherwise.

They have an environment of their own, .venv-jax. EVENKEEL_TEST_DEVICE says where they run: cpu (the
default, whatever there is), as two devices of one process, or cuda, where JAX must see a GPU.
`scripts/gpu jax` runs them so.
"""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

os.environ.setdefault("EVENKEEL_LIBRARY_PATH", str(ROOT / "build" / "dev"))
os.environ["JAX_ENABLE_X64"] = "1"
DEVICE = os.environ.setdefault("EVENKEEL_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
elif DEVICE != "cuda":
    pytest.exit(f"EVENKEEL_TEST_DEVICE is '{DEVICE}', but must be cpu or cuda", returncode=2)
# Programs that tests start find the package in the same place.
os.environ["PYTHONPATH"] = str(ROOT / "python")
sys.path.insert(0, str(ROOT / "python"))
# commands.py and documents.py are shared with the tests of the Python package.
sys.path.append(str(ROOT / "tests" / "python"))


def pytest_sessionstart(session):
    import jax

    if jax.default_backend() != {"cpu": "cpu", "cuda": "gpu"}[DEVICE]:
        pytest.exit(
            f"EVENKEEL_TEST_DEVICE is {DEVICE}, but JAX uses {jax.default_backend()}", returncode=2
        )
