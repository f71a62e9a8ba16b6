"""Tests of evenkeel.tensorflow, against the dev build unless EVENKEEL_LIBRARY_PATH says otherwise.

They have an environment of their own, .venv-tensorflow, as TensorFlow and torch pin different
packages. EVENKEEL_TEST_DEVICE says where they run: cpu (the default, whatever there is) or cuda,
where TensorFlow must see a GPU. `scripts/gpu tensorflow` runs them so.
"""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

os.environ.setdefault("EVENKEEL_LIBRARY_PATH", str(ROOT / "build" / "dev"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
DEVICE = os.environ.setdefault("EVENKEEL_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
elif DEVICE == "cuda":
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
else:
    pytest.exit(f"EVENKEEL_TEST_DEVICE is '{DEVICE}', but must be cpu or cuda", returncode=2)
# Some virtual machines announce AMX and do not have it: a product in bfloat16 ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Programs that tests start find the package in the same place.
os.environ["PYTHONPATH"] = str(ROOT / "python")
sys.path.insert(0, str(ROOT / "python"))
# commands.py and documents.py are shared with the tests of the Python package.
sys.path.append(str(ROOT / "tests" / "python"))


def pytest_sessionstart(session):
    if DEVICE == "cuda":
        import tensorflow as tf

        if not tf.config.list_physical_devices("GPU"):
            pytest.exit("EVENKEEL_TEST_DEVICE is cuda, but TensorFlow sees no GPU", returncode=2)
        # Products that round their inputs to 10 bits would make differences of their own.
        tf.config.experimental.enable_tensor_float_32_execution(False)


@pytest.fixture
def cudnn():
    """Skips where there is none."""
    from tf_support import lacks_cudnn

    if lacks_cudnn():
        pytest.skip(lacks_cudnn())
