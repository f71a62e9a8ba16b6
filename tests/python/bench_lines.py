"""One line of every kind that `python -m evenkeel bench` measures, of a tiny shape."""

import torch

from evenkeel.bench import lines

CPU = torch.device("cpu")
EVERY_KIND = [
    lines.Line("layer_norm", "f32", (8, 48)),
    lines.Line("layer_norm", "f32", (8, 48), activation="silu"),
    lines.Line("rms_norm", "bf16", (8, 48)),
    lines.Line("layer_norm", lines.MIXED, (8, 48)),
    lines.Line("group_norm", "f32", (2, 64, 3, 5), "nchw"),
    lines.Line("group_norm", "f32", (2, 64, 3, 5), "nhwc", "silu"),
]
WITH_RESIDUAL = [
    lines.Line("layer_norm", "bf16+f32", (8, 48)),
    lines.Line("layer_norm", "f32+f32", (8, 48), activation="silu"),
    lines.Line("rms_norm", "f32+f32", (8, 48)),
    lines.Line("rms_norm", "bf16+bf16", (8, 48)),
]
MODULATED = [lines.Line(op, "f32", (2, 4, 48)) for op in ("layer_norm", "rms_norm")]


def label(line):
    return line.label.replace(" ", "_")
