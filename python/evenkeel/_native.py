"""The shared libraries: where they are, and what the core says about itself.

They lie in the package's folder; an editable installation has two of these, one for the sources and
one for what was built. EVENKEEL_LIBRARY_PATH names other folders, say a build folder.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib

import evenkeel


def folders():
    """Where libraries are looked for, in this order."""
    path = os.environ.get("EVENKEEL_LIBRARY_PATH")
    parts = path.split(os.pathsep) if path else evenkeel.__path__
    return [pathlib.Path(part) for part in parts]


def find(pattern):
    """The first file of that name, or None."""
    for folder in folders():
        for path in sorted(folder.glob(pattern)):
            return path
    return None


@functools.cache
def core():
    """The C library, by ctypes."""
    path = find("libevenkeel.so")
    if path is None:
        places = ", ".join(str(folder) for folder in folders())
        raise ImportError(f"evenkeel's library libevenkeel.so is not in {places}")
    library = ctypes.CDLL(str(path))
    for name, arguments in {
        "ek_version": [],
        "ek_backend_name": [ctypes.c_int32],
        "ek_cpu_target_name": [ctypes.c_int32],
    }.items():
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        function.argtypes = arguments
    return library


def version():
    return core().ek_version().decode()


def _names(function):
    names = []
    while (name := function(len(names))) is not None:
        names.append(name.decode())
    return names


def backends():
    """Best first."""
    return _names(core().ek_backend_name)


def cpu_targets():
    """The instruction sets of this machine that there are kernels for, best first."""
    return _names(core().ek_cpu_target_name)


def load_extension(name, path):
    """Imports the compiled module evenkeel.<name> from a file."""
    spec = importlib.util.spec_from_file_location(f"evenkeel.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def minor(version):
    """2.13.0+cpu is of 2.13."""
    return ".".join(version.split("+")[0].split(".")[:2])


def framework(name, title, remedy):
    """The module of a framework, or an ImportError with what to do."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"evenkeel.{name} needs {title}, which is not installed. {remedy}"
        ) from error
