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

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch._load import extension

_layer_norm = extension.layer_norm
_rms_norm = extension.rms_norm
_group_norm = extension.group_norm
_is_compiling = torch.compiler.is_compiling


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
        _require_tensors(x=x, weight=weight, bias=bias)
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
    """RMS norm over the trailing dimensions `normalized_shape` of x; eps None: x's machine epsilon."""
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
        _require_tensors(x=x, weight=weight)
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
        _require_tensors(x=x, weight=weight, bias=bias)
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
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _require_tensors(x, **parameters):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"evenkeel: x must be a tensor, but is {type(x).__name__}")
    for name, value in parameters.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"evenkeel: {name} must be a tensor or None, but is {type(value).__name__}"
            )
