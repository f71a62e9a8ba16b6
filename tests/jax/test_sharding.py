"""Arrays on two devices: rows stay where they are, gradients of parameters are summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_support import BF16, F32, NORMS, make, random

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
COMMUNICATION = (
    "all-gather(",
    "all-reduce(",
    "all-to-all(",
    "collective-permute(",
    "reduce-scatter(",
)


def loss(call):
    def run(inputs):
        results = jax.tree.leaves(call.ours(inputs))
        return sum(jnp.sum(jnp.sin(each.astype(jnp.float32))) for each in results)

    return run


def check_close(actual, expected):
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        wide = np.asarray(expected[name], np.float64)
        tolerance = (0.02 if value.dtype == BF16 else 1e-6) * max(1.0, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(value, np.float64), wide, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("norm", "options", "spec"),
    [
        *((norm, {}, P("devices")) for norm in NORMS),
        ("layer_norm", {"residual": F32}, P(None, "devices")),
        ("rms_norm", {"residual": BF16, "weight": BF16}, P("devices")),
        ("layer_norm", {"axis": (-2, -1)}, P("devices")),
        ("group_norm", {"data_format": "channels_first"}, P("devices")),
    ],
)
def test_rows_stay_where_they_are(norm, options, spec, kind):
    shape = (4, 8, 6) if norm == "group_norm" and "data_format" in options else None
    call = make(norm, shape or ((4, 6, 8) if norm == "group_norm" else (4, 6, 40)), **options)
    gradient = jax.jit(jax.grad(loss(call)))
    expected = gradient(call.inputs)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        inputs = {
            name: jax.device_put(
                each, NamedSharding(mesh, P() if name in ("weight", "bias") else spec)
            )
            for name, each in call.inputs.items()
        }
        found = gradient(inputs)
        text = gradient.lower(inputs).compile().as_text()
    check_close(found, expected)
    for name in ("dx", "dresidual"):
        given = inputs.get(name[1:])
        if given is not None:
            assert found[name[1:]].sharding.is_equivalent_to(given.sharding, given.ndim)
    # The sums of parameters' gradients, which XLA may join into one operation.
    parameters = sum(name in inputs for name in ("weight", "bias"))
    counts = {name: text.count(name) for name in COMMUNICATION if text.count(name)}
    assert set(counts) == {"all-reduce("} and counts["all-reduce("] <= parameters


def test_what_is_normalized_is_brought_together():
    call = make("layer_norm", (4, 6, 40))
    expected = jax.jit(jax.grad(loss(call)))(call.inputs)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    x = jax.device_put(call.x, NamedSharding(mesh, P(None, None, "devices")))
    with jax.set_mesh(mesh):
        check_close(jax.jit(jax.grad(loss(call)))(call.inputs | {"x": x}), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_shard_map(norm):
    call = make(norm, (4, 6, 8))
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    specs = {name: P("devices") if name == "x" else P() for name in call.inputs}

    def summed(inputs):
        part = jax.shard_map(
            lambda inputs: jax.lax.psum(loss(call)(inputs), "devices"),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=P(),
        )
        return part(inputs)

    check_close(jax.jit(jax.grad(summed))(call.inputs), jax.jit(jax.grad(loss(call)))(call.inputs))


def test_a_parameter_gradient_is_summed_before_it_is_rounded():
    """Two halves of a sum in bfloat16 would each be rounded."""
    call = make("rms_norm", (64, 32), weight=BF16)
    call.inputs["x"] = random((64, 32), F32, 3)
    alone = jax.jit(jax.grad(loss(call)))(call.inputs)["weight"]
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.device_put(call.x, NamedSharding(mesh, P("devices")))
        both = jax.jit(jax.grad(loss(call)))(call.inputs | {"x": x})["weight"]
    assert np.array_equal(np.asarray(alone), np.asarray(both))
