"""evenkeel: layer norm, RMS norm and group norm, forward and backward.

`evenkeel.torch` has the operators and modules for PyTorch. `python -m evenkeel info` says what this
installation can do.
"""

from evenkeel._native import version as _version

__version__ = _version()
