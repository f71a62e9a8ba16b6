"""Random calls without end: the same bits every time, and no more memory, threads or files.

    python tests/python/soak.py --minutes 10

Draws some hundred calls from a seed: every norm, dtype and option, views, right and wrong ones,
through evenkeel.torch with gradients and through the C interface with threads of its own. Then makes
them over and over in random order. A training that makes a step a second with a hundred norms in it
makes 17 million calls a day (DAY); small tensors let some minutes have as many.
"""

import argparse
import gc
import pathlib
import random
import resource
import sys
import time

if __name__ == "__main__":
    import conftest  # noqa: F401  (where the package and its library are)

import torch

from evenkeel import _abi, _native
from support import DTYPES, NORMS, ROW_NORMS, make

DAY = 24 * 60 * 60 * 100 * 2
SMALL, LARGE = 400, 40  # calls that are drawn
BATCH = 1000, 2  # of them that are made in turn: few that wait for other threads
GROWTH = 4 << 20  # bytes that may be added after the warm-up: allocators keep some for later
CODES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


def drawn_shape(draw, norm, large):
    """A shape and what is normalized: small, or worth a second thread."""
    elements = draw.randint(20_000, 40_000) if large else draw.randint(1, 1500)
    if norm == "group_norm":
        groups = draw.choice([1, 2, 4])
        channels = groups * draw.randint(1, 4)
        width = draw.randint(1, 6)
        return (max(1, elements // (channels * width)), channels, width, 1), groups
    cols = draw.randint(1, min(elements, 3000))
    return (max(1, elements // cols), 2, cols), (cols,)


def as_view(draw, x):
    """The same values, laid out in another way."""
    kind = draw.choice(["dense", "slice", "turned", "last"])
    if kind == "slice":
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
        wide[..., :-3] = x
        return wide[..., :-3]
    if kind == "turned":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    return x


def drawn_call(draw, norm, large):
    shape, over = drawn_shape(draw, norm, large)
    parameters = [None, torch.float32, draw.choice(DTYPES)]
    return make(
        norm,
        shape,
        over,
        draw.choice(DTYPES),
        draw.choice(parameters),
        None if norm == "rms_norm" else draw.choice(parameters),
        seed=draw.randint(0, 1 << 30),
        activation=draw.choice([None, "silu", "relu", "gelu", "gelu_tanh"]),
    )


def torch_calls(draw, norm, large):
    """Forward and backward through evenkeel.torch, half of the row norms with a residual."""
    call = drawn_call(draw, norm, large)
    call.x = as_view(draw, call.x)
    tensors = list(call.inputs().values())
    if norm in ROW_NORMS and draw.random() < 0.5:
        dtype = torch.float64 if call.x.dtype == torch.float64 else draw.choice(DTYPES)
        residual = as_view(draw, torch.randn(call.x.shape).to(dtype))
        call.options["residual"] = residual
        tensors.append(residual)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    dys = [torch.randn_like(result) for result in results_of(call)]

    def run():
        results = results_of(call)
        gradients = torch.autograd.grad(results, leaves, dys)
        return [*(result.detach() for result in results), *gradients]

    return run, 2


def results_of(call):
    results = call.ours()
    return results if isinstance(results, tuple) else (results,)


def torch_error(draw, norm, large):
    """A call that evenkeel.torch refuses."""
    call = drawn_call(draw, norm, large)
    call.over = 7 * call.x.numel() if norm == "group_norm" else (call.x.shape[-1] + 1,)

    def run():
        try:
            call.ours()
        except (RuntimeError, ValueError) as error:
            return str(error)
        raise AssertionError(f"{call} is accepted")

    return run, 1


def at(tensor):
    return _abi.tensor(tensor.data_ptr(), CODES[tensor.dtype])


def c_calls(draw, norm, large):
    """Forward and backward through the C interface, with up to four threads of the pool."""
    library = _abi.Evenkeel(_native.find("libevenkeel.so"))
    (first, *rest), over = drawn_shape(draw, norm, large)
    x = torch.randn(first, *rest).to(draw.choice(DTYPES))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if norm == "group_norm":
        sizes = {"samples": first, "channels": rest[0], "spatial": rest[1], "groups": over}
        weight, statistics = torch.randn(rest[0]), torch.empty(2, first * over, dtype=wide)
    else:
        sizes = {"rows": first * rest[0], "cols": rest[1]}
        weight, statistics = torch.randn(rest[1]), torch.empty(2, first * rest[0], dtype=wide)
    y, dx, dweight = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
    problem = _abi.sized(_abi.Problem, op=_abi.OPS[norm], eps=1e-5, **sizes)
    parameters = {
        "weight": _abi.vector(weight.data_ptr(), "f32"),
        "mean": None if norm == "rms_norm" else statistics[0].data_ptr(),
        "rstd": statistics[1].data_ptr(),
    }
    forward_args = _abi.sized(_abi.ForwardArgs, x=at(x), y=at(y), **parameters)
    backward_args = _abi.sized(
        _abi.BackwardArgs,
        dy=at(x),
        x=at(x),
        dx=at(dx),
        dweight=_abi.vector(dweight.data_ptr(), "f32"),
        **parameters,
    )
    threads = draw.randint(1, 4)
    forward = library.forward(problem, forward_args, threads)
    backward = library.backward(problem, backward_args, threads)

    def run():
        for output in (y, dx, dweight):
            output.fill_(float("nan"))
        forward()
        backward()
        return [y, dx, dweight]

    run.keep = x, weight, statistics
    return run, 2


def c_error(draw, norm, _):
    """A call that the C interface refuses: without sizes, or of a backend that there is not."""
    library = _abi.Evenkeel(_native.find("libevenkeel.so"))
    problem = _abi.sized(_abi.Problem, op=_abi.OPS[norm], eps=draw.choice([-1.0, 1e-5]))
    args = _abi.sized(_abi.ForwardArgs)

    def run():
        try:
            library.forward(problem, args, 1, backend="nowhere")
        except RuntimeError as error:
            return str(error)
        raise AssertionError("a call without sizes is accepted")

    return run, 1


KINDS = [torch_calls, c_calls, torch_error, c_error]
WEIGHTS = [6, 12, 1, 1]


def bits(outcome):
    """Tensors as integers, so that NaN is NaN and -0 is not 0."""
    if isinstance(outcome, str):
        return outcome
    of_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [tensor.view(of_size[tensor.element_size()]) for tensor in outcome]


class Case:
    """A drawn call and what it gave the first time."""

    def __init__(self, kind, draw, large):
        norm = draw.choice(NORMS)
        self.run, self.calls = kind(draw, norm, large)
        self.name = f"{kind.__name__} of {norm}"
        first = bits(self.run())
        self.first = first if isinstance(first, str) else [tensor.clone() for tensor in first]

    def repeats(self):
        now = bits(self.run())
        if isinstance(now, str):
            return now == self.first
        return all(map(torch.equal, now, self.first))


class Usage:
    """What this process has of the system's."""

    def __init__(self):
        gc.collect()
        process = pathlib.Path("/proc/self")
        pages = int((process / "statm").read_text().split()[1])
        self.memory = pages * resource.getpagesize()
        self.threads = sum(1 for _ in (process / "task").iterdir())
        self.files = sum(1 for _ in (process / "fd").iterdir())

    def __str__(self):
        return f"{self.memory / (1 << 20):.1f} MiB, {self.threads} threads, {self.files} files"


def complaint(before, now):
    """What there is too much of now; "" if nothing."""
    if now.memory > before.memory + GROWTH:
        return f"memory grew by more than {GROWTH >> 20} MiB"
    if now.threads != before.threads:
        return "the number of threads is not what it was"
    if now.files != before.files:
        return "the number of open files is not what it was"
    return ""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    cases = []
    for large, count in (False, SMALL), (True, LARGE):
        for kind in draw.choices(KINDS, WEIGHTS, k=count):
            cases.append(Case(kind, draw, large))

    calls = 0
    start = time.monotonic()
    before = None
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    while before is None or time.monotonic() < start + 60 * options.minutes:
        batch = draw.choices(cases[:SMALL], k=BATCH[0]) + draw.choices(cases[SMALL:], k=BATCH[1])
        for case in batch:
            if not case.repeats():
                print(f"{case.name} does not give what it gave at first")
                return 1
            calls += case.calls
        if before is None and time.monotonic() > start + 15 * options.minutes:
            before, calls_before = Usage(), calls
            print(f"after {calls:,} calls: {before}", flush=True)
    now = Usage()
    print(f"after {calls:,} calls, {calls / DAY:.2f} days' worth: {now}")
    if problem := complaint(before, now):
        print(f"{problem} in {calls - calls_before:,} calls")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
