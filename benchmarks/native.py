"""Compiles the small native sources beside this file, once for each version of their text, and loads
them.
"""

import ctypes
import hashlib
import os
import pathlib
import subprocess

HERE = pathlib.Path(__file__).parent
CACHE = HERE.parent / "build" / "rivals"


def load(source, flags, link=()):
    """The shared library made from `source`; the compiler runs only if text or flags changed."""
    path = HERE / source
    compiler = os.environ.get("CXX", "g++") if path.suffix == ".cc" else os.environ.get("CC", "gcc")
    command = [compiler, "-shared", "-fPIC", *flags, str(path)]
    key = hashlib.sha256(path.read_bytes() + "\0".join([*command, *link]).encode()).hexdigest()[:16]
    target = CACHE / f"{path.stem}-{key}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, *link, "-o", str(scratch)], check=True)
        scratch.rename(target)
    return ctypes.CDLL(str(target))
