"""Where TensorFlow programs run: graphs, pipelines, training, saved models, replicas, XLA.

What needs a process of its own (devices, a library without the package) is a program below.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import program
from tf_support import NORMS, ON_CPU, check_same, make, random, with_gradients

import evenkeel.tensorflow as ek

# Loads a SavedModel with nothing but the operators, as a server does, and writes what it answers.
SERVER = """
import sys
import numpy as np
import tensorflow as tf
tf.config.experimental.enable_tensor_float_32_execution(False)  # as here
tf.load_op_library(sys.argv[1])
model = tf.saved_model.load(sys.argv[2])
np.save(sys.argv[4], model.serve(tf.constant(np.load(sys.argv[3]))).numpy())
assert not any(name.startswith("evenkeel") for name in sys.modules)
"""

# Trains one model on one device, and its twin on two replicas: half a batch for each of them.
REPLICAS = """
import numpy as np
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
import evenkeel.tensorflow as ek

def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((6, 8)), keras.layers.Dense(16), ek.LayerNormalization(), ek.RMSNormalization(),
        ek.GroupNormalization(groups=4), keras.layers.Dense(1),
    ])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model

rng = np.random.default_rng(0)
x, y = rng.standard_normal((32, 6, 8), np.float32), rng.standard_normal((32, 6, 1), np.float32)
alone = build()
before = alone.get_weights()
alone.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
with strategy.scope():
    mirrored = build()
mirrored.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
weights = alone.get_weights(), mirrored.get_weights()
for first, expected, actual in zip(before, *weights, strict=True):
    assert not np.allclose(first, expected, atol=1e-4)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

@tf.function
def step(batch):
    return strategy.run(lambda x: ek.layer_norm_custom(x), args=(batch,))

data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(8))
batch = next(iter(data))
parts = strategy.experimental_local_results(step(batch))
assert [part.shape for part in parts] == [(4, 6, 8)] * 2
operations = step.get_concrete_function(batch).graph.get_operations()
devices = sorted(each.device[-1] for each in operations if each.type == "LayerNormCustom")
assert devices == ["0", "1"], devices
np.testing.assert_array_equal(tf.concat(parts, 0), ek.layer_norm_custom(x[:8]))
print("two replicas")
"""

# fast-LayerNorm-TF's own snippet without evenkeel's package: its user registers the gradient.
ALONE = """
import sys
import tensorflow as tf
custom_module = tf.load_op_library(sys.argv[1])

@tf.RegisterGradient("LayerNormCustom")
def _LayerNormCustomGrad(op, grad):
    return [custom_module.layer_norm_backprop_custom(
        op.inputs[0], grad, op.get_attr("epsilon"))]

inputs = tf.random.normal([32, 51, 128])
with tf.GradientTape() as tape:
    tape.watch(inputs)
    normalized_output = custom_module.layer_norm_custom(inputs, epsilon=1e-5)
    loss = tf.reduce_sum(normalized_output ** 2)
assert tape.gradient(loss, inputs).shape == inputs.shape
assert abs(float(loss) / (32 * 51 * 128) - 1) < 1e-3
print("gradient")
"""


def network(layers, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 8), **options),
            keras.layers.Dense(16),
            layers.LayerNormalization(),
            keras.layers.Dense(16, activation="relu"),
            layers.RMSNormalization(),
            layers.GroupNormalization(groups=4),
            keras.layers.Dense(1),
        ]
    )
    return model


def data(rows=24):
    return random((rows, 6, 8)).numpy(), random((rows, 6, 1), seed=1).numpy()


@pytest.fixture
def policy():
    """Sets the policy of Keras for one test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("norm", NORMS)
def test_graphs_give_eager_results(norm):
    call = make(norm)
    graph = tf.function(lambda inputs: with_gradients(call.ours, inputs))
    check_same(graph(call.inputs), with_gradients(call.ours, call.inputs))


@pytest.mark.parametrize("norm", NORMS)
def test_an_unknown_batch_and_an_empty_one(norm):
    call = make(norm)
    rest = call.inputs["x"].shape[1:]

    @tf.function(input_signature=[tf.TensorSpec([None, *rest], tf.float32)])
    def run(x):
        return with_gradients(call.ours, call.inputs | {"x": x})

    for rows in (2, 1, 0):
        inputs = call.inputs | {"x": call.inputs["x"][:rows]}
        check_same(run(inputs["x"]), with_gradients(call.ours, inputs))
    assert run.experimental_get_tracing_count() == 1
    for name, value in run(call.inputs["x"][:0]).items():
        assert not np.any(value), name


@pytest.mark.parametrize("norm", NORMS)
def test_an_unknown_rank(norm):
    call = make(norm)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def run(x):
        return with_gradients(call.ours, call.inputs | {"x": x})

    check_same(run(call.inputs["x"]), with_gradients(call.ours, call.inputs))


@pytest.mark.parametrize("norm", NORMS)
def test_data_pipelines(norm):
    call = make(norm)
    x = call.inputs["x"]
    dataset = (
        tf.data.Dataset.from_tensor_slices(tf.tile(x, [5] + [1] * (len(x.shape) - 1)))
        .batch(4)
        .map(lambda part: call.ours(call.inputs | {"x": part}), num_parallel_calls=2)
        .prefetch(1)
    )
    y = tf.concat(list(dataset), 0)
    with tf.device("CPU:0"):  # where pipelines run
        expected = call.ours(call.inputs)
    check_same({"y": y}, {"y": tf.tile(expected, [5] + [1] * (len(x.shape) - 1))})


def test_loops():
    x = random((3, 8))

    @tf.function
    def run(x):
        for _ in tf.range(4):
            x = ek.layer_norm_custom(x * x, epsilon=1e-3)
        return x

    def unrolled(x):
        for _ in range(4):
            x = ek.layer_norm_custom(x * x, epsilon=1e-3)
        return x

    def apply(function):
        return with_gradients(lambda inputs: function(inputs["x"]), {"x": x})

    for name, value in apply(run).items():
        np.testing.assert_allclose(value, apply(unrolled)[name], rtol=1e-5, atol=1e-6)


def test_inputs_are_left_alone():
    """The result may be written over x only where nobody reads x again."""
    x = random((64, 32))
    before = x.numpy().copy()

    @tf.function
    def run(x):
        doubled = x * 2.0
        y = ek.layer_norm_custom(doubled)
        return y, doubled

    y, doubled = run(x)
    ek.layer_norm_custom(x)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(doubled, before * 2)
    np.testing.assert_array_equal(y, ek.layer_norm_custom(before * 2))


def test_fit_with_defaults(monkeypatch):
    """compile() without a word on XLA: with a GPU, Keras turns it on for its own layers."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    x, y = data()
    losses = []
    for layers in (keras.layers, ek):
        model = network(layers)
        with monkeypatch.context() as patch:
            patch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
            model.compile(keras.optimizers.Adam(0.01), "mse")
        assert model.jit_compile == (layers is keras.layers)
        model.jit_compile = False  # of Keras's: XLA takes its time
        history = model.fit(x, y, batch_size=5, epochs=4, shuffle=False, verbose=0).history["loss"]
        assert model.predict(x, verbose=0).shape == y.shape
        assert model.evaluate(x, y, verbose=0) < history[0]
        losses.append(history)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_fit_in_eager_mode():
    x, y = data()
    model = network(ek)
    model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0]


def test_fit_in_mixed_bfloat16(policy):
    policy("mixed_bfloat16")
    x, y = data()
    model = network(ek)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(x, y, epochs=4, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    assert history[-1] < history[0]
    assert {w.dtype for w in model.weights} == {"float32"}
    assert model(x).dtype == tf.bfloat16


def test_exported_models_need_the_operators_only(tmp_path):
    x, _ = data()
    model = network(ek)
    model.export(tmp_path / "exported", verbose=False)
    np.save(tmp_path / "x.npy", x)
    program(SERVER, ek.op_library(), tmp_path / "exported", tmp_path / "x.npy", tmp_path / "y.npy")
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model(x), rtol=1e-5, atol=1e-6)


def test_saved_functions_can_be_differentiated(tmp_path):
    class Norm(tf.Module):
        def __init__(self):
            super().__init__()
            self.gamma = tf.Variable(random((8,), shift=1.0))

        @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32)])
        def __call__(self, x):
            return ek.layer_norm_fused_custom(x, self.gamma, tf.zeros(8)) + ek.rms_norm(
                x, self.gamma
            )

    saved = Norm()
    tf.saved_model.save(saved, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    x = random((5, 8))

    def gradients(module):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = module(x)
        dx, dgamma = tape.gradient(y, [x, module.gamma])
        return {"y": y, "dx": dx, "dgamma": dgamma}

    check_same(gradients(loaded), gradients(saved))


def test_two_replicas():
    assert program(REPLICAS, **ON_CPU) == "two replicas\n"  # a CPU can be two devices


def test_the_library_without_the_package():
    assert program(ALONE, ek.op_library()) == "gradient\n"


@pytest.mark.parametrize("norm", NORMS)
def test_xla_says_what_it_cannot_compile(norm):
    call = make(norm)
    compiled = tf.function(lambda inputs: call.ours(inputs), jit_compile=True)
    operator = "EvenkeelNorm" if norm in ("rms_norm", "group_norm") else "LayerNorm.*Custom"
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"(?s)unsupported operations.*{operator}"
    ):
        compiled(call.inputs)
