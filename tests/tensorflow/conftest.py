"""Tests of evenkeel.tensorflow, against the dev build unless EVENKEEL_LIBRARY_PATH says otherwise.

They have an environment of their own, .venv-tensorflow, as TensorFlow and torch pin different
packages.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

os.environ.setdefault("EVENKEEL_LIBRARY_PATH", str(ROOT / "build" / "dev"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Some virtual machines announce AMX and do not have it: a product in bfloat16 ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Programs that tests start find the package in the same place.
os.environ["PYTHONPATH"] = str(ROOT / "python")
sys.path.insert(0, str(ROOT / "python"))
# documents.py is shared with the tests of the Python package.
sys.path.append(str(ROOT / "tests" / "python"))
