"""flax's layers and models: parameters, names, results and checkpoints are flax's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen, nnx
from jax_support import BF16, F32, random

import evenkeel.jax as ek
import evenkeel.jax.linen
import evenkeel.jax.nnx

X = random((4, 5, 24), F32, 1)
KINDS = ["LayerNorm", "RMSNorm", "GroupNorm"]
SETTINGS = [
    {},
    {"dtype": BF16},
    {"param_dtype": BF16},
    {"use_scale": False},
    {"use_bias": False},
    {"epsilon": 0.1},
]


def settings_of(kind, settings):
    if kind == "GroupNorm":
        return {"num_groups": 4, **settings}
    return {
        name: value for name, value in settings.items() if (kind, name) != ("RMSNorm", "use_bias")
    }


def close(actual, expected):
    """Also flax's own statistics, which are less exact."""
    assert actual.dtype == expected.dtype
    tolerance = 0.04 if BF16 in (actual.dtype,) else 2e-5
    wide = (np.asarray(each, np.float64) for each in (actual, expected))
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


def filled(state):
    """Parameters that are not all ones and zeros."""
    leaves, tree = jax.tree.flatten(state)
    leaves = [
        each + random(each.shape, each.dtype, i, 0.3)
        if jnp.issubdtype(each.dtype, jnp.floating)
        else each
        for i, each in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_linen(kind, settings):
    settings = settings_of(kind, settings)
    theirs, ours = (getattr(m, kind)(**settings) for m in (linen, evenkeel.jax.linen))
    parameters = theirs.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(
        jnp.shape, ours.init(jax.random.key(0), X)
    )
    parameters = filled(parameters)
    for x in (X, X.astype(BF16), jnp.arange(48).reshape(2, 24)):
        close(ours.apply(parameters, x), theirs.apply(parameters, x))


def test_linen_models_have_the_same_names():
    def model(layers):
        class Model(linen.Module):
            @linen.compact
            def __call__(self, x):
                x = layers.LayerNorm()(linen.Dense(24)(x))
                return layers.GroupNorm(4)(layers.RMSNorm(name="last")(x))

        return Model()

    theirs, ours = model(linen), model(evenkeel.jax.linen)
    parameters = filled(theirs.init(jax.random.key(0), X))
    names = jax.tree.structure(ours.init(jax.random.key(0), X))
    assert jax.tree.structure(parameters) == names
    close(ours.apply(parameters, X), theirs.apply(parameters, X))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_nnx(kind, settings):
    settings = settings_of(kind, settings)
    theirs, ours = (
        getattr(m, kind)(24, **settings, rngs=nnx.Rngs(0)) for m in (nnx, evenkeel.jax.nnx)
    )
    state = filled(nnx.state(theirs))
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(state)
    for layer in (theirs, ours):
        nnx.update(layer, state)
    for x in (X, X.astype(BF16), jnp.arange(48).reshape(2, 24)):
        close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("LayerNorm", {"reduction_axes": (1, 2)}, "reduction_axes is .1, 2., but must be -1"),
        ("RMSNorm", {"feature_axes": 1}, "feature_axes is 1, but must be -1"),
        ("GroupNorm", {"reduction_axes": (1, 2)}, "reduction_axes is .1, 2., but must be None"),
        ("LayerNorm", {"axis_name": "batch"}, "axis_name is 'batch'.*Use flax's LayerNorm"),
    ],
)
def test_what_does_not_fit_is_refused(kind, settings, message):
    settings = settings_of(kind, settings)
    with pytest.raises(ValueError, match=f"evenkeel: {kind}: {message}"):
        getattr(evenkeel.jax.nnx, kind)(24, **settings, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"evenkeel: {kind}: {message}"):
        getattr(evenkeel.jax.linen, kind)(**settings).init(jax.random.key(0), X)


def test_masks_are_refused():
    with pytest.raises(ValueError, match="mask must be None for LayerNorm"):
        evenkeel.jax.nnx.LayerNorm(24, rngs=nnx.Rngs(0))(X, mask=X > 0)


def test_groups_of_linen():
    layer = evenkeel.jax.linen.GroupNorm(num_groups=None, group_size=6)
    plain = linen.GroupNorm(num_groups=None, group_size=6)
    parameters = plain.init(jax.random.key(0), X)
    close(layer.apply(parameters, X), plain.apply(parameters, X))
    for wrong in ({"group_size": 6}, {"num_groups": None}, {"num_groups": None, "group_size": 7}):
        with pytest.raises(ValueError, match=r"evenkeel: .*group_size"):
            evenkeel.jax.linen.GroupNorm(**wrong).init(jax.random.key(0), X)


class Named(nnx.LayerNorm):
    """Somebody's own."""


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(24, rngs=rngs)
        self.dense = nnx.Linear(24, 24, rngs=rngs)
        self.groups = nnx.GroupNorm(24, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.groups(nnx.relu(self.dense(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.shared = self.blocks[0].norm
        self.own = Named(24, rngs=rngs)
        self.wide = nnx.LayerNorm(24, reduction_axes=(1, 2), rngs=rngs)
        self.batch = nnx.BatchNorm(24, use_running_average=True, rngs=rngs)
        self.last = nnx.RMSNorm(24, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(self.batch(self.wide(self.own(self.shared(x)))))


REPORT = """\
blocks.{0..1}.groups  2 x  GroupNorm  group_norm
blocks.{0..1}.norm    2 x  LayerNorm  layer_norm
last                       RMSNorm    rms_norm
batch                      BatchNorm  skipped: BatchNorm is neither layer norm nor RMS norm nor group norm
own                        Named      skipped: its class is not flax's own
wide                       LayerNorm  skipped: reduction_axes is (1, 2), but must be -1
5 replaced, 3 skipped"""


def test_fuse():
    model = Model()
    state = filled(nnx.state(model))
    nnx.update(model, state)
    before, variables = model(X), jax.tree.leaves(nnx.state(model))
    norm = model.blocks[0].norm
    report = ek.fuse(model)
    assert str(report) == REPORT
    assert repr(report) == "<evenkeel.jax.Report: 5 replaced, 3 skipped>"
    assert model.shared is norm is model.blocks[0].norm
    assert type(norm) is evenkeel.jax.nnx.LayerNorm
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(variables, after, strict=True))
    close(nnx.jit(lambda m, x: m(x))(model, X), before)
    again = ek.fuse(model)
    assert not again.replaced and "already evenkeel's" in str(again)
    report.undo()
    report.undo()
    assert type(norm) is nnx.LayerNorm and np.array_equal(model(X), before)


def test_states_move_both_ways():
    plain, fused = Model(0), Model(1)
    ek.fuse(fused)
    nnx.update(fused, nnx.state(plain))
    close(fused(X), plain(X))
    back = Model(2)
    nnx.update(back, nnx.state(fused))
    assert np.array_equal(back(X), plain(X))


def test_checkpoints_move_both_ways(tmp_path):
    plain, fused = Model(0), Model(1)
    ek.fuse(fused)
    expected = {"plain": plain(X), "fused": fused(X)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        for name, model in (("plain", plain), ("fused", fused)):
            checkpointer.save(tmp_path / name, nnx.state(model))
        checkpointer.wait_until_finished()
        for name, model in (("fused", plain), ("plain", fused)):
            nnx.update(model, checkpointer.restore(tmp_path / name, nnx.state(model)))
            close(model(X), expected[name])


def test_layers_of_a_scan():
    layers = nnx.vmap(lambda key: nnx.LayerNorm(24, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return x + layer(x)

    before = run(layers, X)
    ek.fuse(layers)
    close(run(layers, X), before)


def test_training_goes_on_as_before():
    def losses(fuse):
        model = Model()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        if fuse:
            ek.fuse(model)

        @nnx.jit
        def step(model, optimizer):
            loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        return [float(step(model, optimizer)) for _ in range(8)]

    plain, fused = losses(False), losses(True)
    assert plain[-1] < 0.9 * plain[0]
    np.testing.assert_allclose(fused, plain, rtol=1e-3)


def test_fuse_says_what_is_wrong():
    with pytest.raises(TypeError, match=r"must be a flax\.nnx\.Module, but is of type int$"):
        ek.fuse(3)
    with pytest.raises(TypeError, match=r"of type Dense\. A linen module makes its own layers"):
        ek.fuse(linen.Dense(3))
    with pytest.warns(UserWarning, match="no norm was replaced$"):
        ek.fuse(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    report = ek.fuse(alone := nnx.RMSNorm(24, rngs=nnx.Rngs(0)))
    assert str(report).startswith("(root)") and type(alone) is evenkeel.jax.nnx.RMSNorm
    alone.__class__ = type("Other", (nnx.RMSNorm,), {})
    with pytest.raises(RuntimeError, match=r"cannot undo the surgery on '\(root\)'"):
        report.undo()
