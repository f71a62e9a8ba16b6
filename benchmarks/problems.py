"""The problems that are compared: read from the text lists of tests/cases, and their tensors.

Only what all libraries have in common counts here: operation, sizes and layout (the format itself
is described in tests/support/cases.h). Dtypes and passes are chosen on the command line, so lines
that differ only in others are one problem. A dtype such as "bf16+f32" makes a row norm one of
x + residual: x and y in the first type, residual and sum in the second.
"""

import itertools
import math
import pathlib
from dataclasses import dataclass

import torch

CASES = pathlib.Path(__file__).parent.parent / "tests" / "cases"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
WITH_RESIDUAL = ("f32+f32", "bf16+bf16", "bf16+f32")
EPS = 1e-5
PAGE = 4096


@dataclass(frozen=True)
class Problem:
    """One operation on one shape. Row norms use rows and cols, group norm the rest."""

    op: str
    rows: int = 0
    cols: int = 0
    samples: int = 0
    channels: int = 0
    spatial: int = 0
    groups: int = 0
    layout: str = ""

    @property
    def is_group(self):
        return self.op == "group_norm"

    def has(self, dtype):
        """Whether there is such a norm: group norm takes no residual."""
        return not (self.is_group and "+" in dtype)

    @property
    def pixels(self):
        """Height and width; a square where there is one."""
        side = math.isqrt(self.spatial)
        return (side, side) if side * side == self.spatial else (1, self.spatial)

    @property
    def shape(self):
        return (
            (self.samples, self.channels, *self.pixels) if self.is_group else (self.rows, self.cols)
        )

    @property
    def units(self):
        """How many means there are."""
        return self.samples * self.groups if self.is_group else self.rows

    @property
    def parameters(self):
        return self.channels if self.is_group else self.cols

    def __str__(self):
        return "x".join(map(str, self.shape))


def read(path):
    """The problems of a case list, each once, in its order."""
    names = [name for name in Problem.__dataclass_fields__ if name not in ("op", "layout")]
    problems = {}
    for line in path.read_text().splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        keys = dict(word.split("=", 1) for word in words[1:])
        axes = [
            [(name, int(value)) for value in keys[name].split(",")]
            for name in names
            if name in keys
        ]
        layouts = keys.get("layout", "nchw").split(",") if words[0] == "group_norm" else [""]
        for layout, *sizes in itertools.product(layouts, *axes):
            problems[Problem(op=words[0], layout=layout, **dict(sizes))] = None
    return list(problems)


class Tensors:
    """Inputs and outputs of one problem in one dtype, made once and used by every library.

    Each big tensor begins at its own place within a page, and the outputs where the allocator
    would put torch's: equal places make loads wait for unrelated stores, which costs some libraries
    a third of their speed. weight, bias and their gradients are float32; `weight_as_x` and
    `bias_as_x` are the same values in the dtype of what is normalized. mean, rstd and variance are
    the exact ones, so that a backward pass can be timed on its own.

    What is normalized is x, or its sum with the residual, rounded. dsum is the gradient that arrives
    at the sum from elsewhere; dx has the sum's dtype.
    """

    def __init__(self, problem, dtype, mean=0.25, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.dtype, plus, residual = dtype.partition("+")
        self.adds = bool(plus)
        self.normalized_dtype = residual or self.dtype
        x_kind, kind = DTYPES[self.dtype], DTYPES[self.normalized_dtype]

        def normal(shape):
            return torch.randn(shape, generator=generator)

        def big(place, values=None, kind=x_kind):
            spare = torch.empty(math.prod(problem.shape) + PAGE, dtype=kind)
            begin = (place - spare.data_ptr()) % PAGE // spare.element_size()
            flat = spare[begin : begin + math.prod(problem.shape)]
            if problem.layout == "nhwc":
                samples, channels, height, width = problem.shape
                result = flat.view(samples, height, width, channels).permute(0, 3, 1, 2)
            else:
                result = flat.view(problem.shape)
            return result.zero_() if values is None else result.copy_(values)

        parameters = torch.float64 if dtype == "f64" else torch.float32
        self.statistics_dtype = "f64" if dtype == "f64" else "f32"
        self.x = big(2048, normal(problem.shape) + mean)
        self.dy = big(1024, normal(problem.shape))
        self.y = big(384)
        self.dx = big(384, kind=kind)
        self.weight_as_x = (1 + 0.2 * normal(problem.parameters)).to(kind)
        self.bias_as_x = (0.2 * normal(problem.parameters)).to(kind)
        self.weight = self.weight_as_x.to(parameters)
        self.bias = self.bias_as_x.to(parameters)
        self.dweight = torch.zeros_like(self.weight)
        self.dbias = torch.zeros_like(self.weight)
        self.dweight_as_x = torch.zeros_like(self.weight_as_x)
        self.dbias_as_x = torch.zeros_like(self.weight_as_x)
        self.mean = torch.empty(problem.units, dtype=parameters)
        self.variance = torch.empty_like(self.mean)
        self.rstd = torch.empty_like(self.mean)
        self.normalized = self.x
        if self.adds:
            self.residual = big(3072, normal(problem.shape), kind)
            self.dsum = big(2560, normal(problem.shape), kind)
            self.sum = self.normalized = big(1536, self.x + self.residual, kind)
        self._fill_statistics(problem)

    def _fill_statistics(self, problem):
        units = self.normalized.reshape(problem.units, -1)
        for begin in range(0, problem.units, 1024):
            where = slice(begin, begin + 1024)
            values = units[where].double()
            mean = values.mean(1) if problem.op != "rms_norm" else values.new_zeros(len(values))
            variance = (values - mean[:, None]).square().mean(1)
            self.mean[where] = mean
            self.variance[where] = variance
            self.rstd[where] = (variance + EPS).rsqrt()
