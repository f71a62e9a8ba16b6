"""The CUDA kernels of layer norm and RMS norm: values, gradients, bits, streams, graphs, memory.

The oracle runs on copies of the same inputs, on the CPU unless they are large. Every way of splitting a
row (see src/cuda/row/policies.h) has its row lengths here.
"""

import json

import pytest
import torch
from commands import run
from cuda_support import (
    all_dtypes,
    backends,
    check_autocast,
    check_bits_beside_other_work,
    check_compiled,
    check_everything_is_written,
    check_gradients,
    check_graph,
    check_on_gpu,
    check_parts_alone,
    check_two_streams,
    dtype_pairs,
    floats,
    gradient_for,
    large,
    moved,
    needs_kernels,
    needs_two_gpus,
)

from support import HALVES, ROW_NORMS, Call, make, name_of, random, with_gradients

pytestmark = needs_kernels

LENGTHS = [1, 7, 64, 128, 256, 300, 512, 768, 1000, 1024, 2048, 3001, 4096, 5120, 8192]
LENGTHS += [12288, 16384, 20000, 65536, 131072, 262144, 300000]
# One of each way to split a row, aligned or not.
SOME_LENGTHS = [64, 101, 300, 1024, 3001, 12288, 20001, 65536, 140000, 300000]

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)


def rows_of(length):
    return 300 if length <= 1024 else 5


def on_gpu(norm, shape, dtype=torch.float32, parameters=torch.float32, device="cuda", **options):
    """`make` for rows along the last dimension; RMS norm has no bias."""
    bias = None if norm == "rms_norm" else parameters
    return moved(make(norm, shape, shape[-1:], dtype, parameters, bias, **options), device)


def around(norm, x):
    """A call with this x, which may be large."""
    return on_gpu(norm, (1, x.shape[-1]), x.dtype).replaced(x=x)


def large_call(norm, shape, dtype):
    """A call and a gradient for it."""
    return around(norm, large(shape, dtype, seed=1)), large(shape, dtype, seed=2)


# ---- values and gradients ----


@pytest.mark.parametrize("length", LENGTHS)
@dtype_pairs
@row_norms
def test_values_and_gradients(norm, dtype, parameters, length):
    check_on_gpu(on_gpu(norm, (rows_of(length), length), dtype, parameters))


@pytest.mark.parametrize("length", SOME_LENGTHS)
@all_dtypes
@row_norms
def test_silu(norm, dtype, length):
    check_on_gpu(on_gpu(norm, (5, length), dtype, activation="silu"))


@pytest.mark.parametrize("length", SOME_LENGTHS)
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_llama(dtype, length):
    # A value near the middle between two halves may be rounded to either.
    call = on_gpu("rms_norm", (5, length), dtype, dtype, casting="llama", weight_offset=1.0)
    check_on_gpu(call, outliers=0.02)


@pytest.mark.parametrize(
    "shape", [(130_000, 8), (130_000, 7), (20_000, 300), (9_000, 520)], ids=str
)
@pytest.mark.parametrize(
    ("norm", "dtype"), [("layer_norm", torch.bfloat16), ("rms_norm", torch.float32)], ids=str
)
def test_more_rows_than_fit_on_the_chip(norm, dtype, shape):
    check_on_gpu(on_gpu(norm, shape, dtype))


@pytest.mark.parametrize("length", [64, 3001, 20000])
@row_norms
def test_no_parameters(norm, length):
    check_on_gpu(on_gpu(norm, (5, length), parameters=None))


@row_norms
def test_empty_batch(norm):
    call = on_gpu(norm, (0, 8))
    result = with_gradients(Call.ours, call, torch.ones_like(call.x))
    assert result["y"].shape == result["dx"].shape == (0, 8)
    for name in result.keys() & {"dweight", "dbias"}:
        assert torch.equal(result[name], torch.zeros(8, device="cuda")), name


@needs_two_gpus
@row_norms
def test_device_that_is_not_the_current_one(norm):
    check_on_gpu(on_gpu(norm, (40, 1024), device="cuda:1"))
    assert torch.cuda.current_device() == 0


# ---- layouts in memory ----

# Views whose rows have this length, made of what `memory` gives for a shape.
VIEWS = {
    "columns of a wider tensor": lambda memory, n: memory((6, n + 1))[:, 1:],
    "storage offset": lambda memory, n: memory((6 * n + 1,))[1:].view(6, n),
    "every other row": lambda memory, n: memory((12, n))[::2],
    "rows with gaps": lambda memory, n: memory((6, n + 8))[:, :n],
    "transposed batch": lambda memory, n: memory((3, 4, n)).transpose(0, 1),
}


@pytest.mark.parametrize("length", [64, 1000, 3001, 20000])
@pytest.mark.parametrize("view", VIEWS)
@floats
@row_norms
def test_views(norm, dtype, view, length):
    """They are as good as contiguous tensors, both as x and as dy."""

    def memory(shape):
        return random(shape, dtype, seed=3).cuda()

    tensor = VIEWS[view](memory, length)
    call = around(norm, tensor)
    other = gradient_for(call).contiguous()
    check_on_gpu(call, dy=other)
    check_on_gpu(call.replaced(x=other), dy=tensor)


# ---- determinism ----


@pytest.mark.parametrize("shape", [(4096, 1024), (300, 8192), (64, 65536), (100, 3001)], ids=str)
@floats
@row_norms
def test_bits_are_the_same_beside_other_work(norm, dtype, shape):
    check_bits_beside_other_work(*large_call(norm, shape, dtype))


@pytest.mark.parametrize("length", [64, 1024, 3001, 8192, 65536])
@floats
@row_norms
def test_rows_do_not_depend_on_their_batch(norm, dtype, length):
    check_parts_alone(*large_call(norm, (4096, length), dtype), counts=(1, 7), firsts=(0, 1001))


# ---- streams and graphs ----


@pytest.mark.parametrize("shape", [(2000, 1000), (64, 65536), (5, 300000)], ids=str)
@row_norms
def test_two_streams_at_once(norm, shape):
    calls = [around(norm, large(shape, torch.bfloat16, seed)) for seed in (1, 2)]
    check_two_streams(calls, dy=large(shape, torch.bfloat16, seed=3))


@pytest.mark.parametrize("shape", [(300, 64), (40, 1024), (5, 65536), (5, 300000)], ids=str)
@floats
@row_norms
def test_graph(norm, dtype, shape):
    check_graph(*large_call(norm, shape, dtype))


# ---- memory ----


@pytest.mark.parametrize("length", SOME_LENGTHS)
@all_dtypes
@row_norms
def test_everything_is_written(norm, dtype, length):
    check_everything_is_written(*large_call(norm, (40, length), dtype))


# ---- what torch does besides calling ----


@backends
@floats
@row_norms
def test_compile(norm, dtype, backend):
    call = on_gpu(norm, (40, 1024), dtype)
    check_compiled(call, gradient_for(call), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@row_norms
def test_autocast(norm, dtype):
    check_autocast(on_gpu(norm, (40, 1000), dtype))


@pytest.mark.parametrize("activation", [None, "silu"])
@row_norms
def test_gradcheck(norm, activation):
    check_gradients(on_gpu(norm, (2, 3, 5), torch.float64, torch.float64, activation=activation))


# ---- launches that fail ----

# Each run is a process of its own: a device may be lost to the one that provoked its error. A line for
# each call through the C interface: its status and message, and a sum of y where it could be computed.
CALLS = """
import ctypes, json, sys
import torch
from evenkeel import _abi, _native

class Library(_abi.Evenkeel):
    def _check(self, status):
        self.status, self.text = status, self.library.ek_last_error().decode()

library = Library(_native.find("libevenkeel.so"))
stream = torch.cuda.Stream()
x, y = torch.ones(8, 1024, device="cuda"), torch.full((8, 1024), 7.0, device="cuda")
problem = _abi.sized(_abi.Problem, op=_abi.OPS["layer_norm"], rows=8, cols=1024, eps=1e-5)

def memory(size):
    scratch = torch.empty(size + 64, dtype=torch.uint8, device="cuda")
    return scratch.data_ptr(), scratch

def prepared(address):
    none = _abi.vector(None, "f32")
    tensors = {"x": _abi.tensor(address, "f32"), "y": _abi.tensor(y.data_ptr(), "f32")}
    arguments = _abi.sized(_abi.ForwardArgs, **tensors, weight=none, bias=none)
    where = {"device": _abi.DEVICES["cuda"], "device_index": 0, "stream": stream.cuda_stream}
    return library.forward(problem, arguments, 0, "cuda", memory, **where)

def tell(call):
    library.status, library.text = 0, ""
    call()
    try:
        torch.cuda.synchronize()
        total = y.sum().item()
    except RuntimeError as error:
        total = None
    print(json.dumps([library.status, library.text, total]))

good, bad = prepared(x.data_ptr()), prepared(1 << 20)
torch.cuda.synchronize()
"""
# A capture that is spoiled by waiting for its stream takes no kernel; once it has ended, the stream does.
SPOILED_CAPTURE = """
tell(good)
cuda, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(stream.cuda_stream)
thread_local = 1
assert cuda.cuStreamBeginCapture_v2(handle, thread_local) == 0
assert cuda.cuStreamSynchronize(handle) != 0
library.status = 0
good()
spoiled = library.status, library.text
graph = ctypes.c_void_p()
assert cuda.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0
print(json.dumps([*spoiled, None]))
tell(good)
"""
# A kernel that reads where nothing is ends after its launch, and takes the device from the process.
LOST_DEVICE = """
tell(bad)
tell(good)
sys.stdout.flush()
import os
os._exit(0)  # what torch does at the end would fail too
"""
DEVICE_ERROR = 3  # EK_DEVICE_ERROR


def outcomes(program):
    done = run("-c", CALLS + program)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_launch_failure(status, text):
    assert status == DEVICE_ERROR
    assert text.startswith("cuda: launching ")
    assert " on device 0 failed: " in text


def test_launch_into_a_spoiled_capture_is_a_device_error():
    before, spoiled, after = outcomes(SPOILED_CAPTURE)
    assert before == after == [0, "", 0.0]
    check_launch_failure(*spoiled[:2])


def test_launch_on_a_lost_device_is_a_device_error():
    lost, next_call = outcomes(LOST_DEVICE)
    assert lost == [0, "", None]  # a launch does not wait for its kernel
    check_launch_failure(*next_call[:2])
    assert outcomes("tell(good)") == [[0, "", 0.0]]  # in another process
