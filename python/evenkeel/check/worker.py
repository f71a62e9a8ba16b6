"""Checks the cases on stdin with one backend, and prints a line for each: pass, decline or fail, and why."""

import sys

from evenkeel import _abi, _native
from evenkeel.check import cases, judge, memory


def outcome(case, runner):
    try:
        found = judge.check_case(case, runner)
    except _abi.UnsupportedError as error:
        return "decline", str(error)
    except RuntimeError as error:
        return "fail", str(error)
    return ("fail", found) if found else ("pass", "")


def runner_of(backend):
    if backend == "jax":
        from evenkeel.check.jax_runner import JaxRunner

        return JaxRunner()
    place = memory.Device("cuda") if backend == "cuda" else memory.Host()
    return judge.Runner(_abi.Evenkeel(_native.find("libevenkeel.so")), backend, place)


def main():
    runner = runner_of(sys.argv[1])
    for line in sys.stdin.read().splitlines():
        (case,) = cases.parse_line(line)
        print("\t".join(outcome(case, runner)).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
