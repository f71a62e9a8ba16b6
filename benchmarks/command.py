"""What the command lines of the benchmarks share."""

import argparse
import pathlib
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


def choices(allowed):
    """An argparse type: comma separated words, each one of `allowed`."""

    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"'{word}' is not one of {', '.join(allowed)}")
        return words

    return parse
