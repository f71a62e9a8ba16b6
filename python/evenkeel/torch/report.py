"""What the surgery says it has done, and how that is undone."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from evenkeel import _report
from evenkeel._report import set_class, shown


@dataclass(frozen=True)
class Entry:
    """A module and the class it had. name: the first of its names, "" for the root."""

    name: str
    names: tuple[str, ...]
    module: torch.nn.Module
    original: type


@dataclass(frozen=True)
class Replacement(Entry):
    """A norm that is evenkeel's now."""

    recipe: str


@dataclass(frozen=True)
class Skipped(Entry):
    """A norm, or what looks like one, that was left alone."""

    reason: str


class Report:
    """What became of the norms of a model; print it."""

    def __init__(
        self,
        model: torch.nn.Module,
        replaced: Iterable[Replacement],
        skipped: Iterable[Skipped],
    ) -> None:
        self.model = model
        self.replaced = tuple(replaced)
        self.skipped = tuple(skipped)
        self._fused = [(entry, type(entry.module)) for entry in self.replaced]

    def undo(self) -> None:
        """Gives every module its class back. A second time it does nothing."""
        for entry, fused in self._fused:
            if type(entry.module) not in (fused, entry.original):
                raise RuntimeError(
                    f"evenkeel: cannot undo the surgery on '{shown(entry.name)}': its class was "
                    f"{fused.__name__}, but has been changed to {type(entry.module).__name__} since. "
                    "Nothing was changed now"
                )
        for entry, _ in self._fused:
            set_class(entry.module, entry.original)
        if self._fused:
            forget_compiled(self.model)
        self._fused = []

    def __str__(self) -> str:
        return _report.text(
            [(e.name, e.original.__name__, e.recipe) for e in self.replaced],
            [(e.name, e.original.__name__, e.reason) for e in self.skipped],
        )

    def __repr__(self) -> str:
        return (
            f"<evenkeel.torch.Report: {len(self.replaced)} replaced, {len(self.skipped)} skipped>"
        )


def forget_compiled(model):
    """Drops what torch.compile has made: not every version of torch sees that a class has changed."""
    if "torch._dynamo" not in sys.modules:
        return
    wrapper = sys.modules["torch._dynamo"].OptimizedModule
    if any(isinstance(m, wrapper) or m._compiled_call_impl is not None for m in model.modules()):
        torch.compiler.reset()
