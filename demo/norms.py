"""The norms alone, evenkeel's beside torch's: `python -m evenkeel bench` on the model's own shape and some others."""

import json

import evenkeel.__main__

CONTENDERS = ("evenkeel", "torch")
SHAPES = {  # beside the model's own
    "cpu": "4096x1024 2x320x64x64",
    "cuda": "4096x1024 4096x4096 8x320x64x64",
}


def command(settings, path):
    """The arguments of `python -m evenkeel`."""
    shapes = [settings.norm_shape]
    if settings.size != "tiny":
        shapes += SHAPES[settings.device.type].split()
    what = ["all"]
    if settings.model == "conv":
        what = ["group_norm", "--activation=silu"]
        shapes = [shape for shape in shapes if shape.count("x") == 3]
    options = f"--quick --device={settings.device.type} --dtype={settings.dtype}".split()
    contenders = f"--contenders={','.join(CONTENDERS)}"
    return [
        "bench",
        *what,
        *(f"--shape={s}" for s in shapes),
        *options,
        contenders,
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
