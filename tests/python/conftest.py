"""Tests of the Python package, against the dev build unless EVENKEEL_LIBRARY_PATH says otherwise."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

os.environ.setdefault("EVENKEEL_LIBRARY_PATH", str(ROOT / "build" / "dev"))
# Some virtual machines announce AMX and do not have it: a product in bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Programs that tests start find the package in the same place.
os.environ["PYTHONPATH"] = str(ROOT / "python")
sys.path.insert(0, str(ROOT / "python"))
