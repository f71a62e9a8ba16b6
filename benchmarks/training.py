"""Training steps of whole models on a CUDA device: as they are, after evenkeel's surgery, and without norms.

Random weights in float32, bfloat16 autocast, fused AdamW, torch's scaled_dot_product_attention, dropout as
in the configuration (0.1 in BERT and GPT-2, none in ViT). The three variants are one model with the same
parameters in the same memory; surgery and undo() switch between them in every round, but compiled code is
made for one after the other. "none", where the norms only pass x on, is the floor; the share is how much of
the way from native to there evenkeel goes. Times are medians over the rounds, by CUDA events. To compile block
by block takes seconds, a whole model minutes.

    python benchmarks/training.py --csv benchmarks/results/<file>.csv
    python benchmarks/training.py --device cpu --tiny
"""

import argparse
import contextlib
import gc
import os
import pathlib
import platform
import statistics
import sys
import time
import typing

import torch
import transformers
from rich.console import Console
from rich.table import Table

import command
import evenkeel.torch
from evenkeel import _native

VARIANTS = ("native", "fused", "none")
COLUMNS = (
    "date commit machine torch transformers model batch mode variant step_ms peak_gib share loss"
).split()

STEPS, WARM_STEPS = 5, 3  # of a turn, and before the first turn
# Of the loss: evenkeel's norms give bfloat16 under autocast, where torch's give float32.
TOLERANCE = 1e-2
NO_FIGURE = "-"

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_TEXT = TINY | {"vocab_size": 97, "max_position_embeddings": 32}


class Model(typing.NamedTuple):
    auto: str  # of transformers' classes
    config: str
    batch: tuple  # texts and their length, or images
    settings: dict
    tiny: dict  # settings to try the program with

    def build(self, options):
        config = getattr(transformers, self.config)(
            **(self.tiny if options.tiny else self.settings)
        )
        torch.manual_seed(0)
        with options.device:
            model = getattr(transformers, self.auto).from_config(config, attn_implementation="sdpa")
        return model.train()

    def inputs(self, config, options):
        count, *length = (2, *self.batch[1:]) if options.tiny else self.batch
        with options.device:
            if not length:
                images = torch.randn(count, config.num_channels, *[config.image_size] * 2)
                return {
                    "pixel_values": images,
                    "labels": torch.randint(config.num_labels, (count,)),
                }
            length = min(*length, config.max_position_embeddings)
            tokens = torch.randint(config.vocab_size, (count, length))
            return {"input_ids": tokens, "labels": tokens}


MODELS = {
    "bert-base": Model("AutoModelForMaskedLM", "BertConfig", (64, 512), {}, TINY_TEXT),
    "gpt2-medium": Model(
        "AutoModelForCausalLM",
        "GPT2Config",
        (16, 1024),
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False},
        TINY_TEXT | {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
    ),
    "vit-base": Model(
        "AutoModelForImageClassification",
        "ViTConfig",
        (128,),
        {"num_labels": 1000},
        TINY | {"image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
}


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
            item.module.__class__ = PassOn
    try:
        yield
    finally:
        for item in report.replaced:
            item.module.__class__ = item.original


class Training:
    """A model with its optimizer and one batch."""

    def __init__(self, name, options):
        gc.collect()
        self.device = options.device
        self.model = MODELS[name].build(options)
        self.inputs = MODELS[name].inputs(self.model.config, options)
        # At a rate of zero every step does the same work and leaves the parameters as they are.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)

    def compile(self, what):
        if what == "model":
            self.model.compile(dynamic=False)
            return
        blocks = next(m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList))
        for block in blocks:
            block.compile(dynamic=False)

    def step(self):
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(**self.inputs).loss
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


# Kinds of kernels by what is in their names, first match first.
KINDS = {
    "evenkeel": ("evenkeel",),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "splitK"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "optimizer": ("multi_tensor", "FusedAdam"),
    "with layer norm": ("layer_norm", "LayerNorm", "GammaBeta"),
    "compiled": ("triton_",),
    "other": ("",),
}


def profile(label, training):
    """Prints how long the kinds of kernels take in a step of each variant, in milliseconds."""
    spent = {}
    for variant in VARIANTS:
        torch.compiler.reset()
        with surgery(training.model, variant):
            for _ in range(WARM_STEPS):
                training.step()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profiler:
                for _ in range(STEPS):
                    training.step()
        spent[variant] = dict.fromkeys(KINDS, 0.0)
        for event in profiler.key_averages():
            kind = next(k for k, words in KINDS.items() if any(w in event.key for w in words))
            spent[variant][kind] += event.self_device_time_total / 1e3 / STEPS
    table = Table(title=f"{label}: milliseconds of a step by kind of kernel", title_justify="left")
    for name in ("", *VARIANTS):
        table.add_column(name, justify="right" if name else "left")
    for kind in KINDS:
        table.add_row(kind, *(f"{spent[variant][kind]:.2f}" for variant in VARIANTS))
    table.add_row("all", *(f"{sum(spent[variant].values()):.2f}" for variant in VARIANTS))
    Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(table)


class Figures(typing.NamedTuple):
    milliseconds: float
    gib: float | None
    loss: float


def complain(label, variant, reason):
    if isinstance(reason, Exception):
        text = str(reason).strip() or "no message"
        reason = f"{type(reason).__name__}: {text.splitlines()[0][:200]}"
    print(f"{label}: {variant}: {reason}", file=sys.stderr, flush=True)


def measure(label, training, rounds, compiled):
    """{variant: Figures}; a variant that fails is named, and the others go on."""
    losses, turns = {}, {variant: [] for variant in VARIANTS}

    def attempt(variant, run):
        try:
            with surgery(training.model, variant):
                run(variant)
        except Exception as error:
            complain(label, variant, error)
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

    for variant in VARIANTS:
        attempt(variant, warm_and_take_turns if compiled else warm)
    for _ in range(0 if compiled else rounds):
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
    """What was measured: a table in the end, the CSV file and a line on stderr at once."""

    def __init__(self, options):
        self.csv = options.csv
        self.rows = []
        cuda = options.device.type == "cuda"
        self.constants = {
            "date": command.now(),
            "commit": options.commit,
            "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def add(self, name, batch, mode, figures):
        self.rows.append((name, batch, mode, figures))
        found = ", ".join(f"{v} {f.milliseconds:.1f} ms" for v, f in figures.items())
        print(f"{name} {batch} {mode}: {found or 'no figures'}", file=sys.stderr, flush=True)
        if self.csv:
            command.append(self.csv, COLUMNS, self.csv_rows(name, batch, mode, figures))

    def csv_rows(self, name, batch, mode, figures):
        for variant, (milliseconds, gib, loss) in figures.items():
            row = {"model": name, "batch": batch, "mode": mode, "variant": variant}
            row |= {"step_ms": f"{milliseconds:.2f}", "loss": f"{loss:.4f}"}
            if gib is not None:
                row["peak_gib"] = f"{gib:.2f}"
            if variant == "fused" and share(figures) is not None:
                row["share"] = f"{share(figures):.3f}"
            yield self.constants | row

    def print_table(self):
        constants = self.constants
        table = Table(
            title=f"{constants['machine']}, torch {constants['torch']}, transformers "
            f"{constants['transformers']}, commit {constants['commit']}\n"
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
        # In a pipe rich would fold everything into 80 columns.
        Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(table)


def cell(figures):
    if figures is None:
        return NO_FIGURE
    memory = "" if figures.gib is None else f" ({figures.gib:.1f})"
    return f"{figures.milliseconds:.1f}{memory}"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=command.choices(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps each (default: 5)")
    parser.add_argument(
        "--compile",
        choices=("blocks", "model", "no"),
        default="blocks",
        help="what torch.compile gets after the eager rounds (default: blocks)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="instead of times of steps: where they are spent"
    )
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    options = parser.parse_args()
    options.commit = options.commit or command.commit()
    return options


def check_device(device):
    """Ends the program where the device cannot be used."""
    if device.type != "cuda":
        # Some virtual machines announce AMX and do not have it: a product would end the process.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        return
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/training.py: torch finds no CUDA device (--device cpu --tiny needs none)"
        )
    if "cuda" not in _native.backends():
        sys.exit("benchmarks/training.py: this build of evenkeel has no CUDA backend")


def run(name, mode, options, report):
    """Measures one model in one mode; whether there is a figure for evenkeel."""
    label = mode if mode == "eager" else f"compiled {mode}"
    try:
        training = Training(name, options)
        if mode != "eager":
            training.compile(mode)
        if options.profile:
            profile(f"{name} {label}", training)
            return True
        figures = measure(f"{name} {label}", training, options.rounds, mode != "eager")
        batch = "x".join(str(size) for size in next(iter(training.inputs.values())).shape)
    except Exception as error:
        complain(f"{name} {label}", "model", error)
        return False
    report.add(f"{name} (tiny)" if options.tiny else name, batch, label, figures)
    return "fused" in figures


def main():
    options = arguments()
    check_device(options.device)
    report = Report(options)
    # What may take long comes last.
    modes = ["eager"] if options.compile == "no" else ["eager", options.compile]
    fine = [run(name, mode, options, report) for mode in modes for name in options.models]
    if not options.profile:
        report.print_table()
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
