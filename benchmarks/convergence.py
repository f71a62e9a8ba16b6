"""Whether models learn the same with evenkeel's low precision norms: whole trainings, three seeds, two models.

A GPT of GPT-2's small size on the project's text and a vision transformer on noisy pictures, both under bfloat16
autocast: "native" with torch's norms, which compute and return float32 there, "fused" after `evenkeel.torch.fuse`,
whose norms return bfloat16. A pair has the same weights and batches to begin with (demo/training.py). A row of the
CSV file is the mean loss of five steps. Both models take about four minutes on an H200.

    PYTHONPATH=python python benchmarks/convergence.py --csv benchmarks/results/<file>.csv
    PYTHONPATH=python python benchmarks/convergence.py --report benchmarks/results/<file>.csv

--report makes the pictures and the marked part of docs/convergence.md from such a file, and measures nothing.
"""

import argparse
import csv
import pathlib
import statistics
import sys

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import checkout  # noqa: F401
from demo.training import FUSED, LAST_STEPS, STOCK, Settings, prepare, train
from evenkeel.bench import command, steps
from evenkeel.bench.report import machine

DOCUMENT = command.ROOT / "docs" / "convergence.md"
BEGIN = "<!-- convergence: begin (benchmarks/convergence.py) -->"
END = "<!-- convergence: end -->"

COLUMNS = "date commit machine torch model parameters variant seed step loss".split()
MEAN_OF = 5  # steps, for a row; LAST_STEPS are whole rows
VARIANTS = {STOCK: "native", FUSED: "fused"}
MODELS = {"gpt": ("large", 300), "vit": ("medium", 400)}  # sizes of demo/training.py, and steps
TITLES = {"gpt": "GPT", "vit": "Vision transformer"}
TINY = ("tiny", 30)
SEEDS = (0, 1, 2)


class Recorder:
    """Writes rows as soon as their steps are done: a run that is ended from outside loses little."""

    def __init__(self, path, constants, runs, settings):
        self.path, self.runs, self.seed = path, runs, settings.seed
        parameters = sum(p.numel() for p in runs[STOCK].model.parameters())
        self.constants = constants | {"model": settings.model, "parameters": parameters}
        self.written = dict.fromkeys(runs, 0)

    def rows(self, name):
        losses, begin = self.runs[name].losses, self.written[name]
        for end in range(begin + MEAN_OF, len(losses) + 1, MEAN_OF):
            loss = statistics.fmean(losses[end - MEAN_OF : end])
            row = {"variant": VARIANTS[name], "seed": self.seed, "step": end, "loss": f"{loss:.5f}"}
            yield self.constants | row
            self.written[name] = end

    def write(self, name):
        command.append(self.path, COLUMNS, self.rows(name))


def measure(options):
    """Trains everything, into the CSV file."""
    shared = {
        "date": command.now(),
        "commit": options.commit,
        "machine": machine(options.device),
        "torch": torch.__version__,
    }
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for model in options.models:
            size, steps = TINY if options.tiny else MODELS[model]
            steps = options.steps or steps
            for seed in SEEDS:
                settings = Settings(model, options.device, size, steps, "bf16", seed)
                runs, surgery = prepare(settings)
                if surgery.skipped or not surgery.replaced:
                    sys.exit(f"benchmarks/convergence.py: {model} is not fused:\n{surgery}")
                recorder = Recorder(options.csv, shared, runs, settings)
                task = progress.add_task(f"{model}, seed {seed}", total=2 * steps)

                def advance(name, count, _, recorder=recorder, task=task):
                    recorder.write(name)
                    progress.update(task, advance=count)

                train(runs, settings, advance)


def read(path):
    """{model: {seed: {variant: [(step, loss)]}}}, and the rows themselves."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        seeds = found.setdefault(row["model"], {}).setdefault(int(row["seed"]), {})
        seeds.setdefault(row["variant"], []).append((int(row["step"]), float(row["loss"])))
    return found, rows


def final_loss(curve):
    return statistics.fmean(loss for _, loss in curve[-LAST_STEPS // MEAN_OF :])


def finals(seeds):
    """{variant: final losses, one for each seed}."""
    return {v: [final_loss(each[v]) for each in seeds.values()] for v in VARIANTS.values()}


def changes(seeds):
    """fused - native, one for each seed."""
    losses = finals(seeds)
    return [fused - native for native, fused in zip(*losses.values(), strict=True)]


def spread(seeds):
    """How far apart seeds are without evenkeel."""
    native = finals(seeds)["native"]
    return max(native) - min(native)


def draw(model, seeds, folder):
    """All curves above, fused - native below, with what seeds differ by."""
    # Here and not above: a machine that measures need not have matplotlib.
    import matplotlib.pyplot as plt

    from evenkeel.bench import plots

    plots.style()
    figure, (curves, difference) = plt.subplots(
        2, figsize=(7, 5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    looks = {
        "native": {"color": plots.COLORS["torch"], "linewidth": 3.5},
        "fused": {"color": plots.COLORS["evenkeel"], "linewidth": 1.3},
    }
    for number, each in enumerate(seeds.values()):
        for variant, look in looks.items():
            label = variant if number == 0 else None
            curves.plot(*zip(*each[variant], strict=True), label=label, **look)
        steps, native = zip(*each["native"], strict=True)
        gap = [fused - loss for (_, fused), loss in zip(each["fused"], native, strict=True)]
        difference.plot(steps, gap, color=plots.COLORS["evenkeel"], linewidth=1, alpha=0.8)
    for sign in (-1, 1):
        difference.axhline(sign * spread(seeds), color=plots.TEXT, linestyle="--", linewidth=1)
    difference.plot([], [], "--", color=plots.TEXT, linewidth=1, label="seed to seed, final loss")
    curves.set(title=f"{TITLES[model]}, {len(seeds)} seeds", ylabel="loss")
    difference.set(xlabel="step", ylabel="fused - native")
    curves.legend()
    difference.legend(fontsize=8)
    plots.save(figure, folder, f"convergence-{model}")


def markdown(path):
    """The lines between the markers."""
    found, rows = read(path)
    first = rows[0]
    yield (
        f"From `{path.name}`: {first['machine']}, torch {first['torch']}, commit {first['commit']}. "
        f"Losses are means of the last {LAST_STEPS} steps."
    )
    for model, seeds in found.items():
        steps = max(step for step, _ in next(iter(seeds.values()))["native"])
        parameters = int(next(row["parameters"] for row in rows if row["model"] == model))
        yield from ("", f"### {TITLES[model]}", "")
        yield f"![Losses of all runs, and their differences](images/convergence-{model}.png)"
        yield from ("", f"{parameters / 1e6:.1f} million parameters, {steps} steps.", "")
        yield "| seed | native | fused | fused - native |"
        yield "|---|---|---|---|"
        losses = finals(seeds)
        for seed, native, fused in zip(seeds, losses["native"], losses["fused"], strict=True):
            yield f"| {seed} | {native:.4f} | {fused:.4f} | {fused - native:+.4f} |"
        largest = max(map(abs, changes(seeds)))
        yield from (
            "",
            f"Seeds differ by {spread(seeds):.4f} (largest - smallest native loss); the norms change a loss by at most "
            f"{largest:.4f}, which is {largest / spread(seeds):.2f} of that, and by "
            f"{statistics.fmean(changes(seeds)):+.4f} on average.",
        )


def rewrite(document, path):
    """Makes the document's pictures and its marked part."""
    for model, seeds in read(path)[0].items():
        draw(model, seeds, document.parent / "images")
    head, rest = document.read_text().split(BEGIN)
    _, tail = rest.split(END)
    text = "\n".join(markdown(path))
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=command.choices(MODELS), default=list(MODELS))
    parser.add_argument(
        "--steps", type=int, help="a multiple of 5, at least 20 (default: 300 for gpt, 400 for vit)"
    )
    parser.add_argument("--csv", type=pathlib.Path, help="the file to append to")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    parser.add_argument("--report", type=pathlib.Path, help="the file to make the document from")
    parser.add_argument(
        "--document", type=pathlib.Path, default=DOCUMENT, help="(default: docs/convergence.md)"
    )
    options = parser.parse_args(words)
    options.commit = options.commit or command.commit()
    if (options.csv is None) == (options.report is None):
        parser.error("give either --csv, to measure, or --report, to make the document")
    if options.steps is not None and (options.steps % MEAN_OF or options.steps < LAST_STEPS):
        parser.error(
            f"--steps {options.steps}: takes a multiple of {MEAN_OF}, at least {LAST_STEPS}"
        )
    if options.csv and options.device.type == "cuda" and (reason := steps.no_cuda()):
        parser.error(f"--device cuda: {reason}")
    return options


def main(words=None):
    options = arguments(words)
    if options.report:
        rewrite(options.document, options.report)
    else:
        measure(options)


if __name__ == "__main__":
    main()
