"""The CUDA kernels on tensors with more elements than 32 bits can count."""

import math

import pytest
import torch
from cuda_support import check_samples, needs_kernels
from test_cuda import large_call as large_rows
from test_cuda import row_norms
from test_cuda_group import large_call as large_samples
from test_cuda_group import large_image, layouts, shapes

from support import Call, check, with_gradients

pytestmark = needs_kernels


@pytest.fixture(params=[2**31, 2**32], ids=["beyond 2^31", "beyond 2^32"])
def elements(request):
    """How many, where there is room for four bfloat16 tensors of them and more."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    yield request.param
    torch.cuda.empty_cache()


@pytest.mark.parametrize("length", [64, 4096])
@row_norms
def test_rows(norm, elements, length):
    """Rows at the beginning, in the middle and at the end are right."""
    rows = elements // length + 5

    def some(tensor):
        return torch.cat([tensor[first : first + 3] for first in (0, rows // 2 - 1, rows - 3)])

    check_samples(*large_rows(norm, (rows, length), torch.bfloat16), some)


@shapes({"kept": ((64, 32, 32), 8), "read twice": ((50, 37, 29), 5)})
@layouts
def test_samples(last, shape, groups, elements):
    """Samples at the beginning, in the middle and at the end are right."""
    samples = elements // math.prod(shape) + 5

    def some(tensor):
        return torch.cat([tensor[first : first + 2] for first in (0, samples // 2, samples - 2)])

    check_samples(*large_samples((samples, *shape), groups, last, torch.bfloat16), some)


@layouts
def test_one_group(last, elements):
    """Pixels at the beginning, in the middle and at the end are right, though all are one group's."""
    shape = (1, 8, elements // 8 + 8)
    x, dy = (large_image(shape, last, torch.bfloat16, seed) for seed in (1, 2))
    actual = with_gradients(Call.ours, Call("group_norm", x, 1), dy)

    def mean(function, *tensors):
        parts = zip(*(tensor[0].split(2**24, dim=1) for tensor in tensors), strict=True)
        return sum(function(*(t.double() for t in part)).sum() for part in parts) / x.numel()

    center = mean(lambda x: x, x)
    rstd = (mean(lambda x: (x - center).square(), x) + 1e-5).rsqrt()
    product = mean(lambda x, dy: dy * (x - center) * rstd, x, dy)
    plain = mean(lambda dy: dy, dy)

    def some(tensor):
        pixels = (0, shape[2] // 2, shape[2] - 100)
        return torch.cat([tensor[..., first : first + 100] for first in pixels], dim=-1)

    normalized = (some(x).double() - center) * rstd
    expected = (some(dy).double() - plain - normalized * product) * rstd
    check(some(actual["y"]), normalized, "y")
    check(some(actual["dx"]), expected, "dx")
