"""What a norm adds to a training step in TensorFlow: the benchmark of fast-LayerNorm-TF, five fully
connected layers with different norms, and the operators alone.

Everything runs in one process, in alternating rounds: on TensorFlow's own threads, or with --device cuda
on the first GPU. A ratio is the median of the rounds' ratios. The baseline is measured twice as if it
were two contenders, and the second one's ratio tells how far the machine can be trusted. Results are
compared with Keras's before anything is timed, because a fast wrong answer would look best of all; for
that, products of float32 stay float32 on a GPU (no TF32). A rival that fails is named and left out.

    .venv-tensorflow/bin/python benchmarks/tensorflow_layers.py

prints the tables, writes the CSV file, and rewrites the plots and the marked part of
docs/tensorflow.md. With --plots, the plots go into that folder and the document is left alone.
"""

import argparse
import csv
import functools
import os
import pathlib
import statistics
import sys

import checkout

# The package comes from the sources, as in the tests. All libraries come from one build folder, by
# name the last that has the operators: release before dev.
os.environ.setdefault(
    "EVENKEEL_LIBRARY_PATH",
    str(max(checkout.ROOT.glob("build/*/layer_norm_fused_op.so"), default=checkout.ROOT).parent),
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow greets at length otherwise

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import evenkeel.tensorflow as ek
import tensorflow_report as report
from evenkeel import _native
from evenkeel.bench import command, measure

LAYERS, EPSILON = 5, 1e-5
FIXED, SIZES, QUICK_SIZES = 128, (64, 128, 256, 512, 1024, 2048), (64, 256)
SHAPES = {
    "cpu": ((16, 1024, 256), (4096, 1024)),
    "cuda": ((16, 1024, 256), (4096, 1024), (16384, 4096)),
}
SECONDS, QUICK_SECONDS = 7.0, 1.0  # of a line's rounds
TOLERANCE = 1e-3  # of the norm of the difference from Keras / the norm of Keras's result


def keras_layer(cls, units):
    """The layer's variables by name, and the layer."""
    layer = cls(epsilon=EPSILON)
    layer.build((None, units))
    return {"gamma": layer.gamma.value, "beta": layer.beta.value}, layer


def no_norm(units):
    return {}, lambda x: x


def batch_norm(units):
    gamma, beta = parameters(units)

    def norm(x):
        mean, variance = tf.nn.moments(x, axes=list(range(len(x.shape) - 1)))
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, EPSILON)

    return {"gamma": gamma, "beta": beta}, norm


def parameters(units):
    return tf.Variable(tf.ones([units])), tf.Variable(tf.zeros([units]))


def custom(units):
    return {}, lambda x: ek.layer_norm_custom(x, epsilon=EPSILON)


def bias_add(units):
    _, beta = parameters(units)
    return {"beta": beta}, lambda x: ek.layer_norm_bias_add_custom(x, beta, epsilon=EPSILON)


def fused(units):
    gamma, beta = parameters(units)
    return (
        {"gamma": gamma, "beta": beta},
        lambda x: ek.layer_norm_fused_custom(x, gamma, beta, epsilon=EPSILON),
    )


OPERATORS = dict(zip(report.OPERATORS, (custom, bias_add, fused), strict=True))
KERAS = functools.partial(keras_layer, keras.layers.LayerNormalization)
NETWORK = {
    report.NO_NORM: no_norm,
    report.NO_NORM_AGAIN: no_norm,
    report.KERAS: KERAS,
    report.KERAS_XLA: KERAS,
    report.BATCH_NORM: batch_norm,
    **OPERATORS,
}
ALONE = {
    report.KERAS: KERAS,
    report.KERAS_AGAIN: KERAS,
    report.KERAS_XLA: KERAS,
    **OPERATORS,
    report.LAYER: functools.partial(keras_layer, ek.LayerNormalization),
}


def network_step(make_norm, dense, x, xla):
    """A call that returns the loss and every gradient by name; the dense layers are the same for
    all norms, so that a ratio is the norm's cost and nothing else."""
    norms = [make_norm(x.shape[-1]) for _ in dense]
    variables = {}
    for i, ((kernel, bias), (of_norm, _)) in enumerate(zip(dense, norms, strict=True)):
        found = {"kernel": kernel, "bias": bias, **of_norm}
        variables |= {f"{name} {i}": variable for name, variable in found.items()}

    @tf.function(autograph=False, jit_compile=xla)
    def step(h):
        with tf.GradientTape() as tape:
            for (kernel, bias), (_, norm) in zip(dense, norms, strict=True):
                h = tf.nn.relu(norm(tf.nn.bias_add(tf.matmul(h, kernel), bias)))
            loss = tf.reduce_mean(tf.square(h))
        # Returned, and not only computed: TensorFlow leaves out what nobody reads.
        return {"loss": loss, **tape.gradient(loss, variables)}

    return functools.partial(step, x)


def network_calls(batch, units):
    tf.random.set_seed(0)
    scale = (2 / units) ** 0.5
    dense = [
        (tf.Variable(tf.random.normal([units, units], stddev=scale)), tf.Variable(tf.zeros(units)))
        for _ in range(LAYERS)
    ]
    x = tf.random.normal([batch, units])
    return {
        name: network_step(make, dense, x, xla=name == report.KERAS_XLA)
        for name, make in NETWORK.items()
    }


def operator_step(make_norm, x, dy, xla):
    variables, norm = make_norm(x.shape[-1])

    @tf.function(autograph=False, jit_compile=xla)
    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = norm(x)
        return {"y": y, **tape.gradient(y, {"x": x, **variables}, output_gradients=dy)}

    return functools.partial(step, x, dy)


def operator_calls(shape):
    tf.random.set_seed(0)
    x, dy = tf.random.normal(shape), tf.random.normal(shape)
    return {
        name: operator_step(make, x, dy, xla=name == report.KERAS_XLA)
        for name, make in ALONE.items()
    }


def check(label, calls):
    """Every layer norm computes what Keras's does; the calls of those that can be made."""
    expected, working = calls[report.KERAS](), {}
    for name, call in calls.items():
        try:
            results = call()
        except tf.errors.OpError as error:
            if name not in (report.KERAS_XLA, report.BATCH_NORM):
                raise
            print(f"{label}: {name}: {command.first_line(error)}", file=sys.stderr, flush=True)
            continue
        working[name] = call
        if name in (report.NO_NORM, report.NO_NORM_AGAIN, report.BATCH_NORM):
            continue
        for what, result in results.items():
            error = float(tf.norm(result - expected[what]) / tf.norm(expected[what]))
            if not error < TOLERANCE:  # so that NaN fails too
                sys.exit(f"{label}: {name}: {what} is off by {error:.1e} from Keras's")
    return working


def measured(benchmark, shape, calls, seconds):
    """The rows of one line of the tables."""
    label = f"{benchmark} {'x'.join(map(str, shape))}"
    times = measure.rounds(check(label, calls), seconds, tf.test.experimental.sync_devices)
    baseline = times[report.NO_NORM if benchmark == "network" else report.KERAS]
    for name, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, baseline, strict=False))
        quarter = len(ratios) // 4
        yield {
            "benchmark": benchmark,
            "shape": "x".join(map(str, shape)),
            "contender": name,
            "time_us": f"{statistics.median(values) * 1e6:.1f}",
            "ratio": f"{statistics.median(ratios):.3f}",
            "ratio_low": f"{ratios[quarter]:.3f}",
            "ratio_high": f"{ratios[-1 - quarter]:.3f}",
            "rounds": len(ratios),
        }
    print(f"{label}: {len(baseline)} rounds", file=sys.stderr, flush=True)


def measure_all(device, quick):
    seconds = QUICK_SECONDS if quick else SECONDS
    sizes = QUICK_SIZES if quick else SIZES
    problems = [(FIXED, units) for units in sizes]
    problems += [(batch, FIXED) for batch in sizes if batch != FIXED]
    for batch, units in problems:
        yield from measured("network", (batch, units), network_calls(batch, units), seconds)
    for shape in SHAPES[device]:
        yield from measured("operator", shape, operator_calls(shape), seconds)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def print_table(title, heads, lines):
    table = Table(*heads, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    # In a pipe rich would fold everything into 80 columns.
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)


def gpu_name():
    (gpu, *_) = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")


def arguments():
    date = command.now().split()[0]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument(
        "--csv", type=pathlib.Path, help=f"default: tensorflow-<device>-{date}.csv in results"
    )
    parser.add_argument("--docs", type=pathlib.Path, help="the document to rewrite")
    parser.add_argument("--plots", type=pathlib.Path, help="a folder; instead of --docs")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes, short; writes only what is named"
    )
    options = parser.parse_args()
    options.commit = options.commit or command.commit()
    if not options.quick:
        name = f"tensorflow-{options.device}-{date}.csv"
        options.csv = options.csv or command.ROOT / "benchmarks" / "results" / name
        options.docs = options.docs or (None if options.plots else report.DOCUMENT)
    if options.docs and not options.csv:
        parser.error("--docs: the document names the file its figures are in; give --csv too")
    if options.docs and options.plots:
        parser.error("--plots: the plots of --docs lie beside the document; give one of the two")
    if options.device == "cuda" and not tf.config.list_physical_devices("GPU"):
        parser.error("--device cuda: TensorFlow sees no GPU")
    if options.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    return options


def main():
    options = arguments()
    tf.get_logger().setLevel("ERROR")  # each contender is traced once, which it takes for a mistake
    constants = {
        "date": command.now(),
        "commit": options.commit,
        "machine": gpu_name() if options.device == "cuda" else command.cpu_name(),
        "device": options.device,
        "threads": len(os.sched_getaffinity(0)),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "evenkeel": _native.version(),
        "build": pathlib.Path(ek.op_library()).parent.name,
    }
    tf.config.experimental.enable_tensor_float_32_execution(False)
    rows = [constants | row for row in measure_all(options.device, options.quick)]
    for table in report.tables(rows):
        print_table(*table)
    for sentence in report.verdict(rows):
        print(sentence)
    if options.csv:
        write(options.csv, rows)
    if options.plots:
        report.draw(rows, options.plots)
    if options.docs:
        report.rewrite(options.docs, rows, options.csv.name)


if __name__ == "__main__":
    main()
