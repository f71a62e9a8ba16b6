"""The tensors of a line, its results in float64, and the comparison with them.

Every contender gets the same inputs, and none is timed before its result was looked at.
"""

import math
import typing

import torch

from evenkeel.bench.lines import ACTIVATIONS, EPS, GROUPS, NO_DSUM

TOTAL_BYTES = 600_000_000  # beyond the caches of any GPU
MIN_SETS, MAX_SETS = 2, 256
REFERENCE_ELEMENTS = 1 << 24  # at a time: float64 and its gradients take ten times the memory

# Of the norm of the error / the norm of the result. The rivals' limit only catches nonsense: partial
# sums in bfloat16, as the Triton design has them, may be off by some percent, and some normalize x + residual
# before it is rounded.
HALF_TOLERANCE, FLOAT_TOLERANCE, RIVAL_TOLERANCE = 1e-2, 1e-4, 1e-1


class Set(typing.NamedTuple):
    x: torch.Tensor
    parameters: tuple  # weight and, except for RMS norm, bias; or scale and shift
    dy: torch.Tensor
    residual: torch.Tensor | None = None
    dsum: torch.Tensor | None = None  # what arrives at the sum of x and residual

    @property
    def inputs(self):
        residual = () if self.residual is None else (self.residual,)
        return (self.x, *residual, *self.parameters)

    @property
    def gradients(self):
        """What arrives at the outputs."""
        return (self.dy,) if self.dsum is None else (self.dy, self.dsum)


def make_set(line, device):
    """All leaves belong to the stream that is current here: autograd runs a backward on the stream of
    its forward, and that must be the one that is captured."""
    kind = {"dtype": line.x_dtype, "device": device}
    x, dy = (torch.randn(line.shape, **kind) for _ in range(2))
    if line.layout == "nhwc":
        x, dy = (v.contiguous(memory_format=torch.channels_last) for v in (x, dy))
    if line.modulates:
        # Views of what one linear layer gives for each sample.
        wide = torch.randn(line.shape[0], 6 * line.cols, dtype=line.x_dtype, device=device)
        parameters = wide.chunk(6, -1)[:2]
    else:
        parameters = [
            torch.randn(line.parameters, dtype=line.weight_dtype, device=device)
            for _ in range(1 if line.op == "rms_norm" else 2)
        ]
    residual = dsum = None
    if line.adds:
        kind["dtype"] = line.residual_dtype
        residual, dsum = (torch.randn(line.shape, **kind) for _ in range(2))
    s = Set(x, tuple(parameters), dy, residual, dsum)
    for leaf in s.inputs:
        leaf.requires_grad_()
    return s


def make_sets(line, device, total_bytes=TOTAL_BYTES):
    torch.manual_seed(0)
    count = min(max(math.ceil(total_bytes / line.x_bytes), MIN_SETS), MAX_SETS)
    return [make_set(line, device) for _ in range(count)]


def formula(line, x, weight, *bias):
    """The norm, written out."""
    shape = x.shape
    if line.is_group:
        x = x.reshape(shape[0], GROUPS, -1)
        weight, *bias = (v.view(-1, 1, 1) for v in (weight, *bias))
    if line.op != "rms_norm":
        x = x - x.mean(-1, keepdim=True)
    if line.modulates:
        weight, bias = 1 + weight[:, None], [b[:, None] for b in bias]
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).reshape(shape) * weight
    for b in bias:
        y = y + b
    return ACTIVATIONS[line.activation](y) if line.activation else y


def reference(line, s):
    """{pass: {output: result}} from float64, by autograd through the formula, some rows or samples at a time.

    Stored in float32, which is far closer than any tolerance.
    """
    normalized = s.x.detach()
    if line.adds:
        normalized = normalized + s.residual.detach()
    if line.modulates:
        return modulated_reference(line, s)
    parameters = [v.detach().double().requires_grad_() for v in s.parameters]
    count = max(1, REFERENCE_ELEMENTS // math.prod(line.shape[1:]))
    ys, dxs, sums = [], [], [torch.zeros_like(v) for v in parameters]
    for x, dy in zip(normalized.split(count), s.dy.split(count), strict=True):
        x = x.double().requires_grad_()
        y = formula(line, x, *parameters)
        dx, *parts = torch.autograd.grad(y, (x, *parameters), dy.double())
        ys.append(y.detach().float())
        dxs.append(dx.float())
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    y, dx = torch.cat(ys), torch.cat(dxs)
    names = ("dweight", "dbias")[: len(sums)]
    of_parameters = {name: total.float() for name, total in zip(names, sums, strict=True)}
    if not line.adds:
        return {"forward": {"y": y}, "backward": {"dx": dx} | of_parameters}
    total = dx + s.dsum.float()
    return {
        "forward": {"y": y, "sum": normalized.float()},
        "backward": {"dx": total, "dresidual": total} | of_parameters,
        NO_DSUM: {"dx": dx, "dresidual": dx} | of_parameters,
    }


def modulated_reference(line, s):
    """The same, one sample after the other."""
    parts = []
    for tensors in zip(s.x, *s.parameters, s.dy, strict=True):
        x, *parameters, dy = (tensor.detach().double()[None] for tensor in tensors)
        leaves = [leaf.requires_grad_() for leaf in (x, *parameters)]
        y = formula(line, *leaves)
        parts.append([v.detach().float() for v in (y, *torch.autograd.grad(y, leaves, dy))])
    y, dx, dscale, dshift = (torch.cat(of_samples) for of_samples in zip(*parts, strict=True))
    return {"forward": {"y": y}, "backward": {"dx": dx, "dscale": dscale, "dshift": dshift}}


class WrongResultError(Exception):
    pass


def check(ours, line, results, expected):
    """Raises a WrongResultError for the first result that is too far from the expected one.

    `expected` is {output: result} in the order of the results, which may go on behind it.
    """
    tolerance = FLOAT_TOLERANCE if line.x_dtype.itemsize >= 4 else HALF_TOLERANCE
    if not ours:
        tolerance = RIVAL_TOLERANCE
    if len(results) < len(expected):
        raise WrongResultError(f"there is no {list(expected)[len(results)]}")
    for (part, wanted), result in zip(expected.items(), results, strict=False):
        if result.shape != wanted.shape:
            raise WrongResultError(f"{part} has shape {tuple(result.shape)}")
        error = ((result.detach().float() - wanted).norm() / wanted.norm()).item()
        if not error < tolerance:  # so that NaN fails too
            raise WrongResultError(f"{part} is off by {error:.1e}, allowed is {tolerance:.0e}")
