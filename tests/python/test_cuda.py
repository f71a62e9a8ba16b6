"""The CUDA kernels of layer norm and RMS norm: values, gradients, bits, streams, graphs, memory.

The oracle runs on the CPU, on copies of the same inputs. Every way of splitting a row (see
src/cuda/tuning.h) has its row lengths here.
"""

import contextlib

import pytest
import torch

import evenkeel.torch as ek
from evenkeel import _native
from support import (
    COPIES,
    DTYPES,
    HALVES,
    ROW_NORMS,
    Call,
    check,
    check_same,
    make,
    name_of,
    oracle,
    random,
    recorded,
    terms_of_dx,
    with_gradients,
)

AVAILABLE = torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        AVAILABLE and "cuda" not in _native.backends(), reason="this build has no CUDA backend"
    ),
]

LENGTHS = [1, 7, 64, 128, 256, 300, 512, 768, 1000, 1024, 2048, 3001, 4096, 5120, 8192]
LENGTHS += [12288, 16384, 20000, 65536, 131072, 262144, 300000]
# One of each way to split a row, aligned or not.
SOME_LENGTHS = [64, 101, 300, 1024, 3001, 12288, 20001, 65536, 140000, 300000]
FLOATS = [torch.float32, torch.bfloat16]

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
# (of x, of the parameters)
dtype_pairs = pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(x, parameters) for x in DTYPES for parameters in dict.fromkeys([x, torch.float32])],
    ids=name_of,
)


def rows_of(length):
    return 300 if length <= 1024 else 5


def moved(call, device="cuda"):
    return call.replaced(**{name: tensor.to(device) for name, tensor in call.inputs().items()})


def on_gpu(norm, shape, dtype=torch.float32, parameters=torch.float32, device="cuda", **options):
    """`make` for rows along the last dimension; RMS norm has no bias."""
    bias = None if norm == "rms_norm" else parameters
    return moved(make(norm, shape, shape[-1:], dtype, parameters, bias, **options), device)


def around(norm, x):
    """A call with this x, which may be large."""
    return on_gpu(norm, (1, x.shape[-1]), x.dtype).replaced(x=x)


def gradient_for(call):
    return random(call.x.shape, call.x.dtype, seed=9).to(call.x.device)


def large(shape, dtype, seed):
    """Random values that the GPU makes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")


def check_on_gpu(call, outliers=0.0, dy=None):
    """Checks values, gradients and their dtypes against the oracle."""
    dy = gradient_for(call) if dy is None else dy
    actual = with_gradients(Call.ours, call, dy)
    twin = moved(call, "cpu")
    expected = with_gradients(oracle, twin, dy.cpu())
    assert actual["y"].dtype == call.x.dtype
    for name, tensor in call.inputs().items():
        assert actual[f"d{name}"].dtype == tensor.dtype, f"d{name}"
    for name, value in actual.items():
        assert value.device == call.x.device, name
        scale = terms_of_dx(twin, dy.cpu()) if name == "dx" else 0.0
        check(value.cpu(), expected[name], name, outliers=outliers, scale=scale)


# ---- values and gradients ----


@pytest.mark.parametrize("length", LENGTHS)
@dtype_pairs
@row_norms
def test_values_and_gradients(norm, dtype, parameters, length):
    check_on_gpu(on_gpu(norm, (rows_of(length), length), dtype, parameters))


@pytest.mark.parametrize("length", SOME_LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
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


def test_group_norm_is_refused():
    x = torch.ones(2, 4, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="group norm has no CUDA kernels"):
        ek.group_norm(x, 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
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
    check_on_gpu(call)
    check_on_gpu(call.replaced(x=gradient_for(call)), dy=tensor)


# ---- determinism ----


@pytest.mark.parametrize("shape", [(4096, 1024), (300, 8192), (64, 65536), (100, 3001)], ids=str)
@floats
@row_norms
def test_bits_are_the_same_beside_other_work(norm, dtype, shape):
    call = around(norm, large(shape, dtype, seed=1))
    dy = large(shape, dtype, seed=2)
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


@pytest.mark.parametrize("length", [64, 1024, 3001, 8192, 65536])
@floats
@row_norms
def test_rows_do_not_depend_on_their_batch(norm, dtype, length):
    rows = 4096
    call = around(norm, large((rows, length), dtype, seed=1))
    dy = large((rows, length), dtype, seed=2)
    together = with_gradients(Call.ours, call, dy)
    for count in (1, 7):
        for first in (0, 1001, rows - count):
            part = slice(first, first + count)
            alone = with_gradients(Call.ours, call.replaced(x=call.x[part].clone()), dy[part])
            for name in ("y", "dx"):
                assert torch.equal(alone[name], together[name][part]), (name, count, first)


# ---- streams and graphs ----


@pytest.mark.parametrize("shape", [(2000, 1000), (64, 65536), (5, 300000)], ids=str)
@row_norms
def test_two_streams_at_once(norm, shape):
    calls = [around(norm, large(shape, torch.bfloat16, seed)) for seed in (1, 2)]
    dy = large(shape, torch.bfloat16, seed=3)
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


@pytest.mark.parametrize("shape", [(300, 64), (40, 1024), (5, 65536), (5, 300000)], ids=str)
@floats
@row_norms
def test_graph(norm, dtype, shape):
    """A captured forward and backward pass gives the bits of an eager one for every new input."""
    call = around(norm, large(shape, dtype, seed=1))
    dy = large(shape, dtype, seed=2)

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
        call.x.copy_(large(shape, dtype, seed))
        dy.copy_(large(shape, dtype, seed + 1))
        graph.replay()
        check_same(captured, run())


# ---- memory ----


@pytest.fixture
def much_memory():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("length", [64, 4096])
@pytest.mark.parametrize("elements", [2**31, 2**32], ids=["beyond 2^31", "beyond 2^32"])
@row_norms
@pytest.mark.usefixtures("much_memory")
def test_many_elements(norm, elements, length):
    """Rows at the beginning, in the middle and at the end are right."""
    rows = elements // length + 5
    call = around(norm, large((rows, length), torch.bfloat16, seed=1))
    dy = large((rows, length), torch.bfloat16, seed=2)

    def some(tensor):
        parts = [tensor[first : first + 3] for first in (0, rows // 2 - 1, rows - 3)]
        return torch.cat(parts).cpu()

    actual = with_gradients(Call.ours, call, dy)
    twin = moved(call.replaced(x=some(call.x)), "cpu")
    expected = with_gradients(oracle, twin, some(dy))
    check(some(actual["y"]), expected["y"], "y")
    check(some(actual["dx"]), expected["dx"], "dx", scale=terms_of_dx(twin, some(dy)))
    assert actual["dweight"].isfinite().all()


@contextlib.contextmanager
def poisoned_memory():
    """New memory is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("length", SOME_LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@row_norms
def test_everything_is_written(norm, dtype, length):
    call = around(norm, large((40, length), dtype, seed=1))
    dy = large((40, length), dtype, seed=2)
    expected = with_gradients(Call.ours, call, dy)
    with poisoned_memory():
        result = with_gradients(Call.ours, call, dy)
    check_same(result, expected)
    for name, value in result.items():
        assert not value.isnan().any(), name


# ---- what torch does besides calling ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@floats
@row_norms
def test_compile(norm, dtype, backend):
    torch.compiler.reset()
    call = on_gpu(norm, (40, 1024), dtype)
    dy = gradient_for(call)
    compiled = torch.compile(getattr(ek, norm), backend=backend, fullgraph=True)
    result = with_gradients(lambda c: compiled(*c.arguments(), **c.options), call, dy)
    check_same(result, with_gradients(Call.ours, call, dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@row_norms
def test_autocast(norm, dtype):
    """It reads x as it is and writes bfloat16: one operator, and so one kernel."""
    call = on_gpu(norm, (40, 1000), dtype)

    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return call.ours()

    y = run()
    assert y.dtype == torch.bfloat16
    check(y.cpu(), oracle(moved(call, "cpu")))
    operators = recorded(run)
    assert "evenkeel::forward" in operators
    assert not operators & COPIES


@pytest.mark.parametrize("activation", [None, "silu"])
@row_norms
def test_gradcheck(norm, activation):
    call = on_gpu(norm, (2, 3, 5), torch.float64, torch.float64, activation=activation)
    names = list(call.inputs())

    def function(*tensors):
        return call.replaced(**dict(zip(names, tensors, strict=True))).ours()

    leaves = [tensor.requires_grad_() for tensor in call.inputs().values()]
    assert torch.autograd.gradcheck(function, leaves)
