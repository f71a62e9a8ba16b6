"""Loads the compiled operators, or says plainly why it cannot.

They are built against one version of torch and use its C++ interface, which changes from one minor
version to the next: with another one, loading would end in an unresolved symbol, or worse.
"""

from evenkeel import _native

HINT = "pip install --no-build-isolation --force-reinstall --no-deps evenkeel (or . in its source)"


def minor(version):
    return version.split("+")[0].split(".")[:2]


def built_for():
    """The version of torch that the operators were built against, or None."""
    path = _native.find("torch_version.txt")
    return path.read_text().strip() if path else None


def load():
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "evenkeel.torch needs PyTorch, which is not installed. "
            f"Install it, then build evenkeel again: {HINT}"
        ) from error
    built = built_for()
    if built is None:
        raise ImportError(
            "This evenkeel was built without PyTorch, so it has no operators for it. "
            f"Build it again, now that torch {torch.__version__} is there: {HINT}"
        )
    if minor(built) != minor(torch.__version__):
        raise ImportError(
            f"evenkeel's operators were built against torch {built}, but torch "
            f"{torch.__version__} is installed. Build evenkeel again: {HINT}"
        )
    return _native.load_extension("_torch")


extension = load()
