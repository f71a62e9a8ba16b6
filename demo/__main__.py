"""The demo: trains a small model twice, and shows what evenkeel's norms change and what they do not.

    python -m demo --model conv --steps 50
    python -m demo --compile

On the screen as it goes, and in the end as a page in demo-report. Exit code 1 if the losses of the two runs
differ by more than they may. `make demo` builds the library first; its options go into ARGS.
"""

import argparse
import pathlib
import sys
import time

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo import machine, norms, report, training
from evenkeel.bench import command
from evenkeel.bench.report import machine as machine_name

NAMES = {
    training.STOCK: "stock torch",
    training.FUSED: "with evenkeel",
    training.BARE: "without norms",
}


def steps(text):
    number = int(text) if text.isdecimal() else 0
    if number < training.LAST_STEPS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a number of steps: at least {training.LAST_STEPS}, whose mean is the final loss"
        )
    return number


def device(text):
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"'{text}' is not one of cpu, cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device; cpu is there")
    return torch.device(text)


def arguments(words):
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=training.MODELS, default="llama", help="(default: llama)"
    )
    parser.add_argument(
        "--size",
        choices=training.MODELS["llama"],
        help="(default: small on a CPU, large on a GPU)",
    )
    parser.add_argument("--steps", type=steps, help="(default: those of the size, 200 or 400)")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--dtype",
        choices=training.DTYPES,
        help="bf16 is autocast (default: bf16 where the processor has it, else f32)",
    )
    parser.add_argument("--compile", action="store_true", help="the model by torch.compile")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("demo-report"),
        help="the folder of the report (default: demo-report)",
    )
    options = vars(parser.parse_args(words))
    return training.Settings(**{k: v for k, v in options.items() if k != "out"}), options["out"]


def show_training(console, runs, settings):
    """Trains with a progress bar for each run."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(NAMES[name], total=settings.steps, loss="") for name in runs
        }

        def advance(name, count, loss):
            text = "" if name == training.BARE else f"loss {loss:.3f}"  # of what does not learn
            progress.update(tasks[name], advance=count, loss=text)

        training.train(runs, settings, advance)


def show_result(console, found):
    for line in report.verdict(found):
        console.print(line)


def main(words=None):
    settings, folder = arguments(words)
    console = Console(highlight=False)
    begin, busy = time.monotonic(), machine.make_room()
    folder.mkdir(parents=True, exist_ok=True)

    console.rule("[bold]1  Surgery", align="left")
    runs, surgery = training.prepare(settings)
    parameters = sum(p.numel() for p in runs[training.STOCK].model.parameters())
    console.print(
        f"{settings.model}, {parameters:,} parameters, {settings.dtype}, on {machine_name(settings.device)}\n"
        f"learns from {runs[training.STOCK].data.about}\n\n"
        f"[bold]evenkeel.torch.fuse(model)[/bold]\n{escape(str(surgery))}"
    )

    console.rule("[bold]2  Training, twice from the same seed", align="left")
    runs[training.BARE] = training.bare(settings, runs[training.STOCK].data)
    show_training(console, runs, settings)
    found = report.collect(settings, runs, surgery)
    found["busy"] = busy
    show_result(console, found)

    console.rule("[bold]3  The norms alone", align="left")
    found["bench"], fine = norms.measure(settings, folder / "norms.json")

    found["seconds"] = time.monotonic() - begin
    found["commit"], found["date"] = command.commit(), command.now()
    page = report.write(found, folder)
    console.rule("[bold]Report", align="left")
    console.print(f"{page.resolve()}  ({found['seconds']:.0f} s)", soft_wrap=True)
    if not found["same"]:
        console.print(f"[bold red]demo: FAILED: {report.loss_sentence(found)}")
    if not fine:
        console.print("[bold red]demo: FAILED: a norm of evenkeel's has no figure; see above")
    return 0 if found["same"] and fine else 1


if __name__ == "__main__":
    sys.exit(main())
