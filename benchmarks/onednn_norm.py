"""oneDNN's norms and its addition, called through the shim in onednn_shim.cc.

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
        [(name, ctypes.c_int32) for name in ("op", "nhwc", "dtype", "y_dtype", "backward")]
        + [
            (name, ctypes.c_int64)
            for name in ("rows", "cols", "samples", "channels", "height", "width", "groups")
        ]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("x", "y", "scale", "shift", "mean", "variance")]
        + [(name, ctypes.c_void_p) for name in ("dy", "dx", "dscale", "dshift")]
    )


class AddRequest(ctypes.Structure):
    """Mirrors its namesake."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("rows", "cols")]
        + [(name, ctypes.c_int32) for name in ("a_dtype", "b_dtype", "out_dtype")]
        + [(name, ctypes.c_void_p) for name in ("a", "b", "out")]
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
        for name, request in (("onednn_create", Request), ("onednn_create_add", AddRequest)):
            getattr(self.library, name).restype = ctypes.c_void_p
            getattr(self.library, name).argtypes = [ctypes.POINTER(request)]
        self.library.onednn_execute.argtypes = [ctypes.c_void_p]
        for name in ("onednn_last_error", "onednn_last_name", "onednn_version"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.version = self.library.onednn_version().decode()

    def prepare(self, request):
        """A callable that runs the primitive once, and the name of the implementation oneDNN chose."""
        call = self._call(self.library.onednn_create(ctypes.byref(request)))
        return call, self.library.onednn_last_name().decode()

    def prepare_add(self, request):
        """A callable that adds once."""
        return self._call(self.library.onednn_create_add(ctypes.byref(request)))

    def _call(self, handle):
        if not handle:
            raise RuntimeError(self.library.onednn_last_error().decode())
        execute = self.library.onednn_execute

        def call():
            if execute(handle):
                raise RuntimeError(self.library.onednn_last_error().decode())

        return call
