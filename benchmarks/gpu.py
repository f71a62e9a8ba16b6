"""evenkeel beside torch, torch.compile and a Triton kernel pair on the current CUDA device: layer norm
and RMS norm, forward and backward, in one run.

Each line has so many independent input sets that no cache holds them. One captured CUDA graph runs
them all and keeps every output; the time is that of its replays by CUDA events / the number of
sets. The ceiling is taken the same way on tensors of the same size: a clone for forward, x + dy for
backward. "of limit" is the ceiling's time / the library's. All inputs require gradients, so forward
is that of a training step.

    python benchmarks/gpu.py --csv benchmarks/results/<file>.csv
    python benchmarks/gpu.py --host --csv benchmarks/results/<file>.csv
"""

import argparse
import functools
import gc
import math
import pathlib
import statistics
import sys
import time
import typing

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table

import command
from problems import DTYPES, EPS
from triton_norm import TritonPair

LIBRARIES = ("evenkeel", "torch", "compile", "triton")
WITHOUT_TRITON = LIBRARIES[:3]
HOST_LIBRARIES = LIBRARIES[:2]
PASSES = {"forward": 2, "backward": 3}  # how many tensors of x's size the ceiling moves
COLUMNS = (
    "date commit machine torch triton op shape dtype pass library time_us ceiling_us of_limit gb_per_s"
).split()

TOTAL_BYTES = 600_000_000
MIN_SETS, MAX_SETS = 2, 256
TIMINGS, QUICK_TIMINGS, REPLAYS = 7, 3, 3
WARM_CALLS, WARM_REPLAYS = 2, 10
HOST_CALLS, HOST_WARM_CALLS, HOST_REPEATS = 2000, 200, 5

# Of the norm of the error / the norm of the result. The rivals' limit only catches nonsense: partial
# sums in bfloat16, as the Triton design has them, may be off by some percent.
HALF_TOLERANCE, FLOAT_TOLERANCE, RIVAL_TOLERANCE = 1e-2, 1e-4, 1e-1
FAILED, NO_FIGURE = "FAILED", "-"


class Line(typing.NamedTuple):
    op: str
    dtype: str  # "bf16/f32w": x in bfloat16, weight and bias in float32
    rows: int
    cols: int
    libraries: tuple

    @property
    def shape(self):
        return f"{self.rows}x{self.cols}"

    @property
    def label(self):
        return f"{self.op} {self.shape} {self.dtype}"

    @property
    def mixed(self):
        return "/" in self.dtype

    @property
    def x_dtype(self):
        return DTYPES[self.dtype.split("/")[0]]

    @property
    def weight_dtype(self):
        return torch.float32 if self.mixed else self.x_dtype

    @property
    def x_bytes(self):
        return self.rows * self.cols * self.x_dtype.itemsize


def lines(op, dtype, shapes, libraries=WITHOUT_TRITON):
    return [Line(op, dtype, *map(int, s.split("x")), libraries) for s in shapes.split()]


LINES = [
    *lines(
        "layer_norm",
        "f16",
        "4096x1024 4096x2048 4096x4096 4096x8192 4096x12288 4096x15872",
        LIBRARIES,
    ),
    *lines(
        "layer_norm",
        "bf16",
        "262144x64 262144x256 131072x512 4096x768 8192x5120 16384x4096",
        LIBRARIES,
    ),
    *lines(
        "rms_norm",
        "bf16",
        "262144x128 4096x1024 16384x4096 4096x8192 1024x65536 256x262144",
    ),
    *lines("layer_norm", "bf16", "4096x3000 4096x3001 4096x5119 4096x6144"),
    *lines("layer_norm", "f32", "4096x1024 4096x4096 4096x8192"),
    *lines("layer_norm", "bf16/f32w", "4096x1024 4096x4096 4096x8192"),
]


class Set(typing.NamedTuple):
    inputs: tuple  # x, weight and, for layer norm, bias
    dy: torch.Tensor

    @property
    def x(self):
        return self.inputs[0]


def make_set(line):
    """All leaves belong to the stream that is current here: autograd runs a backward on the stream of
    its forward, and that must be the one that is captured."""
    count = 1 if line.op == "rms_norm" else 2
    x, dy = (torch.randn(line.rows, line.cols, dtype=line.x_dtype, device="cuda") for _ in range(2))
    parameters = [
        torch.randn(line.cols, dtype=line.weight_dtype, device="cuda") for _ in range(count)
    ]
    return Set(tuple(v.requires_grad_() for v in (x, *parameters)), dy)


def make_sets(line):
    torch.manual_seed(0)
    count = min(max(math.ceil(TOTAL_BYTES / line.x_bytes), MIN_SETS), MAX_SETS)
    return [make_set(line) for _ in range(count)]


def norm_of(functions, line):
    """The function of x, weight (and bias), from a module with the signatures of torch.nn.functional."""
    shape = (line.cols,)
    if line.op == "rms_norm":
        rms_norm = functions.rms_norm
        return lambda x, weight: rms_norm(x, shape, weight, EPS)
    layer_norm = functions.layer_norm
    return lambda x, weight, bias: layer_norm(x, shape, weight, bias, EPS)


class ThroughAutograd:
    """What a user gets: the backward pass is that of an output which was computed beforehand."""

    def __init__(self, norm):
        self.norm = norm

    def forward(self, s):
        return (self.norm(*s.inputs),)

    def keep(self, s):
        """What backward needs from a forward that is not timed."""
        return self.forward(s)

    def backward(self, s, kept):
        return torch.autograd.grad(kept[0], s.inputs, s.dy, retain_graph=True)


class Torch(ThroughAutograd):
    """torch eager: the functions, and the operators behind them for backward alone."""

    def __init__(self, line):
        super().__init__(norm_of(F, line))
        self.shape = [line.cols]
        aten = torch.ops.aten
        if line.op == "layer_norm":
            self.operators = aten.native_layer_norm, aten.native_layer_norm_backward
        elif hasattr(aten, "_fused_rms_norm_backward"):
            self.operators = aten._fused_rms_norm, aten._fused_rms_norm_backward
        else:
            self.operators = None
            complain(line.label, "torch", "no operator for backward alone: measured by autograd")

    def keep(self, s):
        if not self.operators:
            return super().keep(s)
        x, *parameters = s.inputs
        with torch.no_grad():
            return self.operators[0](x, self.shape, *parameters, EPS)

    def backward(self, s, kept):
        if not self.operators:
            return super().backward(s, kept)
        x, *parameters = s.inputs
        mask = [True] * len(s.inputs)
        with torch.no_grad():
            return self.operators[1](s.dy, x, self.shape, *kept[1:], *parameters, mask)


def make_evenkeel(line):
    # Here and not above: without it the rivals can still be measured.
    import evenkeel.torch

    return ThroughAutograd(norm_of(evenkeel.torch, line))


def make_compiled(line):
    # The outputs' graphs are kept for the replays, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    norm = norm_of(F, line)
    if not line.mixed:
        return ThroughAutograd(torch.compile(norm, dynamic=False))

    # torch's own layer norm refuses to mix; casts cost nothing once they are compiled.
    def cast_and_norm(x, weight, bias):
        return norm(x.float(), weight, bias).to(x.dtype)

    return ThroughAutograd(torch.compile(cast_and_norm, dynamic=False))


MAKERS = {
    "evenkeel": make_evenkeel,
    "torch": Torch,
    "compile": make_compiled,
    "triton": TritonPair,
}


class WrongResultError(Exception):
    pass


def reference(line, s):
    """{pass: results} in float64, by autograd through the plain formula."""
    inputs = [v.detach().double().requires_grad_() for v in s.inputs]
    x, weight, *bias = inputs
    if line.op == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    for b in bias:
        y = y + b
    gradients = torch.autograd.grad(y, inputs, s.dy.double())
    return {"forward": (y.detach(),), "backward": gradients}


def check(name, line, results, expected):
    tolerance = FLOAT_TOLERANCE if line.x_dtype == torch.float32 else HALF_TOLERANCE
    if name != "evenkeel":
        tolerance = RIVAL_TOLERANCE
    what = ("y",) if len(expected) == 1 else ("dx", "dweight", "dbias")
    for part, result, wanted in zip(what, results, expected, strict=False):
        if result.shape != wanted.shape:
            raise WrongResultError(f"{part} has shape {tuple(result.shape)}")
        error = ((result.detach().double() - wanted).norm() / wanted.norm()).item()
        if not error < tolerance:  # so that NaN fails too
            raise WrongResultError(f"{part} is off by {error:.1e}, allowed is {tolerance:.0e}")


def graph_time(calls, timings):
    """Microseconds of one call, from replays of a graph of all of them."""
    for _ in range(WARM_CALLS):
        kept = [call() for call in calls]
    del kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = [call() for call in calls]
    for _ in range(WARM_REPLAYS):
        graph.replay()
    milliseconds = []
    for _ in range(timings):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    del kept  # until here no output's memory could be given to another
    return statistics.median(milliseconds) * 1e3 / (REPLAYS * len(calls))


def ceiling_time(sets, pass_, timings):
    if pass_ == "forward":
        calls = [functools.partial(torch.clone, s.x.detach()) for s in sets]
    else:
        calls = [functools.partial(torch.add, s.x.detach(), s.dy) for s in sets]
    return graph_time(calls, timings)


def library_time(name, library, line, sets, pass_, expected, timings):
    if pass_ == "forward":
        calls = [functools.partial(library.forward, s) for s in sets]
    else:
        calls = [functools.partial(library.backward, s, library.keep(s)) for s in sets]
    check(name, line, calls[0](), expected)
    return graph_time(calls, timings)


def complain(label, name, reason):
    if isinstance(reason, Exception):
        text = str(reason).strip() or "no message"
        reason = f"{type(reason).__name__}: {text.splitlines()[0][:200]}"
    print(f"{label}: {name}: {reason}", file=sys.stderr, flush=True)


def measure_line(line, names, timings):
    """For each pass: its name, the ceiling's time, {library: time, or the word that stands for it}."""
    sets = make_sets(line)
    expected = reference(line, sets[0])
    libraries = {}
    for name in names:
        try:
            libraries[name] = MAKERS[name](line)
        except Exception as error:
            complain(line.label, name, error)
    for pass_ in PASSES:
        ceiling = ceiling_time(sets, pass_, timings)
        times = dict.fromkeys(names, NO_FIGURE)
        for name, library in libraries.items():
            try:
                times[name] = library_time(
                    name, library, line, sets, pass_, expected[pass_], timings
                )
            except WrongResultError as error:
                times[name] = FAILED
                complain(f"{line.label} {pass_}", name, error)
            except Exception as error:
                complain(f"{line.label} {pass_}", name, error)
        yield pass_, ceiling, times


def clean_up():
    """So that a line meets neither the last one's memory nor its compiled code."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def device_works():
    """Some errors, an illegal access for one, end the use of the device for good."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        complain("device", "lost", error)
        return False
    return True


class Report:
    """What was measured: a table in the end, the CSV file and a line on stderr at once, so that a run
    that is ended from outside loses little."""

    def __init__(self, options):
        self.csv = options.csv
        compared = HOST_LIBRARIES if options.host else LIBRARIES
        self.names = [name for name in compared if name in options.libraries]
        self.rows = []
        self.constants = {
            "date": command.now(),
            "commit": options.commit,
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def add(self, line, pass_, times, ceiling=None):
        self.rows.append((line, pass_, times, ceiling))
        found = ", ".join(f"{name} {cell(time_, ceiling)}" for name, time_ in times.items())
        print(f"{line.label} {pass_}: {found}", file=sys.stderr, flush=True)
        if self.csv:
            command.append(self.csv, COLUMNS, self.csv_rows(line, pass_, times, ceiling))

    def csv_rows(self, line, pass_, times, ceiling):
        for name, time_ in times.items():
            if isinstance(time_, str):
                continue
            row = {"op": line.op, "shape": line.shape, "dtype": line.dtype, "pass": pass_}
            row |= {"library": name, "time_us": f"{time_:.2f}"}
            if ceiling:
                gigabytes = PASSES[pass_] * line.x_bytes / 1e9
                row["ceiling_us"] = f"{ceiling:.2f}"
                row["of_limit"] = f"{ceiling / time_:.3f}"
                row["gb_per_s"] = f"{gigabytes / (time_ * 1e-6):.0f}"
            yield self.constants | row

    def print_table(self, title):
        constants = self.constants
        table = Table(
            title=f"{constants['machine']}, torch {constants['torch']}, triton {constants['triton']}, "
            f"commit {constants['commit']}\n{title}",
            title_justify="left",
        )
        table.add_column("", no_wrap=True)
        table.add_column("pass", no_wrap=True)
        for name in ("ceiling", *self.names):
            table.add_column(name, justify="right", no_wrap=True)
        for line, pass_, times, ceiling in self.rows:
            cells = [cell(times.get(name, NO_FIGURE), ceiling) for name in self.names]
            table.add_row(line.label, pass_, f"{ceiling:.1f}" if ceiling else "", *cells)
        # In a pipe rich would fold everything into 80 columns.
        Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(table)

    def print_leads(self):
        """Against the best rival of each line; a line without a figure of ours is not led in."""
        ahead, behind = 0, []
        for line, pass_, times, _ in self.rows:
            ours = times.get("evenkeel", NO_FIGURE)
            found = {n: t for n, t in times.items() if n != "evenkeel" and not isinstance(t, str)}
            if "evenkeel" not in times or not found:
                continue
            best = min(found, key=found.get)
            if not isinstance(ours, str) and ours < found[best]:
                ahead += 1
                continue
            lead = "" if isinstance(ours, str) else f", lead {found[best] / ours:.2f}"
            behind.append(f"  {line.label} {pass_}: {cell(ours)}, {best} {cell(found[best])}{lead}")
        if ahead or behind:
            print(f"evenkeel leads in {ahead} of {ahead + len(behind)} lines")
        if behind:
            print("it does not in (microseconds; lead: best rival's time / evenkeel's):")
            print("\n".join(behind))

    def fine(self):
        """Whether evenkeel has a figure wherever it was asked for one."""
        return not any(isinstance(times.get("evenkeel"), str) for _, _, times, _ in self.rows)


def cell(time_, ceiling=None):
    if isinstance(time_, str):
        return time_
    return f"{time_:.1f}" + (f" ({ceiling / time_:.2f})" if ceiling else "")


def forward_backward(norm, s):
    return torch.autograd.grad(norm(*s.inputs), s.inputs, s.dy)


def host_time(call):
    """Microseconds of one call, as the caller sees them."""
    for _ in range(HOST_WARM_CALLS):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / HOST_CALLS


def measure_host(report):
    for op in ("layer_norm", "rms_norm"):
        line = Line(op, "bf16", 64, 1024, HOST_LIBRARIES)
        s = make_set(line)
        norms = {}
        for name in report.names:
            try:
                norms[name] = MAKERS[name](line).norm
                forward_backward(norms[name], s)
            except Exception as error:
                norms.pop(name, None)
                complain(f"{line.label} host", name, error)
        passes = {
            "host forward": lambda norm, s: norm(*s.inputs),
            "host forward+backward": forward_backward,
        }
        for pass_, function in passes.items():
            repeats = {name: [] for name in norms}
            for _ in range(HOST_REPEATS):
                for name, norm in norms.items():
                    repeats[name].append(host_time(functools.partial(function, norm, s)))
            times = dict.fromkeys(report.names, NO_FIGURE)
            times |= {name: statistics.median(values) for name, values in repeats.items()}
            report.add(line, pass_, times)


def measure_lines(report, options, start):
    """How many lines were left out for lack of time or of a device."""
    chosen = [line for line in LINES if options.filter in line.label]
    if not chosen:
        sys.exit(f"--filter '{options.filter}': no line contains this")
    chosen = chosen[::3] if options.quick else chosen
    timings = QUICK_TIMINGS if options.quick else TIMINGS
    for done, line in enumerate(chosen):
        if time.monotonic() - start > options.max_seconds or not device_works():
            return len(chosen) - done
        names = [name for name in report.names if name in line.libraries]
        passes_left = list(PASSES)
        try:
            clean_up()
            for pass_, ceiling, times in measure_line(line, names, timings):
                report.add(line, pass_, times, ceiling)
                passes_left.remove(pass_)
        except Exception as error:
            complain(line.label, "line", error)
        for pass_ in passes_left:
            report.add(line, pass_, dict.fromkeys(names, NO_FIGURE))
    return 0


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--filter", default="", help='only lines that contain this, e.g. "layer_norm 4096x1024"'
    )
    parser.add_argument("--libraries", type=command.choices(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument("--quick", action="store_true", help="every third line, fewer timings")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="start no line after this time"
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead: what an eager call of evenkeel and of torch costs the host",
    )
    options = parser.parse_args()
    options.commit = options.commit or command.commit()
    return options


def main():
    start = time.monotonic()
    options = arguments()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: torch finds no CUDA device")
    report = Report(options)
    if options.host:
        measure_host(report)
        report.print_table("host: microseconds of one eager call")
    else:
        # A capture needs another stream than the default one; see make_set.
        with torch.cuda.stream(torch.cuda.Stream()):
            left = measure_lines(report, options, start)
        report.print_table("time in microseconds (of limit)")
        if left:
            print(f"{left} lines were left out")
    report.print_leads()
    sys.exit(0 if report.fine() else 1)


if __name__ == "__main__":
    main()
