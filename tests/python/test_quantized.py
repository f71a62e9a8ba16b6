"""layer_norm_quantized and rms_norm_quantized: bit by bit what the norm in float32 and torch's conversions give.

The formula is written out in torch's operations, beside evenkeel's own norm with out_dtype=torch.float32.
"""

import math

import pytest
import torch
from cuda_support import needs_kernels
from torch._subclasses import FakeTensorMode
from torch.func import vmap

import evenkeel.torch as ek
from support import DTYPES, ROW_NORMS, name_of, random

E4M3, E5M2, I8 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
LARGEST = {E4M3: 448.0, E5M2: 57344.0, I8: 127.0}

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)
formats = pytest.mark.parametrize("dtype", FORMATS, ids=name_of)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_kernels)])


def quantized(y, dtype, scale=None, amax_bound=None, span=1):
    """The formula of docs/numerics.md."""
    largest = torch.tensor(LARGEST[dtype], device=y.device)
    if scale is None:
        amax = y.abs().flatten(-span).amax(-1).reshape(*y.shape[:-span], *[1] * span)
        if amax_bound is not None:
            amax = torch.minimum(amax, torch.tensor(amax_bound, device=y.device))
        scale = (amax / largest).clamp(min=2.0**-126)
    z = y * (1 / scale)
    if dtype == I8:
        return z.nan_to_num(nan=0.0).round().clamp(-128, 127).to(I8), scale
    infinite = z if dtype == E5M2 else math.nan  # E4M3: torch's conversion differs by version
    return torch.where(z.isinf(), infinite, z.clamp(-largest, largest)).to(dtype), scale


def same(found, expected):
    """Bit by bit, whatever the sign of a NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype == I8:
        return torch.equal(found, expected)
    nan = expected.float().isnan()
    codes = {1: torch.uint8, 4: torch.int32}.get(found.element_size(), torch.int16)
    if found.element_size() == 8:
        return torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    bits = [t.contiguous().view(codes).masked_fill(nan, 0) for t in (found, expected)]
    return torch.equal(nan, found.float().isnan()) and torch.equal(*bits)


def compare(norm, x, over, parameters, dtype, scale=None, amax_bound=None, **options):
    """One call of either function against the norm in float32 and the formula."""
    result = getattr(ek, f"{norm}_quantized")(
        x, over, *parameters, 1e-5, dtype=dtype, scale=scale, amax_bound=amax_bound, **options
    )
    y = getattr(ek, norm)(x, over, *parameters, 1e-5, out_dtype=torch.float32, **options)
    if "residual" in options:
        y, total = y
        assert same(result[2], total)
    q, used = quantized(y, dtype, scale, amax_bound, len(over))
    assert same(result[1], used)
    assert same(result[0], q)
    assert len(result) == (3 if "residual" in options else 2)
    return result


def parameters_of(norm, cols, dtype, device="cpu"):
    pair = random((cols,), dtype, 1, 0.5, 1.0).to(device), random((cols,), dtype, 2).to(device)
    return pair[:1] if norm == "rms_norm" else pair


@devices
@formats
@row_norms
def test_every_mix_of_types(norm, dtype, device):
    for x_dtype in DTYPES:
        for weight in DTYPES:
            for cols in (1, 7, 64, 129, 1024):
                x = random((5, cols), x_dtype, cols, 2.0, 0.25).to(device)
                parameters = parameters_of(norm, cols, weight, device)
                compare(norm, x, (cols,), parameters, dtype)
                compare(norm, x, (cols,), parameters, dtype, torch.tensor(0.01, device=device))


@devices
@formats
@row_norms
def test_residual(norm, dtype, device):
    for x_dtype in DTYPES:
        # A sum of float64 goes with a residual of float64.
        for residual in [x_dtype] if x_dtype == torch.float64 else DTYPES[1:]:
            for cols in (33, 512, 1000):
                x = random((4, 3, cols), x_dtype, 3).to(device)
                added = random((4, 3, cols), residual, 4).to(device)
                parameters = parameters_of(norm, cols, torch.bfloat16, device)
                compare(norm, x, (cols,), parameters, dtype, residual=added)
                compare(norm, x, (cols,), parameters, dtype, amax_bound=1.5, residual=added)


@devices
@formats
@row_norms
def test_hostile_values(norm, dtype, device):
    x = random((9, 100), torch.float32, 5)
    x[1, 3], x[3, 99], x[4], x[5], x[6] = math.nan, math.inf, 0.0, 1e-30, 1e30
    x = x.to(device)
    weight, *bias = parameters_of(norm, 100, torch.float32, device)
    for position, value in ((7, math.nan), (50, math.inf), (60, -1e38)):
        weight = weight.clone()
        weight[position] = value
        for bound in (None, 0.5):
            compare(norm, x, (100,), (weight, *bias), dtype, amax_bound=bound)
        for scale in (1e-3, 1e-38, 1e38, 0.0, math.inf, math.nan):
            compare(norm, x, (100,), (weight, *bias), dtype, torch.tensor([scale], device=device))


@devices
@formats
@row_norms
def test_a_row_of_zeros_has_a_scale_and_no_nan(norm, dtype, device):
    x = torch.zeros(2, 48, dtype=torch.bfloat16, device=device)
    q, scale = getattr(ek, f"{norm}_quantized")(x, (48,), dtype=dtype)
    assert scale.shape == (2, 1) and (scale == 2.0**-126).all()
    assert (q.float() == 0).all()


@devices
@row_norms
def test_views_and_shapes(norm, device):
    base = random((7, 6, 80), torch.float16, 6).to(device)
    for x in (base[..., :65], base[..., 3:68], base.transpose(0, 1)[..., 1:33], base[::2, :, ::2]):
        parameters = parameters_of(norm, x.shape[-1], torch.float32, device)
        q, scale = compare(norm, x, x.shape[-1:], parameters, E4M3)[:2]
        assert q.is_contiguous() and scale.shape == (*x.shape[:-1], 1)
    weights = [p.reshape(6, 80) for p in parameters_of(norm, 480, torch.float32, device)]
    _, scale = compare(norm, base, (6, 80), weights, I8)
    assert scale.shape == (7, 1, 1)
    q, scale = getattr(ek, f"{norm}_quantized")(base[:0], 80, dtype=I8)
    assert q.shape == (0, 6, 80) and scale.shape == (0, 6, 1)


@devices
def test_options(device):
    x = random((6, 96), torch.bfloat16, 7).to(device)
    weight = (random((96,), torch.bfloat16, 8),)
    weight = (weight[0].to(device),)
    for casting in (None, "llama", "gemma"):
        for activation in (None, "silu", "gelu"):
            options = {"casting": casting, "activation": activation, "weight_offset": 1.0}
            compare("rms_norm", x, (96,), weight, E5M2, **options)


def multiplies_scaled_rows(device):
    """Whether torch._scaled_mm takes a scale for each row: on a CPU not in every version."""
    q, scale = torch.ones(16, 16, device=device).to(E4M3), torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(q, q.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


@devices
def test_scaled_mm_takes_both(device):
    if device == "cpu" and not multiplies_scaled_rows(device):
        pytest.skip(f"torch {torch.__version__} multiplies no rows with scales on a CPU")
    x = random((32, 64), torch.bfloat16, 9).to(device)
    other = random((48, 64), torch.bfloat16, 10).to(device)
    q, scale = ek.rms_norm_quantized(x, (64,), dtype=E4M3)
    w, w_scale = ek.rms_norm_quantized(other, (64,), dtype=E4M3)
    expected = (q.float() * scale) @ (w.float() * w_scale).t()
    product = torch._scaled_mm(q, w.t(), scale, w_scale.t(), out_dtype=torch.bfloat16)
    assert (product.float() - expected).abs().max() <= expected.abs().max() * 2**-7


@row_norms
@pytest.mark.parametrize("wanting", ["x", "weight", "residual"])
def test_a_gradient_is_refused(norm, wanting):
    function = getattr(ek, f"{norm}_quantized")
    tensors = {"x": random((3, 8)), "weight": random((8,)), "residual": random((3, 8), seed=1)}
    tensors[wanting].requires_grad_()
    call = lambda: function(  # noqa: E731
        tensors["x"], (8,), tensors["weight"], dtype=I8, residual=tensors["residual"]
    )
    with pytest.raises(NotImplementedError, match=f"no gradient, but {wanting} requires one"):
        call()
    with torch.no_grad():
        assert not any(result.requires_grad for result in call())


BAD = [
    ({"dtype": torch.float16}, ValueError, "dtype must be float8_e4m3fn, float8_e5m2 or int8"),
    ({"scale": torch.ones(2)}, ValueError, "scale must have one element"),
    ({"scale": torch.ones(1).double()}, ValueError, "scale must be float32"),
    ({"amax_bound": -1.0}, ValueError, "amax_bound must be positive"),
    ({"amax_bound": 1.0, "scale": torch.ones(1)}, ValueError, "there must be no scale"),
    ({"sum_dtype": torch.float32}, ValueError, "no residual"),
    ({"residual": torch.ones(3, 9)}, RuntimeError, "residual must have the shape"),
]


@row_norms
@pytest.mark.parametrize("options, error, words", BAD, ids=[words for _, _, words in BAD])
def test_bad_input(norm, options, error, words):
    with pytest.raises(error, match=words):
        getattr(ek, f"{norm}_quantized")(random((3, 8)), (8,), **({"dtype": E4M3} | options))


@formats
@row_norms
def test_opcheck(norm, dtype):
    x, added = random((3, 4, 40), torch.bfloat16), random((3, 4, 40), torch.float32, 1)
    operator = getattr(torch.ops.evenkeel, f"{norm}_quantized").default
    for options in ({}, {"scale": torch.tensor(0.1)}, {"residual": added, "amax_bound": 2.0}):
        torch.library.opcheck(operator, (x, [40]), {"dtype": dtype} | options)
    number = {"layer_norm": 0, "rms_norm": 1}[norm]
    arguments = (x, None, None, number, 1, 1e-5, 0, 0, 0.0, dtype, None, 0.0, added, torch.float32)
    torch.library.opcheck(torch.ops.evenkeel.quantized_forward.default, arguments)


@row_norms
def test_compiled_without_graph_breaks(norm):
    function = getattr(ek, f"{norm}_quantized")
    x, added = random((6, 64), torch.bfloat16), random((6, 64), torch.bfloat16, 1)

    def block(x, residual, scale):
        q, rows, total = function(x, (64,), dtype=E4M3, residual=residual)
        fixed, _ = function(total, (64,), dtype=I8, scale=scale)
        return q, rows, total, fixed

    scale = torch.tensor(0.02)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (6, 5):
        ours, eager = compiled(x[:rows], added[:rows], scale), block(x[:rows], added[:rows], scale)
        assert all(same(a, b) for a, b in zip(ours, eager, strict=True))


@formats
@row_norms
def test_fake_and_meta(norm, dtype):
    function = getattr(ek, f"{norm}_quantized")
    with FakeTensorMode():
        q, scale, total = function(
            torch.empty(5, 3, 16), (16,), dtype=dtype, residual=torch.empty(5, 3, 16)
        )
    assert (q.dtype, q.shape) == (dtype, (5, 3, 16))
    assert (scale.dtype, scale.shape) == (torch.float32, (5, 3, 1))
    assert total.shape == q.shape
    q, scale = function(torch.empty(5, 16, device="meta"), (16,), dtype=dtype)
    assert q.device.type == scale.device.type == "meta"


@row_norms
def test_vmap_of_x(norm):
    function = getattr(ek, f"{norm}_quantized")
    x, added = random((4, 3, 32)), random((4, 3, 32), seed=1)
    weight = random((32,), seed=2)
    batched = vmap(lambda x, r: function(x, (32,), weight, dtype=E4M3, residual=r))(x, added)
    alone = function(x, (32,), weight, dtype=E4M3, residual=added)
    assert all(same(a, b) for a, b in zip(batched, alone, strict=True))
    with pytest.raises(NotImplementedError, match="one weight for all of the batch"):
        vmap(lambda x, w: function(x, (32,), w, dtype=E4M3))(x, random((4, 32)))


@row_norms
def test_results_do_not_depend_on_threads_or_rows(norm):
    x = random((300, 257), torch.bfloat16)
    function = getattr(ek, f"{norm}_quantized")
    whole, threads = function(x, (257,), dtype=E4M3), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = function(x[:1], (257,), dtype=E4M3)
        assert all(same(a, b) for a, b in zip(whole, function(x, (257,), dtype=E4M3), strict=True))
    finally:
        torch.set_num_threads(threads)
    assert all(same(a, b[:1]) for a, b in zip(alone, whole, strict=True))
