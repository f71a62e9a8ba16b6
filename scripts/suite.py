"""Runs files of Python tests, each in a pytest process of its own, and counts what became of them.

    python scripts/suite.py --jobs 4 tests/python

A process that dies is a failure and takes no other file with it. Files that need most of a GPU's memory
(ALONE) run first, one after the other. Those that need packages beside the trainers'
(COMPOSERS) run with the Python that EVENKEEL_COMPOSER_PYTHON names, if any. What failed is printed in full;
every reason for a skipped test is printed at the end, with how many tests it kept from running.
"""

import argparse
import ast
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTHING_COLLECTED = 5  # pytest's status
ALONE = ["test_cuda_many_elements"]
# Of tests/python, with Composer, diffusers, kernels, timm: the list of tests/CMakeLists.txt.
COMPOSERS = (
    "test_adaptive_norms test_compiled_unet test_composer test_examples test_kernels test_timm"
).split()


@dataclass
class Outcome:
    """What became of the tests of a file, or of all."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: collections.Counter = field(default_factory=collections.Counter)  # by reason

    def add(self, other: "Outcome") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        skipped = self.skipped.total()
        count = self.passed + len(self.failed) + skipped
        return f"{count} tests: {self.passed} passed, {len(self.failed)} failed, {skipped} skipped"


def reason_of(skipped: ElementTree.Element) -> str:
    """A file that skips itself has its reason in a tuple: path, line, 'Skipped: reason'."""
    message = skipped.get("message", "")
    if message == "collection skipped":
        message = ast.literal_eval(skipped.text)[2].removeprefix("Skipped: ")
    return message


def read(report: Path, name: str) -> Outcome:
    """Of a JUnit report."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(f"{name}::{case.get('name')}")
        elif skipped is not None:
            outcome.skipped[reason_of(skipped)] += 1
        else:
            outcome.passed += 1
    return outcome


def python_for(path: Path) -> str:
    composer = os.environ.get("EVENKEEL_COMPOSER_PYTHON")
    needs_it = path.parent.name == "python" and path.stem in COMPOSERS
    return composer if composer and needs_it else sys.executable


def run(path: Path, seconds: float, threads: int) -> Outcome:
    """Runs one file and tells what came of it."""
    name = os.path.relpath(path, ROOT)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        try:
            done = subprocess.run(
                [python_for(path), "-m", "pytest", "-q", f"--junitxml={report}", str(path)],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": str(threads)} | os.environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            status, output = None, (late.stdout or b"").decode(errors="replace")
        outcome = read(report, name) if report.exists() else Outcome()
    if status is None:
        outcome.failed.append(f"{name}: not finished after {seconds:g} s")
    elif status < 0:
        outcome.failed.append(f"{name}: ended by {signal.Signals(-status).name}")
    elif status not in (0, NOTHING_COLLECTED) and not outcome.failed:
        outcome.failed.append(f"{name}: pytest ended with status {status}")
    elif outcome.passed == 0 and not outcome.failed and not outcome.skipped:
        outcome.failed.append(f"{name}: has no tests")
    if outcome.failed:
        print(output)
    print(f"{name}: {outcome}, {time.monotonic() - begin:.0f} s", flush=True)
    return outcome


def run_all(paths: list[Path], jobs: int, seconds: float) -> Outcome:
    cores = len(os.sched_getaffinity(0))
    alone = [path for path in paths if path.stem in ALONE]
    # Those with many tests of the GPU take longest.
    beside = sorted(set(paths) - set(alone), key=lambda path: ("cuda" not in path.name, path))
    total = Outcome()
    for path in alone:
        total.add(run(path, seconds, cores))
    with ThreadPoolExecutor(jobs) as pool:
        threads = max(1, cores // jobs)
        for done in as_completed([pool.submit(run, path, seconds, threads) for path in beside]):
            total.add(done.result())
    return total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of test_*.py")
    parser.add_argument("--jobs", type=int, default=1, help="files at once (default: 1)")
    parser.add_argument("--seconds", type=float, default=1800, help="for a file (default: 1800)")
    options = parser.parse_args()
    for path in options.paths:
        if not path.exists():
            parser.error(f"there is no {path}")
    return options


def main() -> int:
    options = arguments()
    begin = time.monotonic()
    paths = [
        file.resolve()
        for path in options.paths
        for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])
    ]
    total = run_all(paths, options.jobs, options.seconds)
    if total.passed == 0:
        total.failed.append("no test passed")
    print()
    for reason, count in total.skipped.most_common():
        print(f"skipped: {count:5d} x {reason}")
    for name in total.failed:
        print(f"failed: {name}")
    verdict = "FAILED" if total.failed else "PASSED"
    print(f"{verdict}: {total}, in {time.monotonic() - begin:.0f} s")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
