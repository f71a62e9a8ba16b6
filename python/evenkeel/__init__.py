"""evenkeel: layer norm, RMS norm and group norm, forward and backward.

`evenkeel.torch` has the operators and modules for PyTorch. `python -m evenkeel info` says what this
installation can do.
"""


def __getattr__(name):
    if name == "__version__":  # the library knows it
        from evenkeel._native import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
