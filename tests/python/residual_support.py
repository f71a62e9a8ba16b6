"""What tests of norms with a residual share: a call of ours, the same in two steps, and in float64."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from cuda_support import needs_kernels
from torch import nn

import evenkeel.torch as ek
from support import DTYPES, HALVES, ROW_NORMS, Call, check, make, name_of, random
from support import oracle as oracle_of_norm

F64, F32, F16, BF16 = DTYPES

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_kernels)])

# x, residual and sum. A sum of float64 is added in it, every other one in float32.
MIXES = [
    (x, residual, total)
    for x, residual, total in itertools.product(DTYPES, repeat=3)
    if total == F64 or F64 not in (x, residual)
]
mixes = pytest.mark.parametrize(
    "mix", MIXES, ids=lambda mix: "-".join(name_of(dtype) for dtype in mix)
)
typical_mixes = pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None)], ids=str)


def sum_of(x, residual, dtype):
    compute = F64 if dtype == F64 else F32
    return (x.to(compute) + residual.to(compute)).to(dtype)


@dataclass
class Added:
    """A call of a norm with a residual."""

    call: Call
    residual: torch.Tensor
    sum_dtype: torch.dtype | None = None

    def inputs(self):
        return self.call.inputs() | {"residual": self.residual}

    def replaced(self, **changes):
        residual = changes.pop("residual", self.residual)
        return Added(self.call.replaced(**changes), residual, self.sum_dtype)

    def to(self, device):
        return self.replaced(**{name: tensor.to(device) for name, tensor in self.inputs().items()})

    def type_of_sum(self):
        return self.sum_dtype or self.residual.dtype

    def ours(self):
        options = {"residual": self.residual, "sum_dtype": self.sum_dtype} | self.call.options
        return getattr(ek, self.call.norm)(*self.call.arguments(), **options)

    def in_two_steps(self):
        total = sum_of(self.call.x, self.residual, self.type_of_sum())
        options = {"out_dtype": self.call.x.dtype} | self.call.options
        return getattr(ek, self.call.norm)(
            *self.call.replaced(x=total).arguments(), **options
        ), total

    def oracle(self):
        """In float64, but for the rounding of the sum, which gradients do not see."""
        x, residual = self.call.x, self.residual
        exact = x.double() + residual.double()
        rounded = sum_of(x, residual, self.type_of_sum()).double()
        total = exact + (rounded - exact).detach()
        return oracle_of_norm(self.call.replaced(x=total)), total


def added(norm, mix=(F32, F32, None), shape=(6, 5, 40), weight=F32, **options):
    x, residual, total = mix
    bias = None if norm == "rms_norm" else weight
    call = make(norm, shape, shape[-1:], x, weight, bias, **options)
    return Added(call, random(shape, residual, seed=3, scale=2.0), total)


def with_gradients(run, call, dy=None, dsum=None, wanted=None):
    """y, sum and gradients by name of `run` (a method of Added)."""
    leaves = {
        name: tensor.detach().requires_grad_(wanted is None or name in wanted)
        for name, tensor in call.inputs().items()
    }
    outputs = run(call.replaced(**leaves))
    sought = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [
        (result, gradient if gradient.dtype == result.dtype else gradient.to(result.dtype))
        for result, gradient in zip(outputs, (dy, dsum), strict=True)
        if gradient is not None
    ]
    results, arriving = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(results, list(sought.values()), arriving, allow_unused=True)
    named = {f"d{name}": g for name, g in zip(sought, gradients, strict=True)}
    return {"y": outputs[0].detach(), "sum": outputs[1].detach()} | named


def function_of(call, run=Added.ours):
    names = list(call.inputs())
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call.inputs().values()]
    return lambda *tensors: run(call.replaced(**dict(zip(names, tensors, strict=True)))), leaves


def directions(call, device="cpu"):
    shape = call.call.x.shape
    return random(shape, seed=8).to(device), random(shape, seed=9).to(device)


def check_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name]
        assert (value is None) == (other is None), name
        if value is not None:
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name


def check_call(call, dy, dsum):
    """Against float64; dtypes, too. dy and dsum: float32 that the dtypes of y and sum can hold, or None."""
    actual = with_gradients(Added.ours, call, dy, dsum)
    expected = with_gradients(Added.oracle, call, dy, dsum)
    assert actual["y"].dtype == (call.call.options.get("out_dtype") or call.call.x.dtype)
    assert actual["sum"].dtype == call.type_of_sum()
    rstd_is_wide = call.type_of_sum() == F64
    for name, value in actual.items():
        if expected[name] is None:
            assert value is None, name
            continue
        if name.startswith("d"):
            assert value.dtype == call.inputs()[name[1:]].dtype, name
        compute = None if rstd_is_wide or name == "sum" else F32
        check(
            value, expected[name].double(), name, compute, scale=8.0 if name.startswith("d") else 0
        )


def rounded(tensor, dtype):
    return tensor.to(dtype).float() if dtype in HALVES else tensor


class Block(nn.Module):
    """A pre-norm block and a post-norm one."""

    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = ek.RMSNorm(width, eps=1e-5), ek.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x, residual):
        y, residual = self.first(x, residual)
        y, residual = self.second(self.down(self.up(y).relu()), residual)
        return y * 2, residual


def block_in_two_steps(block, x, residual):
    residual = x + residual
    residual = residual + block.down(block.up(block.first(residual)).relu())
    return block.second(residual) * 2, residual
