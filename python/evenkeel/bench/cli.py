"""`python -m evenkeel bench`: its arguments, and the order of things."""

import argparse
import dataclasses
import gc
import importlib.util
import json
import pathlib
import sys
import time
from contextlib import nullcontext

import torch

from evenkeel._progress import progress_bar
from evenkeel.bench import command, lines, measure, timing
from evenkeel.bench.contenders import TITLES, missing
from evenkeel.bench.report import Report, complain, constants, print_sweep

WHAT = (*lines.NORMS, "surgery", "all")
QUICK_SECONDS = 30  # no line is started after these
HOST_CONTENDERS = ("evenkeel", "torch")

DESCRIPTION = """evenkeel beside every other library that is installed, with the limit beside them: a copy
(backward: a sum) that moves the bytes of the pass, in the same run. "of limit" is the limit's time / the
library's. A result that is off against float64 is shown as "wrong", one that a library does not give as "-", with
the reason on stderr. On a GPU a figure is the time of a call in a CUDA graph over so many sets of tensors that no
cache holds them; on a CPU the libraries take turns. A dtype bf16+f32 is a norm of x + residual, x in bf16 and the
residual in f32. A shape 8x256x1152 of a layer norm or RMS norm is modulated: 8 samples with a scale and a shift each."""


def positive_shape(text):
    try:
        return lines.parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser):
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in lines.PRESETS.items())
    parser.description = DESCRIPTION
    parser.add_argument("what", nargs="?", choices=WHAT, default="all", help="(default: all)")
    parser.add_argument(
        "--preset",
        choices=lines.PRESETS,
        help=f"{presets} (default: peers on a GPU, cpu on a CPU)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: a GPU if there is one)"
    )
    parser.add_argument(
        "--dtype",
        choices=(*lines.DTYPES, lines.MIXED, *lines.WITH_RESIDUAL),
        help="instead of the preset's; surgery: of autocast, f32 is none",
    )
    parser.add_argument("--pass", dest="pass_", choices=(*lines.PASSES, "both"))
    parser.add_argument(
        "--shape",
        type=positive_shape,
        action="append",
        help="instead of the preset's: 4096x1024, or for group norm 8x320x64x64; may be repeated",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help=f"what the sizes of the preset {lines.SWEEP} are drawn from (default: 0)",
    )
    parser.add_argument("--layout", choices=lines.LAYOUTS, help="group norm: only this one")
    parser.add_argument("--activation", choices=lines.ACTIVATIONS, help="applied after the norm")
    parser.add_argument(
        "--contenders",
        type=command.choices(TITLES),
        help=f"of {', '.join(TITLES)} (default: all that are installed)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="under a minute: fewer lines and timings, torch.compile only if it is named",
    )
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FOLDER", help="write PNG and SVG pictures there"
    )
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.set_defaults(run=lambda options: main(parser, options))


def device_of(parser, options):
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; cpu is there")
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def chosen_preset(options, device):
    """The preset's lines as the options change them, and its passes."""
    default = "peers" if device.type == "cuda" else "cpu"
    preset = lines.PRESETS[options.preset or default]
    found = list(preset.lines)
    if options.preset == lines.SWEEP:
        found = list(lines.sweep(options.seed or 0, device.type))
    if options.preset == lines.TUTORIAL and device.type == "cpu":
        options.dtype = options.dtype or "f32"
        print(
            f"{lines.TUTORIAL}: on the CPU in {options.dtype}; the tutorial's own figures are of a GPU in f16"
        )
    ops = lines.NORMS if options.what == "all" else (options.what,)
    found = [line for line in found if line.op in ops]
    if options.shape:
        dtype = "bf16" if device.type == "cuda" else "f32"
        layouts = {op: lines.LAYOUTS if op == "group_norm" else ("",) for op in ops}
        found = [
            lines.Line(op, dtype, shape, layout)
            for shape in options.shape
            for op in ops
            if options.what != "all" or (op == "group_norm") == (len(shape) == 4)
            for layout in layouts[op]
        ]
    return changed(found, options), preset.passes


def changed(found, options):
    """Lines with the dtype, layout and activation that were asked for; equal ones once."""
    values = {"dtype": options.dtype, "activation": options.activation}
    values = {name: value for name, value in values.items() if value}
    result = {}
    for line in found:
        if not options.layout or line.layout in ("", options.layout):
            result[dataclasses.replace(line, **values)] = None
    return list(result)


def spread(chosen):
    """Every third line, but at least one of each norm, layout, activation, with and without a residual."""
    kinds = {(line.op, line.layout, line.activation, line.adds): line for line in reversed(chosen)}
    return [line for i, line in enumerate(chosen) if i % 3 == 0 or line in kinds.values()]


def chosen_contenders(options, device):
    """Those that were named, or all that this machine has."""
    if options.contenders:
        return options.contenders
    if options.preset == lines.HOST:
        return list(HOST_CONTENDERS)
    reasons = {name: missing(name, device) for name in TITLES}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        names = ", ".join(TITLES[name] for name in TITLES if reasons[name] == reason)
        print(f"not compared: {names}: {reason}", file=sys.stderr)
    slow = {"compile"} if options.quick else set()
    return [name for name, reason in reasons.items() if not reason and name not in slow]


def clean_up(device):
    """So that a line meets neither the last one's memory nor its compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_works(device):
    """Some errors, an illegal access for one, end the use of a GPU for good."""
    try:
        timing.synchronize(device)
    except RuntimeError as error:
        complain("device", "lost", error)
        return False
    return True


def measure_lines(chosen, passes, report, device, options, tell):
    """How many lines were left out for lack of time or of a device. Calls tell(done, label) before each."""
    start = time.monotonic()
    effort = timing.QUICK if options.quick else timing.FULL
    for done, line in enumerate(chosen):
        late = options.quick and time.monotonic() - start > QUICK_SECONDS
        if late or not device_works(device):
            return len(chosen) - done
        tell(done, line.label)
        left = list(passes)
        try:
            clean_up(device)
            if passes[0] in timing.HOST_PASSES:
                calls = timing.HOST_CALLS // (10 if options.quick else 1)
                results = timing.measure_host(line, passes, report.names, device, calls)
            else:
                results = timing.measure_line(line, passes, report.names, device, effort)
            for result in results:
                report.add(result)
                left.remove(result.pass_)
        except Exception as error:
            complain(line.label, "line", command.first_line(error))
        for pass_ in left:
            nothing = dict.fromkeys(report.names, timing.NO_FIGURE)
            report.add(timing.Result(line, pass_, None, nothing, {}))
    return 0


def check_options(parser, options):
    """Ends the program where options do not go together."""
    if options.what == "surgery":
        for name in ("preset", "shape", "layout", "activation", "pass_", "contenders"):
            if getattr(options, name):
                parser.error(
                    f"--{name.strip('_')} is for norms; surgery takes --dtype, --device and --quick"
                )
        if options.dtype not in (None, "f32", "bf16", "f16"):
            parser.error(f"--dtype {options.dtype}: surgery takes f32, bf16, f16")
    if options.layout and options.what not in ("group_norm", "all"):
        parser.error(f"--layout {options.layout}: only group_norm has layouts, not {options.what}")
    if options.preset and options.shape:
        parser.error("--shape stands for lines of one's own, and does not go with --preset")
    if options.seed is not None and options.preset != lines.SWEEP:
        parser.error(f"--seed {options.seed}: only --preset {lines.SWEEP} draws its lines")
    if options.preset == lines.RESIDUAL and options.dtype not in (None, *lines.WITH_RESIDUAL):
        words = ", ".join(lines.WITH_RESIDUAL)
        parser.error(f"--dtype {options.dtype}: the preset {lines.RESIDUAL} takes {words}")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(
            "--plot needs matplotlib, which is not installed: pip install 'evenkeel[bench]'"
        )
    if options.pass_ and options.preset == lines.HOST:
        parser.error(
            f"--pass {options.pass_}: the preset host has its own passes, {' and '.join(timing.HOST_PASSES)}"
        )


def run_norms(parser, options, shared, device):
    """Measures, prints and draws the norms; returns the report and the pictures."""
    try:
        chosen, passes = chosen_preset(options, device)
    except ValueError as error:
        parser.error(str(error))
    if not chosen:
        parser.error(f"there is no {options.what} in this preset")
    if options.pass_:
        passes = tuple(lines.PASSES) if options.pass_ == "both" else (options.pass_,)
    if options.quick and not options.shape:
        chosen = spread(chosen)
    names = chosen_contenders(options, device)
    measure.keep_pages()
    with progress_bar() as progress:
        task = progress.add_task("", total=len(chosen))
        report = Report(shared, names, options.csv, quiet=not progress.disable)
        # A capture needs another stream than the default one; see tensors.make_set.
        captures = device.type == "cuda" and options.preset != lines.HOST
        with torch.cuda.stream(torch.cuda.Stream()) if captures else nullcontext():
            left = measure_lines(
                chosen,
                passes,
                report,
                device,
                options,
                lambda done, label: progress.update(task, completed=done, description=label),
            )
    curves = options.preset == lines.TUTORIAL
    report.print_rates() if curves else report.print_table()
    report.print_leads()
    if left:
        print(f"{left} of {len(chosen)} lines were left out")
    drawn = []
    if options.preset == lines.SWEEP:
        # All of the file: a sweep takes a while, and may be measured in parts.
        drawn = command.read(options.csv) if options.csv else report.rows()
        print_sweep(drawn)
    if not options.plot:
        return report, []
    from evenkeel.bench import plots

    if drawn:
        return report, plots.draw_sweep(drawn, options.plot, shared["machine"])
    return report, plots.draw(report.results, names, options.plot, shared["machine"], curves)


def run_surgery(options, shared, device):
    """The same for training steps."""
    from evenkeel.bench import steps, surgery

    path = options.csv
    if path and options.what == "all":  # other columns: a file of its own
        path = path.with_name(f"{path.stem}-surgery{path.suffix}")
    report = steps.Report({k: v for k, v in shared.items() if k != "triton"}, path)
    with progress_bar() as progress:
        task = progress.add_task("", total=surgery.COUNT)
        surgery.run(
            report,
            device,
            surgery.autocast_of(options.dtype, device),
            options.quick,
            lambda done, name: progress.update(task, completed=done, description=name),
        )
    report.print_table()
    if not options.plot:
        return report, []
    from evenkeel.bench import plots

    figure = plots.draw_steps(report.rows, f"training steps\n{shared['machine']}")
    return report, plots.save(figure, options.plot, "surgery")


def main(parser, options):
    check_options(parser, options)
    device = device_of(parser, options)
    shared = constants(device, options.commit)
    own_lines = options.shape or options.preset
    parts = []
    if options.what != "surgery":
        parts.append(run_norms(parser, options, shared, device))
    if options.what == "surgery" or (options.what == "all" and not own_lines):
        parts.append(run_surgery(options, shared, device))
    if options.json:
        content = dict(shared)
        for report, _ in parts:
            content |= report.content()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    for _, pictures in parts:
        for path in pictures:
            print(path)
    return 0 if all(report.fine() for report, _ in parts) else 1
