"""What the surgery says it has done, and how that is undone.

A model has dozens of equal norms that differ in their numbers only; printed, they share a line.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch


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
        rows = [(e.name, e.original.__name__, e.recipe) for e in self.replaced]
        rows += [(e.name, e.original.__name__, f"skipped: {e.reason}") for e in self.skipped]
        table = [
            (shown(name), f"{count} x" if count > 1 else "", *what)
            for name, count, *what in compressed(rows)
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([*lines, f"{len(self.replaced)} replaced, {len(self.skipped)} skipped"])

    def __repr__(self) -> str:
        return (
            f"<evenkeel.torch.Report: {len(self.replaced)} replaced, {len(self.skipped)} skipped>"
        )


def set_class(module, new):
    """Past the __setattr__ of the module, which may do more than that."""
    object.__setattr__(module, "__class__", new)


def forget_compiled(model):
    """Drops what torch.compile has made: not every version of torch sees that a class has changed."""
    if "torch._dynamo" not in sys.modules:
        return
    wrapper = sys.modules["torch._dynamo"].OptimizedModule
    if any(isinstance(m, wrapper) or m._compiled_call_impl is not None for m in model.modules()):
        torch.compiler.reset()


def shown(name):
    return name or "(root)"


def compressed(rows):
    """Rows (name, *what) as (name, count, *what): one for those that differ in numbers only.

    The numbers at one place of the names are joined at a time, the last place first, so that what
    is written in braces is always all there: `a.{0..1}.b.{0..3}` stands for eight names.
    """
    joined = {(tuple(name.split(".")), tuple(what)): 1 for name, *what in rows}
    for place in reversed(range(max((len(parts) for parts, _ in joined), default=0))):
        groups = {}
        for (parts, what), count in joined.items():
            number = place < len(parts) and is_number(parts[place])
            key = (*parts[:place], None, *parts[place + 1 :]) if number else parts
            groups.setdefault((key, what, count), []).append(number and int(parts[place]))
        joined = {
            (tuple(braced(each) if part is None else part for part in key), what): count * len(each)
            for (key, what, count), each in groups.items()
        }
    return [(".".join(parts), count, *what) for (parts, what), count in joined.items()]


def is_number(part):
    return part.isdecimal() and str(int(part)) == part


def braced(numbers):
    """Numbers as text: 7, {0..3}, {0..3,5}."""
    spans = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
