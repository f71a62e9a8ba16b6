"""Loads the compiled operators, or says plainly why it cannot: _native.py checks torch's version."""

from evenkeel import _native

_native.require("torch", "PyTorch")
extension = _native.load_extension("_torch")
