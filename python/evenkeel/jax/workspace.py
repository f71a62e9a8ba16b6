"""How much scratch memory a call needs on the GPUs of this machine: asked of the C library while a
program is lowered, because XLA allocates it as one more result of the call.

Nothing is read at the addresses that are given here; they are apart from each other, and aligned as
XLA aligns.
"""

import ctypes
import functools
import math

import jax

from evenkeel import _abi, _native
from evenkeel.jax.norm import kind_of

DEVICE = {"device": _abi.DEVICES["cuda"]}  # what tests put in its place answers without a GPU
DTYPES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}


def on_gpus(direction, norm, operands, results):
    """Bytes, or None where there is no GPU; operands and results: shapes and dtypes by name."""
    shapes = operands | results
    arrays = tuple((name, each.shape, DTYPES[str(each.dtype)]) for name, each in shapes.items())
    sizes = [size_on(index, direction, norm, arrays) for index in gpus()]
    return max(sizes) if sizes else None


@functools.cache
def gpus():
    """An ordinal for each kind of GPU that JAX sees."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # there is no such backend
        return ()
    return tuple({each.device_kind: each.local_hardware_id for each in devices}.values())


@functools.cache
def size_on(index, direction, norm, arrays):
    """arrays: (name, shape, dtype) of all operands and results."""
    shape = next(shape for name, shape, _ in arrays if name == "x")
    fields = {}
    for place, (name, _, dtype) in enumerate(arrays, 1):
        address = place << 44
        kind = kind_of(name)
        if kind == "statistic":
            fields[name] = address
        else:
            fields[name] = (_abi.vector if kind == "parameter" else _abi.tensor)(address, dtype)
    args = _abi.sized(_abi.ForwardArgs if direction == "forward" else _abi.BackwardArgs, **fields)
    execution = _abi.sized(_abi.Execution, **DEVICE, device_index=index)
    size = ctypes.c_size_t()
    library = _native.core()
    references = (ctypes.byref(each) for each in (problem(norm, shape), args, execution, size))
    if getattr(library, f"ek_{direction}_workspace")(*references):
        library.ek_last_error.restype = ctypes.c_char_p
        raise RuntimeError(f"evenkeel: {library.ek_last_error().decode()}")
    return size.value


def problem(norm, shape):
    """ek_problem, as the handler makes it of x's buffer."""
    lead, rest = math.prod(shape[: norm.lead]), math.prod(shape[norm.lead :])
    if norm.op == "group_norm":
        channels = shape[-1] if norm.channels_last else shape[norm.lead]
        sizes = {
            "samples": lead,
            "channels": channels,
            "spatial": rest // channels,
            "groups": norm.groups,
        }
    else:
        sizes = {"rows": lead, "cols": rest}
    return _abi.sized(
        _abi.Problem, **norm.codes(), **sizes, eps=norm.eps, weight_offset=norm.weight_offset
    )
