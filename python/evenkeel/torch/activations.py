"""The activations in torch's own operations, by their numbers in the C interface.

For what computes around the kernels: batched parameters, exported programs, norms that are handed back to the compiler.
"""

import torch
import torch.nn.functional as F

from evenkeel._abi import ACTIVATIONS

NONE = ACTIVATIONS["none"]

_aten = torch.ops.aten


def _silu_gradient(dy, z):
    s = torch.sigmoid(z)  # aten.silu_backward has no derivative
    return dy * s * (1 + z * (1 - s))


# Beyond, the slope of GELU's tanh form is 0 or 1, and aten.gelu_backward overflows.
_GELU_TANH_END = 24


def _within(z):
    return z.clamp(-_GELU_TANH_END, _GELU_TANH_END)


# Of each: its value, and dy times its slope.
_FORMULAS = {
    "silu": (F.silu, _silu_gradient),
    "relu": (F.relu, lambda dy, z: _aten.threshold_backward(dy, z, 0)),
    "gelu": (F.gelu, lambda dy, z: _aten.gelu_backward(dy, z)),
    "gelu_tanh": (
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: _aten.gelu_backward(dy, _within(z), approximate="tanh"),
    ),
}
_BY_NUMBER = {ACTIVATIONS[name]: formulas for name, formulas in _FORMULAS.items()}


def value(activation, z):
    return z if activation == NONE else _BY_NUMBER[activation][0](z)


def differentiable(activation, z):
    """The same for torch to differentiate."""
    if activation != ACTIVATIONS["gelu_tanh"]:
        return value(activation, z)
    return torch.where(z > _GELU_TANH_END, z, value(activation, _within(z)))


def gradient(activation, dy, z):
    """dy times the slope at z."""
    return dy if activation == NONE else _BY_NUMBER[activation][1](dy, z)
