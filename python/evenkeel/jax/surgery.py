"""Makes the norms of an existing flax.nnx model evenkeel's: each gets another class.

Parameters, their names, their paths and their sharing stay as they are, so checkpoints and optimizers
see no difference.
"""

import warnings
from dataclasses import dataclass

from flax import nnx

from evenkeel import _report
from evenkeel._report import set_class, shown
from evenkeel.jax import nnx as fused

OF_FLAX = {
    nnx.LayerNorm: fused.LayerNorm,
    nnx.RMSNorm: fused.RMSNorm,
    nnx.GroupNorm: fused.GroupNorm,
}
OURS = tuple(OF_FLAX.values())
NAMES = {nnx.LayerNorm: "layer_norm", nnx.RMSNorm: "rms_norm", nnx.GroupNorm: "group_norm"}


@dataclass(frozen=True)
class Entry:
    """A norm, or what looks like one, and the class it had. name: its path, "" for the root."""

    name: str
    module: nnx.Module
    original: type
    outcome: str  # the name of the norm, or why it was skipped


class Report:
    """What became of the norms of a model; print it."""

    def __init__(self, model, replaced, skipped):
        self.model = model
        self.replaced = tuple(replaced)
        self.skipped = tuple(skipped)
        self._fused = self.replaced

    def undo(self):
        """Gives every module its class back. A second time it does nothing."""
        for entry in self._fused:
            if type(entry.module) not in (entry.original, OF_FLAX[entry.original]):
                raise RuntimeError(
                    f"evenkeel: cannot undo the surgery on '{shown(entry.name)}': its class has been "
                    f"changed to {type(entry.module).__name__} since. Nothing was changed now"
                )
        for entry in self._fused:
            set_class(entry.module, entry.original)
        self._fused = ()

    def __str__(self):
        def rows(entries):
            return [(e.name, e.original.__name__, e.outcome) for e in entries]

        return _report.text(rows(self.replaced), rows(self.skipped))

    def __repr__(self):
        return f"<evenkeel.jax.Report: {len(self.replaced)} replaced, {len(self.skipped)} skipped>"


def fuse(model):
    """Makes the norms of a flax.nnx model evenkeel's, in place, and returns a report of them.

    Replaced: modules of exactly flax's classes LayerNorm, RMSNorm and GroupNorm over the last axis.
    Left alone, with a reason in the report: other axes, statistics over devices, subclasses, other norms.
    Functions that JAX has compiled with the model before stay as they are.
    """
    if not isinstance(model, nnx.Module):
        hint = ""
        if any(base.__module__.startswith("flax.linen") for base in type(model).__mro__):
            hint = ". A linen module makes its own layers: use those of evenkeel.jax.linen in it"
        raise TypeError(
            f"evenkeel: model must be a flax.nnx.Module, but is of type {type(model).__name__}{hint}"
        )
    replaced, skipped = [], []
    for path, module in nnx.iter_modules(model):
        name, kind = ".".join(map(str, path)), type(module)
        reason = _reason(module)
        if reason is not None:
            skipped.append(Entry(name, module, kind, reason))
        elif kind in OF_FLAX:
            replaced.append(Entry(name, module, kind, NAMES[kind]))
    for entry in replaced:
        set_class(entry.module, OF_FLAX[entry.original])
    if not replaced and not any(isinstance(entry.module, OURS) for entry in skipped):
        known = f"; {len(skipped)} were skipped, see the report" if skipped else ""
        warnings.warn(f"evenkeel.fuse: no norm was replaced{known}", UserWarning, stacklevel=2)
    return Report(model, replaced, skipped)


def _reason(module):
    """Why what looks like a norm is left alone; None for what is replaced, and for what is no norm."""
    kind = type(module)
    if kind in OF_FLAX:
        return fused.unfit(module)
    if isinstance(module, OURS):
        return "already evenkeel's"
    if isinstance(module, tuple(OF_FLAX)):
        return "its class is not flax's own"
    if "norm" in kind.__name__.lower():
        return f"{kind.__name__} is neither layer norm nor RMS norm nor group norm"
    return None
