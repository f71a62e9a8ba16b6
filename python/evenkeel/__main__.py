"""The commands of the package: `python -m evenkeel info`, `build`, `bench`, `bench-jax` and `check`, or `evenkeel info`."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys

import evenkeel
from evenkeel import _binding, _native
from evenkeel.bench import command

# Commands in modules of their own: what they are for, where they live.
EXTRAS = {
    "build": ("the operators for the torch that is installed, with g++", "evenkeel.build"),
    "bench": ("speed, beside every other library that is installed", "evenkeel.bench.cli"),
    "bench-jax": ("speed of evenkeel.jax, beside what else JAX has", "evenkeel.bench.jax_cli"),
    "check": ("results of this build on this machine against float64", "evenkeel.check.cli"),
}


def installed(name):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def operators(framework):
    """What there is to say about evenkeel.<framework>."""
    try:
        return f"ready: {importlib.import_module(f'evenkeel.{framework}._load').PATH}"
    except ImportError as error:
        return f"not available: {error}"


def compiled_models():
    """What torch.compile does with norms."""
    try:
        from evenkeel.torch import compiling
    except ImportError:
        return "not available"
    return f"norms are {compiling.status()}"


def info():
    """Pairs of a title and a line of text."""
    targets = _native.cpu_targets()
    override = os.environ.get("EVENKEEL_CPU_TARGET")
    yield "evenkeel", f"{evenkeel.__version__}, {_native.find('libevenkeel.so')}"
    yield "backends", ", ".join(_native.backends()) + " (best first)"
    if "cuda" not in _native.backends():
        yield "CUDA", "not built: this library runs on the CPU only"
    chosen = f"; EVENKEEL_CPU_TARGET={override} is set" if override else ""
    yield "CPU kernels", ", ".join(targets) + f" (best first){chosen}"
    yield "CPU", f"{command.cpu_name()}, {os.cpu_count()} processors"
    yield "system", f"{platform.platform()}, Python {platform.python_version()}"
    for name in ("torch", "tensorflow", "jax"):
        yield name, installed(name) or installed(f"{name}-cpu") or "not installed"
    for name in ("torch", "tensorflow", "jax"):
        yield f"evenkeel.{name}", operators(name)
    yield "torch.compile", compiled_models()


def print_info(options):
    lines = list(info())
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        print(f"{title:<{width}}  {text}")


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="evenkeel", description=evenkeel.__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    about = "backends, instruction sets, versions, what is built"
    commands.add_parser("info", help=about).set_defaults(run=print_info)
    for name, (about, module) in EXTRAS.items():
        subparser = commands.add_parser(name, help=about)
        if name not in arguments[:1]:  # its imports are slow
            continue
        try:
            importlib.import_module(module).add_arguments(subparser)
        except ModuleNotFoundError as error:
            remedy = "pip install 'evenkeel[bench]'"
            if error.name == "torch":
                remedy = f"install it; then, if need be: {_binding.BUILD}"
            sys.exit(f"evenkeel {name} needs {error.name}, which is not installed: {remedy}")
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
