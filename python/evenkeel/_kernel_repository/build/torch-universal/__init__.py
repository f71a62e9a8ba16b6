"""The layers, in the layout that the package `kernels` expects of a repository."""

from evenkeel import kernels as layers

__all__ = ["layers"]
