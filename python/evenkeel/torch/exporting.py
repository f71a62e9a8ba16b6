"""The norms in torch's own operators, for programs that leave torch.

torch.onnx.export and other converters of exported programs know torch's operators, not evenkeel's. So evenkeel's are
decomposed into torch's while torch.onnx.export runs, which translates them into ONNX's LayerNormalization,
RMSNormalization and GroupNormalization, or into their formulas where the opset has none. For all other converters
there is a table, `decompositions()`.

ONNX's norms round the normalized value of a half-precision x before they apply the weight, and compute float64 in
float32. The kernels do not. So ONNX's get float32, with casts around them, and float64 is written out.
"""

import math
import sys
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenkeel._abi import CASTINGS, OPS
from evenkeel.torch import activations

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FORWARD = torch.ops.evenkeel.forward.default
_ADD_FORWARD = torch.ops.evenkeel.add_forward.default
_MODULATED_FORWARD = torch.ops.evenkeel.modulated_forward.default
_ROW_NORMS = [
    f"{what}_{norm}" for what in ("add", "modulated") for norm in ("layer_norm", "rms_norm")
]
_PUBLIC = [getattr(torch.ops.evenkeel, name).default for name in (*OPS, *_ROW_NORMS)]


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """{operator of evenkeel: a function that computes the same by torch's operators}.

    `program.run_decompositions(decompositions())` leaves a program of torch's operators.
    """
    return _INTERNAL | {operator: _decomposed(operator) for operator in _PUBLIC}


def register():
    """Has torch.onnx.export decompose the operators, whether it is given a model or an exported program.

    At import: it collects decompositions before it runs the model.
    """
    for operator in _PUBLIC:
        if _COMPOSITE not in operator.py_kernels:
            operator.py_impl(_COMPOSITE)(_decomposed_for_onnx(operator))


def _decomposed_for_onnx(operator):
    decomposed = _decomposed(operator)

    def kernel(*args, **kwargs):
        # torch.onnx is slow to import, and whoever exports has imported it.
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            return decomposed(*args, **kwargs)
        return operator._op_dk(_COMPOSITE, *args, **kwargs)

    return kernel


def _decomposed(operator):
    def kernel(*args, **kwargs):
        with _ForwardDecomposed():
            return operator._op_dk(_COMPOSITE, *args, **kwargs)

    return kernel


class _ForwardDecomposed(TorchDispatchMode):
    """The public operators check their arguments and call an internal one, which is decomposed here."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in _INTERNAL:
            return _INTERNAL[operator](*args)
        return operator(*args, **(kwargs or {}))


def forward(
    x,
    weight,
    bias,
    op,
    span,
    eps,
    activation,
    casting,
    weight_offset,
    out_dtype,
    statistics,
):
    """evenkeel::forward by torch's operators."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    value = x.to(dtype)
    weight, bias = (
        None if parameter is None else parameter.to(dtype) for parameter in (weight, bias)
    )
    if weight is not None and weight_offset != 0:
        weight = weight + weight_offset
    norm = _written_out if wide else _of_torch
    if casting == CASTINGS["llama"] and x.dtype != dtype:
        y = norm(value, None, None, op, span, eps).to(x.dtype).to(dtype)
        y = y if weight is None else y * weight
    else:
        y = norm(value, weight, bias, op, span, eps)
    y = activations.value(activation, y)
    mean, rstd = _statistics(value, op, span, eps) if statistics else (None, None)
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    return laid_out(y.to(out_dtype), x, op), *(
        x.new_empty(0, dtype=kept) if part is None else part.to(kept) for part in (mean, rstd)
    )


def add_forward(x, weight, bias, op, *others):
    """evenkeel::add_forward by torch's operators."""
    *options, residual, sum_dtype = others
    dtype = torch.float64 if sum_dtype == torch.float64 else torch.float32
    total = laid_out((x.to(dtype) + residual.to(dtype)).to(sum_dtype), x, op)
    return *forward(total, weight, bias, op, *options), total


def modulated_forward(x, weight, bias, op, span, eps, activation, casting, weight_offset, *others):
    """evenkeel::modulated_forward by torch's operators."""
    out_dtype, statistics, scale, shift, *added = others
    tensors = [tensor for tensor in (x, weight, bias, scale, shift) if tensor is not None]
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    options = eps, activations.NONE, casting, weight_offset, dtype, statistics
    if added[0] is None:
        results = forward(x, weight, bias, op, span, *options)
        results = (*results, x.new_empty(0, dtype=added[1]))
    else:
        results = add_forward(x, weight, bias, op, span, *options, *added)
    y, *others = results
    if scale is not None:
        y = y * (1 + scale.to(dtype))
    if shift is not None:
        y = y + shift.to(dtype)
    return laid_out(activations.value(activation, y).to(out_dtype), x, op), *others


_INTERNAL = {
    _FORWARD: forward,
    _ADD_FORWARD: add_forward,
    _MODULATED_FORWARD: modulated_forward,
}


def _of_torch(value, weight, bias, op, span, eps):
    if op == OPS["group_norm"]:
        return torch.group_norm(value, span, weight, bias, eps)
    shape = value.shape[value.dim() - span :]
    if op == OPS["layer_norm"]:
        return torch.layer_norm(value, shape, weight, bias, eps)
    # RMSNormalization has no default weight; torch would give it one of the shape of x.
    return torch.rms_norm(value, shape, value.new_ones(shape) if weight is None else weight, eps)


def _written_out(value, weight, bias, op, span, eps):
    _, centered, rstd = _moments(value, op, span, eps)
    y = (centered * rstd).reshape(value.shape)
    if op == OPS["group_norm"]:
        along = [-1] + [1] * (value.dim() - 2)
        weight, bias = (p if p is None else p.reshape(along) for p in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _moments(value, op, span, eps):
    """Mean (None: RMS norm's), the values without it, and the reciprocal of their standard deviation."""
    if op == OPS["group_norm"]:
        value = value.reshape(value.shape[0], span, math.prod(value.shape[1:]) // span)
        dims = [2]
    else:
        dims = list(range(value.dim() - span, value.dim()))
    mean = None if op == OPS["rms_norm"] else value.mean(dims, keepdim=True)
    centered = value if mean is None else value - mean
    return mean, centered, (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _statistics(value, op, span, eps):
    mean, _, rstd = _moments(value, op, span, eps)
    shape = rstd.shape[: 2 if op == OPS["group_norm"] else value.dim() - span]
    return mean if mean is None else mean.reshape(shape), rstd.reshape(shape)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def laid_out(y, x, op):
    """In memory as the kernels leave it: the program may hold views of it."""
    if op == OPS["rms_norm"]:
        return y.contiguous(memory_format=torch._prims_common.suggest_memory_format(x))
    last = x.dim() > 2 and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()
    if op == OPS["layer_norm"] or not last:
        return y.contiguous()
    if x.dim() in _CHANNELS_LAST:
        return y.contiguous(memory_format=_CHANNELS_LAST[x.dim()])
    return y.movedim(1, -1).contiguous().movedim(-1, 1)
