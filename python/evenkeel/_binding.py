"""The operators for torch: one compiled file for each minor version of torch and of Python.

They use torch's C++ interface, which changes from one minor version to the next: with another one,
loading would end in an unresolved symbol, or worse. A wheel carries those that it was built with,
side by side, and the sources; `python -m evenkeel build` (build.py) makes any other one and keeps it
in the user's cache. libevenkeel.so itself knows neither torch nor Python.
"""

import hashlib
import os
import pathlib
import sysconfig

import evenkeel
from evenkeel import _native

BUILD = "python -m evenkeel build"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def file_name(version):
    """As bindings/torch/CMakeLists.txt names it."""
    return f"_torch-{_native.minor(version)}{SUFFIX}"


def source_folder():
    """Where the C++ sources are: beside the modules of an installed package, or in a checkout."""
    installed = [pathlib.Path(part) / "_source" for part in evenkeel.__path__]
    checkout = pathlib.Path(__file__).resolve().parents[2]
    for folder in (*installed, checkout):
        if (folder / "bindings" / "torch").is_dir():
            return folder
    raise ImportError(f"evenkeel's sources are neither in {installed[0]} nor in {checkout}")


def sources():
    """What the operators are compiled from: the C++ files, the C header, the linker's script."""
    folder = source_folder()
    return [
        *sorted((folder / "bindings" / "torch").glob("*.cc")),
        folder / "bindings" / "torch" / "norm.h",
        folder / "bindings" / "memory" / "pages.h",
        folder / "include" / "evenkeel" / "evenkeel.h",
        folder / "cmake" / "extension.map",
    ]


def cache_folder():
    """The user's, for these sources: other versions of evenkeel have folders of their own."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources()))
    return pathlib.Path(cache) / "evenkeel" / digest.hexdigest()[:16]


def find(version):
    """The operators for this Python and that version of torch, or None."""
    name = file_name(version)
    for folder in (*_native.folders(), cache_folder()):
        if (folder / name).exists():
            return folder / name
    return None


def load():
    """The compiled module for the torch that is installed; an ImportError says what is missing."""
    torch = _native.framework("torch", "PyTorch", f"Install it; then, if need be: {BUILD}")
    path = find(torch.__version__)
    if path is None:
        there = [file.name for folder in _native.folders() for file in folder.glob("_torch-*.so")]
        raise ImportError(
            f"evenkeel has no operators for torch {torch.__version__} and this Python, "
            f"{file_name(torch.__version__)}, but {', '.join(sorted(there)) or 'none at all'}. "
            f"To make them, with g++ and in less than a minute, run: {BUILD}"
        )
    _native.core()  # which the operators find by its name in the process, wherever they lie
    return _native.load_extension("_torch", path)
