"""What JAX's transformations do with a norm: differentiation of every order and mode, vmap, remat, scan,
donation, export."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import program
from jax_support import (
    ACTIVATIONS,
    BF16,
    F32,
    F64,
    NORMS,
    ROW_NORMS,
    check,
    check_same,
    formula,
    make,
    random,
    with_gradients,
)

import evenkeel.jax as ek
from evenkeel import _abi
from evenkeel.jax import workspace

SHAPES = {"group_norm": (2, 3, 2, 8), "layer_norm": (3, 2, 10), "rms_norm": (3, 2, 10)}
VARIANTS = [
    *((norm, {}) for norm in NORMS),
    *((norm, {"activation": "silu", "weight_offset": 1.0}) for norm in NORMS),
    *(("layer_norm", {"activation": each}) for each in ACTIVATIONS),
    *((norm, {"residual": F64}) for norm in ROW_NORMS),
    ("group_norm", {"data_format": "channels_first", "num_groups": 3}),
]


def double(norm, options):
    """A small call in float64, ours and the oracle as functions of its arrays."""
    call = make(norm, SHAPES[norm], F64, F64, F64, **options)

    def expected(inputs):
        extra = {}
        if "residual" in inputs:
            extra["sum_is"] = jax.lax.stop_gradient(inputs["x"] + inputs["residual"])
        return formula(norm, **inputs, **call.options, **extra)

    return call, call.ours, expected


def scalar(function):
    """A scalar that depends on all results in a way that no derivative is lost."""

    def run(inputs):
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(function(inputs)))

    return run


def check_tree(actual, expected):
    jax.tree.map(lambda a, e: check(a, e, arithmetic=F64, scale=1.0), actual, expected)


def count(function, *arguments):
    """How often each handler is called by a compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return tuple(text.count(f'custom_call_target="evenkeel_{n}"') for n in ("forward", "backward"))


@pytest.mark.parametrize(("norm", "options"), VARIANTS)
def test_tangents(norm, options):
    call, ours, expected = double(norm, options)
    dots = {name: random(each.shape, F64, 7) for name, each in call.inputs.items()}

    def both(function):
        return jax.jit(lambda i, d: jax.jvp(function, (i,), (d,)))(call.inputs, dots)

    check_tree(both(ours), both(expected))


@pytest.mark.parametrize(("norm", "options"), VARIANTS)
def test_second_derivatives_in_every_mode(norm, options):
    call, ours, expected = double(norm, options)
    dots = {name: random(each.shape, F64, 7) for name, each in call.inputs.items()}
    grad, wanted = jax.grad(scalar(ours)), jax.grad(scalar(expected))
    forward_over_reverse = jax.jit(lambda i: jax.jvp(grad, (i,), (dots,))[1])(call.inputs)
    check_tree(
        forward_over_reverse, jax.jit(lambda i: jax.jvp(wanted, (i,), (dots,))[1])(call.inputs)
    )

    def reverse_over_reverse(inputs):
        slopes = grad(inputs)
        return sum(jnp.vdot(slopes[name], dots[name]) for name in slopes)

    def reverse_over_forward(inputs):
        return jax.jvp(scalar(ours), (inputs,), (dots,))[1]

    check_tree(jax.jit(jax.grad(reverse_over_reverse))(call.inputs), forward_over_reverse)
    check_tree(jax.jit(jax.grad(reverse_over_forward))(call.inputs), forward_over_reverse)


@pytest.mark.parametrize("norm", NORMS)
def test_third_derivative(norm):
    call, ours, expected = double(norm, {})
    dot = random(call.x.shape, F64, 7)

    def along(function, t):
        return scalar(function)(call.inputs | {"x": call.x + t * dot})

    def third(function):
        return jax.jit(jax.grad(jax.grad(jax.grad(lambda t: along(function, t)))))(0.0)

    check_tree(third(ours), third(expected))


def test_gradients_of_some_inputs_only():
    call = make("layer_norm", residual=F32)
    dy = random(call.x.shape)

    def loss(part, rest):
        y, total = call.ours(rest | part)
        return jnp.vdot(y, dy) + jnp.vdot(total, dy)

    both = jax.grad(loss)(call.inputs, {})
    for name, value in call.inputs.items():
        rest = {other: each for other, each in call.inputs.items() if other != name}
        one = jax.grad(loss)({name: value}, rest)
        check_same(one, {name: both[name]})
        assert count(jax.grad(loss), {name: value}, rest) == (1, 1)


def test_gradient_of_the_sum_alone():
    call = make("rms_norm", None, BF16, residual=F32)
    dx, dresidual = jax.grad(
        lambda x, r: jnp.sum(3 * call.ours(call.inputs | {"x": x, "residual": r})[1]), (0, 1)
    )(call.x, call.inputs["residual"])
    assert dx.dtype == BF16 and dresidual.dtype == F32
    assert np.all(np.asarray(dx) == 3) and np.all(np.asarray(dresidual) == 3)


@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_is_one_call(norm):
    call = make(norm, (5, *SHAPES[norm]))
    call.inputs = {**make(norm, SHAPES[norm]).inputs, "x": random((5, *SHAPES[norm]))}
    rest = {name: each for name, each in call.inputs.items() if name != "x"}
    dy = random(call.x.shape, seed=9)

    def of_one(x, dy):
        y, pull = jax.vjp(lambda x: call.ours(rest | {"x": x}), x)
        return {"y": y, "dx": pull(dy)[0]}

    batched = jax.jit(jax.vmap(of_one, in_axes=(1, 1), out_axes=1))
    found = batched(jnp.moveaxis(call.x, 0, 1), jnp.moveaxis(dy, 0, 1))
    one_by_one = [of_one(x, d) for x, d in zip(call.x, dy, strict=True)]
    for name, value in found.items():
        assert np.array_equal(value, jnp.stack([each[name] for each in one_by_one], 1)), name
    assert count(jax.vmap(of_one), call.x, dy) == (1, 1)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_a_batch_are_one_call(norm):
    call = make(norm, SHAPES[norm])
    xs = random((5, *SHAPES[norm]))

    def loss(inputs, xs):
        return jnp.sum(jax.vmap(lambda x: call.ours(inputs | {"x": x}))(xs) ** 2)

    assert count(jax.grad(loss), call.inputs, xs) == (1, 1)


@pytest.mark.parametrize("batched", ["x", "parameters", "both"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_for_each_element_of_a_batch(norm, batched):
    call, ours, expected = double(norm, {"activation": "silu"})
    axes = {
        name: 0 if batched != ("parameters" if name == "x" else "x") else None
        for name in call.inputs
    }
    inputs = {
        name: random((4, *each.shape), F64, 8) if axes[name] == 0 else each
        for name, each in call.inputs.items()
    }

    def per_element(function):
        both = jax.value_and_grad(scalar(function))
        return jax.jit(jax.vmap(both, in_axes=(axes,)))(inputs)

    check_tree(per_element(ours), per_element(expected))


def test_hessian():
    call, ours, expected = double("layer_norm", {})
    wanted = jax.jit(jax.hessian(scalar(expected)))(call.inputs)
    for hessian in (jax.jacfwd(jax.grad(scalar(ours))), jax.jacrev(jax.grad(scalar(ours)))):
        check_tree(jax.jit(hessian)(call.inputs), wanted)


def test_checkpoint_and_scan():
    call = make("layer_norm", residual=F32)
    parameters = {name: call.inputs[name] for name in ("weight", "bias")}

    def layer(carry, _):
        y, total = ek.layer_norm(carry, **parameters, residual=jnp.tanh(carry))
        return y + 0.1 * total, None

    def scanned(x, layer):
        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0] ** 2)

    def unrolled(x):
        for _ in range(3):
            x = layer(x, None)[0]
        return jnp.sum(x**2)

    expected = jax.jit(jax.grad(unrolled))(call.x)
    for body in (layer, jax.checkpoint(layer)):
        found = jax.jit(jax.grad(scanned), static_argnums=1)(call.x, body)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # Computed once more in the backward pass, and not kept.
    once_more = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: layer(x, None)[0])(x) ** 2))
    assert count(once_more, call.x)[1] == 1


def test_donated_residual():
    """Its memory becomes the sum's; without that there is a copy, and what is not donated stays."""
    call = make("rms_norm", (64, 40), residual=F32)

    def step(residual, donate):
        inputs = call.inputs | {"residual": residual}
        y, total = ek.rms_norm(**inputs, donate_residual=donate)
        return total, y

    def text(donate):
        function = jax.jit(lambda r: step(r, donate), donate_argnums=0)
        return function.lower(call.inputs["residual"]).compile().as_text()

    assert "input_output_alias" in text(True) and " copy(" not in text(True)
    assert " copy(" in text(False)
    before = np.array(call.inputs["residual"])
    kept = jax.jit(lambda r: step(r, True))(call.inputs["residual"])
    assert np.array_equal(call.inputs["residual"], before)
    # In use afterwards: copied.
    used = jax.jit(lambda r: (*step(r, True), r + 1))(call.inputs["residual"])
    assert np.array_equal(used[2], before + 1)
    plain = jax.jit(lambda r: step(r, False))(call.inputs["residual"])
    for found in (kept, used):
        for one, other in zip(found, plain, strict=False):
            assert np.array_equal(one, other)


CALLED = """
import sys
import jax, numpy as np
import evenkeel.jax
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
with np.load(sys.argv[2]) as arrays:
    np.save(sys.argv[3], exported.call(*arrays.values()))
"""


def exported(function, *arguments, **options):
    names = [f"evenkeel_{n}{s}" for n in ("forward", "backward") for s in ("", "_scratch")]
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    return jax.export.export(jax.jit(function), disabled_checks=unchecked, **options)(*arguments)


def test_export(tmp_path):
    call = make("layer_norm")

    def gradient(x, weight, bias):
        return jax.grad(lambda x: jnp.sum(jnp.sin(ek.layer_norm(x, weight, bias))))(x)

    program_file = tmp_path / "gradient"
    program_file.write_bytes(exported(gradient, *call.inputs.values()).serialize())
    np.savez(tmp_path / "arrays.npz", **call.inputs)
    program(CALLED, program_file, tmp_path / "arrays.npz", tmp_path / "result.npy")
    assert np.array_equal(np.load(tmp_path / "result.npy"), jax.jit(gradient)(**call.inputs))


@pytest.mark.parametrize(("norm", "options"), VARIANTS)
def test_lowering_for_cuda(norm, options):
    """What is called there, with which attributes: without a GPU, the handlers that ask for scratch memory."""
    call, ours, _ = double(norm, options)
    text = exported(
        lambda i: jax.grad(scalar(ours))(i), call.inputs, platforms=["cuda"]
    ).mlir_module()
    for name in ("forward", "backward"):
        assert f"@evenkeel_{name}" in text
    for attribute in (
        f"op = {NORMS.index(norm)} : i64",
        f"lead = {1 if norm == 'group_norm' else 2} : i64",
        f"layout = {0 if 'data_format' in options else 1} : i64",
        f"activation = {_abi.ACTIVATIONS[options.get('activation', 'none')]} : i64",
        f"has_residual = {'true' if 'residual' in options else 'false'}",
        f"has_dsum = {'true' if 'residual' in options else 'false'}",
        f"wants_dresidual = {'true' if 'residual' in options else 'false'}",
        f"wants_dbias = {'false' if norm == 'rms_norm' else 'true'}",
    ):
        assert attribute in text, attribute


@pytest.mark.parametrize(("norm", "options"), VARIANTS)
def test_lowering_for_cuda_with_a_gpu(norm, options, monkeypatch):
    """With the CPU's answers for a GPU's: the workspace is one more result of the call."""
    monkeypatch.setattr(workspace, "gpus", lambda: (0,))
    monkeypatch.setitem(workspace.DEVICE, "device", _abi.DEVICES["cpu"])
    workspace.size_on.cache_clear()
    call, ours, _ = double(norm, options)
    text = exported(
        lambda i: jax.grad(scalar(ours))(i), call.inputs, platforms=["cuda"]
    ).mlir_module()
    workspace.size_on.cache_clear()
    assert "_scratch" not in text
    calls = [line for line in text.splitlines() if "custom_call @evenkeel_" in line]
    assert len(calls) == 2
    for line in calls:
        assert re.search(r"tensor<\d+xui8>\) loc", line), line


def test_gradients_are_the_same_under_jit_and_without():
    call = make("group_norm", activation="silu")
    dy = [random(call.x.shape)]
    with jax.disable_jit():  # then with_gradients compiles nothing either
        plain = with_gradients(call.ours, call.inputs, dy)
    check_same(with_gradients(call.ours, call.inputs, dy), plain)
