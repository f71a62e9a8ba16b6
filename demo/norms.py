"""The norms alone, evenkeel's beside torch's: `python -m evenkeel bench` on the model's own shape and another."""

import json

import evenkeel.__main__

CONTENDERS = ("evenkeel", "torch")
OPERATIONS = {"llama": "rms_norm", "gpt": "layer_norm", "vit": "layer_norm", "conv": "group_norm"}
SHAPES = {  # beside the model's own: of rows, and of images
    "cpu": ("4096x1024", "2x320x64x64"),
    "cuda": ("16384x4096", "8x320x64x64"),
}


def command(settings, path):
    """The arguments of `python -m evenkeel`."""
    operation = OPERATIONS[settings.model]
    of_images = operation == "group_norm"
    shapes = [settings.norm_shape]
    if settings.size != "tiny":
        shapes.append(SHAPES[settings.device.type][of_images])
    return [
        "bench",
        operation,
        *["--activation=silu"] * of_images,
        *(f"--shape={shape}" for shape in shapes),
        "--quick",
        f"--device={settings.device.type}",
        f"--dtype={settings.dtype}",
        f"--contenders={','.join(CONTENDERS)}",
        f"--json={path}",
    ]


def measure(settings, path):
    """Prints the table, and returns what `bench` has written to `path`, and whether all of it is fine."""
    fine = not evenkeel.__main__.main(command(settings, path))
    return json.loads(path.read_text()), fine


def lines(bench):
    """[(what, pass, {library: figures})] of a bench's JSON, in its order."""
    found = {}
    for row in bench["figures"]:
        what = f"{row['op'].replace('_', ' ')} {row['shape'].replace('x', ' x ')} {row['dtype']}"
        found.setdefault((what, row["pass"]), {})[row["library"]] = row
    return [(what, pass_, each) for (what, pass_), each in found.items()]
