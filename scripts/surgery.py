"""What the surgery does to every model of tests/python/zoo.py: prints it and rewrites it in docs/surgery.md.

Each model runs a training step in float32 on the CPU, as it is and after the surgery. Of the document only
what lies between the markers is written; nothing there is typed by hand. Differences are rounded to one
digit, so that the text stays the same for the same versions.

    .venv/bin/python scripts/surgery.py
"""

import collections
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

import torch
import transformers
from conftest import ROOT  # and it finds the package and its libraries
from rich.console import Console
from rich.table import Table
from zoo import ZOO, difference, norms_of

import evenkeel.torch

DOCUMENT = ROOT / "docs" / "surgery.md"
BEGIN, END = "<!-- surgery: begin (scripts/surgery.py) -->", "<!-- surgery: end -->"
HEADS = ("model", "norms", "replaced", "by", "left alone", "logits", "gradients")


def counted(texts):
    """Each text once, with how often it came if that is more."""
    counts = collections.Counter(texts)
    return "; ".join(text if n == 1 else f"{n} x {text}" for text, n in counts.items())


def brief(reason):
    """Without how far off, where and with which numbers: that stands in the report."""
    return reason if len(reason) <= 50 else reason.split(": ")[0]


def examine(entry):
    """The cells of the table, and the report as text."""
    model = entry.build()
    before = entry.run(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no norm was replaced")
        report = evenkeel.torch.fuse(model)
    off = difference(entry.run(model), before)[:2] if report.replaced else ()
    left = [f"{item.original.__name__}: {brief(item.reason)}" for item in report.skipped]
    cells = [
        entry.name,
        str(len(norms_of(model))),
        str(len(report.replaced)),
        counted(item.recipe for item in report.replaced),
        counted(left),
        *([f"{value:.0e}" for value in off] or ["", ""]),
    ]
    return cells, str(report)


def markdown(rows, versions):
    lines = [
        f"Made with {versions}, in float32 on the CPU.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
        *(f"| {' | '.join(cells)} |" for cells, _ in rows),
        "",
        "The reports:",
    ]
    for cells, report in rows:
        summary = f"<summary>{cells[0]}: {report.splitlines()[-1]}</summary>"
        lines += ["", "<details>", summary, "", "```", report, "```", "</details>"]
    return "\n".join(lines)


def print_table(rows, versions):
    table = Table(title=versions, title_justify="left")
    for name in HEADS:
        table.add_column(name, justify="left" if name in ("model", "by", "left alone") else "right")
    for cells, _ in rows:
        table.add_row(*cells)
    # In a pipe rich would fold everything into 80 columns.
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def main():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = (
        f"evenkeel {evenkeel.__version__}, torch {torch.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}"
    )
    rows = [examine(entry) for entry in ZOO]
    print_table(rows, versions)
    head, rest = DOCUMENT.read_text().split(BEGIN)
    _, tail = rest.split(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{markdown(rows, versions)}\n{END}{tail}")


if __name__ == "__main__":
    main()
