"""What a case has to give, in float64, and how far from it rounding may lead.

Arrays are (units, elements of a unit). The bounds are those of tests/support/bounds.h, for whole arrays: a first-order
error analysis that follows the formulas term by term, so that it allows nothing for what a kernel should not do. In
the names, e_v is the allowed absolute error of v.
"""

import dataclasses
import math

import numpy as np

from evenkeel.check.memory import LARGEST, round_to


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    u: float  # unit roundoff
    tiny: float  # what underflow may cost a single operation
    wide: bool  # float64

    def sum_error(self, terms):
        """A sum of that many terms is off by no more than this share of the sum of their magnitudes."""
        return self.u * (8 + (terms / 2 if self.wide else 0.75 * min(terms, 16384) ** 0.5))


def arithmetic_of(case, pass_):
    if case.computes_in_f64(pass_):
        return Arithmetic(2.0**-52, 2.0**-1022, True)
    return Arithmetic(2.0**-24, 2.0**-148, False)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclasses.dataclass(frozen=True)
class Activated:
    """An activation at z: its value and slope, and what errors do to them."""

    value: np.ndarray
    slope: np.ndarray
    steepest: float  # how fast the value changes with z, at most
    bend: float  # how fast the slope does
    exponent: np.ndarray  # its error, in unit roundoffs, is one of the value


def activated(name, z):
    root = math.sqrt(2 / math.pi)
    if name == "silu":
        s = sigmoid(z)
        return Activated(z * s, s * (1 + z * (1 - s)), 1.1, 0.5, np.abs(z))
    if name == "relu":
        return Activated(np.where(z <= 0, 0, z), np.where(z <= 0, 0, 1.0), 1, 0, 0 * z)
    if name == "gelu":
        cdf = erfc(-z / math.sqrt(2)) / 2
        slope = cdf + z * np.exp(-np.square(z) / 2) * root / 2
        return Activated(z * cdf, slope, 1.13, 0.8, np.square(z))
    u = 2 * root * (z + 0.044715 * z**3)
    s = sigmoid(u)
    slope = s * (1 + z * (1 - s) * 2 * root * (1 + 3 * 0.044715 * np.square(z)))
    return Activated(z * s, slope, 1.13, 0.9, 2 * np.abs(u))


def by_unit(case, parameter):
    """A parameter as it meets the elements of units."""
    if not case.is_group:
        return parameter[None, :]
    groups = case["groups"]
    rows = np.repeat(parameter.reshape(groups, -1), case["spatial"], axis=1)
    return np.tile(rows, (case["samples"], 1))


def by_parameter(case, elements):
    """Sums of elements for every parameter."""
    if not case.is_group:
        return elements.sum(0)
    shape = case["samples"], case["channels"], case["spatial"]
    return elements.reshape(shape).sum((0, 2))


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What meets the elements of units: with a scale and a shift, (1 + scale) * weight and (1 + scale) * bias + shift."""

    weight: np.ndarray
    bias: np.ndarray
    e_weight: np.ndarray  # but for the rounding of the weight's own offset
    e_bias: np.ndarray
    factor: np.ndarray  # 1 + scale


def parameters_of(case, u, weight, bias, modulation):
    weight, bias = by_unit(case, weight), by_unit(case, bias)
    if modulation is None:
        return Parameters(weight, bias, 0, 0, 1)
    rows = case.unit_count // case["samples"]
    scale, shift = (np.repeat(values, rows, axis=0) for values in modulation)
    factor = 1 + scale
    return Parameters(
        weight * factor,
        bias * factor + shift,
        3 * u * np.abs(weight * factor),
        3 * u * (np.abs(bias * factor) + np.abs(shift)),
        factor,
    )


def after_casting(case, value, e_value):
    """The casting order llama rounds the normalized value: an error below half an ulp can become a whole one."""
    if case["casting"] != "llama":
        return value, e_value
    dtype = case.normalized_dtype
    low, rounded, high = (round_to(v, dtype) for v in (value - e_value, value, value + e_value))
    return rounded, np.maximum(high - rounded, rounded - low)


def added(case, x, residual):
    """The one right sum: added in float64 where that is its type, otherwise in float32, and rounded to its type."""
    total = x + residual
    if case.normalized_dtype != "f64":
        total = round_to(total, "f32")
    return round_to(total, case.normalized_dtype)


def forward(case, x, weight, bias, modulation):
    """{output: (value, bound)}; weight has its offset, and both are there (1 and 0 where absent).

    x is what is normalized: where there is a residual, the sum. modulation: scale and shift, or None.
    """
    a = arithmetic_of(case, "forward")
    u, tiny = a.u, a.tiny
    centers = case.op != "rms_norm"
    sum_u = a.sum_error(case.unit_size)
    mean = x.mean(1, keepdims=True) if centers else np.zeros((len(x), 1))
    variance = np.square(x - mean).mean(1, keepdims=True)
    rstd = 1 / np.sqrt(variance + case["eps"])
    deviation = np.sqrt(variance)
    e_stored = (sum_u if a.wide else 2 * u) * np.abs(mean)
    e_mean = e_stored + sum_u * deviation + 4 * tiny if centers else np.zeros_like(mean)
    # Means of blocks are float64 for float32, but no wider than the compute type for float64.
    e_merged = 8 * u * np.abs(mean) * deviation if a.wide else 0
    e_variance = 2 * sum_u * variance + e_merged + np.square(e_mean) + 4 * tiny
    e_rstd = rstd * (0.5 * e_variance * np.square(rstd) + 3 * u)

    own = parameters_of(case, u, weight, bias, modulation)
    weight, bias = own.weight, own.bias
    normalized = (x - mean) * rstd
    e_normalized = (
        e_mean * rstd + np.abs(x - mean) * e_rstd + 2 * u * np.abs(normalized) + tiny * rstd
    )
    cast, e_cast = after_casting(case, normalized, e_normalized)
    scaled = cast * weight
    y = scaled + bias
    e_y = np.abs(weight) * e_cast + 3 * u * np.abs(scaled) + u * np.abs(bias) + tiny
    e_y = e_y + own.e_weight * np.abs(cast) + own.e_bias
    if case["activation"] != "none":
        at = activated(case["activation"], y)
        y = at.value
        e_y = at.steepest * e_y + (8 + at.exponent) * u * np.abs(y) + 2.0**-126
    return {
        "y": (y, e_y),
        "sum": (x, np.zeros_like(x)),
        "mean": (mean[:, 0], e_mean[:, 0]),
        "rstd": (rstd[:, 0], e_rstd[:, 0]),
    }


def quantized(case, y, e_y, buffers):
    """What becomes of y and its bound: scaled, by the scales that the library gives, and those scales."""
    largest = LARGEST[case["y"]]
    results = {}
    if case["y_scale"] == "rows":
        amax = np.abs(y).max(1, initial=0)
        if case["amax_bound"]:
            amax = np.where(amax > case["amax_bound"], case["amax_bound"], amax)
        wanted = np.maximum(amax / largest, 2.0**-126)
        results["y_row_scale"] = (wanted, e_y.max(1, initial=0) / largest + 2.0**-22 * wanted)
        scale = buffers["y_row_scale"].read()[:, None]
    else:
        scale = buffers["y_scale"].read()
    z = y / scale
    return results | {"y": (z, e_y / scale + 2.0**-21 * np.abs(z))}


def backward(case, x, dy, dsum, weight, bias, modulation, mean, rstd):
    """The same for gradients, from the statistics that a forward call has saved. dsum is None where it is absent."""
    a = arithmetic_of(case, "backward")
    u, tiny = a.u, a.tiny
    centers = case.op != "rms_norm"
    size, sum_u = case.unit_size, a.sum_error(case.unit_size)
    mean, rstd = mean[:, None], rstd[:, None]
    plain_weight, plain_bias = by_unit(case, weight), by_unit(case, bias)
    own = parameters_of(case, u, weight, bias, modulation)
    weight, bias = own.weight, own.bias
    normalized = (x - mean) * rstd
    e_normalized = 3 * u * np.abs(normalized) + u * np.abs(mean) * rstd + tiny * rstd
    cast, e_cast = after_casting(case, normalized, e_normalized)
    dz, e_dz = dy, np.zeros_like(dy)
    if case["activation"] != "none":
        scaled = cast * weight
        z = scaled + bias
        e_z = np.abs(weight) * e_cast + 3 * u * np.abs(scaled) + u * np.abs(bias)
        e_z = e_z + own.e_weight * np.abs(cast) + own.e_bias
        at = activated(case["activation"], z)
        dz = dy * at.slope
        e_dz = np.abs(dy) * (at.bend * e_z + 8 * u) + u * np.abs(dz)
        # A ReLU selects, so that a NaN stays where it is let through. Its slope is that of either side where its kink
        # is within reach.
        if case["activation"] == "relu":
            dz = np.where(at.slope == 0, 0, dy)
            e_dz = np.where(np.abs(z) <= e_z, np.abs(dy), 0)
    g = dz * weight
    e_g = np.abs(weight) * e_dz + 2 * u * np.abs(g) + own.e_weight * np.abs(dz) + tiny

    def unit_mean(elements):
        return elements.sum(1, keepdims=True) / size

    level, e_level = np.zeros_like(mean), np.zeros_like(mean)
    if centers:
        level = unit_mean(g)
        e_level = sum_u * unit_mean(np.abs(g)) + unit_mean(e_g) + tiny
    slope = unit_mean(g * normalized)
    e_terms = e_g * np.abs(normalized) + np.abs(g) * e_normalized
    e_slope = sum_u * unit_mean(np.abs(g * normalized)) + unit_mean(e_terms) + tiny
    dx = rstd * (g - level - normalized * slope)
    e_parts = e_g + e_level + np.abs(normalized) * e_slope + np.abs(slope) * e_normalized
    e_last = 4 * u * (np.abs(g) + np.abs(level) + np.abs(normalized * slope))
    e_dx = rstd * (e_parts + e_last) + tiny
    if dsum is not None:
        dx = dx + dsum
        e_dx = e_dx + u * np.abs(dx) + tiny

    column_u = a.sum_error(x.size / max(case.parameters, 1))

    def summed(terms, e_terms):
        e_sum = by_parameter(case, e_terms + tiny) + column_u * by_parameter(case, np.abs(terms))
        return by_parameter(case, terms), e_sum

    product, e_product = dz * cast, np.abs(cast) * e_dz + np.abs(dz) * e_cast
    results = {"dx": (dx, e_dx), "dresidual": (dx, e_dx)}
    if modulation is None:
        return results | {"dweight": summed(product, e_product), "dbias": summed(dz, e_dz)}

    e_product, e_gradient = e_product + 3 * u * np.abs(product), e_dz + 3 * u * np.abs(dz)
    factor, samples = own.factor, case["samples"]
    sample_u = a.sum_error(case.unit_count // samples)

    def by_sample(elements):
        return elements.reshape(samples, -1, case.unit_size).sum(1)

    def of_samples(terms, magnitudes, e_terms):
        return by_sample(terms), by_sample(e_terms + tiny) + sample_u * by_sample(magnitudes)

    return results | {
        "dweight": summed(factor * product, np.abs(factor) * e_product),
        "dbias": summed(factor * dz, np.abs(factor) * e_gradient),
        "dscale": of_samples(
            product * plain_weight + dz * plain_bias,
            np.abs(product * plain_weight) + np.abs(dz * plain_bias),
            np.abs(plain_weight) * e_product + np.abs(plain_bias) * e_gradient,
        ),
        "dshift": of_samples(dz, np.abs(dz), e_dz),
    }
