"""What benchmarks share around their measurements: arguments, where and when, the CSV files.

It needs nothing but Python, so that the programs in benchmarks/ can use it in environments without a built evenkeel.
"""

import argparse
import csv
import datetime
import importlib.metadata
import pathlib
import platform
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def commit():
    """Of the code that is measured: git's description of a source tree, the version of an installed package."""
    if not (ROOT / "include" / "evenkeel" / "evenkeel.h").exists():
        try:
            return importlib.metadata.version("evenkeel")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return "unknown"
    return result.stdout.strip() or "unknown"


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def append(path, columns, rows):
    """Adds rows to a CSV file, which gets a header if it is new; what a row lacks stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path):
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def choices(allowed):
    """An argparse type: comma separated words, each one of `allowed`."""

    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"'{word}' is not one of {', '.join(allowed)}")
        return words

    return parse


def first_line(error):
    """An exception in one line of a message."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"
