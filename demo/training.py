"""The runs of the demo: the same model, batches and order of steps; only the norms differ.

They take turns of a few steps, in an order that is drawn anew each time, so that whatever else the machine does hits
all alike, and none is always warmed up by the same other.
"""

import dataclasses
import math
import random
import statistics
import time
import typing

import torch

import evenkeel.torch
from demo import data, machine, networks
from evenkeel.bench import steps as bench

STOCK, FUSED = "stock", "fused"
BARE = "bare"  # norms, and the SiLU behind group norms, only pass x on; it learns nothing
DTYPES = ("f32", "bf16")
LAST_STEPS = 20  # the final loss is the mean of these
# Of the final losses, in nats. In f32 the runs differ by rounding alone. Under autocast torch's norms give
# float32 and evenkeel's bfloat16.
TOLERANCE = {"f32": 0.01, "bf16": 0.05}
WARM_UP = 0.1  # of the steps, until the learning rate is what it should be


class Size(typing.NamedTuple):
    batch: int
    length: int  # of a text, or the side of a picture
    rate: float  # of learning
    network: dict
    steps: int = 400


# A Llama has the blocks of a model that people use, but fewer of them, and a byte for a token.
SMOL_135M = {"width": 576, "inner": 1536, "heads": 9, "kv_heads": 3}  # SmolLM2-135M
SMOL_360M = {"width": 960, "inner": 2560, "heads": 15, "kv_heads": 5}  # SmolLM2-360M
TINY_LLAMA = {"width": 2048, "inner": 5632, "heads": 32, "kv_heads": 4}  # TinyLlama-1.1B
MODELS = {
    "llama": {
        "tiny": Size(
            4, 16, 1e-3, {"layers": 2, "width": 32, "inner": 64, "heads": 2, "kv_heads": 1}
        ),
        "small": Size(4, 128, 1e-3, {"layers": 4} | SMOL_135M, 200),
        "medium": Size(8, 512, 6e-4, {"layers": 8} | SMOL_360M, 200),
        "large": Size(8, 1024, 3e-4, {"layers": 6} | TINY_LLAMA, 200),
    },
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
TEXTS = "llama", "gpt"  # what learns text; the others learn pictures


@dataclasses.dataclass
class Settings:
    """What to train; what is None becomes what suits the model and the kind of device."""

    model: str
    device: torch.device
    size: str | None = None
    steps: int | None = None
    dtype: str | None = None
    seed: int = 0
    compile: bool = False

    def __post_init__(self):
        cpu = self.device.type == "cpu"
        self.size = self.size or ("small" if cpu else "large")
        self.dtype = self.dtype or ("f32" if cpu and not machine.has_bf16() else "bf16")
        self.steps = self.steps or self.sizes.steps

    @property
    def sizes(self):
        return MODELS[self.model][self.size]

    @property
    def norm_shape(self):
        """What the norms of this model normalize, as `bench` takes it."""
        batch, length, network = self.sizes.batch, self.sizes.length, self.sizes.network
        if self.model == "conv":
            return f"{batch}x{network['channels']}x{length}x{length}"
        tokens = length if self.model in TEXTS else (length // networks.PATCH) ** 2
        return f"{batch * tokens}x{network['width']}"

    def data(self):
        kind = data.Text if self.model in TEXTS else data.Pictures
        return kind(self.sizes.batch, self.sizes.length, self.steps, self.seed, self.device)

    def network(self, classes):
        torch.manual_seed(self.seed)
        model = networks.MAKERS[self.model](classes, self.sizes.length, **self.sizes.network)
        return model.to(self.device, memory_format=torch.channels_last)


class Run:
    """A model on its way, with what there is to know about it."""

    def __init__(self, settings, data, learns=True):
        self.settings, self.data = settings, data
        self.model = self.forward = settings.network(data.classes)
        self.rate = settings.sizes.rate if learns else 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=True)
        self.losses, self.seconds = [], []  # of steps, and of a step on average in each turn

    def compile(self):
        """Where the settings want it. After surgery, which changes what is compiled."""
        if self.settings.compile:
            self.forward = torch.compile(self.model, dynamic=False)

    def step(self, number):
        done = (number + 1) / self.settings.steps
        factor = min(1.0, done / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        batch = self.data.batch(number)
        kind = self.settings.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            loss = self.forward(*batch)
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


class PassOn(torch.nn.Module):
    """The class of a norm that does nothing, but for what autocast does behind every norm: the cast for products."""

    def forward(self, x):
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def prepare(settings):
    """{STOCK: Run, FUSED: Run}, and the report of the surgery."""
    if settings.device.type == "cpu":
        bench.tame_cpu()
    data = settings.data()
    runs = {name: Run(settings, data) for name in (STOCK, FUSED)}
    surgery = evenkeel.torch.fuse(runs[FUSED].model)
    for run in runs.values():
        run.compile()
    return runs, surgery


def bare(settings, data):
    """A run without norms, to take turns with the others."""
    run = Run(settings, data, learns=False)
    for item in evenkeel.torch.fuse(run.model).replaced:
        item.module.__class__ = PassOn
    run.compile()
    return run


def train(runs, settings, advance):
    """All steps of all runs; advance(name, steps, loss) is told of every turn."""
    length = 1 if settings.device.type == "cpu" else 10
    order, chance = list(runs), random.Random(settings.seed)
    for begin in range(0, settings.steps, length):
        numbers = range(begin, min(begin + length, settings.steps))
        chance.shuffle(order)
        for name in order:
            advance(name, len(numbers), runs[name].turn(numbers))
