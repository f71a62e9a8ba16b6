"""What the JAX tests share: calls with their arrays, a float64 oracle, and comparisons.

The oracle is the written-out formula in float64; JAX differentiates it. Tolerances are those of
tests/python/support.py.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import evenkeel.jax as ek

ROW_NORMS = ["layer_norm", "rms_norm"]
NORMS = [*ROW_NORMS, "group_norm"]
DTYPES = [np.dtype(each) for each in (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16)]
F64, F32, F16, BF16 = DTYPES

ACTIVATIONS = {
    "silu": lambda z: z * jax.nn.sigmoid(z),
    "relu": lambda z: jnp.where(z > 0, z, 0.0),
    "gelu": lambda z: z * jax.scipy.stats.norm.cdf(z),
    "gelu_tanh": lambda z: z * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)),
}

# How far a result may be from the oracle, relative to its largest element.
RELATIVE = {F64: 1e-12, F32: 1e-6}


@dataclass
class Call:
    """One call of a function of evenkeel.jax; inputs: its arrays by name."""

    norm: str
    inputs: dict
    options: dict = field(default_factory=dict)

    def ours(self, inputs):
        return getattr(ek, self.norm)(**inputs, **self.options)

    @property
    def x(self):
        return self.inputs["x"]


def formula(
    norm,
    x,
    weight=None,
    bias=None,
    residual=None,
    *,
    eps=1e-6,
    axis=-1,
    num_groups=None,
    data_format="channels_last",
    activation=None,
    weight_offset=0.0,
    casting=None,
    out_dtype=None,
    sum_dtype=None,
    sum_is=None,
):
    """The result in float64, differentiable as often as one likes.

    sum_is: what is normalized, as rounded in memory; derivatives do not see the rounding.
    """
    del out_dtype, sum_dtype
    total = x = x.astype(F64)
    if residual is not None:
        total = x + residual.astype(F64)
        total = total + jax.lax.stop_gradient(sum_is.astype(F64) - total)
    y, shape = total, x.shape
    axes = axis if isinstance(axis, tuple) else (axis,)
    first = data_format == "channels_first"
    if num_groups:
        y = jnp.moveaxis(y, 1, -1) if first else y
        shape = y.shape
        y = y.reshape(shape[0], math.prod(shape[1:-1]), num_groups, shape[-1] // num_groups)
        axes = (1, 3)
    if norm != "rms_norm":
        y = y - y.mean(axes, keepdims=True)
    y = y / jnp.sqrt((y * y).mean(axes, keepdims=True) + eps)
    y = y.reshape(shape)
    if casting == "llama":
        y = y + jax.lax.stop_gradient(y.astype(sum_is.dtype).astype(F64) - y)
    if weight is not None:
        y = y * (weight.astype(F64) + weight_offset)
    if bias is not None:
        y = y + bias.astype(F64)
    y = jnp.moveaxis(y, -1, 1) if first else y
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if residual is None else (y, total)


def random(shape, dtype=F32, seed=0, scale=1.0, shift=0.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values * scale + shift).astype(dtype)


def make(norm, shape=None, dtype=F32, weight=F32, bias=F32, residual=None, seed=0, **options):
    """A call with ordinary random values; weight, bias, residual: their dtype, or None for absent."""
    if norm == "group_norm":
        shape = shape or (3, 5, 2, 12)
        options = {"num_groups": 4} | options
    shape = shape or (6, 5, 40)
    if norm != "group_norm":
        axis = options.get("axis", -1)
        channels = shape[-len(axis) :] if isinstance(axis, tuple) else shape[-1:]
    else:
        channels = (shape[1 if options.get("data_format") == "channels_first" else -1],)
    inputs = {"x": random(shape, dtype, seed, scale=1.5, shift=0.25)}
    if weight is not None:
        shift = 1.0 - options.get("weight_offset", 0.0)
        inputs["weight"] = random(channels, weight, seed + 1, scale=0.5, shift=shift)
    if bias is not None and norm != "rms_norm":
        inputs["bias"] = random(channels, bias, seed + 2, scale=0.5)
    if residual is not None:
        inputs["residual"] = random(shape, residual, seed + 3)
    return Call(norm, inputs, options)


def with_gradients(function, inputs, cotangents):
    """Results and gradients by name of a function of a dictionary of arrays, in one program."""

    def run(inputs, cotangents):
        results, pull = jax.vjp(function, inputs)
        results_of = results if isinstance(results, tuple) else (results,)
        given = tuple(c.astype(r.dtype) for c, r in zip(cotangents, results_of, strict=True))
        (gradients,) = pull(given if isinstance(results, tuple) else given[0])
        named = dict(zip(("y", "sum"), results_of, strict=False))
        return named | {f"d{name}": value for name, value in gradients.items()}

    return jax.jit(run)(inputs, cotangents)


def ordered(values):
    """The numbers of a half-precision array as integers: neighbours differ by one."""
    bits = values.view(np.int16).astype(np.int64)
    return np.where(bits >= 0, bits, -0x8000 - bits)


def check(actual, expected, what="result", arithmetic=F32, scale=0.0):
    """Asserts that `actual` is `expected` (of the oracle), as well as its dtype can hold it.

    scale: the size of what the result is made of, where it is larger than the result.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    dtype = actual.dtype
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    if actual.size == 0:
        return
    error = np.abs(actual.astype(np.float64) - expected)
    allowed = RELATIVE[arithmetic] * max(np.abs(expected).max(), scale)
    if dtype == F32:
        allowed = allowed + np.abs(expected) * np.finfo(np.float32).eps
    good = error <= allowed
    if dtype in (F16, BF16):
        good |= np.abs(ordered(actual) - ordered(expected.astype(dtype))) <= 1
    if good.all():
        return
    worst = np.unravel_index(
        np.where(good, -1.0, np.nan_to_num(error, nan=np.inf)).argmax(), error.shape
    )
    raise AssertionError(
        f"{what} ({dtype}): {(~good).sum()} of {good.size} elements are wrong; the worst at "
        f"{tuple(map(int, worst))}: {actual[worst]!r}, not {expected[worst]!r}"
    )


def terms_of_dx(call, normalized, dy):
    """The size of what is summed to dx: where it cancels, dx is much smaller."""
    x = np.asarray(normalized, np.float64)
    groups, axis = call.options.get("num_groups"), call.options.get("axis", -1)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if groups:
        first = call.options.get("data_format") == "channels_first"
        x = np.moveaxis(x, 1, -1) if first else x
        x, axes = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups), (1, 3)
    power = (x**2).mean(axes) if call.norm == "rms_norm" else x.var(axes)
    weight = np.asarray(call.inputs.get("weight", 1.0), np.float64)
    largest = np.abs(weight + call.options.get("weight_offset", 0.0)).max()
    eps = call.options.get("eps", 1e-6)
    return float(largest * np.abs(np.asarray(dy, np.float64)).max() / np.sqrt(power + eps).min())


def check_call(call):
    """Checks values, gradients, dtypes and shapes of a call against the oracle; returns them."""
    cotangents = [random(call.x.shape, F64, seed=9)]
    if "residual" in call.inputs:
        cotangents.append(random(call.x.shape, F64, seed=10))
    out = np.dtype(call.options.get("out_dtype") or call.x.dtype)
    given = [cotangents[0].astype(out)]
    extra = {}
    if "residual" in call.inputs:
        sum_dtype = np.dtype(call.options.get("sum_dtype") or call.inputs["residual"].dtype)
        given.append(cotangents[1].astype(sum_dtype))
        wide = F64 if sum_dtype == F64 else F32
        x, residual = (call.inputs[name].astype(wide) for name in ("x", "residual"))
        extra["sum_is"] = (x + residual).astype(sum_dtype)
    elif call.options.get("casting") == "llama":
        extra["sum_is"] = call.x
    actual = with_gradients(call.ours, call.inputs, given)
    inputs = {name: value.astype(F64) for name, value in call.inputs.items()}
    expected = with_gradients(
        lambda inputs: formula(call.norm, **inputs, **call.options, **extra), inputs, given
    )
    normalized = extra.get("sum_is", call.x)
    dtypes = {"y": out, "sum": normalized.dtype}
    wide = F64 in [each.dtype for each in call.inputs.values()] + [out, normalized.dtype]
    narrow_statistics = normalized.dtype != F64
    for name, value in actual.items():
        wanted = dtypes.get(name) or call.inputs[name[1:]].dtype
        assert value.dtype == wanted, f"{name}: {value.dtype}, not {wanted}"
        scale = 0.0
        if name in ("dx", "dresidual") and value.size:
            scale = terms_of_dx(call, normalized, given[0])
        if name in ("dweight", "dbias"):
            scale = float(np.abs(np.asarray(given[0], np.float64)).sum() / max(1, value.size))
        saved = narrow_statistics and name not in ("y", "sum")
        check(value, expected[name], name, F64 if wide and not saved else F32, scale)
    return actual


def check_same(actual, expected):
    """Asserts that two dictionaries of arrays are equal, bit by bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        assert np.asarray(value).tobytes() == np.asarray(expected[name]).tobytes(), name
