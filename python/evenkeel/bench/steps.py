"""Training steps of whole models: as they are, after evenkeel's surgery, and without norms.

The three variants are one model with the same parameters in the same memory; surgery and its undoing
switch between them in every round, but compiled code is made for one after the other, and for all of them again. "none", where the
norms only pass x on, is the floor; the share is how much of the way from native to there evenkeel goes.
Times are medians over the rounds, by CUDA events on a GPU.
"""

import contextlib
import gc
import math
import os
import statistics
import sys
import time
import typing

import torch
from rich.table import Table

import evenkeel.torch
from evenkeel import _native
from evenkeel.bench import command
from evenkeel.bench.report import complain, console
from evenkeel.bench.timing import NO_FIGURE
from evenkeel.torch.modules import SPENT

VARIANTS = ("native", "fused", "none")
COLUMNS = "date commit machine torch model batch mode variant step_ms spread_ms peak_gib share loss".split()

STEPS, WARM_STEPS = 5, 3  # of a turn, and before the first turn
CYCLES = 2  # over the variants of a compiled model, each compiled anew: a drift between them shows in the spread
# Of the loss: evenkeel's norms give bfloat16 under autocast, where torch's give float32.
TOLERANCE = 1e-2


class PassOn(torch.nn.Module):
    """The class of a norm that is to do nothing."""

    def forward(self, x):
        return x


@contextlib.contextmanager
def surgery(model, variant):
    """The model as this variant; afterwards it is what it was."""
    if variant == "native":
        yield
        return
    report = evenkeel.torch.fuse(model)
    if variant == "none":
        for item in report.replaced:
            # An activation that went into the norm before it has to be done after all.
            item.module.__class__ = item.original if item.original in SPENT else PassOn
    try:
        yield
    finally:
        for item in report.replaced:
            item.module.__class__ = item.original


def no_cuda():
    """Why a CUDA device cannot be measured here; empty if it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (--device cpu --tiny needs none)"
    if "cuda" not in _native.backends():
        return "this build of evenkeel has no CUDA backend"
    return ""


def tame_cpu():
    """Some virtual machines announce AMX and do not have it: a product in bfloat16 would end the process."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class Training:
    """A model with its optimizer and one batch, which `loss_of(model)` knows.

    autocast: a dtype, or None. blocks: what is compiled piece by piece.
    """

    def __init__(self, model, loss_of, device, autocast, blocks=()):
        gc.collect()
        self.model, self.loss_of, self.device, self.autocast = model, loss_of, device, autocast
        self.blocks = blocks
        # At a rate of zero every step does the same work and leaves the parameters as they are.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def compile(self, what):
        for part in [self.model] if what == "model" else self.blocks:
            part.compile(dynamic=False)

    def step(self):
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.loss_of(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self):
        """Of a step that drops the same elements for every variant."""
        torch.manual_seed(1)
        return self.step().item()

    def turn(self):
        """Milliseconds of a step, and the most GiB that were in use (None on a CPU)."""
        self.step()
        if self.device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(STEPS):
                self.step()
            return (time.perf_counter() - begin) * 1e3 / STEPS, None
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / STEPS, torch.cuda.max_memory_allocated() / 2**30


class Figures(typing.NamedTuple):
    milliseconds: float
    gib: float | None
    loss: float
    spread: float  # milliseconds between the fastest and the slowest turn


def measure(label, training, rounds, compiled=False, seconds=math.inf):
    """{variant: Figures}; a variant that fails is named, and the others go on.

    After so many seconds no further round is started, but there is always one.
    """
    losses, turns = {}, {variant: [] for variant in VARIANTS}

    def attempt(variant, run):
        try:
            with surgery(training.model, variant):
                run(variant)
        except Exception as error:
            complain(label, variant, command.first_line(error))
            turns.pop(variant)
            training.optimizer.zero_grad()

    def warm(variant):
        for _ in range(WARM_STEPS):
            training.step()
        losses[variant] = training.loss()

    def take_turns(variant, count=1):
        turns[variant] += [training.turn() for _ in range(count)]

    def warm_and_take_turns(variant):
        torch.compiler.reset()
        warm(variant)
        take_turns(variant, rounds)

    for _ in range(CYCLES if compiled else 1):
        for variant in list(turns):
            attempt(variant, warm_and_take_turns if compiled else warm)
    end = time.monotonic() + seconds
    for done in range(0 if compiled else rounds):
        if done and time.monotonic() > end:
            break
        for variant in list(turns):
            attempt(variant, take_turns)
    if {"native", "fused"} <= losses.keys():
        off = abs(losses["fused"] / losses["native"] - 1)
        if not off <= TOLERANCE:  # so that NaN fails too
            complain(label, "fused", f"the loss is off by {off:.1e}, allowed is {TOLERANCE:.0e}")
            turns.pop("fused", None)
    return {
        variant: Figures(
            statistics.median(milliseconds for milliseconds, _ in found),
            found[-1][1],
            losses[variant],
            max(found)[0] - min(found)[0],
        )
        for variant, found in turns.items()
    }


def share(figures):
    """Of the way from native to none; None where a figure is missing or there is next to no way."""
    if not set(VARIANTS) <= figures.keys():
        return None
    native, fused, none = (figures[variant].milliseconds for variant in VARIANTS)
    return (native - fused) / (native - none) if native > 1.01 * none else None


class Report:
    """What was measured: a table in the end, the CSV file and a line on stderr at once.

    `constants` are what all rows have in common, in the order of the columns.
    """

    def __init__(self, constants, csv=None):
        self.constants, self.csv = constants, csv
        self.columns = [*constants, *(name for name in COLUMNS if name not in constants)]
        self.rows = []

    def add(self, name, batch, mode, figures):
        self.rows.append((name, batch, mode, figures))
        found = ", ".join(f"{v} {f.milliseconds:.1f} ms" for v, f in figures.items())
        print(f"{name} {batch} {mode}: {found or 'no figures'}", file=sys.stderr, flush=True)
        if self.csv:
            command.append(self.csv, self.columns, self.csv_rows(name, batch, mode, figures))

    def csv_rows(self, name, batch, mode, figures):
        for variant, (milliseconds, gib, loss, spread) in figures.items():
            row = {"model": name, "batch": batch, "mode": mode, "variant": variant}
            row |= {"step_ms": f"{milliseconds:.2f}", "spread_ms": f"{spread:.2f}"}
            row |= {"loss": f"{loss:.4f}"}
            if gib is not None:
                row["peak_gib"] = f"{gib:.2f}"
            if variant == "fused" and share(figures) is not None:
                row["share"] = f"{share(figures):.3f}"
            yield self.constants | row

    def content(self):
        """For JSON."""
        steps = [
            {"model": name, "batch": batch, "mode": mode, "share": share(figures)}
            | {variant: found._asdict() for variant, found in figures.items()}
            for name, batch, mode, figures in self.rows
        ]
        return {"steps": steps}

    def print_table(self):
        about = {k: v for k, v in self.constants.items() if k not in ("date", "machine")}
        versions = ", ".join(f"{key} {value}" for key, value in about.items())
        table = Table(
            title=f"{self.constants['machine']}, {versions}\n"
            "a training step in milliseconds (peak memory in GiB)",
            title_justify="left",
        )
        table.add_column("", no_wrap=True)
        table.add_column("mode", no_wrap=True)
        for name in (*VARIANTS, "native / fused", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, batch, mode, figures in self.rows:
            lead, part = NO_FIGURE, share(figures)
            if {"native", "fused"} <= figures.keys():
                lead = f"{figures['native'].milliseconds / figures['fused'].milliseconds:.3f}"
            cells = [cell(figures.get(variant)) for variant in VARIANTS]
            part = NO_FIGURE if part is None else f"{part:.2f}"
            table.add_row(f"{name} {batch}", mode, *cells, lead, part)
        console().print(table)

    def fine(self):
        return all("fused" in figures for *_, figures in self.rows)


def cell(figures):
    if figures is None:
        return NO_FIGURE
    memory = "" if figures.gib is None else f" ({figures.gib:.1f})"
    return f"{figures.milliseconds:.1f}{memory}"
