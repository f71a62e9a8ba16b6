"""Errors of evenkeel, torch and oneDNN against float64, on the same inputs: the tables of
docs/numerics.md.

The exact result is computed in float64 from the inputs as stored, and is not rounded: half-
precision outputs carry at least their own rounding. Each library's backward pass uses the
statistics of its own forward pass. Two figures per output: the largest error and the root of the
mean squared error, both relative to the exact result's largest value. reports.py makes the tables.

A dtype such as bf16+f32 is a norm of x + residual, with the sum and a gradient that arrives at it.

    python benchmarks/accuracy.py --csv benchmarks/results/accuracy-<machine>-<date>.csv
"""

import argparse
import os
import pathlib
import subprocess
import sys

import torch

import checkout  # noqa: F401
import cpu_contenders
import onednn_norm
import problems
import rivals
from evenkeel import _abi
from evenkeel.bench import command

PROBLEMS = [
    problems.Problem("layer_norm", rows=4096, cols=1024),
    problems.Problem("layer_norm", rows=65536, cols=64),
    problems.Problem("layer_norm", rows=1024, cols=15872),
    problems.Problem("rms_norm", rows=4096, cols=1024),
    problems.Problem("rms_norm", rows=65536, cols=128),
    problems.Problem("group_norm", samples=2, channels=320, spatial=4096, groups=32, layout="nchw"),
    problems.Problem("group_norm", samples=2, channels=320, spatial=4096, groups=32, layout="nhwc"),
]
# Mean of x beside its spread of 1. Around 1e4 neighbouring bf16 numbers are 64 apart: rows would be constant.
MEANS = {"f32": (0.25, 1e4), "bf16": (0.25, 100), "f16": (0.25, 1000)}
COLUMNS = (
    "date commit versions threads problem dtype mean output library largest root_mean_square"
).split()
OUTPUTS = ("y", "dx", "dweight", "dbias")


def exact(problem, t):
    """y, the gradients and the sum in float64, in the memory format of x."""
    x, dy = (_units(problem, v.double()) for v in (t.normalized, t.dy))
    weight, bias = (_per_unit(problem, v.double()) for v in (t.weight, t.bias))
    rms = problem.op == "rms_norm"
    mean = 0 if rms else x.mean(1, keepdim=True)
    rstd = ((x - mean).square().mean(1, keepdim=True) + problems.EPS).rsqrt()
    normal = (x - mean) * rstd
    gradient = dy * weight
    along = (gradient * normal).mean(1, keepdim=True)
    constant = 0 if rms else gradient.mean(1, keepdim=True)
    result = {
        "y": normal * weight + (0 if rms else bias),
        "dx": rstd * (gradient - constant - normal * along),
        "dweight": _fold(problem, dy * normal),
    }
    if not rms:
        result["dbias"] = _fold(problem, dy)
    if t.adds:
        result["dx"] += t.dsum
        result["sum"] = t.x.double() + t.residual
    return result


def _units(problem, v):
    """One line for each row or group, channels before pixels."""
    return v.reshape(problem.units, -1)


def _per_unit(problem, parameter):
    """weight or bias, spread so that it multiplies _units()."""
    if not problem.is_group:
        return parameter
    spread = parameter.repeat_interleave(problem.spatial).reshape(problem.groups, -1)
    return spread.repeat(problem.samples, 1)


def _fold(problem, v):
    """The sum of _units() for each parameter."""
    if not problem.is_group:
        return v.sum(0)
    return v.reshape(problem.samples, problem.channels, problem.spatial).sum((0, 2))


def error(problem, computed, reference):
    """(largest, root mean square) of the error, relative to the largest exact value."""
    computed = computed.double()
    computed = computed if computed.dim() == 1 else _units(problem, computed)
    difference = computed - reference
    scale = reference.abs().max()
    return (difference.abs().max() / scale).item(), (
        difference.square().mean().sqrt() / scale
    ).item()


def outputs_of_evenkeel(library, threads, backend):
    def run(problem, t):
        cpu_contenders.evenkeel(library, problem, t, False, threads, backend=backend)()
        cpu_contenders.evenkeel(library, problem, t, True, threads, backend=backend)()
        return [t.y, t.dx, t.dweight, t.dbias]

    return run


def outputs_of_onednn(library):
    add = cpu_contenders.onednn_add(library)

    def run(problem, t):
        cpu_contenders.onednn(library, problem, t, False, add)()
        cpu_contenders.onednn(library, problem, t, True, add)()
        return [t.y, t.dx, t.dweight, t.dbias]

    return run


def outputs_of_torch(weight_as_x):
    def run(problem, t):
        y, *total = cpu_contenders.as_called("torch", problem, t, False, weight_as_x)()
        if t.adds:
            t.sum.copy_(total[0].detach())
        gradients = cpu_contenders.as_called("torch", problem, t, True, weight_as_x)()
        return [y.detach(), *gradients[1 if t.adds else 0 :]]  # of the sum: in the residual's dtype

    return run


def figures(libraries, dtype, mean):
    """The lines of the CSV file for one dtype and mean, problem by problem."""
    f32_weight = dtype.endswith("f32")  # as what is normalized
    names = [name for name in libraries if not f32_weight or name != "torch, f32 weight"]
    for problem in (problem for problem in PROBLEMS if problem.has(dtype)):
        reference = exact(problem, problems.Tensors(problem, dtype, mean))
        errors = {}
        for name in names:
            tensors = problems.Tensors(problem, dtype, mean)
            if tensors.adds:
                tensors.sum.zero_()  # it is for the library to make
            computed = dict(zip(OUTPUTS, libraries[name](problem, tensors), strict=False))
            if tensors.adds:
                computed["sum"] = tensors.sum
            for output, truth in reference.items():
                errors[output, name] = error(problem, computed[output], truth)
        label = " ".join(filter(None, [problem.op, str(problem), problem.layout]))
        for output in reference:
            for name in names:
                largest, spread = errors[output, name]
                yield {
                    "problem": label,
                    "dtype": dtype,
                    "mean": f"{mean:g}",
                    "output": output,
                    "library": name,
                    "largest": f"{largest:.3e}",
                    "root_mean_square": f"{spread:.3e}",
                }


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library", type=pathlib.Path, default=rivals.default_library(), help="libevenkeel.so"
    )
    parser.add_argument("--backend", help="evenkeel's backend (default: its best)")
    parser.add_argument("--without", choices=["evenkeel", "onednn"], action="append", default=[])
    parser.add_argument(
        "--dtypes",
        type=command.choices(["f32", "bf16", "f16", *problems.WITH_RESIDUAL]),
        default=["f32", "bf16"],
    )
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    if "evenkeel" not in options.without and not options.library.exists():
        sys.exit(f"--library {options.library}: no such file; build the library first (make build)")
    if not options.worker:
        environment = os.environ | onednn_norm.environment()
        sys.exit(
            subprocess.run(
                [sys.executable, *sys.argv, "--worker"], env=environment, check=False
            ).returncode
        )
    libraries, versions = {}, []
    if "evenkeel" not in options.without:
        library = _abi.Evenkeel(options.library)
        libraries["evenkeel"] = outputs_of_evenkeel(
            library, torch.get_num_threads(), options.backend
        )
        versions.append(f"evenkeel {library.version} {options.backend or library.target}")
    libraries["torch"] = outputs_of_torch(True)
    libraries["torch, f32 weight"] = outputs_of_torch(False)
    versions.append(f"torch {torch.__version__}")
    if "onednn" not in options.without:
        library = onednn_norm.OneDnn()
        libraries["onednn"] = outputs_of_onednn(library)
        versions.append(f"oneDNN {library.version}")
    where = {
        "date": command.now(),
        "commit": command.commit(),
        "versions": ", ".join(versions),
        "threads": torch.get_num_threads(),
    }
    print(where["versions"])
    for dtype in options.dtypes:
        for mean in MEANS[dtype.split("+")[0]]:
            for row in figures(libraries, dtype, mean):
                shown = ("problem", "dtype", "mean", "output", "library")
                label = " ".join(row[column] for column in shown)
                print(f"{label:<72} {row['largest']} ({row['root_mean_square']})", flush=True)
                if options.csv:
                    command.append(options.csv, COLUMNS, [where | row])


if __name__ == "__main__":
    main()
