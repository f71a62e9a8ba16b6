"""evenkeel's C ABI for Python, without a framework: the structs of evenkeel.h and ready calls.

A ready call has its structs and workspace made once, so that calling it costs one foreign function
call, which checks and plans as any caller's does. Pointers are plain integers (a tensor's
data_ptr()); whoever makes a call keeps the memory alive. Nothing of the package is imported here, so that
benchmarks load libraries of their own choice.
"""

import ctypes

DTYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 3}
QUANTIZED = {"e4m3": 4, "e5m2": 5, "i8": 6}  # y's alone
OPS = {"layer_norm": 0, "rms_norm": 1, "group_norm": 2}
LAYOUTS = {"nchw": 0, "nhwc": 1}
CASTINGS = {"none": 0, "llama": 1, "gemma": 2}
ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}
DEVICES = {"cpu": 0, "cuda": 1}


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
        ("residual", Tensor),
        ("sum", Tensor),
        ("y_scale", ctypes.c_void_p),
        ("y_row_scale", ctypes.c_void_p),
        ("y_amax_bound", ctypes.c_double),
        ("scale", Tensor),
        ("shift", Tensor),
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
        ("dsum", Tensor),
        ("dresidual", Tensor),
        ("scale", Tensor),
        ("shift", Tensor),
        ("dscale", Tensor),
        ("dshift", Tensor),
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


def tensor(pointer, dtype, row_stride=0, outer_stride=0):
    """A tensor; strides of 0 mean dense."""
    return Tensor(pointer, row_stride, outer_stride, (DTYPES | QUANTIZED)[dtype])


def vector(pointer, dtype):
    """A parameter vector; a pointer of None means absent."""
    return Vector(data=pointer, dtype=DTYPES[dtype])


class UnsupportedError(RuntimeError):
    """The call is right, but the backend declines it."""


UNSUPPORTED = 2  # EK_UNSUPPORTED


def host_memory(size):
    """The address of scratch memory of that size, and what keeps it alive."""
    memory = ctypes.create_string_buffer(size + 64)
    return ctypes.addressof(memory), memory


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
            kind = UnsupportedError if status == UNSUPPORTED else RuntimeError
            raise kind(self.library.ek_last_error().decode())

    def _ready(self, name, problem, args, threads, backend, memory, **where):
        execution = sized(
            Execution, threads=threads, backend=backend.encode() if backend else None, **where
        )
        references = ctypes.byref(problem), ctypes.byref(args), ctypes.byref(execution)
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"ek_{name}_workspace")(*references, ctypes.byref(size)))
        execution.workspace, workspace = memory(size.value)
        execution.workspace_size = size.value
        run = getattr(self.library, f"ek_{name}")

        def call():
            status = run(*references)
            if status:
                self._check(status)

        call.keep = workspace
        return call

    def forward(self, problem, args, threads, backend=None, memory=host_memory, **where):
        """A callable that runs the forward pass once; `where` are fields of the execution."""
        return self._ready("forward", problem, args, threads, backend, memory, **where)

    def backward(self, problem, args, threads, backend=None, memory=host_memory, **where):
        """A callable that runs the backward pass once."""
        return self._ready("backward", problem, args, threads, backend, memory, **where)
