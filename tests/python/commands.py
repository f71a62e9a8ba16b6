"""Runs `python ...` as a user does. The tests of JAX and TensorFlow import it, too."""

import os
import subprocess
import sys

SECONDS = 120  # for a program


def run(*arguments, timeout=None, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def program(source, *arguments, **environment):
    """What a Python program of its own prints; it must end well."""
    done = run("-c", source, *map(str, arguments), timeout=SECONDS, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
