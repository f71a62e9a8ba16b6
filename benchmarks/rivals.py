"""evenkeel as its users call it, beside torch and oneDNN: every problem of tests/cases/peers.txt, forward and
backward, in one run.

Each thread count gets a process of its own, confined to as many processors, since oneDNN takes as
many threads as it sees processors. The ceiling (a copy, for backward an add of two tensors, ordinary
stores to memory that is there already, the same threads) runs in the same rounds. A time is the first quartile of
the rounds, as what else the machine does only ever adds to it; with --busy it is their mean. "of limit" is the ceiling's time / the
contender's.

With --residual, the row norms among them, of x + residual: forward stores y and the sum, backward adds
the gradient that arrives at the sum to dx. The ceiling is one pass over the same bytes.

    python benchmarks/rivals.py --threads 1,2 --csv benchmarks/results/rivals.csv
    python benchmarks/rivals.py --part 1/4 ...      the first quarter of the lines; the CSV file grows with each part
"""

import argparse
import csv
import os
import pathlib
import statistics
import subprocess
import sys

import checkout  # noqa: F401
import cpu_contenders
import onednn_norm
import problems
from evenkeel.bench import command, measure

ROOT = pathlib.Path(__file__).parent.parent
CONTENDERS = (*cpu_contenders.AS_CALLED, "onednn", cpu_contenders.C_INTERFACE)
DEFAULT_CONTENDERS = tuple(name for name in CONTENDERS if name != "torch.compile")
OWN = ("evenkeel", cpu_contenders.C_INTERFACE)
COLUMNS = (
    "date commit cpu threads op shape layout dtype pass contender time_us of_limit busy versions"
).split()


def default_library():
    for folder in ("build/release", "build/cpu-only", "build/dev", "build"):
        path = ROOT / folder / "libevenkeel.so"
        if path.exists():
            return path
    return ROOT / "build/release/libevenkeel.so"


def part(text):
    """(which, of how many), from "1/4"."""
    which, _, count = text.partition("/")
    if not (which.isdecimal() and count.isdecimal() and 1 <= int(which) <= int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a part such as 1/4")
    return int(which), int(count)


def typical(times, busy):
    """One time for each contender: the first quartile of its rounds, or their mean beside busy processes."""
    if busy:
        return {name: statistics.fmean(values) for name, values in times.items()}
    return {name: sorted(values)[len(values) // 4] for name, values in times.items()}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads",
        default="1,2",
        help="thread counts, each in a process of its own (default: 1,2)",
    )
    parser.add_argument(
        "--dtypes",
        type=command.choices([*problems.DTYPES, *problems.WITH_RESIDUAL]),
        default=["f32", "bf16"],
        help="of x, or x+residual (default: f32,bf16)",
    )
    parser.add_argument(
        "--residual",
        dest="dtypes",
        action="store_const",
        const=list(problems.WITH_RESIDUAL),
        help=f"the same as --dtypes {','.join(problems.WITH_RESIDUAL)}",
    )
    parser.add_argument(
        "--passes", type=command.choices(["forward", "backward"]), default=["forward", "backward"]
    )
    parser.add_argument(
        "--contenders", type=command.choices(CONTENDERS), default=list(DEFAULT_CONTENDERS)
    )
    parser.add_argument(
        "--cases", type=pathlib.Path, default=problems.CASES / "peers.txt", help="a case list"
    )
    parser.add_argument(
        "--filter", default="", help='only lines that contain this, e.g. "layer_norm 4096x1024"'
    )
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="1/4: the first quarter of the lines"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each line (default: 3)"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="so many other processes keep the same processors busy"
    )
    parser.add_argument("--quick", action="store_true", help="half a second for each line")
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument(
        "--library", type=pathlib.Path, default=default_library(), help="libevenkeel.so"
    )
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def fastest(times, family):
    """The name of a library's fastest variant, or None."""
    found = [name for name in times if name.split(",")[0] == family]
    return min(found, key=times.get, default=None)


class Table:
    """Prints a line as soon as it is measured. For evenkeel's own column its parameters are float32."""

    def __init__(self, names):
        self.rivals = [name for name in names if name not in OWN]
        self.columns = [cpu_contenders.LIMIT, cpu_contenders.TORCH_LIMIT, *OWN, *self.rivals]
        self.leads = []
        self.mixed = []

    def header(self, threads, libraries):
        versions = ", ".join(f"{name} {version}" for name, version in libraries.versions.items())
        count = f"{threads} thread{'s' if threads > 1 else ''}"
        print(f"\n{command.cpu_name()}, {count}; {versions}")
        print("time in microseconds (of limit); lead: best rival's time / evenkeel's;")
        print("mixed: evenkeel's time with parameters in x's dtype / with float32 parameters\n")
        cells = "".join(f"{name:>18}" for name in self.columns)
        print(f"{'':<46}{cells}{'lead':>8}{'mixed':>8}", flush=True)

    def line(self, label, times, refusals):
        rivals = {name: fastest(times, name) for name in self.rivals}
        text = f"{label:<46}"
        for column in self.columns:
            name = rivals.get(column, column)
            if name in times:
                of_limit = times[cpu_contenders.LIMIT] / times[name]
                text += f"{times[name] * 1e6:>11.1f} ({of_limit:4.2f})"
            else:
                text += f"{'-':>18}"
        rivals = [name for name in rivals.values() if name]
        behind = False
        if "evenkeel" in times and rivals:
            lead = min(times[name] for name in rivals) / times["evenkeel"]
            behind = lead <= 1
            self.leads.append(lead)
            text += f"{lead:8.2f}"
        for name in times:
            if name.startswith("evenkeel,"):
                self.mixed.append(times[name] / times["evenkeel"])
                text += f"{self.mixed[-1]:8.2f}"
        print(text + ("  behind" if behind else ""), flush=True)
        for name, reason in refusals.items():
            print(f"    {name}: {reason}")

    def footer(self):
        if self.leads:
            ahead = sum(lead > 1 for lead in self.leads)
            print(
                f"\nahead in {ahead} of {len(self.leads)} lines; smallest lead {min(self.leads):.2f}"
            )
        if self.mixed:
            print(f"mixed dtypes: {min(self.mixed):.2f} to {max(self.mixed):.2f}")


def work(options):
    """Measures with one thread count; False if evenkeel refused a line."""
    threads = options.worker
    libraries = cpu_contenders.Libraries(options.contenders, options.library, threads)
    versions = "; ".join(f"{name} {version}" for name, version in libraries.versions.items())
    date = command.now()
    constants = {
        "date": date,
        "commit": command.commit(),
        "cpu": command.cpu_name(),
        "threads": threads,
        "busy": options.busy,
        "versions": versions,
    }
    table = Table(options.contenders)
    table.header(threads, libraries)
    rows = []
    fine = True
    which, count = options.part
    for i, problem in enumerate(problems.read(options.cases)):
        if i % count != which - 1:
            continue
        for dtype in filter(problem.has, options.dtypes):
            labels = {
                name: " ".join(
                    filter(None, [problem.op, str(problem), problem.layout, dtype, name])
                )
                for name in options.passes
            }
            labels = {name: label for name, label in labels.items() if options.filter in label}
            if not labels:
                continue
            tensors = problems.Tensors(problem, dtype)
            for name, label in labels.items():
                calls, refusals = libraries.prepare(problem, tensors, backward=name == "backward")
                seconds = 0.5 if options.quick else options.seconds
                times = typical(measure.rounds(calls, seconds), options.busy)
                table.line(label, times, refusals)
                fine = fine and not any(refused.startswith("evenkeel") for refused in refusals)
                for contender, time_ in times.items():
                    of_limit = times[cpu_contenders.LIMIT] / time_
                    rows.append(
                        constants
                        | {
                            "op": problem.op,
                            "shape": str(problem),
                            "layout": problem.layout,
                            "dtype": dtype,
                        }
                        | {"pass": name, "contender": contender}
                        | {
                            "time_us": f"{time_ * 1e6:.2f}",
                            "of_limit": f"{of_limit:.3f}",
                        }
                    )
    table.footer()
    if options.csv:
        append(options.csv, rows)
    return fine


def append(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def start_worker(threads, options):
    """This program again, for one thread count, on as many processors; its exit code."""
    processors = sorted(os.sched_getaffinity(0))
    if threads > len(processors):
        sys.exit(f"--threads {threads}: this machine offers {len(processors)} processors")
    environment = os.environ | onednn_norm.environment() | {"OMP_NUM_THREADS": str(threads)}
    # evenkeel.torch takes its operators from where the library is.
    environment["EVENKEEL_LIBRARY_PATH"] = str(options.library.resolve().parent)
    command = [sys.executable, *sys.argv, "--worker", str(threads)]
    confine = lambda: os.sched_setaffinity(0, processors[:threads])  # noqa: E731
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin, preexec_fn=confine) for _ in range(options.busy)]
    try:
        return subprocess.run(command, env=environment, preexec_fn=confine, check=False).returncode
    finally:
        for other in others:
            other.kill()
            other.wait()


def main():
    options = arguments()
    if "evenkeel" in options.contenders and not options.library.exists():
        sys.exit(f"--library {options.library}: no such file; build the library first (make build)")
    if options.worker:
        sys.exit(0 if work(options) else 1)
    sys.exit(max(start_worker(int(threads), options) for threads in options.threads.split(",")))


if __name__ == "__main__":
    main()
