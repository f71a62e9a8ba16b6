"""`bench surgery`: training steps of a small GPT and a small conv net, native against `fuse(model)`."""

import math
import time

import torch

from evenkeel.bench import models, steps
from evenkeel.bench.report import complain

ROUNDS, QUICK_ROUNDS, QUICK_SECONDS = 9, 5, 3.0
QUICK_TOTAL = 10.0  # seconds after which no further model is started
GPU_GPT = {"texts": 8, "length": 1024, "layers": 12, "width": 768, "heads": 12}
CPU_GPT = {"texts": 4, "length": 128, "layers": 2, "width": 256, "heads": 4}
GPU_IMAGE, CPU_IMAGE = (8, 320, 64, 64), (4, 64, 16, 16)
GPU_BLOCKS, CPU_BLOCKS = 8, 4


def workloads(device):
    """Names, and functions that make a model and its batch."""
    on_gpu = device.type == "cuda"
    sizes = GPU_GPT if on_gpu else CPU_GPT
    shape, blocks = (GPU_IMAGE, GPU_BLOCKS) if on_gpu else (CPU_IMAGE, CPU_BLOCKS)
    yield "small GPT", lambda: models.gpt(device=device, **sizes)
    for layout in ("nchw", "nhwc"):
        yield (
            f"conv net, {layout}",
            lambda layout=layout: models.conv_net(shape, device, blocks, layout),
        )


COUNT = 3


def run(report, device, autocast, quick, tell):
    """Measures all workloads into the report; calls tell(done, name) before each."""
    if device.type == "cpu":
        steps.tame_cpu()
    start = time.monotonic()
    for done, (name, make) in enumerate(workloads(device)):
        if quick and time.monotonic() - start > QUICK_TOTAL:
            complain(name, "left out", "--quick is over")
            continue
        tell(done, name)
        model, batch = make()
        training = steps.Training(model, lambda model, batch=batch: model(batch), device, autocast)
        rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, math.inf)
        figures = steps.measure(f"{name} eager", training, rounds, seconds=seconds)
        report.add(name, "x".join(map(str, batch.shape)), "eager", figures)


def autocast_of(dtype, device):
    """The dtype of autocast: bfloat16 on a GPU, none on a CPU, unless told otherwise."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else None
    return {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype)
