"""`python -m evenkeel check`: its arguments, its processes, what it prints.

Every backend, and every instruction set of the CPU backend, is checked by a process of its own (worker.py): the
library reads EVENKEEL_CPU_TARGET once, and a process that crashes leaves the name of its case behind.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import numpy  # noqa: F401  (the workers need it: better missed here than there)

from evenkeel import _native
from evenkeel._progress import progress_bar
from evenkeel.check import cases

QUICK_STEP = 8
SHOWN = 5  # failures of a backend that are printed; JSON has them all

DESCRIPTION = """Compares every backend of this build with float64 on this machine, over the case lists of the library's own
tests; where JAX is installed, calls by XLA as well. What it prints belongs into a bug report. Exit code 1 if anything is off."""


@dataclasses.dataclass
class Verdict:
    backend: str
    passed: int = 0
    declined: int = 0
    reason: str = ""  # of the first decline, or why nothing was run
    failures: list = dataclasses.field(default_factory=list)  # of {"case", "message"}

    @property
    def ran(self):
        return self.passed + len(self.failures) > 0

    @property
    def word(self):
        if self.failures:
            return "FAIL"
        return "pass" if self.ran else "skipped"


def no_cuda():
    """Why the CUDA backend cannot be checked, or None."""
    try:
        import torch
    except ImportError:
        return "it is checked with torch's tensors, and torch is not installed"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def backends(device):
    """{name: why it cannot be checked, or None}; instruction sets are named behind a colon."""
    found = {}
    for name in _native.backends():
        if name == "cuda" and device != "cpu":
            found[name] = no_cuda()
        elif name == "cpu" and device != "cuda":
            found |= {f"cpu:{target}": None for target in _native.cpu_targets()}
        elif name not in ("cpu", "cuda") and device != "cuda":
            found[name] = None
    if device != "cuda" and importlib.util.find_spec("jax") and _native.find("evenkeel_jax.so"):
        found["jax"] = None  # the CPU backend, called by XLA
    return found


def worker(backend, chosen):
    """A process that checks cases, whose texts it reads."""
    name, _, target = backend.partition(":")
    environment = dict(os.environ)
    if target:
        environment["EVENKEEL_CPU_TARGET"] = target
    process = subprocess.Popen(
        [sys.executable, "-m", "evenkeel.check.worker", name],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.stdin.write("\n".join(case.text for case in chosen))
    process.stdin.close()
    return process


def check(backend, chosen, advance):
    """The Verdict on a backend; advance() is called for every case."""
    verdict, done, words = Verdict(backend), 0, []
    with worker(backend, chosen) as process:
        for line in process.stdout:
            kind, _, text = line.rstrip("\n").partition("\t")
            if kind not in ("pass", "decline", "fail"):
                words.append(line.strip())  # a traceback, or what a runtime prints before it ends
                continue
            if kind == "pass":
                verdict.passed += 1
            elif kind == "decline":
                verdict.declined += 1
                verdict.reason = verdict.reason or text
            else:
                verdict.failures.append({"case": chosen[done].text, "message": text})
            done += 1
            advance()
    if done < len(chosen):
        code = process.returncode
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        message = " ".join([f"the process ended here ({end})", *words[-1:]])
        verdict.failures.append({"case": chosen[done].text, "message": message})
    return verdict


def repeat(backend, case):
    """A command that checks one case again."""
    parts = ["python", "-m", "evenkeel", "check", "--backend", backend, "--case", case]
    return shlex.join(parts)


def print_verdicts(verdicts):
    width = max(len(verdict.backend) for verdict in verdicts)
    for verdict in verdicts:
        counts = f"{verdict.passed} passed"
        if verdict.failures:
            counts += f", {len(verdict.failures)} failed"
        if verdict.declined:
            counts += f", {verdict.declined} declined"
        text = counts if verdict.ran or verdict.declined else verdict.reason
        if verdict.declined:
            text += f" ({verdict.reason})"
        print(f"{verdict.backend:<{width}}  {verdict.word:<8}{text}")
    for verdict in verdicts:
        for failure in verdict.failures[:SHOWN]:
            print(f"\n{verdict.backend}: {failure['case']}\n  {failure['message']}")
            print(f"  again: {repeat(verdict.backend, failure['case'])}")
        left = len(verdict.failures) - SHOWN
        if left > 0:
            print(f"\n{verdict.backend}: and {left} more failures (--json writes all)")


def one_case(text):
    try:
        return cases.parse_line(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser):
    parser.description = DESCRIPTION
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: all that are there)")
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_STEP}th case")
    parser.add_argument("--json", type=pathlib.Path, help="write what was found to this file")
    parser.add_argument("--backend", help="only this one, say cpu:AVX2")
    parser.add_argument("--case", type=one_case, help="only this case, in the words of the lists")
    parser.set_defaults(run=lambda options: main(parser, options))


def main(parser, options):
    from evenkeel.__main__ import info, print_info

    found = backends(options.device)
    if options.backend:
        if options.backend not in found:
            parser.error(f"--backend {options.backend}: this build has {', '.join(found)}")
        found = {options.backend: found[options.backend]}
    chosen = options.case or cases.read()[:: QUICK_STEP if options.quick else 1]
    print_info(options)
    print(f"\n{len(chosen)} cases", flush=True)

    with progress_bar() as progress:
        verdicts = []
        for name, reason in found.items():
            if reason:
                verdicts.append(Verdict(name, reason=reason))
                continue
            task = progress.add_task(name, total=len(chosen))
            verdicts.append(check(name, chosen, lambda task=task: progress.advance(task)))
    print_verdicts(verdicts)
    fine = not any(verdict.failures for verdict in verdicts) and any(v.ran for v in verdicts)
    print(f"\nevenkeel check: {'PASSED' if fine else 'FAILED'}")
    if options.json:
        backends_found = [dataclasses.asdict(v) | {"verdict": v.word} for v in verdicts]
        content = {
            "info": dict(info()),
            "cases": len(chosen),
            "passed": fine,
            "backends": backends_found,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if fine else 1
