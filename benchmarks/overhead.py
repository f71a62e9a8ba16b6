"""What one call costs the host: evenkeel.torch beside torch.nn.functional on 8 x 64, one thread.

The tensors are so small that time is spent on the way to the kernel and back. Both run in alternating
rounds; the ratio is the median over the rounds. Prints Markdown for docs/performance.md.

    python benchmarks/overhead.py
"""

import statistics
import time

import torch
import torch.nn.functional as F

import evenkeel.torch as ek

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
    torch.set_num_threads(1)
    print("| 8 x 64, f32, one thread | evenkeel | torch | ratio |")
    print("|---|---|---|---|")
    for name, ours, theirs in cases():
        rounds = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
        mine, other = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"| {name} | {mine:.1f} us | {other:.1f} us | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
