"""What the tests of the CUDA kernels share: when they run, calls on the GPU, and comparisons.

The checks take a call and a gradient of its result, so that norms over rows and over groups are held to
the same rules: right values, the same bits in every run and stream, and memory written as a whole.
"""

import contextlib
import math

import pytest
import torch

import evenkeel.torch as ek
from evenkeel import _native
from support import (
    COPIES,
    DTYPES,
    Call,
    arithmetic_of,
    check,
    check_same,
    name_of,
    oracle,
    random,
    recorded,
    terms_of_dx,
    with_gradients,
)

AVAILABLE = torch.cuda.is_available()
needs_kernels = [
    pytest.mark.skipif(not AVAILABLE, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        AVAILABLE and "cuda" not in _native.backends(), reason="this build has no CUDA backend"
    ),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FLOATS = [torch.float32, torch.bfloat16]
floats = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
# (of x, of the parameters)
dtype_pairs = pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(x, parameters) for x in DTYPES for parameters in dict.fromkeys([x, torch.float32])],
    ids=name_of,
)
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])

# More elements than this are left to the oracle on the GPU, where it takes no time.
MOST_FOR_CPU = 2**18


def moved(call, device="cuda"):
    return call.replaced(**{name: tensor.to(device) for name, tensor in call.inputs().items()})


def gradient_for(call):
    """Random values in the order of x's dimensions in memory, without its gaps."""
    return torch.empty_like(call.x).copy_(random(call.x.shape, call.x.dtype, seed=9))


def large(shape, dtype, seed):
    """Random values that the GPU makes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")


# ---- values ----


def terms_of_gradients(call, dy):
    """The sizes of what is summed to gradients. Of few parameters, all may happen to be smaller."""
    sums = {
        f"d{name}": (dy.double().norm() / math.sqrt(tensor.numel())).item()
        for name, tensor in call.inputs().items()
    }
    return sums | {"dx": terms_of_dx(call, dy)}


def check_on_gpu(call, outliers=0.0, dy=None):
    """Checks values, gradients and their dtypes against the oracle; returns them."""
    dy = gradient_for(call) if dy is None else dy
    actual = with_gradients(Call.ours, call, dy)
    place = "cpu" if call.x.numel() <= MOST_FOR_CPU else call.x.device
    twin, dy = moved(call, place), dy.to(place)
    expected = with_gradients(oracle, twin, dy.to(actual["y"].dtype))
    assert actual["y"].dtype == (call.options.get("out_dtype") or call.x.dtype)
    for name, tensor in call.inputs().items():
        assert actual[f"d{name}"].dtype == tensor.dtype, f"d{name}"
    scales = terms_of_gradients(twin, dy)
    for name, value in actual.items():
        assert value.device == call.x.device, name
        value, scale = value.to(place), scales.get(name, 0.0)
        check(value, expected[name], name, arithmetic_of(call, name), outliers, scale)
    return actual


def check_samples(call, dy, some):
    """Checks what `some` picks of y and dx, whose samples or rows must stand for themselves."""
    actual = with_gradients(Call.ours, call, dy)
    twin, some_dy = moved(call.replaced(x=some(call.x)), "cpu"), some(dy).cpu()
    expected = with_gradients(oracle, twin, some_dy)
    check(some(actual["y"]).cpu(), expected["y"], "y")
    scale = terms_of_dx(twin, some_dy)
    check(some(actual["dx"]).cpu(), expected["dx"], "dx", scale=scale)
    assert actual["dweight"].isfinite().all()


# ---- bits ----


def check_bits_beside_other_work(call, dy):
    """50 runs give the same bits while another stream keeps the chip busy."""
    matrix = large((4096, 4096), torch.bfloat16, seed=3)
    product = torch.empty_like(matrix)
    expected = with_gradients(Call.ours, call, dy)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with torch.cuda.stream(other):
            for _ in range(10):
                torch.mm(matrix, matrix, out=product)
        results.append(with_gradients(Call.ours, call, dy))
    torch.cuda.current_stream().synchronize()
    assert not other.query(), "the other stream was not busy until the end"
    torch.cuda.synchronize()
    for result in results:
        check_same(result, expected)


def check_parts_alone(call, dy, counts, firsts):
    """Some rows or samples give the same y and dx alone as among all others."""
    together = with_gradients(Call.ours, call, dy)
    for count in counts:
        for first in (*firsts, len(call.x) - count):
            part = slice(first, first + count)
            alone = with_gradients(Call.ours, call.replaced(x=call.x[part].clone()), dy[part])
            for name in ("y", "dx"):
                assert torch.equal(alone[name], together[name][part]), (name, count, first)


def check_two_streams(calls, dy):
    """Calls that run at the same time do not disturb each other."""
    expected = [with_gradients(Call.ours, call, dy) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(with_gradients(Call.ours, call, dy))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        check_same(result, expected[i % len(calls)])


def check_graph(call, dy):
    """A captured forward and backward pass gives the bits of an eager one for every new input."""

    def run():
        return with_gradients(Call.ours, call, dy)

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (10, 20, 30):
        call.x.copy_(large(call.x.shape, call.x.dtype, seed))
        dy.copy_(large(dy.shape, dy.dtype, seed + 1))
        graph.replay()
        check_same(captured, run())


# ---- memory ----


@contextlib.contextmanager
def poisoned_memory():
    """New memory is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_everything_is_written(call, dy):
    expected = with_gradients(Call.ours, call, dy)
    with poisoned_memory():
        result = with_gradients(Call.ours, call, dy)
    check_same(result, expected)
    for name, value in result.items():
        assert not value.isnan().any(), name


# ---- what torch does besides calling ----


def check_compiled(call, dy, backend):
    """Returns the results."""
    torch.compiler.reset()
    compiled = torch.compile(getattr(ek, call.norm), backend=backend, fullgraph=True)
    result = with_gradients(lambda c: compiled(*c.arguments(), **c.options), call, dy)
    check_same(result, with_gradients(Call.ours, call, dy))
    return result


def check_autocast(call):
    """It reads x as it is and writes bfloat16: one operator, and so one kernel."""

    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return call.ours()

    y = run()
    assert y.dtype == torch.bfloat16
    check(y.cpu(), oracle(moved(call, "cpu")))
    operators = recorded(run)
    assert "evenkeel::forward" in operators
    assert not operators & COPIES


def check_gradients(call):
    """By differences of the call's own values."""
    names = list(call.inputs())

    def function(*tensors):
        return call.replaced(**dict(zip(names, tensors, strict=True))).ours()

    leaves = [tensor.requires_grad_() for tensor in call.inputs().values()]
    assert torch.autograd.gradcheck(function, leaves)
