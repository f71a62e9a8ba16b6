"""oneDNN's norms, called through the shim in onednn_shim.cc.

The `onednn` wheel has only the shared library, built for SYCL: it finds its processor through the
OpenCL runtime in the same environment, and schedules on TBB. `environment()` holds the variables
that this needs; they have to be set before the process starts. How many threads it takes follows
from the processors the process may use.
"""

import ctypes
import pathlib
import sys

import native

PREFIX = pathlib.Path(sys.prefix)
OPS = {"layer_norm": 0, "rms_norm": 1, "group_norm": 2}
DTYPES = {"f32": 0, "bf16": 1, "f16": 2}


class Request(ctypes.Structure):
    """Mirrors NormRequest."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("op", "nhwc", "dtype", "backward")]
        + [
            (name, ctypes.c_int64)
            for name in ("rows", "cols", "samples", "channels", "height", "width", "groups")
        ]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("x", "y", "scale", "shift", "mean", "variance")]
        + [(name, ctypes.c_void_p) for name in ("dy", "dx", "dscale", "dshift")]
    )


def environment():
    """The variables that the wheels' libraries need to find each other."""
    return {
        "LD_LIBRARY_PATH": str(PREFIX / "lib"),
        "OCL_ICD_FILENAMES": str(PREFIX / "lib" / "libintelocl.so"),
    }


class OneDnn:
    """The loaded library."""

    def __init__(self):
        flags = ["-std=c++17", "-O2", f"-I{PREFIX / 'include'}", f"-L{PREFIX / 'lib'}"]
        link = ["-l:libdnnl.so.3", "-Wl,--allow-shlib-undefined"]
        self.library = native.load("onednn_shim.cc", flags, link)
        self.library.onednn_create.restype = ctypes.c_void_p
        self.library.onednn_create.argtypes = [ctypes.POINTER(Request)]
        self.library.onednn_execute.argtypes = [ctypes.c_void_p]
        for name in ("onednn_last_error", "onednn_last_name", "onednn_version"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.version = self.library.onednn_version().decode()

    def prepare(self, request):
        """A callable that runs the primitive once, and the name of the implementation oneDNN chose."""
        handle = self.library.onednn_create(ctypes.byref(request))
        if not handle:
            raise RuntimeError(self.library.onednn_last_error().decode())
        name = self.library.onednn_last_name().decode()
        execute = self.library.onednn_execute

        def call():
            if execute(handle):
                raise RuntimeError(self.library.onednn_last_error().decode())

        return call, name
