"""evenkeel's C ABI for Python, without a framework: the structs of evenkeel.h and prepared calls.

A prepared call has its structs and workspace made once, so that calling it costs one foreign
function call. Pointers are plain integers (a tensor's data_ptr()); whoever prepares a call keeps
the memory alive.
"""

import ctypes

DTYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 3}
OPS = {"layer_norm": 0, "rms_norm": 1, "group_norm": 2}
LAYOUTS = {"nchw": 0, "nhwc": 1}


class Problem(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("op", "layout", "activation", "casting", "reserved")]
        + [(name, ctypes.c_int64) for name in ("rows", "cols", "inner_rows")]
        + [(name, ctypes.c_int64) for name in ("samples", "channels", "spatial", "groups")]
        + [("eps", ctypes.c_double), ("weight_offset", ctypes.c_double)]
    )


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("outer_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Vector(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("x", Tensor),
        ("y", Tensor),
        ("weight", Vector),
        ("bias", Vector),
        ("mean", ctypes.c_void_p),
        ("rstd", ctypes.c_void_p),
    ]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("dy", Tensor),
        ("x", Tensor),
        ("weight", Vector),
        ("bias", Vector),
        ("mean", ctypes.c_void_p),
        ("rstd", ctypes.c_void_p),
        ("dx", Tensor),
        ("dweight", Vector),
        ("dbias", Vector),
    ]


class Execution(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("parallel", ctypes.c_void_p),
        ("backend", ctypes.c_char_p),
    ]


def sized(struct, **fields):
    """A struct that records its own size, as the EK_..._INIT macros do."""
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def tensor(pointer, dtype):
    """A dense tensor."""
    return Tensor(data=pointer, dtype=DTYPES[dtype])


def vector(pointer, dtype):
    """A parameter vector; a pointer of None means absent."""
    return Vector(data=pointer, dtype=DTYPES[dtype])


class Evenkeel:
    """The loaded library."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        for name in ("ek_last_error", "ek_version", "ek_cpu_target_name"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.version = self.library.ek_version().decode()
        target = self.library.ek_cpu_target_name(0)
        self.target = target.decode() if target else "none"

    def _check(self, status):
        if status:
            raise RuntimeError(self.library.ek_last_error().decode())

    def _prepare(self, name, problem, args, threads, backend):
        execution = sized(Execution, threads=threads, backend=backend.encode() if backend else None)
        references = ctypes.byref(problem), ctypes.byref(args), ctypes.byref(execution)
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"ek_{name}_workspace")(*references, ctypes.byref(size)))
        workspace = ctypes.create_string_buffer(size.value + 64)
        execution.workspace = ctypes.addressof(workspace)
        execution.workspace_size = size.value
        run = getattr(self.library, f"ek_{name}")

        def call():
            if run(*references):
                raise RuntimeError(self.library.ek_last_error().decode())

        call.keep = workspace
        return call

    def forward(self, problem, args, threads, backend=None):
        """A callable that runs the forward pass once."""
        return self._prepare("forward", problem, args, threads, backend)

    def backward(self, problem, args, threads, backend=None):
        """A callable that runs the backward pass once."""
        return self._prepare("backward", problem, args, threads, backend)
