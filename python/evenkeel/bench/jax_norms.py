"""What `python -m evenkeel bench-jax` (jax_cli.py) measures.

Every contender is one compiled program of the same arrays: x and, where there is one, a residual of x's dtype,
parameters in float32; forward + backward computes results and all gradients. Everything runs in one process, in
alternating rounds. Freed memory stays with the process, so that no contender is timed with fresh pages, unless
--fresh-pages leaves that to malloc, which gives large arrays back at once; on a GPU the calls go round over so many
sets of arrays that no cache holds them. Results are compared with the formulas' before anything is timed. The
smallest shapes tell what a call costs the host.
"""

import functools
import itertools
import os
import pathlib
import statistics
import sys

import flax
import jax
import jax.numpy as jnp
from flax import linen

import evenkeel.jax as ek
from evenkeel import _native
from evenkeel.bench import command, measure
from evenkeel.bench import jax_lines as report
from evenkeel.bench.jax_cli import NORMS

EPS, GROUPS = 1e-6, 32
ROWS = {"cpu": [(4096, 4096), (16384, 1024)], "cuda": [(4096, 4096), (16384, 4096), (25216, 768)]}
IMAGES = {"cpu": [(8, 64, 64, 256)], "cuda": [(8, 64, 64, 320), (32, 64, 64, 256)]}
SMALL = {"layer_norm": (8, 64), "rms_norm": (8, 64), "group_norm": (2, 4, 4, 64)}
SETS_BYTES, MOST_SETS = 600e6, 64  # of all sets of arrays together, on a GPU


def formula(norm, x, weight, bias):
    wide = x.astype(jnp.float32)
    if norm == "group_norm":
        wide = wide.reshape(x.shape[0], -1, GROUPS, x.shape[-1] // GROUPS)
    axes = (1, 3) if norm == "group_norm" else -1
    if norm != "rms_norm":
        wide = wide - jnp.mean(wide, axes, keepdims=True)
    y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + EPS)
    y = y.reshape(x.shape) * weight
    return (y if norm == "rms_norm" else y + bias).astype(x.dtype)


def flax_layer(norm, x, weight, bias):
    layers = {
        "layer_norm": linen.LayerNorm,
        "rms_norm": linen.RMSNorm,
        "group_norm": linen.GroupNorm,
    }
    options = {"num_groups": GROUPS} if norm == "group_norm" else {}
    layer = layers[norm](epsilon=EPS, dtype=x.dtype, **options)
    parameters = {"scale": weight} | ({} if norm == "rms_norm" else {"bias": bias})
    return layer.apply({"params": parameters}, x)


def pallas(norm, x, weight, bias):
    from jax.experimental.pallas.ops.gpu import layer_norm, rms_norm

    module = {"layer_norm": layer_norm, "rms_norm": rms_norm}[norm]
    return getattr(module, norm)(x, weight, bias, eps=EPS).astype(x.dtype)


def evenkeels(norm, x, weight, bias):
    arguments = (x, GROUPS) if norm == "group_norm" else (x,)
    parameters = (weight,) if norm == "rms_norm" else (weight, bias)
    return getattr(ek, norm)(*arguments, *parameters, eps=EPS)


def adding(function):
    """The norm of a sum, and the sum."""

    def run(norm, x, residual, weight, bias):
        total = x + residual
        return function(norm, total, weight, bias), total

    return run


def evenkeels_sum(norm, x, residual, weight, bias):
    parameters = (weight,) if norm == "rms_norm" else (weight, bias)
    return getattr(ek, norm)(x, *parameters, eps=EPS, residual=residual)


def contenders(norm, residual, device):
    found = {report.FORMULAS: formula, report.FLAX: flax_layer}
    if device == "cuda" and norm != "group_norm":
        found[report.PALLAS] = pallas
    if residual:
        found = {name: adding(function) for name, function in found.items()}
    return found | {report.EVENKEEL: evenkeels_sum if residual else evenkeels}


def arrays_of(shape, dtype, residual, seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    big = [jax.random.normal(key, shape, dtype) for key in keys]
    x, inner, *cotangents = big
    parameters = [jnp.linspace(0.5, 1.5, shape[-1]), jnp.linspace(-1, 1, shape[-1])]
    if residual:
        return [x, inner, *parameters], tuple(cotangents)
    return [x, *parameters], cotangents[0]


def programs(norm, residual, pass_, device):
    for name, function in contenders(norm, residual, device).items():
        function = functools.partial(function, norm)
        if pass_ == "forward":
            yield name, jax.jit(lambda inputs, cotangents, function=function: function(*inputs))
            continue

        def both(inputs, cotangents, function=function):
            y, pull = jax.vjp(function, *inputs)
            return y, pull(cotangents)

        yield name, jax.jit(both)


def agrees(found, expected, dtype):
    """Whether results are the formulas', as far as the dtype of x lets them be."""
    tolerance = 1e-3 if dtype == jnp.float32 else 2e-2

    def close(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return bool(jnp.linalg.norm(a - b) <= tolerance * jnp.linalg.norm(b))

    return all(jax.tree.leaves(jax.tree.map(close, found, expected)))


def measured(norm, residual, shape, dtype, pass_, options):
    """Rows of the CSV file: one for each contender of a line."""
    bytes_of_a_set = jnp.dtype(dtype).itemsize * jnp.zeros(shape, jnp.int8).size * 4
    count = 1
    if options.device == "cuda" and shape != SMALL[norm]:
        count = min(max(1, int(SETS_BYTES / bytes_of_a_set)), MOST_SETS)
    sets = [arrays_of(shape, dtype, residual, seed) for seed in range(count)]
    last, calls, expected = [None], {}, None
    for name, program in programs(norm, residual, pass_, options.device):
        label = f"{norm} {shape} {jnp.dtype(dtype)} {pass_}: {name}"
        try:
            found = jax.block_until_ready(program(*sets[0]))
        except Exception as error:
            print(f"{label} is left out: {command.first_line(error)}", file=sys.stderr)
            continue
        expected = found if expected is None else expected
        if not agrees(found, expected, dtype):
            print(f"{label} is left out: its results are wrong", file=sys.stderr)
            continue
        turns = itertools.cycle(sets)

        def call(program=program, turns=turns):
            last[0] = program(*next(turns))
            if options.device == "cpu":
                jax.block_until_ready(last[0])

        calls[name] = call
    times = measure.rounds(calls, options.seconds, lambda: jax.block_until_ready(last[0]))
    for name, values in times.items():
        yield {
            "op": norm,
            "residual": int(residual),
            "shape": "x".join(map(str, shape)),
            "dtype": str(jnp.dtype(dtype)),
            "pass": pass_,
            "contender": name,
            "time_us": f"{statistics.median(values) * 1e6:.1f}",
            "speedup": f"{measure.ratio(times, name, report.EVENKEEL):.3f}",
            "rounds": len(values),
        }


def lines(norms, device):
    for norm in norms:
        large = IMAGES[device] if norm == "group_norm" else ROWS[device]
        problems = list(
            itertools.product(
                (False,) if norm == "group_norm" else (False, True),
                large,
                (jnp.float32, jnp.bfloat16),
            )
        )
        for residual, shape, dtype in [*problems, (False, SMALL[norm], jnp.float32)]:
            for pass_ in report.PASSES:
                yield norm, residual, shape, dtype, pass_


def main(parser, options):
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif options.device == "cuda" and jax.default_backend() != "gpu":
        parser.error("--device cuda: JAX sees no GPU")
    options.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if not options.fresh_pages:
        measure.keep_pages()
    constants = {
        "date": command.now(),
        "commit": options.commit or command.commit(),
        "machine": command.cpu_name() if options.device == "cpu" else jax.devices()[0].device_kind,
        "device": options.device,
        "threads": len(os.sched_getaffinity(0)),
        "pages": "fresh" if options.fresh_pages else "kept",
        "jax": jax.__version__,
        "flax": flax.__version__,
        "evenkeel": _native.version(),
        "build": pathlib.Path(ek._load.PATH).parent.name,
    }
    rows = []
    for line in lines(options.norms or NORMS, options.device):
        found = [constants | row for row in measured(*line, options)]
        rows += found
        print(report.sentence(found), flush=True)
        if options.csv:
            command.append(options.csv, list(found[0]), found)
