"""Both runs of the demo: the same model, batches and order of steps; only the norms differ.

The runs take turns of a few steps, so that whatever else the machine does hits both alike. Where the time of a
step goes is asked afterwards, with torch's profiler, because a profiled step takes longer.
"""

import dataclasses
import math
import os
import statistics
import time
import typing

import torch

import evenkeel.torch
from demo import data, networks
from evenkeel.bench import steps as bench

STOCK, FUSED = "stock", "fused"
DTYPES = ("f32", "bf16")
LAST_STEPS = 20  # the final loss is the mean of these
# Of the final losses, in nats. In f32 the runs differ by rounding alone. Under autocast torch's norms give
# float32 and evenkeel's bfloat16.
TOLERANCE = {"f32": 0.01, "bf16": 0.05}
WARM_UP = 0.1  # of the steps, until the learning rate is what it should be
PROFILED_STEPS = 9

# What norms are made of. evenkeel's do the SiLU behind a group norm too, so torch's SiLU is counted as well.
TORCH_NORMS = {
    f"aten::{name}{pass_}"
    for name in ("native_layer_norm", "native_group_norm", "silu")
    for pass_ in ("", "_backward")
}
OUR_NORMS = {"evenkeel::forward", "evenkeel::backward"}
OUR_KERNELS = "evenkeel"  # is in the name of each
COPIES = "aten::copy_"


class Size(typing.NamedTuple):
    batch: int
    length: int  # of a text, or the side of a picture
    rate: float  # of learning
    network: dict


MODELS = {
    "gpt": {
        "tiny": Size(4, 16, 1e-3, {"layers": 2, "width": 32, "heads": 2}),
        "small": Size(8, 128, 1e-3, {"layers": 4, "width": 128, "heads": 4}),
        "medium": Size(16, 256, 1e-3, {"layers": 6, "width": 384, "heads": 6}),
        "large": Size(32, 512, 6e-4, {"layers": 12, "width": 768, "heads": 12}),
    },
    "vit": {
        "tiny": Size(4, 16, 1e-3, {"layers": 2, "width": 32, "heads": 2}),
        "small": Size(8, 32, 1e-3, {"layers": 4, "width": 128, "heads": 4}),
        "medium": Size(64, 64, 5e-4, {"layers": 12, "width": 384, "heads": 6}),
        "large": Size(128, 64, 5e-4, {"layers": 12, "width": 768, "heads": 12}),
    },
    "conv": {
        "tiny": Size(4, 8, 1e-3, {"channels": 32, "blocks": 1}),
        "small": Size(8, 32, 1e-3, {"channels": 64, "blocks": 3}),
        "medium": Size(16, 64, 1e-3, {"channels": 128, "blocks": 6}),
        "large": Size(32, 64, 5e-4, {"channels": 320, "blocks": 8}),
    },
}
STEPS = 400


@dataclasses.dataclass
class Settings:
    """What to train; what is None becomes what suits the model and the kind of device."""

    model: str
    device: torch.device
    size: str | None = None
    steps: int | None = None
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self):
        cpu = self.device.type == "cpu"
        self.size = self.size or ("small" if cpu else "large")
        self.dtype = self.dtype or ("f32" if cpu else "bf16")
        self.steps = self.steps or STEPS

    @property
    def sizes(self):
        return MODELS[self.model][self.size]

    @property
    def norm_shape(self):
        """What the norms of this model normalize, as `bench` takes it."""
        batch, length, _, network = self.sizes
        if self.model == "conv":
            return f"{batch}x{network['channels']}x{length}x{length}"
        tokens = length if self.model == "gpt" else (length // networks.PATCH) ** 2
        return f"{batch * tokens}x{network['width']}"

    def data(self):
        kind = data.Text if self.model == "gpt" else data.Pictures
        return kind(self.sizes.batch, self.sizes.length, self.steps, self.seed, self.device)

    def network(self, classes):
        torch.manual_seed(self.seed)
        model = networks.MAKERS[self.model](classes, self.sizes.length, **self.sizes.network)
        return model.to(self.device, memory_format=torch.channels_last)


class Run:
    """A model on its way, with what there is to know about it."""

    def __init__(self, settings, data):
        self.settings, self.data = settings, data
        self.model = settings.network(data.classes)
        self.rate = settings.sizes.rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=True)
        self.losses, self.seconds = [], []  # of steps, and of a step on average in each turn

    def step(self, number):
        done = (number + 1) / self.settings.steps
        factor = min(1.0, done / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        batch = self.data.batch(number)
        kind = self.settings.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def turn(self, numbers):
        """Takes some steps, and returns the last loss."""
        begin = time.perf_counter()
        losses = [self.step(number) for number in numbers]
        self.losses += torch.stack(losses).tolist()  # which waits for a GPU
        self.seconds.append((time.perf_counter() - begin) / len(losses))
        return self.losses[-1]

    @property
    def final_loss(self):
        return statistics.fmean(self.losses[-LAST_STEPS:])


def prepare(settings):
    """{STOCK: Run, FUSED: Run}, and the report of the surgery."""
    if settings.device.type == "cpu":
        bench.tame_cpu()
    data = settings.data()
    runs = {name: Run(settings, data) for name in (STOCK, FUSED)}
    return runs, evenkeel.torch.fuse(runs[FUSED].model)


def train(runs, settings, advance):
    """All steps of both runs; advance(name, steps, loss) is told of every turn."""
    length = 1 if settings.device.type == "cpu" else 10
    order = list(runs)
    for begin in range(0, settings.steps, length):
        numbers = range(begin, min(begin + length, settings.steps))
        for name in order:
            advance(name, len(numbers), runs[name].turn(numbers))
        order.reverse()  # neither always comes second


class Times(typing.NamedTuple):
    """Of a step, in milliseconds: of the processor, or where there is one, of the GPU."""

    norms: float
    rest: float
    copies: float  # a part of the rest
    copy_count: int


def add_up(events, cuda):
    """Times of what torch's profiler has seen, as its key_averages()."""
    total = norms = copies = copy_count = 0
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            if not event.is_user_annotation:  # but a kernel; the optimizer annotates its steps
                total += event.self_device_time_total
                norms += event.self_device_time_total if OUR_KERNELS in event.key else 0
            continue
        inside = event.device_time_total if cuda else event.cpu_time_total
        total += 0 if cuda else event.self_cpu_time_total
        if event.key in TORCH_NORMS or (event.key in OUR_NORMS and not cuda):
            norms += inside
        elif event.key == COPIES:
            copies, copy_count = inside, event.count
    if not total:
        raise RuntimeError("torch's profiler has seen nothing of a step on this device")
    return Times(norms / 1e3, (total - norms) / 1e3, copies / 1e3, copy_count)


def profile(run, number):
    """Times of one step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of every start and stop
    cuda = run.settings.device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *[kinds.CUDA] * cuda]) as found:
        run.step(number)
        if cuda:
            torch.cuda.synchronize()
    return add_up(found.key_averages(), cuda)


def times(runs, settings):
    """Milliseconds of a step, medians: {name: in norms}, and in the rest, which is the same in both runs.

    Copies that torch's norms need and evenkeel's do not (casts under autocast, other layouts) count as norms.
    """
    found = {name: [] for name in runs}
    for number in range(settings.steps)[-PROFILED_STEPS:]:
        for name, run in runs.items():
            found[name].append(profile(run, number))
    for each in found.values():
        each.pop(0)  # it warmed up
    middle = {
        n: Times(*map(statistics.median, zip(*each, strict=True))) for n, each in found.items()
    }
    norms = {name: each.norms for name, each in middle.items()}
    rest = [step.rest for each in found.values() for step in each]
    stock, fused = middle[STOCK], middle[FUSED]
    if stock.copy_count > fused.copy_count:
        norms[STOCK] += max(0.0, stock.copies - fused.copies)
        rest = [step.rest for step in found[FUSED]]
    return norms, statistics.median(rest)
