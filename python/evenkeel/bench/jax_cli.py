"""`python -m evenkeel bench-jax`: its arguments. JAX is imported when it runs, so that they can be listed without it."""

import argparse
import pathlib
import sys

DESCRIPTION = """evenkeel.jax beside what else normalizes in JAX: the written-out formulas under jit (XLA's fusion),
flax's modules, and on a GPU the norms among Pallas's examples. Results are compared with the formulas' before
anything is timed."""

NORMS = ("layer_norm", "rms_norm", "group_norm")
SECONDS = 2.0  # of a line's rounds


def add_arguments(parser):
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "norms",
        nargs="*",
        choices=[*NORMS, []],
        metavar="norm",
        help=f"of {', '.join(NORMS)} (default: all)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="(default: a GPU if JAX sees one, else the CPU)",
    )
    parser.add_argument(
        "--fresh-pages", action="store_true", help="on a CPU: large results in new memory"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a line's rounds")
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser, options):
    try:
        from evenkeel.bench import jax_norms
    except ModuleNotFoundError as error:
        sys.exit(
            f"evenkeel bench-jax needs {error.name}, which is not installed: pip install {error.name}"
        )
    return jax_norms.main(parser, options)
