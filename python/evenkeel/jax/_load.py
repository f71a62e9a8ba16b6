"""Loads the handlers and registers them with XLA, or says plainly why it cannot.

They are a plain shared library that XLA calls by its foreign function interface. That has a version
of its own: a framework takes handlers of its own version or an older one, whatever jax's version is.
"""

import ctypes
import pathlib
import re

from evenkeel import _native

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps . (in evenkeel's source)"
LIBRARY = "evenkeel_jax.so"


def framework_version():
    """(major, minor) of the interface that the installed jaxlib has."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    numbers = dict(
        re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text(), re.M)
    )
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def check_version(built, there):
    """Both are (major, minor)."""
    if built[0] == there[0] and built[1] <= there[1]:
        return
    raise ImportError(
        "evenkeel's handlers were built for version {}.{} of XLA's foreign function interface, "
        "but jax {} has version {}.{}. Build evenkeel again: {}".format(
            *built, jax.__version__, *there, REBUILD
        )
    )


def load():
    path = _native.find(LIBRARY)
    if path is None:
        raise ImportError(
            "This evenkeel was built without jaxlib's headers, so it has no handlers for JAX. "
            f"Build it again, now that jax {jax.__version__} is there: {REBUILD}"
        )
    _native.core()  # which the handlers find by its name in the process, wherever they lie
    library = ctypes.CDLL(str(path))
    check_version((ctypes.c_int32 * 2).in_dll(library, "ek_jax_ffi_version"), framework_version())
    for name in ("forward", "backward"):
        for target, symbol, platform in (
            (name, f"{name}_cpu", "cpu"),
            (name, f"{name}_cuda", "CUDA"),
            (f"{name}_scratch", f"{name}_cuda_scratch", "CUDA"),
        ):
            handler = jax.ffi.pycapsule(getattr(library, f"ek_jax_{symbol}"))
            try:
                jax.ffi.register_ffi_target(f"evenkeel_{target}", handler, platform=platform)
            except Exception as error:
                raise ImportError(
                    f"jax {jax.__version__} refuses evenkeel's handlers: {error} "
                    f"Build evenkeel again: {REBUILD}"
                ) from error
    return str(path), library


jax = _native.framework("jax", "JAX", f"Install it, then build evenkeel: {REBUILD}")
PATH, library = load()
