"""Runs `python ...` as a user does."""

import os
import subprocess
import sys


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
