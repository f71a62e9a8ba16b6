"""Mixed precision in the real trainers, with evenkeel's norms and without: the same loss, and how fast.

Composer (each of the three algorithms, at two events, resumed from a checkpoint in the middle), Lightning, Hugging
Face's Trainer and accelerate. A fit and its unfused twin have the same weights and batches. Mixed precision rounds
differently in torch's norms, which return float32, so losses are compared by a bound: the means of the last steps may
differ by 0.05 nats, and both must have fallen. A rate is that of the second half of a fit.

    PYTHONPATH=python python benchmarks/trainers.py --csv benchmarks/results/<file>.csv
    PYTHONPATH=python python benchmarks/trainers.py --device cpu --tiny

What is not installed is named, counted and skipped. Composer is looked for in the Python that
EVENKEEL_COMPOSER_PYTHON names (default: the one that runs this). The curves go into a second file, *-curves.csv.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import typing
import warnings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Hugging Face's would spread over all GPUs

import torch
from rich import box
from rich.table import Table

import checkout  # noqa: F401
import trainer_fits
from evenkeel.bench import command, report, steps
from trainer_fits import LAST_STEPS, Fit, Workload

BOUND = 0.05  # nats; of the mean of the last steps
STEPS, TINY_STEPS = 100, 60
MEAN_OF = 5  # steps, for a row of the curves
PYTHON = os.environ.get("EVENKEEL_COMPOSER_PYTHON", sys.executable)
COLUMNS = (
    "date commit machine torch trainer version mode norms model steps replaced loss_unfused loss_fused "
    "difference resumed_difference bound steps_per_s_unfused steps_per_s_fused ratio verdict"
).split()
CURVES = "date commit machine torch trainer version mode norms model step unfused fused".split()

ALGORITHMS = {
    "FusedLayerNorm": "gpt",
    "LowPrecisionLayerNorm": "gpt",
    "LowPrecisionGroupNorm": "conv",
}
EVENTS = ("init", "after_load")


class Case(typing.NamedTuple):
    """One line of the table. half: float16, which needs a GPU; options: of the function that fits."""

    trainer: str
    mode: str
    norms: str
    model: str
    half: bool
    options: dict

    def __str__(self):
        return f"{self.trainer} {self.mode} {self.norms} {self.model}"


def composer_cases():
    for precision in ("amp_bf16", "amp_fp16"):
        for (algorithm, model), event in itertools.product(ALGORITHMS.items(), EVENTS):
            options = {"algorithm": algorithm, "event": event, "precision": precision}
            half = precision == "amp_fp16"
            yield Case("composer", precision, f"{algorithm}, {event}", model, half, options)


def lightning_cases():
    for precision, model in itertools.product(("bf16-mixed", "16-mixed"), ("gpt", "conv")):
        half = precision == "16-mixed"
        yield Case("lightning", precision, "Fuse", model, half, {"precision": precision})


def hugging_face_cases():
    for words in ("bf16", "fp16", "bf16 torch_compile", "bf16 gradient_checkpointing"):
        options = dict.fromkeys(words.split(), True)
        half = "fp16" in options
        yield Case("hugging-face", words, "FuseCallback", "llama", half, options)


def accelerate_cases():
    for precision in ("bf16", "fp16"):
        options = {"mixed_precision": precision}
        yield Case("accelerate", precision, "fuse", "gpt", precision == "fp16", options)


class Trainer(typing.NamedTuple):
    """modules: what it needs, one of each tuple; packages: the first that is there tells the version."""

    cases: typing.Callable
    modules: tuple
    packages: tuple


TRAINERS = {
    "composer": Trainer(composer_cases, (("composer",),), ("mosaicml",)),
    "lightning": Trainer(
        lightning_cases,
        (("lightning", "pytorch_lightning"),),
        ("lightning", "pytorch-lightning"),
    ),
    "hugging-face": Trainer(
        hugging_face_cases, (("transformers",), ("accelerate",)), ("transformers",)
    ),
    "accelerate": Trainer(accelerate_cases, (("accelerate",),), ("accelerate",)),
}


def missing(name):
    """What a trainer needs and this Python does not have, as text; empty if nothing."""
    lacking = [
        " or ".join(modules)
        for modules in TRAINERS[name].modules
        if not any(importlib.util.find_spec(module) for module in modules)
    ]
    return " and ".join(lacking)


def version(name):
    for package in TRAINERS[name].packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


# ---- fits ----


class Result(typing.NamedTuple):
    case: Case
    version: str
    unfused: Fit
    fused: Fit
    resumed: Fit | None

    @property
    def difference(self):
        return final(self.fused) - final(self.unfused)

    @property
    def resumed_difference(self):
        """To the fit that was not interrupted; None where nothing was resumed."""
        return self.resumed and final(self.resumed) - final(self.fused)

    @property
    def ratio(self):
        return self.fused.steps_per_s / self.unfused.steps_per_s

    def wrong(self):
        """What is, as text; empty if nothing."""
        found = []
        if not self.fused.replaced:
            found.append("no norm was replaced")
        for name, value in (("loss", self.difference), ("resumed loss", self.resumed_difference)):
            if value is not None and not abs(value) <= BOUND:  # so that NaN is wrong too
                found.append(f"the {name} is off by {value:+.4f}, allowed is {BOUND}")
        for name, fit in (("unfused", self.unfused), ("fused", self.fused)):
            if not final(fit) < fit.losses[0]:
                found.append(f"the {name} loss did not fall")
        return "; ".join(found)


def final(fit):
    return statistics.fmean(fit.losses[-LAST_STEPS:])


class Runner:
    """Makes fits; unfused ones once for all cases that they serve."""

    def __init__(self, options):
        self.options, self.workloads, self.unfused = options, {}, {}

    def workload(self, name):
        if name not in self.workloads:
            size = "tiny" if self.options.tiny else "large"
            self.workloads[name] = Workload(name, self.options.device, size, self.options.steps)
        return self.workloads[name]

    def fit(self, case, fused):
        """A fit, and what it was resumed to where a trainer does that."""
        workload = self.workload(case.model)
        if case.trainer == "composer":
            import composer_fits

            options = case.options | ({} if fused else {"algorithm": None})
            return composer_fits.fit(workload, **options)
        function = getattr(trainer_fits, f"{case.trainer.replace('-', '_')}_fit")
        return function(workload, fused, **case.options), None

    def run(self, case):
        key = case.trainer, case.mode, case.model
        if key not in self.unfused:
            self.unfused[key] = self.fit(case, fused=False)[0]
        return Result(case, version(case.trainer), self.unfused[key], *self.fit(case, fused=True))


def run_here(names, options, found):
    """The cases of trainers, with this Python; found: a Findings."""
    runner = Runner(options)
    for name in names:
        lacking = missing(name)
        for case in TRAINERS[name].cases():
            if options.modes and case.mode not in options.modes:
                continue
            if lacking:
                found.skip(case, f"needs {lacking}")
            elif case.half and options.device.type == "cpu":
                found.skip(case, "float16 with a gradient scaler needs a GPU")
            else:
                try:
                    found.add(runner.run(case))
                except Exception as error:
                    found.fail(case, command.first_line(error))


def run_in_composers_python(options, found):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        words = ["--trainers", "composer", "--here", "--json", str(path)]
        words += ["--device", str(options.device), "--steps", str(options.steps)]
        words += ["--tiny"] * options.tiny
        words += ["--modes", ",".join(options.modes)] if options.modes else []
        done = subprocess.run([PYTHON, __file__, *words], stdout=subprocess.DEVNULL, check=False)
        if path.exists():
            found.read(json.loads(path.read_text()))
        else:
            found.fail("composer", f"{PYTHON} ended with status {done.returncode}")


# ---- what was found ----


class Findings:
    """Results; what was skipped and what failed, with reasons."""

    def __init__(self):
        self.results, self.skipped, self.failed = [], [], []

    def add(self, result):
        self.results.append(result)
        wrong = result.wrong()
        if wrong:
            self.fail(result.case, wrong)
        print(
            f"{result.case}: {final(result.unfused):.4f} -> {final(result.fused):.4f}, "
            f"{result.unfused.steps_per_s:.2f} -> {result.fused.steps_per_s:.2f} steps/s",
            file=sys.stderr,
            flush=True,
        )

    def skip(self, case, reason):
        self.skipped.append((str(case), reason))

    def fail(self, case, reason):
        report.complain("trainers", case, reason)
        self.failed.append((str(case), reason))

    def write(self, path):
        path.write_text(json.dumps([self.results, self.skipped, self.failed]))

    def read(self, content):
        """What another process wrote."""
        results, skipped, failed = content
        for case, of_version, *fits in results:
            fits = [fit and Fit(*fit) for fit in fits]
            self.results.append(Result(Case(*case), of_version, *fits))
        self.skipped += skipped
        self.failed += failed


def verdict(result):
    return "FAILED" if result.wrong() else "ok"


def print_table(constants, found):
    about = ", ".join(f"{name} {constants[name]}" for name in ("torch", "commit"))
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{constants['machine']}, {about}\n"
        f"losses are means of the last {LAST_STEPS} steps; a change of {BOUND} nats is allowed",
        title_justify="left",
    )
    for name in ("trainer", "mode", "norms (replaced)", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("first", "loss", "fused", "change", "resumed", "steps/s", "fused", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for result in found.results:
        case, unfused, fused = result.case, result.unfused, result.fused
        resumed = result.resumed_difference
        table.add_row(
            f"{case.trainer} {result.version}",
            *(case.mode, f"{case.norms} ({fused.replaced})", case.model),
            f"{unfused.losses[0]:.3f}",
            *(f"{final(unfused):.4f}", f"{final(fused):.4f}", f"{result.difference:+.4f}"),
            "" if resumed is None else f"{resumed:+.4f}",
            *(f"{unfused.steps_per_s:.2f}", f"{fused.steps_per_s:.2f}", f"{result.ratio:.3f}"),
            verdict(result),
            style="red" if result.wrong() else "",
        )
    console = report.console()
    console.width = max(console.width, 190)  # so that no figure is cut
    console.print(table)
    for title, entries in (("skipped", found.skipped), ("FAILED", found.failed)):
        for case, reason in entries:
            print(f"{title}: {case}: {reason}")
    print(
        f"{len(found.results)} cases ran, {len(found.failed)} failed, {len(found.skipped)} were skipped"
    )


def csv_rows(constants, results):
    for result in results:
        case = result.case._asdict()
        resumed = result.resumed_difference
        yield constants | {
            **{name: case[name] for name in ("trainer", "mode", "norms", "model")},
            "version": result.version,
            "steps": len(result.fused.losses),
            "replaced": result.fused.replaced,
            "loss_unfused": f"{final(result.unfused):.5f}",
            "loss_fused": f"{final(result.fused):.5f}",
            "difference": f"{result.difference:+.5f}",
            "resumed_difference": "" if resumed is None else f"{resumed:+.5f}",
            "bound": BOUND,
            "steps_per_s_unfused": f"{result.unfused.steps_per_s:.3f}",
            "steps_per_s_fused": f"{result.fused.steps_per_s:.3f}",
            "ratio": f"{result.ratio:.3f}",
            "verdict": verdict(result),
        }


def curve_rows(constants, results):
    for result in results:
        case = result.case._asdict()
        of_case = {name: case[name] for name in ("trainer", "mode", "norms", "model")}
        for begin in range(0, len(result.fused.losses), MEAN_OF):
            part = slice(begin, begin + MEAN_OF)
            means = {
                name: f"{statistics.fmean(getattr(result, name).losses[part]):.5f}"
                for name in ("unfused", "fused")
            }
            row = of_case | {"version": result.version, "step": begin + MEAN_OF}
            yield constants | row | means


# ---- the command ----


def arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=command.choices(TRAINERS), default=list(TRAINERS))
    modes = [case.mode for trainer in TRAINERS.values() for case in trainer.cases()]
    parser.add_argument(
        "--modes", type=command.choices(list(dict.fromkeys(modes))), help="default: all"
    )
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, or {TINY_STEPS} with --tiny")
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    parser.add_argument("--json", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.steps = options.steps or (TINY_STEPS if options.tiny else STEPS)
    if options.steps < 2 * LAST_STEPS or options.steps % MEAN_OF:
        parser.error(
            f"--steps {options.steps}: takes a multiple of {MEAN_OF}, at least {2 * LAST_STEPS}"
        )
    if options.device.type == "cuda" and (reason := steps.no_cuda()):
        parser.error(f"--device cuda: {reason}")
    return options


def main(words=None):
    options = arguments(words)
    if options.device.type == "cpu":
        steps.tame_cpu()
        if options.tiny:
            torch.set_num_threads(1)  # models this small only wait for more
    # Trainers have much to say about what they were told to leave out.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = Findings()
    for name in options.trainers:
        if name == "composer" and not options.here:
            run_in_composers_python(options, found)
        else:
            run_here([name], options, found)
    if options.json:
        found.write(options.json)
        return 0
    constants = report.constants(options.device, options.commit)
    del constants["triton"]
    print_table(constants, found)
    if options.csv:
        command.append(options.csv, COLUMNS, csv_rows(constants, found.results))
        curves = options.csv.with_name(f"{options.csv.stem}-curves.csv")
        command.append(curves, CURVES, curve_rows(constants, found.results))
    return 1 if found.failed or not found.results else 0


if __name__ == "__main__":
    sys.exit(main())
