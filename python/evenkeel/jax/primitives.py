"""The three operations and what JAX's transformations do with them.

    forward     the kernel. Its tangent is
    tangent     a formula, linear in the tangents, whose transpose is
    backward    the kernel. Its tangent is a formula, which JAX differentiates to any order.

So jax.grad runs one kernel forward and one backward, jvp and derivatives of derivatives are formulas,
and none of it is an option of the caller. Under vmap the batch becomes more rows of one call. All
three take and return arrays by name: their parameters `operands` and `results`.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from evenkeel.jax import calls, formulas, internals
from evenkeel.jax.norm import kind_of
from evenkeel.jax.partitioning import partitioned

LINEAR = {"x_dot": "dx", "residual_dot": "dresidual", "weight_dot": "dweight", "bias_dot": "dbias"}


def operation(name):
    primitive = Primitive(f"evenkeel_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_run, primitive))
    primitive.def_abstract_eval(_abstract)
    return primitive


def _run(primitive, *arrays, **static):
    with jax.disable_jit(False):  # a handler is called from a compiled program only
        return _compiled(primitive, **static)(*arrays)


@functools.cache
def _compiled(primitive, **static):
    return jax.jit(functools.partial(primitive.bind, **static))


def _abstract(*operand_types, norm, operands, results):
    """Shapes and dtypes, and how they are split: as x, or as the parameter whose gradient it is."""
    named = dict(zip(operands, operand_types, strict=True))
    x = named["x"]

    def type_of(name):
        kind = kind_of(name)
        dtype = norm.dtype_of(name, named)
        if kind == "tensor":
            return x.update(dtype=dtype, weak_type=False)
        if kind == "parameter":
            return named[name.removeprefix("d")].update(dtype=dtype, weak_type=False)
        shape = norm.statistics_shape(x.shape)
        spec = tuple(x.sharding.spec)[: norm.lead] + (None,) * (len(shape) - norm.lead)
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*spec))
        return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    return [type_of(name) for name in results]


forward_p, tangent_p, backward_p = map(operation, ("forward", "tangent", "backward"))
FORMULAS = {
    forward_p: formulas.forward,
    tangent_p: formulas.tangent,
    backward_p: formulas.backward,
}


def formula(primitive, norm, operands, results):
    """The formula of an operation, as a function of arrays."""

    def function(*arrays):
        named = FORMULAS[primitive](norm, **dict(zip(operands, arrays, strict=True)))
        return [named[name] for name in results]

    return function


# ---- lowering ----


def _kernel(platform, direction):
    def lowered(*arrays, norm, operands, results):
        def call(dtypes, *arrays):
            return calls.call(platform, direction, norm, operands, results, dtypes, *arrays)

        return partitioned(call, norm, operands, results, arrays)

    return mlir.lower_fun(lowered, multiple_results=True)


internals.lowered_with_devices(forward_p, backward_p)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(forward_p, _kernel(_platform, "forward"), platform=_platform)
    mlir.register_lowering(backward_p, _kernel(_platform, "backward"), platform=_platform)
mlir.register_lowering(
    tangent_p,
    mlir.lower_fun(
        lambda *arrays, **static: formula(tangent_p, **static)(*arrays), multiple_results=True
    ),
)


# ---- differentiation ----


def _forward_jvp(primals, tangents, *, norm, operands, results):
    with_sum = ("sum",) if "residual" in operands else ()
    everything = ("y", *with_sum, *norm.statistics)
    done = forward_p.bind(*primals, norm=norm, operands=operands, results=everything)
    saved = dict(zip(operands, primals, strict=True)) | dict(zip(everything, done, strict=True))
    saved["x"] = saved.pop("sum") if with_sum else saved["x"]
    kept = ("x", *(name for name in ("weight", "bias") if name in operands), *norm.statistics)
    dots = {
        f"{name}_dot": tangent
        for name, tangent in zip(operands, tangents, strict=True)
        if type(tangent) is not ad.Zero
    }
    moves = "x_dot" in dots or "residual_dot" in dots
    names = ("y_dot", *(["sum_dot"] if with_sum and moves else []))
    found = tangent_p.bind(
        *(saved[name] for name in kept),
        *dots.values(),
        norm=norm,
        operands=(*kept, *dots),
        results=names,
    )
    moving = dict(zip(names, found, strict=True))
    outputs = dict(zip(everything, done, strict=True))
    # mean and rstd are for the backward pass; what depends on them is differentiated through x.
    return [outputs[name] for name in results], [
        moving.get(f"{name}_dot", internals.zero_tangent(outputs[name])) for name in results
    ]


def _tangent_transpose(cotangents, *arrays, norm, operands, results):
    named = dict(zip(operands, arrays, strict=True))
    arriving = {
        name: value
        for name, value in zip(results, cotangents, strict=True)
        if type(value) is not ad.Zero
    }
    wanted = {LINEAR[name]: each for name, each in named.items() if ad.is_undefined_primal(each)}
    if "y_dot" in arriving:
        gradients = _gradients(norm, named, wanted, arriving)
    else:  # what follows depends on the sum alone, or on nothing
        gradients = {name: internals.zero_cotangent(each) for name, each in wanted.items()}
        if "sum_dot" in arriving:
            gradients |= {
                name: arriving["sum_dot"].astype(each.aval.dtype)
                for name, each in wanted.items()
                if kind_of(name) == "tensor"
            }
    return [gradients.get(LINEAR.get(name)) for name in operands]


def _gradients(norm, named, wanted, arriving):
    inputs = {"dy": arriving["y_dot"]}
    inputs |= {name: each for name, each in named.items() if name not in LINEAR}
    if "sum_dot" in arriving:
        inputs["dsum"] = arriving["sum_dot"]
    operands = tuple(name for name in calls.OPERANDS["backward"] if name in inputs)
    results = tuple(name for name in calls.RESULTS["backward"] if name in wanted)
    found = backward_p.bind(
        *(inputs[name] for name in operands), norm=norm, operands=operands, results=results
    )
    return dict(zip(results, found, strict=True))


def _formula_jvp(primitive, primals, tangents, **static):
    done = primitive.bind(*primals, **static)
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def function(*values):
        arrays = list(primals)
        for i, value in zip(moving, values, strict=True):
            arrays[i] = value
        return formula(primitive, **static)(*arrays)

    _, dots = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])
    return done, dots


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
for _primitive in (tangent_p, backward_p):
    ad.primitive_jvps[_primitive] = functools.partial(_formula_jvp, _primitive)


# ---- vmap ----


def _batched_kernel(primitive, arrays, dims, *, norm, operands, results):
    """One call with the batch as a leading dimension. Parameters that differ within the batch, and
    gradients of parameters for each element of it, are left to the formulas."""
    per_element = [name for name in results if kind_of(name) == "parameter"]
    if any(
        dim is not None and kind_of(name) == "parameter"
        for name, dim in zip(operands, dims, strict=True)
    ):
        return _batched_formula(
            primitive, arrays, dims, norm=norm, operands=operands, results=results
        )
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    leading = [
        array if kind_of(name) == "parameter" else batching.bdim_at_front(array, dim, size)
        for name, array, dim in zip(operands, arrays, dims, strict=True)
    ]
    rows = tuple(name for name in results if name not in per_element)
    done = {}
    if rows:
        found = primitive.bind(*leading, norm=norm.batched(), operands=operands, results=rows)
        done |= dict(zip(rows, found, strict=True))
    if per_element:
        found, _ = _batched_formula(
            primitive, arrays, dims, norm=norm, operands=operands, results=tuple(per_element)
        )
        done |= dict(zip(per_element, found, strict=True))
    return [done[name] for name in results], [0] * len(results)


def _batched_formula(primitive, arrays, dims, **static):
    return _vmapped(primitive, tuple(dims), **static)(*arrays), [0] * len(static["results"])


@functools.cache
def _vmapped(primitive, dims, **static):
    return jax.jit(jax.vmap(formula(primitive, **static), in_axes=dims))


batching.primitive_batchers[forward_p] = functools.partial(_batched_kernel, forward_p)
batching.primitive_batchers[backward_p] = functools.partial(_batched_kernel, backward_p)
batching.primitive_batchers[tangent_p] = functools.partial(_batched_formula, tangent_p)
