"""What the demo has found: as numbers (demo.json), as a picture of the losses, and as a page for people.

The page is one file that loads nothing, so that it can be sent to somebody. Every number on it comes from
demo.json's content; page.html and page.css are its look.
"""

import base64
import html
import json
import os
import pathlib
import statistics
import string

import matplotlib.pyplot as plt
import torch

import evenkeel
from demo import norms
from demo.training import FUSED, LAST_STEPS, STOCK, TOLERANCE
from evenkeel.bench import plots
from evenkeel.bench.report import machine

HERE = pathlib.Path(__file__).parent
PICTURE = "loss"
TITLES = {
    "gpt": "A small GPT",
    "vit": "A vision transformer",
    "conv": "A conv net of group norms and SiLU",
}


def collect(settings, runs, surgery, norms_ms, rest_ms):
    """A dictionary for JSON."""
    difference = runs[FUSED].final_loss - runs[STOCK].final_loss
    turns = zip(runs[STOCK].seconds, runs[FUSED].seconds, strict=True)
    low, middle, high = statistics.quantiles([stock / fused for stock, fused in turns], n=4)
    tolerance = TOLERANCE[settings.dtype]
    return {
        "machine": machine(settings.device),
        "device": settings.device.type,
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "evenkeel": evenkeel.__version__,
        "model": settings.model,
        "size": settings.size,
        "steps": settings.steps,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "batch": settings.sizes.batch,
        "length": settings.sizes.length,
        "network": settings.sizes.network,
        "data": runs[STOCK].data.about,
        "parameters": sum(p.numel() for p in runs[STOCK].model.parameters()),
        "surgery": str(surgery),
        "replaced": len(surgery.replaced),
        "losses": {name: run.losses for name, run in runs.items()},
        "final_loss": {name: run.final_loss for name, run in runs.items()},
        "difference": difference,
        "tolerance": tolerance,
        "same": abs(difference) <= tolerance,  # and not if it is no number
        "step_ms": {n: statistics.median(run.seconds) * 1e3 for n, run in runs.items()},
        "step_ratio": {"low": low, "median": middle, "high": high},
        "norms_ms": norms_ms,
        "rest_ms": rest_ms,
        "share": norms_ms[STOCK] / (norms_ms[STOCK] + rest_ms),
        "won": (norms_ms[STOCK] - norms_ms[FUSED]) / (norms_ms[STOCK] + rest_ms),
    }


def percent(value):
    return f"{100 * value:.1f} %" if value < 0.095 else f"{100 * value:.0f} %"


def loss_sentence(found):
    """Whether the two runs have learned the same."""
    return (
        f"The final losses (mean of the last {LAST_STEPS} steps) are "
        f"{found['final_loss'][STOCK]:.4f} stock and {found['final_loss'][FUSED]:.4f} with evenkeel: "
        f"a difference of {small(abs(found['difference'])).replace('<', 'less than')}, "
        f"{'within' if found['same'] else 'which is more than'} the tolerance of {found['tolerance']}."
    )


def share_sentence(found):
    """What there is to win at all on this machine."""
    return f"Norms are {percent(found['share'])} of a step here; that is all there is to win."


def gain_sentence(found):
    """What was won of it."""
    if not found["replaced"]:
        return "evenkeel has replaced no norm of this model on this device, so nothing can change."
    stock, fused = found["norms_ms"][STOCK], found["norms_ms"][FUSED]
    return (
        f"torch spends {stock:.2f} ms of a step in them, evenkeel {fused:.2f} ms: "
        f"{percent(abs(found['won']))} of a step {'won' if found['won'] >= 0 else 'lost'}."
    )


def ratio_sentence(found):
    """The same, measured over whole steps."""
    ratio = found["step_ratio"]
    return (
        f"Measured over whole steps, stock takes {ratio['median']:.2f} times as long; half of the "
        f"comparisons lie between {ratio['low']:.2f} and {ratio['high']:.2f}."
    )


def busy_sentence(found):
    """A warning where something else ran beside the demo; empty where nothing did."""
    if round(found["busy"]) == 0:
        return ""
    return (
        f"Something else kept {found['busy']:.1f} of {found['processors']} processors busy when the demo began. "
        "Losses do not mind, but times say less than they could."
    )


def small(value):
    return f"{value:.4f}" if value >= 1e-4 else "< 0.0001"


def verdict(found):
    sentences = (loss_sentence, share_sentence, gain_sentence, ratio_sentence, busy_sentence)
    return [text for text in (sentence(found) for sentence in sentences) if text]


def draw_losses(found):
    """Both curves, one over the other, and their difference below."""
    plots.style()
    figure, (curves, difference) = plt.subplots(
        2, figsize=(4.4, 3.8), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    losses = found["losses"]
    numbers = range(1, found["steps"] + 1)
    # The wide line below shows wherever the narrow one does not cover it.
    curves.plot(
        numbers, losses[STOCK], color=plots.COLORS["torch"], linewidth=3.5, label="stock torch"
    )
    curves.plot(
        numbers, losses[FUSED], color=plots.COLORS["evenkeel"], linewidth=1.2, label="with evenkeel"
    )
    curves.set(title="Loss, twice from the same seed", ylabel="loss")
    curves.legend()
    change = [b - a for a, b in zip(losses[STOCK], losses[FUSED], strict=True)]
    difference.plot(numbers, change, color=plots.COLORS["evenkeel"], linewidth=1.2)
    for sign in (-1, 1):
        difference.axhline(sign * found["tolerance"], color=plots.TEXT, linestyle="--", linewidth=1)
    limit = 1.5 * max(found["tolerance"], *map(abs, change))
    difference.set(xlabel="step", ylabel="difference", ylim=(-limit, limit))
    return figure


def embedded(path):
    """A picture as part of the page."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def bar(kind, title, share, text):
    """A bar of the page; share is of the room that there is."""
    return (
        f'<div class="bar {kind}"><span>{html.escape(title)}</span>'
        f'<i><b style="width:{100 * share:.1f}%"></b></i><em>{html.escape(text)}</em></div>'
    )


def step_bars(found):
    """A step of both runs, with the part that norms have in it."""
    rest = found["rest_ms"]
    longest = rest + max(found["norms_ms"].values())
    return "\n".join(
        f'<div class="bar {kind}"><span>{title}</span>'
        f'<i><b style="width:{100 * found["norms_ms"][name] / longest:.1f}%"></b>'
        f'<s style="width:{100 * rest / longest:.1f}%"></s></i>'
        f"<em>{found['norms_ms'][name]:.2f} + {rest:.1f} ms</em></div>"
        for name, title, kind in ((STOCK, "stock", "torch"), (FUSED, "evenkeel", "ours"))
    )


def norm_bars(bench):
    """Speed as a share of the limit, for each line and pass."""
    lines = []
    for what, pass_, found in norms.lines(bench):
        widest = max(1.0, *(row["of_limit"] for row in found.values()))
        times = {name: row["time_us"] for name, row in found.items()}
        lead = times["torch"] / times["evenkeel"] if times.keys() >= {"torch", "evenkeel"} else 0
        bars = [
            bar(
                "ours" if name == "evenkeel" else name,
                name,
                row["of_limit"] / widest,
                f"{row['time_us']:.1f} µs, {row['of_limit']:.2f}",
            )
            for name, row in found.items()
        ]
        limit = next(iter(found.values()))["ceiling_us"]
        bars.append(bar("limit", "limit", 1 / widest, f"{limit:.1f} µs, 1.00"))
        lines.append(
            f'<div class="line"><h3>{html.escape(what)} {pass_}'
            f'<strong class="{"ahead" if lead >= 1 else "behind"}">{lead:.2f}x</strong></h3>'
            f"{''.join(bars)}</div>"
        )
    for each in bench["missing"]:
        text = f"{each['line']}: {each['library']}: {each['reason']}"
        lines.append(f"<p class=small>{html.escape(text)}</p>")
    return "\n".join(lines)


def facts(found):
    """Pairs for the table of circumstances."""
    sizes = ", ".join(f"{name} {value}" for name, value in found["network"].items())
    names = ("model", "size", "steps", "device", "dtype", "seed")
    options = " ".join(f"--{name} {found[name]}" for name in names)
    return {
        "Machine": found["machine"],
        "Versions": f"evenkeel {found['evenkeel']} (commit {found['commit']}), torch {found['torch']}",
        "Model": f"{found['model']}, {found['size']}: {sizes}; {found['parameters']:,} parameters",
        "Data": found["data"],
        "Training": f"{found['steps']} steps of {found['batch']} x {found['length']}, {found['dtype']}"
        f"{' autocast' if found['dtype'] == 'bf16' else ''}, AdamW, seed {found['seed']}",
        "Taken": f"{found['date']} UTC, in {found['seconds']:.0f} s",
        "Again": f"make demo ARGS='{options}'",
    }


def page(found, picture):
    stock, fused = (found["norms_ms"][name] for name in (STOCK, FUSED))
    ratio = found["step_ratio"]
    values = {
        "style": (HERE / "page.css").read_text(),
        "status": "same" if found["same"] else "different",
        "same": "The loss is the same" if found["same"] else "The losses differ",
        "difference": small(abs(found["difference"])),
        "tolerance": f"{found['tolerance']}",
        "norm_ratio": f"{stock / fused:.2f}x",
        "stock_norms": f"{stock:.2f}",
        "fused_norms": f"{fused:.2f}",
        "share": percent(found["share"]),
        "step_ratio": f"{ratio['median']:.2f}x",
        "low": f"{ratio['low']:.2f}",
        "high": f"{ratio['high']:.2f}",
        "stock_ms": f"{found['step_ms'][STOCK]:.1f}",
        "fused_ms": f"{found['step_ms'][FUSED]:.1f}",
        "model": TITLES[found["model"]],
        "loss_sentence": loss_sentence(found),
        "share_sentence": share_sentence(found),
        "gain_sentence": gain_sentence(found),
        "ratio_sentence": ratio_sentence(found),
        "busy_sentence": busy_sentence(found),
        "surgery": found["surgery"],
    }
    values = {k: v if k == "style" else html.escape(v) for k, v in values.items()}
    values |= {
        "losses": embedded(picture),
        "step_bars": step_bars(found),
        "norm_bars": norm_bars(found["bench"]),
        "facts": "".join(
            f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in facts(found).items()
        ),
    }
    return string.Template((HERE / "page.html").read_text()).substitute(values)


def write(found, folder):
    """Writes everything into the folder, and returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(found, indent=1) + "\n")
    _, picture = plots.save(draw_losses(found), folder, PICTURE)
    path = folder / "index.html"
    path.write_text(page(found, picture))
    return path
