"""What one call costs the host: evenkeel.torch beside torch.nn.functional on 8 x 64, one thread.

The tensors are so small that time is spent on the way to the kernel and back. Both run in alternating
rounds; the ratio is the median over the rounds. reports.py makes the table of docs/performance.md.

    python benchmarks/overhead.py --csv benchmarks/results/overhead-<machine>-<date>.csv
"""

import argparse
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F

import checkout  # noqa: F401
import evenkeel.torch as ek
from evenkeel.bench import command

COLUMNS = "date commit machine torch call evenkeel_us torch_us ratio".split()
ROUNDS, CALLS = 31, 1000
SHAPE = (64,)


def seconds(call):
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


def cases():
    """Name, evenkeel's call, torch's call."""
    x = torch.randn(8, 64)
    weight, bias, dy = torch.randn(64), torch.randn(64), torch.randn(8, 64)
    norms = {
        "layer_norm": (ek.layer_norm, F.layer_norm, (weight, bias)),
        "rms_norm": (ek.rms_norm, F.rms_norm, (weight,)),
    }
    for name, (ours, theirs, parameters) in norms.items():
        yield (
            f"{name} forward, no gradients",
            lambda ours=ours, p=parameters: ours(x, SHAPE, *p),
            lambda theirs=theirs, p=parameters: theirs(x, SHAPE, *p),
        )
        inputs = [v.clone().requires_grad_() for v in (x, *parameters)]
        yield (
            f"{name} forward",
            lambda ours=ours, i=inputs: ours(i[0], SHAPE, *i[1:]),
            lambda theirs=theirs, i=inputs: theirs(i[0], SHAPE, *i[1:]),
        )
        yield (
            f"{name} forward + backward",
            lambda ours=ours, i=inputs: torch.autograd.grad(ours(i[0], SHAPE, *i[1:]), i, dy),
            lambda theirs=theirs, i=inputs: torch.autograd.grad(theirs(i[0], SHAPE, *i[1:]), i, dy),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    path = parser.parse_args().csv
    torch.set_num_threads(1)
    where = {
        "date": command.now(),
        "commit": command.commit(),
        "machine": command.cpu_name(),
        "torch": torch.__version__,
    }
    for name, ours, theirs in cases():
        rounds = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
        mine, other = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"{name:<32} {mine:6.1f} us {other:6.1f} us {ratio:5.2f}", flush=True)
        if path:
            figures = {"evenkeel_us": mine, "torch_us": other, "ratio": ratio}
            row = {column: f"{value:.2f}" for column, value in figures.items()}
            command.append(path, COLUMNS, [where | {"call": name} | row])


if __name__ == "__main__":
    main()
