"""The norms as functions, with the signatures and the meaning of torch.nn.functional.

    layer_norm(x, normalized_shape, weight, bias, eps)
    rms_norm(x, normalized_shape, weight, eps)
    group_norm(x, num_groups, weight, bias, eps)

and, by keyword:

    activation      "silu": applied to the result, in the same kernel, forward and backward
    weight_offset   added to every weight (1.0 for weights that are stored as weight - 1)
    casting         rms_norm: where half-precision input is rounded; "llama" rounds before the weight is multiplied,
                    "gemma" and None only at the end
    out_dtype       of the result

x, weight and bias may have different floating dtypes; nothing is cast beforehand. The result has the
dtype of x. Under autocast it has autocast's dtype, where torch.nn.functional would return float32:
this is the one difference in meaning, and out_dtype=torch.float32 removes it.
"""

import sys

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch._load import extension

_layer_norm = extension.layer_norm
_rms_norm = extension.rms_norm
_group_norm = extension.group_norm
_is_compiling = torch.compiler.is_compiling


def _before_subclass():
    """Tells DTensor how norms may be split, as soon as there can be one: its import is slow."""
    if "torch.distributed.tensor" in sys.modules:
        extension.set_subclass_hook(None)
        from evenkeel.torch import sharding

        sharding.register()


extension.set_subclass_hook(_before_subclass)


def layer_norm(
    x,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    activation=None,
    weight_offset=0.0,
    out_dtype=None,
):
    """Layer norm over the trailing dimensions `normalized_shape` of x."""
    if has_torch_function_variadic(x, weight, bias):
        return handle_torch_function(
            layer_norm,
            (x, weight, bias),
            x,
            normalized_shape,
            weight,
            bias,
            eps,
            activation=activation,
            weight_offset=weight_offset,
            out_dtype=out_dtype,
        )
    if not _is_compiling():
        y = _layer_norm(
            x, normalized_shape, weight, bias, eps, activation, weight_offset, out_dtype
        )
        if y is not NotImplemented:
            return y
        _check_types(
            x=x,
            normalized_shape=normalized_shape,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
            weight_offset=weight_offset,
            out_dtype=out_dtype,
        )
    return torch.ops.evenkeel.layer_norm(
        x,
        _sizes(normalized_shape),
        weight,
        bias,
        eps,
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
    )


def rms_norm(
    x,
    normalized_shape,
    weight=None,
    eps=None,
    *,
    activation=None,
    weight_offset=0.0,
    casting=None,
    out_dtype=None,
):
    """RMS norm over the trailing dimensions `normalized_shape` of x.

    eps None: the machine epsilon of float32, or of float64 if x is.
    """
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(
            rms_norm,
            (x, weight),
            x,
            normalized_shape,
            weight,
            eps,
            activation=activation,
            weight_offset=weight_offset,
            casting=casting,
            out_dtype=out_dtype,
        )
    if not _is_compiling():
        y = _rms_norm(
            x, normalized_shape, weight, eps, activation, weight_offset, casting, out_dtype
        )
        if y is not NotImplemented:
            return y
        _check_types(
            x=x,
            normalized_shape=normalized_shape,
            weight=weight,
            casting=casting,
            **({} if eps is None else {"eps": eps}),
            activation=activation,
            weight_offset=weight_offset,
            out_dtype=out_dtype,
        )
    return torch.ops.evenkeel.rms_norm(
        x,
        _sizes(normalized_shape),
        weight,
        eps,
        activation=activation,
        weight_offset=weight_offset,
        casting=casting,
        out_dtype=out_dtype,
    )


def group_norm(
    x,
    num_groups,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    activation=None,
    weight_offset=0.0,
    out_dtype=None,
):
    """Group norm of x (samples, channels, ...); a channels-last x gives a channels-last result."""
    if has_torch_function_variadic(x, weight, bias):
        return handle_torch_function(
            group_norm,
            (x, weight, bias),
            x,
            num_groups,
            weight,
            bias,
            eps,
            activation=activation,
            weight_offset=weight_offset,
            out_dtype=out_dtype,
        )
    if not _is_compiling():
        y = _group_norm(x, num_groups, weight, bias, eps, activation, weight_offset, out_dtype)
        if y is not NotImplemented:
            return y
        _check_types(
            x=x,
            num_groups=num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
            weight_offset=weight_offset,
            out_dtype=out_dtype,
        )
    return torch.ops.evenkeel.group_norm(
        x,
        num_groups,
        weight,
        bias,
        eps,
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
    )


def _sizes(normalized_shape):
    return [normalized_shape] if isinstance(normalized_shape, _INTEGER) else normalized_shape


_INTEGER, _NUMBER = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)

# Argument: what it may be, in types and in words.
_ALLOWED = {
    "x": ((torch.Tensor,), "a tensor"),
    "normalized_shape": ((*_INTEGER, tuple, list), "an integer or a sequence of integers"),
    "num_groups": (_INTEGER, "an integer"),
    "eps": (_NUMBER, "a number"),
    "weight_offset": (_NUMBER, "a number"),
    "out_dtype": ((torch.dtype, type(None)), "a torch.dtype or None"),
    **dict.fromkeys(("weight", "bias"), ((torch.Tensor, type(None)), "a tensor or None")),
    **dict.fromkeys(("activation", "casting"), ((str, type(None)), "a string or None")),
}


def _check_types(**arguments):
    """Raises a TypeError that names the first argument of a wrong type."""
    for name, value in arguments.items():
        types, words = _ALLOWED[name]
        fine = isinstance(value, types) and not isinstance(value, bool)
        if fine and name == "normalized_shape" and not isinstance(value, _INTEGER):
            fine = all(isinstance(size, _INTEGER) and not isinstance(size, bool) for size in value)
        if not fine:
            given = f"{value!r} of type {type(value).__name__}"
            raise TypeError(f"evenkeel: {name} must be {words}, but is {given}")
