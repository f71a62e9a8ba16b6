"""What the Python tests share: calls with their tensors, a float64 oracle, and comparisons.

The oracle is the written-out formula in float64; its gradients come from torch's autograd.
"""

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import evenkeel.torch as ek

ROW_NORMS = ["layer_norm", "rms_norm"]
NORMS = [*ROW_NORMS, "group_norm"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]

# How far a result may be from the oracle, relative to its largest element.
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-6}

# What a copy or a cast of a tensor looks like in a profile.
COPIES = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy"}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@dataclass
class Call:
    """One call of a norm; `over` is normalized_shape or num_groups."""

    norm: str
    x: torch.Tensor
    over: tuple | int
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float | None = 1e-5
    options: dict = field(default_factory=dict)

    def arguments(self):
        parameters = [self.weight] if self.norm == "rms_norm" else [self.weight, self.bias]
        return [self.x, self.over, *parameters, self.eps]

    def ours(self):
        return getattr(ek, self.norm)(*self.arguments(), **self.options)

    def torchs(self):
        return getattr(F, self.norm)(*self.arguments())

    def inputs(self):
        """The tensors of the call by name."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def replaced(self, **changes):
        values = {"x": self.x, "weight": self.weight, "bias": self.bias} | changes
        return Call(self.norm, over=self.over, eps=self.eps, options=self.options, **values)


def random(shape, dtype=torch.float32, seed=0, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * scale + shift).to(dtype)


def make(
    norm, shape, over, dtype=torch.float32, weight=torch.float32, bias=None, seed=0, **options
):
    """A call with ordinary random values; weight and bias: their dtype, or None for absent."""
    parameters = over if norm in ROW_NORMS else shape[1]
    eps = options.pop("eps", 1e-5)
    # Weights lie around one, with weight_offset too.
    shift = 1.0 - options.get("weight_offset", 0.0)
    return Call(
        norm,
        random(shape, dtype, seed, scale=1.5, shift=0.25),
        over,
        weight and random(parameters, weight, seed + 1, scale=0.5, shift=shift),
        bias and random(parameters, bias, seed + 2, scale=0.5),
        eps,
        options,
    )


def ordinary(norm, dtype=torch.float32, weight=torch.float32, bias=torch.float32, **options):
    """`make` with a shape that suits the norm; RMS norm has no bias."""
    if norm == "group_norm":
        return make(norm, (3, 12, 5, 3), 4, dtype, weight, bias, **options)
    return make(
        norm, (6, 5, 40), (40,), dtype, weight, None if norm == "rms_norm" else bias, **options
    )


def rows_and_rstd(call):
    """What is normalized, as rows and centered where the norm does that, and 1 / its deviation."""
    x = call.x.double()
    if call.norm == "group_norm":
        rows = x.reshape(x.shape[0], call.over, -1)
    else:
        rows = x.reshape(*x.shape[: x.dim() - len(call.over)], -1)
    if call.norm != "rms_norm":
        rows = rows - rows.mean(-1, keepdim=True)
    return rows, (rows.square().mean(-1, keepdim=True) + call.eps).rsqrt()


ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def oracle(call):
    """The result of a call in float64, differentiable."""
    rows, rstd = rows_and_rstd(call)
    y = (rows * rstd).reshape(call.x.shape)
    if call.options.get("casting") == "llama":
        # The gradient passes through the rounding as if it were not there.
        y = y + (y.to(call.x.dtype).double() - y).detach()
    # Parameters of a group norm stand at the channels.
    shape = (-1,) + (1,) * (y.dim() - 2) if call.norm == "group_norm" else call.over
    if call.weight is not None:
        offset = call.options.get("weight_offset", 0.0)
        y = y * (call.weight.double() + offset).reshape(shape)
    if call.bias is not None:
        y = y + call.bias.double().reshape(shape)
    return ACTIVATIONS.get(call.options.get("activation"), lambda z: z)(y)


def terms_of_dx(call, dy):
    """The size of what is summed to dx: where it cancels, dx is much smaller."""
    _, rstd = rows_and_rstd(call)
    weight = 1.0 if call.weight is None else call.weight + call.options.get("weight_offset", 0.0)
    return float(rstd.max() * dy.double().abs().max() * torch.as_tensor(weight).abs().max())


def with_gradients(function, call, dy, wanted=None):
    """The result and the gradients by name of `function` (oracle, Call.ours) of the call."""
    leaves = {
        name: tensor.detach().requires_grad_(wanted is None or name in wanted)
        for name, tensor in call.inputs().items()
    }
    y = function(call.replaced(**leaves))
    sought = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    dy = dy if dy.dtype == y.dtype else dy.to(y.dtype)
    gradients = torch.autograd.grad(y, list(sought.values()), dy)
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(sought, gradients, strict=True)}


def ordered(tensor):
    """The numbers of a half-precision tensor as integers: neighbours differ by one."""
    bits = tensor.contiguous().view(torch.int16).long()
    return torch.where(bits >= 0, bits, -0x8000 - bits)


def ulps(actual, expected):
    """How many representable numbers lie between each pair of elements; of one half dtype."""
    assert actual.dtype == expected.dtype
    return (ordered(actual) - ordered(expected)).abs()


def check(actual, expected, what="result", compute=None, outliers=0.0, scale=0.0):
    """Asserts that `actual` is `expected` (of the oracle), as well as its dtype can hold it.

    compute: the dtype of the arithmetic, where it is not float32 or, for float64 results, float64.
    outliers: the share of elements that may be wrong by some roundings of bfloat16.
    scale: the size of what the result is made of, where it is larger than the result.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    if actual.numel() == 0:
        return
    compute = compute or (torch.float64 if actual.dtype == torch.float64 else torch.float32)
    error = (actual.double() - expected).abs()
    scale = max(expected.abs().max().item(), scale)
    allowed = RELATIVE[compute] * scale
    if actual.dtype == torch.float32:  # compute may be float64
        allowed = allowed + expected.abs() * torch.finfo(torch.float32).eps
    good = error <= allowed
    if actual.dtype in HALVES:
        good |= ulps(actual, expected.to(actual.dtype)) <= 1
    bad = ~good
    if bad.double().mean() <= outliers and (error <= 0.03 * scale).all():
        return
    worst = torch.where(bad, error, -1).nan_to_num(nan=torch.inf).argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, actual.shape))
    raise AssertionError(
        f"{what} ({name_of(actual.dtype)}): {int(bad.sum())} of {bad.numel()} elements are wrong; "
        f"the worst at {where}: {actual[where].item()!r}, not {expected[where].item()!r}, "
        f"at a scale of {scale:.3g}"
    )


def check_call(call, outliers=0.0, dy=None):
    """Checks values, gradients, dtypes and shapes of a call against the oracle; returns them."""
    out_dtype = call.options.get("out_dtype") or call.x.dtype
    dy = random(call.x.shape, out_dtype, seed=9) if dy is None else dy
    expected = with_gradients(oracle, call, dy)
    actual = with_gradients(Call.ours, call, dy)
    assert actual["y"].dtype == out_dtype
    for name, tensor in call.inputs().items():
        assert actual[f"d{name}"].dtype == tensor.dtype, f"d{name}"
    for name, value in actual.items():
        scale = terms_of_dx(call, dy) if name == "dx" else 0.0
        check(value, expected[name], name, arithmetic_of(call, name), outliers, scale)
    return actual


def arithmetic_of(call, name):
    """The dtype of what a result can rest on."""
    dtypes = {tensor.dtype for tensor in call.inputs().values()} | {call.options.get("out_dtype")}
    # Means and inverse deviations are kept in float32 where x is not float64.
    wide = call.x.dtype == torch.float64 or (name == "y" and torch.float64 in dtypes)
    return torch.float64 if wide else torch.float32


def check_same(actual, expected):
    """Asserts that two results of with_gradients are equal, bit by bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def recorded(run):
    """The names of the operators that `run()` calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return {event.key for event in profiler.key_averages()}
