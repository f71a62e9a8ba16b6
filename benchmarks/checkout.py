"""Importing this lets a program of this folder find what it shares with the package and the demo of its checkout."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

sys.path[:0] = [str(ROOT / "python"), str(ROOT)]
