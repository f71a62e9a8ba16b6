"""The shared libraries: where they are, and what the core says about itself.

They lie in the package's folder; an editable installation has two of these, one for the sources and
one for what was built. EVENKEEL_LIBRARY_PATH names other folders, say a build folder.
"""

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import pathlib

import evenkeel

REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps evenkeel (or . in its source)"
)


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


def load_extension(name):
    """Imports the compiled module evenkeel.<name>; None where it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = find(name + suffix)
        if path is not None:
            spec = importlib.util.spec_from_file_location(f"evenkeel.{name}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def built_for(framework):
    """The version of a framework that the operators for it were built against, or None."""
    path = find(f"{framework}_version.txt")
    return path.read_text().strip() if path else None


def minor(version):
    return version.split("+")[0].split(".")[:2]


def require(framework, title):
    """The module of a framework, once it is the one that evenkeel's operators were built against.

    They use its C++ interface, which changes from one minor version to the next: with another one,
    loading would end in an unresolved symbol, or worse.
    """
    try:
        module = importlib.import_module(framework)
    except ImportError as error:
        raise ImportError(
            f"evenkeel.{framework} needs {title}, which is not installed. "
            f"Install it, then build evenkeel again: {REBUILD}"
        ) from error
    built = built_for(framework)
    if built is None:
        raise ImportError(
            f"This evenkeel was built without {title}, so it has no operators for it. "
            f"Build it again, now that {framework} {module.__version__} is there: {REBUILD}"
        )
    if minor(built) != minor(module.__version__):
        raise ImportError(
            f"evenkeel's operators were built against {framework} {built}, but {framework} "
            f"{module.__version__} is installed. Build evenkeel again: {REBUILD}"
        )
    return module
