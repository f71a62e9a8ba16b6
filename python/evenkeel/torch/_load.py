"""Loads the compiled operators, or says plainly why it cannot: see _binding.py."""

from evenkeel import _binding

extension = _binding.load()
PATH = extension.__file__
