"""`make test`: everything that must hold, step by step, with one summary at the end.

Steps: build and ctest of the dev preset, build and ctest of the asan preset (the sanitizers), and
the style checks. A failed step does not stop the ones that do not need it, so that one run shows
all that is wrong. Skipped tests are named: a test that did not run proves nothing.
"""

import argparse
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    """What all steps together have found."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def step(title: str, command: list[str], outcome: Outcome) -> bool:
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    ok = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    verdict = "ok" if ok else "FAILED"
    print(f"== {title}: {verdict}, {duration(time.monotonic() - start)}", flush=True)
    if not ok:
        outcome.failed.append(f"step: {title}")
    return ok


def read_results(path: Path, preset: str, outcome: Outcome) -> None:
    """Adds ctest's JUnit report to the outcome."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{preset}: {case.get('name')}"
        status = case.get("status")
        output = case.findtext("system-out", "")
        if status == "run":
            outcome.passed += 1
        elif status == "fail":
            outcome.failed.append(name)
        else:  # notrun, disabled
            reason = re.search(r"skipped: (.+)", output)
            outcome.skipped.append(f"{name} ({reason.group(1) if reason else status})")
        # A case that GoogleTest skipped inside a program that passed; named again at its end.
        cases = set(re.findall(r"^\[  SKIPPED \] (\w[\w./]*\.\w[\w./]*)", output, re.M))
        outcome.skipped.extend(f"{name}: {case}" for case in sorted(cases))
        # The same of pytest, with its reason.
        cases = re.findall(r"^SKIPPED (\[\d+\] \S+: .+)$", output, re.M)
        outcome.skipped.extend(f"{name}: {case}" for case in cases)


def check_preset(preset: str, jobs: int, outcome: Outcome) -> None:
    if not step(f"build {preset}", ["scripts/build", preset, str(jobs)], outcome):
        return
    report = ROOT / "build" / preset / "junit.xml"
    report.unlink(missing_ok=True)
    ctest = f"ctest --preset {preset} --parallel {jobs} --test-output-size-passed 1000000"
    step(f"test {preset}", [*ctest.split(), "--output-junit", str(report)], outcome)
    if report.exists():
        read_results(report, preset, outcome)
    else:
        outcome.failed.append(f"{preset}: ctest left no report")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="compilers to run at once")
    jobs = parser.parse_args().jobs

    start = time.monotonic()
    outcome = Outcome()
    for preset in ("dev", "asan"):
        check_preset(preset, jobs, outcome)
    step("style", ["scripts/lint"], outcome)

    print()
    for title, names in (("skipped", outcome.skipped), ("failed", outcome.failed)):
        for name in names:
            print(f"{title}: {name}")
    if outcome.passed == 0:
        outcome.failed.append("no test ran")
    verdict = "FAILED" if outcome.failed else "PASSED"
    print(
        f"evenkeel: {verdict}: {outcome.passed} tests passed, {len(outcome.failed)} failures, "
        f"{len(outcome.skipped)} skipped, in {duration(time.monotonic() - start)}"
    )
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
