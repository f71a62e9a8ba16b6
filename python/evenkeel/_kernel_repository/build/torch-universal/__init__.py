"""The layers, in the layout that the package `kernels` expects of a repository.

The layout can be published as it stands: this variant holds no kernels, and needs evenkeel to be installed. That
cannot be said in metadata.json, whose python-depends may only have names of a list that `kernels` keeps.
"""

try:
    from evenkeel import kernels as layers
except ModuleNotFoundError as error:
    if error.name != "evenkeel":
        raise
    raise ImportError(
        "this kernel is the installed package evenkeel, which is not here: install evenkeel, "
        "built for the torch of this environment"
    ) from error

__all__ = ["layers"]
