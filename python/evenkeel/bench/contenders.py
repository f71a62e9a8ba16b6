"""Every library that is compared, as calls of the same form: forward(set), and backward(set, kept)
after keep(set), which is not timed.

A contender is made for one line. One that cannot be made, or fails later, has "-" in the tables and its
reason on stderr; the others go on. Names are those of the CSV files, TITLES those of tables and plots.
"""

import functools
import importlib

import torch
import torch._functorch.config
import torch.nn.functional as F

from evenkeel.bench import command
from evenkeel.bench.lines import ACTIVATIONS, EPS, GROUPS

TITLES = {
    "evenkeel": "evenkeel",
    "torch": "torch",
    "compile": "torch.compile",
    "triton": "triton (tutorial's design)",
    "apex": "Apex",
    "apex-fast": "Apex contrib fast",
    "liger": "Liger",
    "quack": "QuACK",
    "flash-attn": "flash-attn",
}
# What a rival is imported from; all of these run on GPUs only.
MODULES = {
    "triton": "evenkeel.bench.triton_norm",
    "apex": "apex.normalization",
    "apex-fast": "apex.contrib.layer_norm",
    "liger": "liger_kernel.transformers.functional",
    "quack": "quack",
    "flash-attn": "flash_attn.ops.triton.layer_norm",
}
# Other row lengths end the process.
APEX_FAST_COLS = {
    *(768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288),
    *(12800, 14336, 15360, 16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
}


class NotOfferedError(Exception):
    """The library is not there, or has no such norm."""


def missing(name, device):
    """Why a contender cannot be used on this machine, or None."""
    if name not in MODULES:
        return None
    if device.type != "cuda":
        return "for GPUs only"
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        return f"not installed ({error})"
    except Exception as error:  # whatever an import of somebody else's may do
        return f"cannot be imported ({command.first_line(error)})"
    return None


class ThroughAutograd:
    """What a user gets: the backward pass is that of an output which was computed beforehand."""

    def __init__(self, norm):
        self.norm = norm

    def forward(self, s):
        return (self.norm(*s.inputs),)

    def keep(self, s):
        """What backward needs from a forward that is not timed."""
        return self.forward(s)

    def backward(self, s, kept):
        return torch.autograd.grad(kept, s.inputs, s.gradients, retain_graph=True)


class WithResidual(ThroughAutograd):
    """A norm of x + residual, which gives y and the sum.

    `y_alone` gives y where nothing else uses the sum. The gradient that does not arrive is then no tensor of zeros,
    which autograd makes for most implementations of an operator with two outputs.
    """

    def __init__(self, norm, y_alone=None):
        super().__init__(norm)
        self.y_alone = y_alone or (lambda *inputs: norm(*inputs)[0])

    def forward(self, s):
        return self.norm(*s.inputs)

    def keep(self, s):
        return self.forward(s) if s.dsum is not None else (self.y_alone(*s.inputs),)


def torch_norm(line):
    """The function of x, residual (where there is one), weight (and bias) in torch's own functions."""
    shape = (line.cols,)
    if line.is_group:
        norm = lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias, EPS)  # noqa: E731
    elif line.op == "rms_norm":
        norm = lambda x, weight: F.rms_norm(x, shape, weight, EPS)  # noqa: E731
    else:
        norm = lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, EPS)  # noqa: E731
    activate = ACTIVATIONS.get(line.activation)
    if line.modulates:
        plain = F.rms_norm if line.op == "rms_norm" else F.layer_norm

        def norm(x, scale, shift):
            y = plain(x, shape, eps=EPS)
            return y * (1 + scale[:, None]) + shift[:, None]

    whole = (lambda *inputs: activate(norm(*inputs))) if activate else norm
    if not line.adds:
        return whole

    def add_and_norm(x, residual, *parameters):
        total = x + residual
        return whole(total, *parameters).to(x.dtype), total

    return add_and_norm


class Torch(ThroughAutograd):
    """torch eager: the functions and, on a GPU, the operators behind them for backward alone.

    There are none for a norm with an activation. A channels-last image goes through autograd too, which
    makes the copies that torch's operators need, and so does everything on a CPU: what autograd costs the
    host counts there, for all contenders alike.
    """

    def __init__(self, line):
        super().__init__(torch_norm(line))
        aten = torch.ops.aten
        self.op, self.operators, self.sizes = line.op, None, ([line.cols],)
        if line.activation or line.layout == "nhwc" or line.modulates:
            return
        if line.is_group:
            samples, channels, *pixels = line.shape
            self.sizes = samples, channels, pixels[0] * pixels[1], GROUPS
            self.operators = aten.native_group_norm, aten.native_group_norm_backward
        elif line.op == "layer_norm":
            self.operators = aten.native_layer_norm, aten.native_layer_norm_backward
        elif hasattr(aten, "_fused_rms_norm_backward"):
            self.operators = aten._fused_rms_norm, aten._fused_rms_norm_backward

    def has_operators(self, s):
        return self.operators and s.x.is_cuda

    def keep(self, s):
        if not self.has_operators(s):
            return super().keep(s)
        x, *parameters = s.inputs
        with torch.no_grad():
            if self.op == "group_norm":
                return self.operators[0](x, *parameters, *self.sizes, EPS)
            return self.operators[0](x, *self.sizes, *parameters, EPS)

    def backward(self, s, kept):
        if not self.has_operators(s):
            return super().backward(s, kept)
        x, *parameters = s.inputs
        mask = [True] * len(s.inputs)
        with torch.no_grad():
            if self.op == "group_norm":
                return self.operators[1](s.dy, x, *kept[1:], parameters[0], *self.sizes, mask)
            return self.operators[1](s.dy, x, *self.sizes, *kept[1:], *parameters, mask)


def make_torch(line):
    return WithResidual(torch_norm(line)) if line.adds else Torch(line)


def make_evenkeel(line):
    # Here and not above: without it the rivals can still be measured.
    import evenkeel.torch as ek

    options = {"activation": line.activation} if line.activation else {}
    shape = (line.cols,)
    if line.adds:
        row_norm = getattr(ek, line.op)
        return WithResidual(
            lambda x, r, *parameters: row_norm(x, shape, *parameters, EPS, residual=r, **options)
        )
    if line.modulates:
        row_norm = getattr(ek, line.op)
        return ThroughAutograd(
            lambda x, scale, shift: row_norm(x, shape, eps=EPS, scale=scale, shift=shift, **options)
        )
    if line.is_group:
        norm = lambda x, weight, bias: ek.group_norm(x, GROUPS, weight, bias, EPS, **options)  # noqa: E731
    elif line.op == "rms_norm":
        norm = lambda x, weight: ek.rms_norm(x, shape, weight, EPS, **options)  # noqa: E731
    else:
        norm = lambda x, weight, bias: ek.layer_norm(x, shape, weight, bias, EPS, **options)  # noqa: E731
    return ThroughAutograd(norm)


def make_compiled(line):
    # The outputs' graphs are kept for the replays, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    norm = torch_norm(line)
    if line.adds:
        y_alone = torch.compile(lambda *inputs: norm(*inputs)[0], dynamic=False)
        return WithResidual(torch.compile(norm, dynamic=False), y_alone)
    if not line.mixed:
        return ThroughAutograd(torch.compile(norm, dynamic=False))

    # torch's own layer norm refuses to mix; casts cost nothing once they are compiled.
    def cast_and_norm(x, *parameters):
        return norm(x.float(), *parameters).to(x.dtype)

    return ThroughAutograd(torch.compile(cast_and_norm, dynamic=False))


def rows_only(line, name):
    if line.is_group or line.activation or line.modulates:
        raise NotOfferedError(f"{name} has only plain row norms")


def no_residual(line, name):
    if line.adds:
        raise NotOfferedError(f"{name} adds no residual")


def make_triton(line):
    from evenkeel.bench.triton_norm import TritonPair

    rows_only(line, "this pair of kernels")
    no_residual(line, "this pair of kernels")
    return TritonPair(line)


def through_module(module):
    """A library's module, which reads the set's parameters in place of its own."""
    names = ("weight", "bias")

    def norm(x, *parameters):
        given = dict(zip(names, parameters, strict=False))
        return torch.func.functional_call(module, given, (x,))

    return ThroughAutograd(norm)


def make_apex(line):
    if line.is_group:
        from apex.contrib.group_norm import GroupNorm

        if line.activation not in ("", "silu"):
            raise NotOfferedError("Apex's group norm has SiLU alone")
        if line.layout != "nhwc" or line.parameters not in GroupNorm.SUPPORTED_CHANNELS:
            raise NotOfferedError(
                "Apex has a group norm of its own for NHWC and some channel counts only"
            )
        return through_module(GroupNorm(GROUPS, line.parameters, EPS, act=line.activation))
    import apex.normalization

    rows_only(line, "Apex")
    no_residual(line, "Apex")
    # With parameters of another type Apex's result takes that type: another norm than the others compute.
    if line.mixed:
        raise NotOfferedError("Apex's result would have the weight's dtype")
    kind = {"layer_norm": "FusedLayerNorm", "rms_norm": "FusedRMSNorm"}[line.op]
    return through_module(getattr(apex.normalization, kind)(line.cols, EPS))


def make_apex_fast(line):
    from apex.contrib.layer_norm import FastLayerNorm

    rows_only(line, "it")
    no_residual(line, "it")
    if line.op != "layer_norm" or line.mixed or line.cols not in APEX_FAST_COLS:
        raise NotOfferedError(f"not for {line.label}")
    return through_module(FastLayerNorm(line.cols, EPS))


def make_liger(line):
    from liger_kernel.transformers import functional

    if line.modulates and line.op == "rms_norm" and not line.activation:
        modulated = functional.liger_modulated_rms_norm
        # In place it would overwrite dy, which the next replay reads again.
        return ThroughAutograd(
            lambda x, scale, shift: modulated(x, None, scale, shift, EPS, in_place=False)
        )
    rows_only(line, "Liger")
    if line.adds:
        if line.op != "rms_norm" or line.residual_dtype != line.x_dtype:
            raise NotOfferedError("Liger adds a residual before RMS norm only, in the dtype of x")
        add_and_norm = functional.liger_fused_add_rms_norm
        return WithResidual(lambda x, r, w: add_and_norm(x, r, w, EPS, in_place=False))
    if line.op == "layer_norm":
        return ThroughAutograd(lambda x, w, b: functional.liger_layer_norm(x, w, b, EPS))
    return ThroughAutograd(lambda x, w: functional.liger_rms_norm(x, w, EPS, in_place=False))


def make_quack(line):
    import quack

    rows_only(line, "QuACK")
    if line.op != "rms_norm":
        raise NotOfferedError("QuACK's public layer norm has no backward pass")
    if not line.adds:
        return ThroughAutograd(lambda x, weight: quack.rmsnorm(x, weight, eps=EPS))

    def add_and_norm(x, residual, weight, prenorm=True):
        return quack.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=prenorm)

    return WithResidual(add_and_norm, functools.partial(add_and_norm, prenorm=False))


def make_flash_attn(line):
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    rows_only(line, "flash-attn")
    if line.adds:
        norm = layer_norm_fn if line.op == "layer_norm" else rms_norm_fn

        def add_and_norm(x, residual, weight, bias=None, prenorm=True):
            return norm(x, weight, bias, residual=residual, eps=EPS, prenorm=prenorm)

        return WithResidual(add_and_norm, functools.partial(add_and_norm, prenorm=False))
    if line.op == "layer_norm":
        return ThroughAutograd(lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=EPS))
    return ThroughAutograd(lambda x, weight: rms_norm_fn(x, weight, None, eps=EPS))


MAKERS = {
    "evenkeel": make_evenkeel,
    "torch": make_torch,
    "compile": make_compiled,
    "triton": make_triton,
    "apex": make_apex,
    "apex-fast": make_apex_fast,
    "liger": make_liger,
    "quack": make_quack,
    "flash-attn": make_flash_attn,
}
