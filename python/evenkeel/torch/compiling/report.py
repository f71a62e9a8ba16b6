"""Which norm of a compiled model went which way, and why: the log `evenkeel.compile`, and `compile_report()`.

What torch takes out of its caches has been decided before and is not in the report.
"""

import collections
import logging
import typing

log = logging.getLogger("evenkeel.compile")


class Line(typing.NamedTuple):
    norm: str  # its module in the model
    pass_: str  # forward, backward, or both
    way: str  # evenkeel or compiler
    why: str


class CompileReport:
    """Lines, and how often each was decided; print it."""

    def __init__(self, lines):
        self.lines = dict(lines)

    def __str__(self):
        if not self.lines:
            return "no norm of evenkeel's was compiled by this process"
        rows = [(*line, f"{count}x" if count > 1 else "") for line, count in self.lines.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(map(str.ljust, row, widths)).rstrip()  # one line for each
            for row in rows
        )


_decided: collections.Counter[Line] = collections.Counter()


def compile_report() -> CompileReport:
    """Which norms of the models that this process has compiled went which way, and why."""
    return CompileReport(_decided)


def decided(norm, pass_, way, why):
    _decided[Line(norm, pass_, way, why)] += 1
    log.info("%s, %s: %s: %s", norm, pass_, way, why)


def clear():
    _decided.clear()
