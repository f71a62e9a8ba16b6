"""What the benchmarks share around their measurements: arguments, where and when, the CSV files."""

import argparse
import csv
import datetime
import pathlib
import platform
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def commit():
    """Of the code that is measured."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return "unknown"
    return result.stdout.strip() or "unknown"


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def append(path, columns, rows):
    """Adds rows to a CSV file, which gets a header if it is new; what a row lacks stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def choices(allowed):
    """An argparse type: comma separated words, each one of `allowed`."""

    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"'{word}' is not one of {', '.join(allowed)}")
        return words

    return parse
