"""The norms as functions, with the signatures and the meaning of torch.nn.functional.

    layer_norm(x, normalized_shape, weight, bias, eps)
    rms_norm(x, normalized_shape, weight, eps)
    group_norm(x, num_groups, weight, bias, eps)

and, by keyword:

    activation      "silu", "relu", "gelu" or "gelu_tanh" (GELU's tanh form): applied to the result, in the same kernel,
                    forward and backward
    weight_offset   added to every weight (1.0 for weights that are stored as weight - 1)
    casting         rms_norm: where half-precision input is rounded; "llama" rounds before the weight is multiplied,
                    "gemma" and None only at the end
    out_dtype       of the result
    residual        layer_norm, rms_norm: added to x before, in the same kernel. The result is then a pair (y, sum): y is
                    the norm of sum = x + residual, and both have the bits of an addition and a norm of its result
    sum_dtype       of that sum, which is normalized as rounded to it; that of the residual, unless it is given
    scale, shift    layer_norm, rms_norm: of each sample, in the same kernel: activation(norm * (1 + scale) + shift), as in
                    AdaLN. The shape is that of x with ones for the dimensions, from one on, that share them, (B, 1, C), or
                    without these, (B, C); a view of a wider tensor is read where it lies

x, residual, weight, bias, scale and shift may have different floating dtypes; nothing is cast beforehand. The result has the
dtype of x. Under autocast it has autocast's dtype, where torch.nn.functional would return float32:
this is the one difference in meaning, and out_dtype=torch.float32 removes it.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch import batching, compiling
from evenkeel.torch._load import extension

Shape = int | Sequence[int]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh", "none"]
Casting = Literal["llama", "gemma", "none"]

_layer_norm = extension.layer_norm
_rms_norm = extension.rms_norm
_group_norm = extension.group_norm
_add_layer_norm = extension.add_layer_norm
_add_rms_norm = extension.add_rms_norm
_modulated_layer_norm = extension.modulated_layer_norm
_modulated_rms_norm = extension.modulated_rms_norm
_is_compiling = torch.compiler.is_compiling


# Parts of torch that are told about the operators when they are first met, and the module that tells
# them. Their imports are slow.
_to_tell = {"torch.distributed.tensor": "sharding", "torch._inductor.lowering": "compiling.order"}
_telling = threading.RLock()


def _before_subclass():
    """Tells those parts of torch that have been imported. Returns when all of them know, in every thread."""
    with _telling:
        for listener in [name for name in _to_tell if name in sys.modules]:
            importlib.import_module(f"evenkeel.torch.{_to_tell[listener]}").register()
            del _to_tell[listener]
        # Each time: its configuration is anybody's, and each thread has its own.
        if "torch._inductor.config" in sys.modules:
            compiling.install()


extension.set_subclass_hook(_before_subclass)
batching.register()


@overload
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
    residual: None = None,
    sum_dtype: None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor: ...


@overload
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
    residual: Tensor,
    sum_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


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
    residual: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm over the trailing dimensions `normalized_shape` of x.

    With a residual of the shape of x: the norm of sum = x + residual, and that sum. With a scale or a shift of each
    sample, norm * (1 + scale) + shift.
    """
    if scale is not None or shift is not None:
        tensors = x, weight, bias, residual, scale, shift
        if not has_torch_function_variadic(*tensors) and not _is_compiling():
            pair = _modulated_layer_norm(
                x,
                normalized_shape,
                weight,
                bias,
                eps,
                scale,
                shift,
                activation,
                weight_offset,
                residual,
                sum_dtype,
                out_dtype,
            )
            if pair is not NotImplemented:
                return pair[0] if residual is None else pair
    elif residual is None and sum_dtype is None:
        if not has_torch_function_variadic(x, weight, bias) and not _is_compiling():
            y = _layer_norm(
                x, normalized_shape, weight, bias, eps, activation, weight_offset, out_dtype
            )
            if y is not NotImplemented:
                return y
    elif not has_torch_function_variadic(x, residual, weight, bias) and not _is_compiling():
        pair = _add_layer_norm(
            x,
            residual,
            normalized_shape,
            weight,
            bias,
            eps,
            activation,
            weight_offset,
            sum_dtype,
            out_dtype,
        )
        if pair is not NotImplemented:
            return pair
    return _long_way(
        layer_norm,
        (x, weight, bias, residual, scale, shift),
        (x, normalized_shape, weight, bias, eps),
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
        residual=residual,
        sum_dtype=sum_dtype,
        scale=scale,
        shift=shift,
    )


@overload
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
    residual: None = None,
    sum_dtype: None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor: ...


@overload
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
    residual: Tensor,
    sum_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


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
    residual: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm over the trailing dimensions `normalized_shape` of x.

    With a residual of the shape of x: the norm of sum = x + residual, and that sum. With a scale or a shift of each
    sample, norm * (1 + scale) + shift.

    eps None: the machine epsilon of float32, or of float64 if what is normalized is.
    """
    if scale is not None or shift is not None:
        tensors = x, weight, residual, scale, shift
        if not has_torch_function_variadic(*tensors) and not _is_compiling():
            pair = _modulated_rms_norm(
                x,
                normalized_shape,
                weight,
                eps,
                scale,
                shift,
                activation,
                weight_offset,
                casting,
                residual,
                sum_dtype,
                out_dtype,
            )
            if pair is not NotImplemented:
                return pair[0] if residual is None else pair
    elif residual is None and sum_dtype is None:
        if not has_torch_function_variadic(x, weight) and not _is_compiling():
            y = _rms_norm(
                x, normalized_shape, weight, eps, activation, weight_offset, casting, out_dtype
            )
            if y is not NotImplemented:
                return y
    elif not has_torch_function_variadic(x, residual, weight) and not _is_compiling():
        pair = _add_rms_norm(
            x,
            residual,
            normalized_shape,
            weight,
            eps,
            activation,
            weight_offset,
            casting,
            sum_dtype,
            out_dtype,
        )
        if pair is not NotImplemented:
            return pair
    return _long_way(
        rms_norm,
        (x, weight, residual, scale, shift),
        (x, normalized_shape, weight, eps),
        activation=activation,
        weight_offset=weight_offset,
        casting=casting,
        out_dtype=out_dtype,
        residual=residual,
        sum_dtype=sum_dtype,
        scale=scale,
        shift=shift,
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
    """Group norm of x (samples, channels, ...); a channels-last x gives a channels-last result. It takes no residual."""
    if not has_torch_function_variadic(x, weight, bias) and not _is_compiling():
        y = _group_norm(x, num_groups, weight, bias, eps, activation, weight_offset, out_dtype)
        if y is not NotImplemented:
            return y
    return _long_way(
        group_norm,
        (x, weight, bias),
        (x, num_groups, weight, bias, eps),
        activation=activation,
        weight_offset=weight_offset,
        out_dtype=out_dtype,
    )


def _long_way(
    function, tensors, arguments, residual=None, sum_dtype=None, scale=None, shift=None, **options
):
    """Overridden by a subclass or a mode, traced by torch.compile, or with arguments of other types."""
    added = residual is not None or sum_dtype is not None
    modulated = scale is not None or shift is not None
    if added:
        options |= {"residual": residual, "sum_dtype": sum_dtype}
    if modulated:
        options |= {"scale": scale, "shift": shift}
    if any(isinstance(tensor, NestedTensor) for tensor in tensors):
        return _of_jagged(function, tensors, *arguments, **options)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(function, tensors, *arguments, **options)
    if not _is_compiling():
        _check_types(function, arguments, options)
    x, over, *others = arguments
    if function is not group_norm and isinstance(over, _INTEGER):
        over = [over]
    if modulated:
        operator = getattr(torch.ops.evenkeel, f"modulated_{function.__name__}")
        pair = operator(x, over, *others, **options)
        return pair if residual is not None else pair[0]
    if not added:
        return getattr(torch.ops.evenkeel, function.__name__)(x, over, *others, **options)
    del options["residual"]
    if residual is None:
        raise ValueError(
            f"evenkeel: sum_dtype is {sum_dtype}, but there is no residual to add to x"
        )
    operator = getattr(torch.ops.evenkeel, f"add_{function.__name__}")
    return operator(x, residual, over, *others, **options)


def _of_jagged(function, tensors, x, over, *others, **options):
    """The norm of a nested tensor: of its values, the rows of all its parts."""
    residual = options.get("residual")
    if "scale" in options:
        raise NotImplementedError(
            f"evenkeel: {function.__name__} takes no scale and no shift where x is nested"
        )
    may_be = () if function is group_norm else (x, residual)
    for name, tensor in zip(("x", "weight", "bias"), tensors, strict=False):
        if isinstance(tensor, NestedTensor) and all(tensor is not one for one in may_be):
            raise NotImplementedError(
                f"evenkeel: {name} of {function.__name__} must be a dense tensor, but is nested"
            )
    if residual is not None:
        for name, tensor in (("x", x), ("residual", residual)):
            if not isinstance(tensor, NestedTensor):
                raise NotImplementedError(
                    "evenkeel: x and residual must both be nested or both dense, "
                    f"but {name} is not nested"
                )
        if residual.shape != x.shape:
            raise ValueError(
                f"evenkeel: residual must have the shape {list(x.shape)} of x, with its offsets, "
                f"but has {list(residual.shape)}"
            )
    ragged, span = x._ragged_idx, 1 if isinstance(over, _INTEGER) else len(over)
    if ragged >= x.dim() - span:
        raise ValueError(
            f"evenkeel: normalized_shape must leave out the ragged dimension {ragged} of x, "
            f"but has the last {span} of {x.dim()} dimensions: {over}"
        )
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and tensor.lengths() is not None:
            raise NotImplementedError(
                f"evenkeel: {name} must be contiguous where it is nested, "
                "but its parts have gaps between them"
            )
    limits = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}

    def nested(values):
        return torch.nested.nested_tensor_from_jagged(
            values, x.offsets(), jagged_dim=ragged, **limits
        )

    if residual is None:
        return nested(function(x.values(), over, *others, **options))
    options["residual"] = residual.values()
    y, total = function(x.values(), over, *others, **options)
    return nested(y), nested(total)


_INTEGER, _NUMBER = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)

# Argument: what it may be, in types and in words. None is allowed where it is the default.
_ALLOWED = {
    "normalized_shape": ((*_INTEGER, tuple, list), "an integer or a sequence of integers"),
    "num_groups": (_INTEGER, "an integer"),
    **dict.fromkeys(("out_dtype", "sum_dtype"), ((torch.dtype,), "a torch.dtype")),
    **dict.fromkeys(
        ("x", "weight", "bias", "residual", "scale", "shift"), ((torch.Tensor,), "a tensor")
    ),
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
