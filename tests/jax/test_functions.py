"""Values and first gradients against float64, for every dtype, shape and option."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_support import (
    ACTIVATIONS,
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    NORMS,
    ROW_NORMS,
    check_call,
    check_same,
    make,
    random,
    with_gradients,
)

import evenkeel.jax as ek

# One of each dtype for x, parameters and result, and every pair of x's and the parameters'.
MIXES = [(x, p, None) for x, p in itertools.product(DTYPES, DTYPES)]
MIXES += [(BF16, F32, F32), (F32, F32, BF16), (F16, BF16, F64), (F64, F32, F16)]


@pytest.mark.parametrize(("x", "parameter", "out"), MIXES)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients(norm, x, parameter, out):
    check_call(make(norm, None, x, parameter, F32, out_dtype=out))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((40,), -1),
        ((1, 1), -1),
        ((3, 257), -1),
        ((2, 3, 4, 5), -1),
        ((3, 4, 5), (-2, -1)),
        ((3, 4, 5), (0, 1, 2)),
        ((2, 70001), -1),
        ((700, 300), -1),  # enough for threads
    ],
)
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_shapes_of_rows(norm, shape, axis):
    check_call(make(norm, shape, axis=axis))


@pytest.mark.parametrize(
    ("shape", "data_format", "groups"),
    [
        ((2, 6), "channels_last", 3),
        ((2, 6), "channels_first", 1),
        ((2, 7, 6), "channels_last", 6),
        ((2, 6, 7), "channels_first", 2),
        ((2, 3, 4, 5, 8), "channels_last", 4),
        ((2, 8, 3, 4, 5), "channels_first", 4),
        ((4, 30, 30, 64), "channels_last", 8),  # enough for threads
    ],
)
def test_shapes_of_images(shape, data_format, groups):
    check_call(make("group_norm", shape, num_groups=groups, data_format=data_format))


@pytest.mark.parametrize(
    ("norm", "parameters"), [(norm, parameters) for norm in NORMS for parameters in range(4)]
)
def test_parameters_are_optional(norm, parameters):
    weight, bias = (F32 if parameters & bit else None for bit in (1, 2))
    check_call(make(norm, weight=weight, bias=bias))


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        *((norm, {"activation": each}) for norm in NORMS for each in ACTIVATIONS),
        *((norm, {"weight_offset": 1.0}) for norm in NORMS),
        ("rms_norm", {"casting": "llama"}),
        ("rms_norm", {"casting": "gemma", "weight_offset": 1.0}),
        ("layer_norm", {"eps": 0.5}),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_options(norm, options, dtype):
    check_call(make(norm, None, dtype, **options))


@pytest.mark.parametrize(
    ("x", "residual", "total"),
    [(F32, F32, None), (BF16, F32, None), (BF16, BF16, F32), (F16, F64, None), (F32, BF16, None)],
)
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_residual(norm, x, residual, total):
    call = make(norm, None, x, residual=residual, sum_dtype=total)
    found = check_call(call)
    # The bits of an addition and a norm of its result.
    wide = jnp.promote_types(found["sum"].dtype, jnp.float32)
    total = call.x.astype(wide) + call.inputs["residual"].astype(wide)
    total = total.astype(found["sum"].dtype)
    parameters = {name: call.inputs[name] for name in ("weight", "bias") if name in call.inputs}
    y = getattr(ek, norm)(total, **parameters, out_dtype=call.x.dtype)
    check_same({"y": found["y"], "sum": found["sum"]}, {"y": y, "sum": total})


@pytest.mark.parametrize("norm", NORMS)
def test_no_rows(norm):
    shape = (0, 4, 12) if norm == "group_norm" else (0, 40)
    found = check_call(make(norm, shape))
    assert found["dx"].shape == shape
    assert not np.any(found["dweight"])


@pytest.mark.parametrize("norm", ROW_NORMS)
def test_rows_without_elements(norm):
    found = check_call(make(norm, (3, 0)))
    assert found["y"].shape == (3, 0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "values",
    [
        {"scale": 1.0, "shift": 1e4},
        {"scale": 1e-30},
        {"scale": 1e15},
        {"scale": 0.0, "shift": 3.0},
    ],
)
def test_hostile_values(norm, values):
    call = make(norm)
    call.inputs["x"] = random(call.x.shape, F32, 5, **values)
    inputs = {name: value.astype(F64) for name, value in call.inputs.items()}
    y, wide = call.ours(call.inputs), call.ours(inputs)
    # What rounding x itself to float32 may cost.
    spread = max(float(jnp.std(call.x)), 1e-6) if values.get("scale") else 1.0
    allowed = 1e-6 * max(1.0, abs(values.get("shift", 0.0)) / spread / 100) * 10
    assert float(jnp.abs(y - wide).max()) <= allowed


@pytest.mark.parametrize("norm", NORMS)
def test_not_a_number_stays_in_its_row(norm):
    call = make(norm)
    for value in (jnp.nan, jnp.inf):
        hostile = call.inputs | {"x": call.x.at[(0,) * call.x.ndim].set(value)}
        y, ordinary = call.ours(hostile), call.ours(call.inputs)
        assert np.isnan(np.asarray(y[0])).any()
        assert np.array_equal(y[1:], ordinary[1:])


@pytest.mark.parametrize("norm", NORMS)
def test_results_do_not_depend_on_the_batch(norm):
    shape = (12, 30, 20, 64) if norm == "group_norm" else (600, 512)
    call = make(norm, shape)
    dy = random(shape, seed=9)
    all_of_it = with_gradients(call.ours, call.inputs, [dy])
    again = with_gradients(call.ours, call.inputs, [dy])
    check_same(all_of_it, again)
    part = slice(3, 5)
    alone = with_gradients(call.ours, call.inputs | {"x": call.x[part]}, [dy[part]])
    for name in ("y", "dx"):
        assert np.array_equal(all_of_it[name][part], alone[name]), name


def test_calls_from_many_threads_at_once():
    """All of them want XLA's threads; no one may wait for a thread that waits for it."""
    call = make("layer_norm", (512, 1024))
    step = jax.jit(
        lambda x: jax.lax.fori_loop(0, 10, lambda _, x: call.ours(call.inputs | {"x": x}), x)
    )
    expected = np.asarray(step(call.x))
    with ThreadPoolExecutor(8) as pool:
        devices = [jax.devices()[i % jax.device_count()] for i in range(32)]
        found = pool.map(lambda device: step(jax.device_put(call.x, device)), devices)
        assert all(np.array_equal(each, expected) for each in found)


def test_arrays_of_numpy_are_taken():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(ek.rms_norm(x), ek.rms_norm(jnp.asarray(x)))


def test_nothing_is_cast_beside_the_kernel():
    call = make("layer_norm", None, BF16, F32, F32)
    dy = [random(call.x.shape, BF16)]
    text = (
        jax.jit(lambda i: with_gradients(call.ours, i, dy)).lower(call.inputs).compile().as_text()
    )
    assert text.count('custom_call_target="evenkeel_') == 2
    assert " convert(" not in text
    assert " copy(" not in text
