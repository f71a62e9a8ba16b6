"""How long calls take.

GPU: each line has so many independent input sets that no cache holds them. One captured CUDA graph runs
them all and keeps every output; the time is that of its replays by CUDA events / the number of sets. The
graphs of all contenders take turns: a chip that gets warm slows all of them. And they write to the same
places: where an output lies in memory makes up to 2 % of the time.
CPU: one set, freed pages stay with the process, the contenders take turns (measure.py).
The ceiling is taken the same way on tensors of the same size: a copy for forward, x + dy for backward.
With a residual it is one kernel that reads and writes as many tensors as the pass has to, all of one size, and
together as many bytes (lines.RESIDUAL_PASSES): forward, 2 read and 2 written, a copy of half of the bytes; backward, 3
read and 1 written, a + b * c; without dsum, 2 read and 1 written, a + b.
All inputs require gradients, so forward is that of a training step.
"""

import functools
import statistics
import time
import typing

import torch

from evenkeel.bench import command, measure, tensors
from evenkeel.bench.contenders import MAKERS, NotOfferedError, missing
from evenkeel.bench.lines import NO_DSUM

CEILING = "limit"
WRONG, NO_FIGURE = "wrong", "-"
REPLAYS = 3
WARM_CALLS, WARM_REPLAYS = 2, 10
HOST_CALLS, HOST_REPEATS = 2000, 5


class Effort(typing.NamedTuple):
    timings: int  # of the graph's replays, on a GPU
    seconds: float  # for the rounds of a line, on a CPU


FULL, QUICK = Effort(7, 1.5), Effort(3, 0.4)


class Result(typing.NamedTuple):
    """One pass of one line. A time is microseconds of a call, or the word that stands for it."""

    line: object
    pass_: str
    ceiling: float | None
    times: dict
    reasons: dict  # why there is no time

    def of_limit(self, name):
        time_ = self.times.get(name)
        return self.ceiling / time_ if self.ceiling and isinstance(time_, float) else None

    def gb_per_s(self, name):
        time_ = self.times.get(name)
        if not self.ceiling or not isinstance(time_, float):
            return None
        return self.line.gb_per_s(self.pass_, time_)


class Graph:
    """Calls that were captured. Each writes to memory of its own; other graphs of the pool may get it.

    What the calls read has to stay: a replay reads it where it was.
    """

    def __init__(self, calls, pool):
        self.calls = calls
        for _ in range(WARM_CALLS):
            kept = [call() for call in calls]
        del kept
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=torch.cuda.current_stream()):
            kept = [call() for call in calls]
        del kept
        for _ in range(WARM_REPLAYS):
            self.graph.replay()

    def time(self):
        """Microseconds of one call, from a few replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()  # whatever ran before leaves the caches
        begin.record()
        for _ in range(REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / (REPLAYS * len(self.calls))


def in_turns(count, timers):
    """The median of `count` results of each timer."""
    found = {name: [] for name in timers}
    for _ in range(count):
        for name, timer in timers.items():
            found[name].append(timer())
    return {name: statistics.median(times) for name, times in found.items()}


def times_by_graphs(prepared, effort, fail):
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for name, prepare in prepared.items():
        try:
            graphs[name] = Graph(prepare(), pool)
        except Exception as error:
            fail(name, error)
    return in_turns(effort.timings, {name: graph.time for name, graph in graphs.items()})


def times_in_rounds(prepared, effort, fail):
    calls = {}
    for name, prepare in prepared.items():
        try:
            (calls[name],) = prepare()
        except Exception as error:
            fail(name, error)
    found = measure.rounds(calls, effort.seconds)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in found.items()}


# With a residual: what the ceiling's kernel reads, beside the one tensor that it writes.
CEILING_OPERANDS = {"forward": 1, "backward": 3, NO_DSUM: 2}


def ceiling_operands(line, s, pass_):
    """What the ceiling's kernel reads. Allocated one by one, so that all are aligned."""
    if not line.adds:
        return (s.x.detach(),) if pass_ == "forward" else (s.x.detach(), s.dy)
    count = CEILING_OPERANDS[pass_]
    size = line.moved_bytes(pass_) // ((count + 1) * line.x_dtype.itemsize)
    kind = {"dtype": line.x_dtype, "device": s.x.device}
    return tuple(torch.randn(size, **kind) for _ in range(count))


def ceiling_calls(line, sets, pass_):
    found = [ceiling_operands(line, s, pass_) for s in sets]
    kernel = (torch.clone, torch.add, torch.addcmul)[len(found[0]) - 1]
    if sets[0].x.is_cuda:
        return [functools.partial(kernel, *operands) for operands in found]
    # torch's sums of half types are bound by arithmetic on a CPU; those of integers are not.
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[line.x_dtype.itemsize]
    found = [[v.view(integers) for v in operands] for operands in found]
    out = torch.empty_like(found[0][0])
    if kernel is torch.clone:
        return [functools.partial(out.copy_, x) for (x,) in found]
    return [functools.partial(kernel, *operands, out=out) for operands in found]


def contender_calls(name, contender, line, sets, pass_, expected):
    """The calls of a contender, after a look at the first one's result."""
    if pass_ == NO_DSUM:
        sets = [s._replace(dsum=None) for s in sets]
    if pass_ == "forward":
        calls = [functools.partial(contender.forward, s) for s in sets]
    else:
        calls = [functools.partial(contender.backward, s, contender.keep(s)) for s in sets]
    tensors.check(name == "evenkeel", line, calls[0](), expected)
    return calls


def make_contenders(line, names, device, fail):
    made = {}
    for name in names:
        reason = missing(name, device)
        try:
            if reason:
                raise NotOfferedError(reason)
            made[name] = MAKERS[name](line)
        except Exception as error:
            fail(name, error)
    return made


def measure_line(line, passes, names, device, effort):
    """Yields the Result of each pass."""
    on_gpu = device.type == "cuda"
    sets = tensors.make_sets(line, device) if on_gpu else [tensors.make_set(line, device)]
    expected = tensors.reference(line, sets[0])
    never = {}
    contenders = make_contenders(line, names, device, never.__setitem__)
    for pass_ in passes:
        failures = dict(never)
        prepared = {CEILING: functools.partial(ceiling_calls, line, sets, pass_)}
        for name, contender in contenders.items():
            prepared[name] = functools.partial(
                contender_calls, name, contender, line, sets, pass_, expected[pass_]
            )
        times = (times_by_graphs if on_gpu else times_in_rounds)(
            prepared, effort, failures.__setitem__
        )
        yield result_of(line, pass_, names, times, failures)


def result_of(line, pass_, names, times, failures):
    words = {
        name: WRONG if isinstance(error, tensors.WrongResultError) else NO_FIGURE
        for name, error in failures.items()
    }
    return Result(
        line,
        pass_,
        times.get(CEILING),
        {name: times[name] if name in times else words[name] for name in names},
        {name: reason_of(error) for name, error in failures.items()},
    )


def reason_of(error):
    ours = isinstance(error, (NotOfferedError, tensors.WrongResultError))
    return str(error) if ours else command.first_line(error)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_time(call, device, calls):
    """Microseconds of one call, as the caller sees them."""
    for _ in range(calls // 10):
        call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6 / calls


def forward_backward(norm, s):
    return torch.autograd.grad(norm(*s.inputs), s.inputs, s.gradients)


HOST_PASSES = {
    "host forward": lambda norm, s: norm(*s.inputs),
    "host forward+backward": forward_backward,
}


def measure_host(line, passes, names, device, calls=HOST_CALLS):
    """What an eager call costs its caller; yields the Result of each pass."""
    s = tensors.make_set(line, device)
    failures = {}
    norms = {}
    for name, contender in make_contenders(line, names, device, failures.__setitem__).items():
        try:
            forward_backward(contender.norm, s)
            norms[name] = contender.norm
        except Exception as error:
            failures[name] = error
    for pass_ in passes:
        timers = {}
        for name, norm in norms.items():
            call = functools.partial(HOST_PASSES[pass_], norm, s)
            timers[name] = functools.partial(host_time, call, device, calls)
        times = in_turns(HOST_REPEATS, timers)
        yield result_of(line, pass_, names, times, failures)
