"""`python -m evenkeel info`: what this installation is, and what it can do on this machine."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys

import evenkeel
from evenkeel import _native


def installed(name):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def operators(framework):
    """What there is to say about evenkeel.<framework>."""
    try:
        importlib.import_module(f"evenkeel.{framework}._load")
    except ImportError as error:
        return f"not available: {error}"
    return f"ready, built against {framework} {_native.built_for(framework)}"


def cpu_name():
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            names = (
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


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
    yield "CPU", f"{cpu_name()}, {os.cpu_count()} processors"
    yield "system", f"{platform.platform()}, Python {platform.python_version()}"
    for name in ("torch", "tensorflow", "jax"):
        yield name, installed(name) or installed(f"{name}-cpu") or "not installed"
    for name in ("torch", "tensorflow"):
        yield f"evenkeel.{name}", operators(name)
    yield "evenkeel.jax", "not built: there are no operators for it yet"


def print_info():
    lines = list(info())
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        print(f"{title:<{width}}  {text}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m evenkeel", description=evenkeel.__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    command = commands.add_parser(
        "info", help="backends, instruction sets, versions, what is built"
    )
    command.set_defaults(run=print_info)
    parser.parse_args(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
