"""The norms as functions of arrays.

    layer_norm(x, weight, bias, eps)                 over the last axis, or the trailing ones of `axis`
    rms_norm(x, weight, eps)
    group_norm(x, num_groups, weight, bias, eps)     channels last; data_format="channels_first"

and, by keyword:

    activation      "silu", "relu", "gelu" or "gelu_tanh" (GELU's tanh form): applied to the result, in the same kernel,
                    forward and backward
    weight_offset   added to every weight (1.0 for weights that are stored as weight - 1)
    casting         rms_norm: where half-precision input is rounded; "llama" rounds before the weight is multiplied,
                    "gemma" and None only at the end
    out_dtype       of the result
    residual        layer_norm, rms_norm: added to x before, in the same kernel. The result is then a pair (y, sum): y is
                    the norm of sum = x + residual
    sum_dtype       of that sum, which is normalized as rounded to it; that of the residual, unless it is given
    donate_residual True: sum is written over residual. If anything else needs the residual, XLA copies it before, so
                    this is for a residual that is not needed again

x, residual, weight and bias may have different floating dtypes; nothing is cast beforehand. The result has the
dtype of x. Everything is checked while JAX traces.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from evenkeel import _abi
from evenkeel.jax import internals
from evenkeel.jax.norm import Norm
from evenkeel.jax.primitives import forward_p

DTYPES = tuple(np.dtype(name) for name in (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16))
CHANNELS_LAST = {"channels_last": True, "channels_first": False}


def layer_norm(
    x,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    axis=-1,
    activation=None,
    weight_offset=0.0,
    out_dtype=None,
    residual=None,
    sum_dtype=None,
    donate_residual=False,
):
    """Layer norm over the last axis of x, or over the trailing axes that `axis` names.

    With a residual of the shape of x: the norm of sum = x + residual, and that sum.
    """
    return _row_norm(
        "layer_norm",
        {"x": x, "residual": residual, "weight": weight, "bias": bias},
        axis,
        (out_dtype, sum_dtype, donate_residual),
        eps=_number("eps", eps),
        activation=_chosen("activation", activation, _abi.ACTIVATIONS),
        weight_offset=_offset(weight_offset, weight),
    )


def rms_norm(
    x,
    weight=None,
    eps=1e-6,
    *,
    axis=-1,
    activation=None,
    weight_offset=0.0,
    casting=None,
    out_dtype=None,
    residual=None,
    sum_dtype=None,
    donate_residual=False,
):
    """RMS norm over the last axis of x, or over the trailing axes that `axis` names.

    With a residual of the shape of x: the norm of sum = x + residual, and that sum.
    """
    return _row_norm(
        "rms_norm",
        {"x": x, "residual": residual, "weight": weight},
        axis,
        (out_dtype, sum_dtype, donate_residual),
        eps=_number("eps", eps),
        activation=_chosen("activation", activation, _abi.ACTIVATIONS),
        casting=_chosen("casting", casting, _abi.CASTINGS),
        weight_offset=_offset(weight_offset, weight),
    )


def group_norm(
    x,
    num_groups,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    data_format="channels_last",
    activation=None,
    weight_offset=0.0,
    out_dtype=None,
):
    """Group norm of x (samples, ..., channels), or (samples, channels, ...) for "channels_first"."""
    arrays = _arrays({"x": x, "weight": weight, "bias": bias})
    x = arrays["x"]
    if data_format not in CHANNELS_LAST:
        names = ", ".join(map(repr, CHANNELS_LAST))
        raise ValueError(f"evenkeel: data_format must be one of {names}, but is {data_format!r}")
    channels_last = CHANNELS_LAST[data_format]
    if x.ndim < 2:
        raise ValueError(f"evenkeel: x has shape {x.shape}, but must have rank 2 or more")
    channels = x.shape[-1 if channels_last else 1]
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, np.integer)):
        raise TypeError(f"evenkeel: num_groups must be an int, but is {num_groups!r}")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"evenkeel: num_groups is {num_groups}, but must divide the {channels} channels of x"
        )
    _check_parameters(arrays, (channels,), "one value for each channel of x")
    norm = Norm(
        "group_norm",
        lead=1,
        eps=_number("eps", eps),
        x_dtype=x.dtype,
        out_dtype=_dtype("out_dtype", out_dtype, x.dtype),
        groups=int(num_groups),
        channels_last=channels_last,
        activation=_chosen("activation", activation, _abi.ACTIVATIONS),
        weight_offset=_offset(weight_offset, weight),
    )
    return _run(norm, arrays)


def _row_norm(op, given, axis, results, **options):
    arrays = _arrays(given)
    x, residual = arrays["x"], arrays.get("residual")
    out_dtype, sum_dtype, donate_residual = results
    if x.ndim < 1:
        raise ValueError("evenkeel: x has shape (), but must have rank 1 or more")
    lead = _lead(axis, x.ndim)
    _check_parameters(arrays, x.shape[lead:], "that of the normalized axes of x")
    added = _added(x, residual, sum_dtype, donate_residual)
    norm = Norm(
        op,
        lead=lead,
        x_dtype=x.dtype,
        out_dtype=_dtype("out_dtype", out_dtype, x.dtype),
        **added,
        **options,
    )
    return _run(norm, arrays)


def _added(x, residual, sum_dtype, donate_residual):
    """What the norm has to know of the residual."""
    if residual is None:
        for name, value in (("sum_dtype", sum_dtype), ("donate_residual", donate_residual)):
            if value:
                raise ValueError(f"evenkeel: {name} is {value}, but there is no residual")
        return {}
    if residual.shape != x.shape:
        raise ValueError(
            f"evenkeel: residual has shape {residual.shape}, but must have shape {x.shape}: that of x"
        )
    sum_dtype = _dtype("sum_dtype", sum_dtype, residual.dtype)
    if np.float64 in (x.dtype, residual.dtype) and sum_dtype != np.float64:
        raise ValueError(
            f"evenkeel: sum_dtype is {sum_dtype}, but must be float64 where x or residual is"
        )
    if donate_residual and sum_dtype != residual.dtype:
        raise ValueError(
            f"evenkeel: donate_residual is True, but the sum is {sum_dtype} and the residual "
            f"{residual.dtype}: they must have one dtype"
        )
    return {
        "residual_dtype": residual.dtype,
        "sum_dtype": sum_dtype,
        "donate_residual": bool(donate_residual),
    }


def _run(norm, arrays):
    results = ("y", "sum") if norm.sum_dtype else ("y",)
    done = forward_p.bind(
        *_varying_alike(arrays.values()), norm=norm, operands=tuple(arrays), results=results
    )
    return tuple(done) if norm.sum_dtype else done[0]


def _varying_alike(arrays):
    """Inside shard_map, a parameter that all devices share becomes one of each: the transpose of
    that is the sum of its gradients over the devices."""
    arrays = list(arrays)
    varying = [internals.varying(each) for each in arrays]
    everywhere = frozenset().union(*varying)
    return [
        jax.lax.pcast(each, tuple(sorted(everywhere - own)), to="varying")
        if own != everywhere
        else each
        for each, own in zip(arrays, varying, strict=True)
    ]


# ---- checks ----


def _arrays(given):
    """Those that are given, as arrays, by name."""
    return {name: _array(name, value) for name, value in given.items() if value is not None}


def _array(name, value):
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        raise TypeError(f"evenkeel: {name} must be an array, but is {value!r}") from error
    if array.dtype not in DTYPES:
        raise TypeError(f"evenkeel: {name} has dtype {array.dtype}, but must have {_known()}")
    return array


def _known():
    return "one of " + ", ".join(map(str, DTYPES))


def _dtype(name, given, default):
    if given is None:
        return np.dtype(default)
    try:
        dtype = np.dtype(given)
    except TypeError as error:
        raise TypeError(f"evenkeel: {name} must be {_known()}, but is {given!r}") from error
    if dtype not in DTYPES:
        raise TypeError(f"evenkeel: {name} must be {_known()}, but is {dtype}")
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError(f"evenkeel: {name} is float64, but jax_enable_x64 is off")
    return dtype


def _lead(axis, ndim):
    """How many leading dimensions are not normalized."""
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    if not axes or not all(isinstance(each, int) and -ndim <= each < ndim for each in axes):
        raise ValueError(
            f"evenkeel: axis is {axis!r}, but must name axes of x, which has rank {ndim}"
        )
    lead = ndim - len(axes)
    if sorted(each % ndim for each in axes) != list(range(lead, ndim)):
        raise ValueError(
            f"evenkeel: axis is {axis!r}, but must name the last axis, or several trailing ones, of x, "
            f"which has rank {ndim}"
        )
    return lead


def _check_parameters(arrays, shape, what):
    for name in ("weight", "bias"):
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(
                f"evenkeel: {name} has shape {arrays[name].shape}, but must have shape {shape}: {what}"
            )


def _number(name, value):
    try:
        number = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"evenkeel: {name} must be a number that is known while tracing, but is {value!r}"
        ) from error
    if not math.isfinite(number) or (name == "eps" and number < 0):
        least = " and not negative" if name == "eps" else ""
        raise ValueError(f"evenkeel: {name} is {number}, but must be finite{least}")
    return number


def _offset(weight_offset, weight):
    offset = _number("weight_offset", weight_offset)
    if offset and weight is None:
        raise ValueError(f"evenkeel: weight_offset is {offset}, but there is no weight")
    return offset


def _chosen(name, value, known):
    value = "none" if value is None else value
    if value not in known:
        raise ValueError(
            f"evenkeel: {name} must be one of {', '.join(map(repr, known))}, but is {value!r}"
        )
    return value
