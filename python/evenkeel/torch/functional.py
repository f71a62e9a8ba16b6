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

import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch import batching
from evenkeel.torch._load import extension

Shape = int | Sequence[int]
Activation = Literal["silu", "none"]
Casting = Literal["llama", "gemma", "none"]

_layer_norm = extension.layer_norm
_rms_norm = extension.rms_norm
_group_norm = extension.group_norm
_is_compiling = torch.compiler.is_compiling


# Parts of torch that are told about the operators when they are first met, and the module that tells
# them. Both imports are slow.
_to_tell = {"torch.distributed.tensor": "sharding", "torch._inductor.lowering": "compiling"}
_telling = threading.RLock()


def _before_subclass():
    """Tells those parts of torch that have been imported. Returns when all of them know, in every thread."""
    with _telling:
        for listener in [name for name in _to_tell if name in sys.modules]:
            importlib.import_module(f"evenkeel.torch.{_to_tell[listener]}").register()
            del _to_tell[listener]
        if not _to_tell:
            extension.set_subclass_hook(None)


extension.set_subclass_hook(_before_subclass)
batching.register()


def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: Activation | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer norm over the trailing dimensions `normalized_shape` of x."""
    if not has_torch_function_variadic(x, weight, bias) and not _is_compiling():
        y = _layer_norm(
            x, normalized_shape, weight, bias, eps, activation, weight_offset, out_dtype
        )
        if y is not NotImplemented:
            return y
    return _long_way(
        layer_norm,
        torch.ops.evenkeel.layer_norm,
        (x, weight, bias),
        (x, normalized_shape, weight, bias, eps),
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
    )


def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: Activation | None = None,
    weight_offset: float = 0.0,
    casting: Casting | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS norm over the trailing dimensions `normalized_shape` of x.

    eps None: the machine epsilon of float32, or of float64 if x is.
    """
    if not has_torch_function_variadic(x, weight) and not _is_compiling():
        y = _rms_norm(
            x, normalized_shape, weight, eps, activation, weight_offset, casting, out_dtype
        )
        if y is not NotImplemented:
            return y
    return _long_way(
        rms_norm,
        torch.ops.evenkeel.rms_norm,
        (x, weight),
        (x, normalized_shape, weight, eps),
        activation=activation,
        weight_offset=weight_offset,
        casting=casting,
        out_dtype=out_dtype,
    )


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: Activation | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Group norm of x (samples, channels, ...); a channels-last x gives a channels-last result."""
    if not has_torch_function_variadic(x, weight, bias) and not _is_compiling():
        y = _group_norm(x, num_groups, weight, bias, eps, activation, weight_offset, out_dtype)
        if y is not NotImplemented:
            return y
    return _long_way(
        group_norm,
        torch.ops.evenkeel.group_norm,
        (x, weight, bias),
        (x, num_groups, weight, bias, eps),
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
    )


def _long_way(function, operator, tensors, arguments, **options):
    """Overridden by a subclass or a mode, traced by torch.compile, or with arguments of other types."""
    if any(isinstance(tensor, NestedTensor) for tensor in tensors):
        return _of_jagged(function, tensors, *arguments, **options)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(function, tensors, *arguments, **options)
    if not _is_compiling():
        _check_types(function, arguments, options)
    x, over, *others = arguments
    if function is not group_norm and isinstance(over, _INTEGER):
        over = [over]
    return operator(x, over, *others, **options)


def _of_jagged(function, tensors, x, over, *others, **options):
    """The norm of a nested tensor: of its values, the rows of all its parts."""
    for name, tensor in zip(("x", "weight", "bias"), tensors, strict=False):
        if isinstance(tensor, NestedTensor) and (tensor is not x or function is group_norm):
            raise NotImplementedError(
                f"evenkeel: {name} of {function.__name__} must be a dense tensor, but is nested"
            )
    ragged, span = x._ragged_idx, 1 if isinstance(over, _INTEGER) else len(over)
    if ragged >= x.dim() - span:
        raise ValueError(
            f"evenkeel: normalized_shape must leave out the ragged dimension {ragged} of x, "
            f"but has the last {span} of {x.dim()} dimensions: {over}"
        )
    if x.lengths() is not None:
        raise NotImplementedError(
            "evenkeel: x must be contiguous where it is nested, but its parts have gaps between them"
        )
    y = function(x.values(), over, *others, **options)
    limits = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(y, x.offsets(), jagged_dim=ragged, **limits)


_INTEGER, _NUMBER = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)

# Argument: what it may be, in types and in words. None is allowed where it is the default.
_ALLOWED = {
    "normalized_shape": ((*_INTEGER, tuple, list), "an integer or a sequence of integers"),
    "num_groups": (_INTEGER, "an integer"),
    "out_dtype": ((torch.dtype,), "a torch.dtype"),
    **dict.fromkeys(("x", "weight", "bias"), ((torch.Tensor,), "a tensor")),
    **dict.fromkeys(("eps", "weight_offset"), (_NUMBER, "a number")),
    **dict.fromkeys(("activation", "casting"), ((str,), "a string")),
}


def _check_types(function, arguments, options):
    """Raises a TypeError that names the first argument of a wrong type."""
    parameters = inspect.signature(function).parameters
    for name, value in (dict(zip(parameters, arguments, strict=False)) | options).items():
        types, words = _ALLOWED[name]
        if parameters[name].default is None:
            types, words = (*types, type(None)), f"{words} or None"
        fine = isinstance(value, types) and not isinstance(value, bool)
        if fine and name == "normalized_shape" and not isinstance(value, _INTEGER):
            fine = all(isinstance(size, _INTEGER) and not isinstance(size, bool) for size in value)
        if not fine:
            given = f"{value!r} of type {type(value).__name__}"
            raise TypeError(f"evenkeel: {name} must be {words}, but is {given}")
