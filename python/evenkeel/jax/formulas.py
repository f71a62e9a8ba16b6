"""The norms, their tangents and their gradients written out in JAX's own operations.

Slower than the kernels, and used only for what they do not do: tangents (jvp), derivatives of
derivatives, and parameters that differ within a batch of vmap. Each function takes and returns
arrays by name (norm.py).
"""

import functools

import jax
import jax.numpy as jnp


def _gelu_tanh(z):
    end = 24.0  # beyond, the slope is 0 or 1, and jax.nn.gelu's derivative overflows
    return jnp.where(z > end, z, jax.nn.gelu(jnp.clip(z, -end, end), approximate=True))


ACTIVATIONS = {
    "none": None,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": _gelu_tanh,
}


class Formula:
    """What all three have in common: the normalized values, and how arrays meet them."""

    def __init__(self, norm, x, weight=None, bias=None):
        self.norm, self.shape = norm, x.shape
        self.activation = ACTIVATIONS[norm.activation]
        self.dtype = norm.compute_dtype(
            *(each.dtype for each in (weight, bias) if each is not None)
        )
        lead, rest = x.shape[: norm.lead], x.shape[norm.lead :]
        if norm.op != "group_norm":
            self.split, axes, channels = x.shape, range(norm.lead, x.ndim), rest
            sums = range(norm.lead)
        elif norm.channels_last:
            self.split = (*lead, *rest[:-1], norm.groups, rest[-1] // norm.groups)
            axes = [*range(norm.lead, x.ndim - 1), x.ndim]
            channels, sums = rest[-1:], range(x.ndim - 1)
        else:
            self.split = (*lead, norm.groups, rest[0] // norm.groups, *rest[1:])
            axes = range(norm.lead + 1, x.ndim + 1)
            channels = (rest[0], *(1 for _ in rest[1:]))
            sums = [i for i in range(x.ndim) if i != norm.lead]
        self.axes, self.channels, self.sums = tuple(axes), channels, tuple(sums)
        self.weight = None if weight is None else self.spread(weight) + norm.weight_offset
        self.bias = None if bias is None else self.spread(bias)
        values = self.wide(x).reshape(self.split)
        self.mean = self.average(values) if norm.centers else None
        values = values - self.mean if norm.centers else values
        self.rstd = jax.lax.rsqrt(self.average(values * values) + norm.eps)
        self.normalized = values * self.rstd

    def wide(self, array):
        return array.astype(self.dtype)

    def spread(self, parameter):
        """A parameter as it meets x."""
        return self.wide(parameter).reshape(self.channels)

    def average(self, values):
        return jnp.mean(values, self.axes, keepdims=True)

    def cast(self):
        """The normalized values as they meet the weight. Rounding has the derivative of the identity."""
        values = self.normalized.reshape(self.shape)
        if self.norm.casting != "llama":
            return values
        rounded = self.wide(values.astype(self.norm.normalized_dtype))
        return values + jax.lax.stop_gradient(rounded - values)

    def before_activation(self):
        z = self.cast()
        z = z if self.weight is None else z * self.weight
        return z if self.bias is None else z + self.bias

    def activated(self):
        z = self.before_activation()
        return z if self.activation is None else self.activation(z)

    def sloped(self, tangent):
        """A tangent, or a gradient, times the slope of the activation."""
        if self.activation is None:
            return tangent
        return jax.jvp(self.activation, (self.before_activation(),), (tangent,))[1]

    def fold(self, gradient, parameter):
        """The sum of a gradient over everything but its parameter's dimensions."""
        return jnp.sum(gradient, self.sums).reshape(parameter.shape).astype(parameter.dtype)


def forward(norm, x, residual=None, weight=None, bias=None):
    named = {}
    if residual is not None:
        wide = norm.compute_dtype() if norm.sum_dtype == jnp.float64 else jnp.float32
        x = named["sum"] = (x.astype(wide) + residual.astype(wide)).astype(norm.sum_dtype)
    f = Formula(norm, x, weight, bias)
    named["y"] = f.activated().astype(norm.out_dtype)
    shape = norm.statistics_shape(x.shape)
    for name in norm.statistics:
        named[name] = getattr(f, name).reshape(shape).astype(norm.statistics_dtype)
    return named


def tangent(norm, x, weight=None, bias=None, mean=None, rstd=None, **dots):
    """The tangents of y and sum; x is what was normalized. Linear in the dots.

    mean and rstd are there for the backward pass, which is this function's transpose; here they are
    computed from x, so that derivatives see how they depend on it.
    """
    f = Formula(norm, x, weight, bias)
    z_dot = jnp.zeros(x.shape, f.dtype)
    named = {}
    moving = [f.wide(dots[name]) for name in ("x_dot", "residual_dot") if name in dots]
    if moving:
        x_dot = sum(moving[1:], moving[0])
        named["sum_dot"] = x_dot.astype(norm.sum_dtype) if norm.sum_dtype else None
        x_dot = x_dot.reshape(f.split)
        g = x_dot - f.normalized * f.average(f.normalized * x_dot)
        g = g - f.average(x_dot) if norm.centers else g
        n_dot = (g * f.rstd).reshape(x.shape)
        z_dot = z_dot + (n_dot if f.weight is None else n_dot * f.weight)
    if "weight_dot" in dots:
        z_dot = z_dot + f.cast() * f.spread(dots["weight_dot"])
    if "bias_dot" in dots:
        z_dot = z_dot + f.spread(dots["bias_dot"])
    return named | {"y_dot": f.sloped(z_dot).astype(norm.out_dtype)}


def backward(norm, dy, x, weight=None, bias=None, mean=None, rstd=None, dsum=None):
    """All gradients; x is what was normalized. mean and rstd are computed from it."""
    f = Formula(norm, x, weight, bias)
    dz = f.sloped(f.wide(dy))
    g = (dz if f.weight is None else dz * f.weight).reshape(f.split)
    dx = g - f.normalized * f.average(g * f.normalized)
    dx = dx - f.average(g) if norm.centers else dx
    dx = (dx * f.rstd).reshape(x.shape)
    dx = dx if dsum is None else dx + f.wide(dsum)
    named = {"dx": dx.astype(norm.x_dtype)}
    if norm.residual_dtype:
        named["dresidual"] = dx.astype(norm.residual_dtype)
    if weight is not None:
        named["dweight"] = f.fold(dz * f.cast(), weight)
    if bias is not None:
        named["dbias"] = f.fold(dz, bias)
    return named
