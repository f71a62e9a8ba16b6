"""What the demo has found: as numbers (demo.json), as a picture of the losses, and as a page for people.

The page is one file that loads nothing, so that it can be sent to somebody. Every number on it comes from
demo.json's content; page.html and page.css are its look.
"""

import base64
import html
import json
import os
import pathlib
import string

import matplotlib.pyplot as plt
import torch

import evenkeel
from demo import norms, times
from demo.training import BARE, FUSED, LAST_STEPS, STOCK, TOLERANCE
from evenkeel.bench import plots
from evenkeel.bench.report import machine

HERE = pathlib.Path(__file__).parent
PICTURE = "loss"
TITLES = {
    "llama": "A small Llama",
    "gpt": "A small GPT",
    "vit": "A vision transformer",
    "conv": "A conv net of group norms and SiLU",
}
# Which norms these are, and who trains with them.
ABOUT_NORMS = {
    "llama": "transformers' LlamaRMSNorm: written by hand, operation by operation, as in most models that people train "
    "today. torch.nn.RMSNorm is another one, with other rounding",
    "gpt": "torch.nn.LayerNorm",
    "vit": "torch.nn.LayerNorm",
    "conv": "torch.nn.GroupNorm, and the SiLU behind it",
}


def collect(settings, runs, surgery):
    """A dictionary for JSON."""
    learning = {name: run for name, run in runs.items() if name != BARE}
    difference = runs[FUSED].final_loss - runs[STOCK].final_loss
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
        "compile": settings.compile,
        "batch": settings.sizes.batch,
        "length": settings.sizes.length,
        "network": settings.sizes.network,
        "data": runs[STOCK].data.about,
        "parameters": sum(p.numel() for p in runs[STOCK].model.parameters()),
        "surgery": str(surgery),
        "replaced": len(surgery.replaced),
        "losses": {name: run.losses for name, run in learning.items()},
        "final_loss": {name: run.final_loss for name, run in learning.items()},
        "difference": difference,
        "tolerance": tolerance,
        "same": abs(difference) <= tolerance,  # and not if it is no number
        "turns_ms": {n: [1e3 * each for each in run.seconds] for n, run in runs.items()},
        "times": times.compare({name: run.seconds for name, run in runs.items()}),
    }


def percent(value):
    return f"{100 * value:.1f} %" if abs(value) < 0.095 else f"{100 * value:.0f} %"


def interval(estimate, digits):
    return f"{estimate['low']:.{digits}f} to {estimate['high']:.{digits}f}"


def milliseconds(estimate):
    return f"{estimate['value']:.{2 if abs(estimate['value']) < 10 else 1}f}"


def at_most(estimate):
    """A time that noise may have made of nothing is known from above only."""
    if times.includes(estimate, 0):
        return f"at most {max(0.0, estimate['high']):.1f}"
    return milliseconds(estimate)


def loss_sentence(found):
    """Whether the two runs have learned the same."""
    return (
        f"The final losses (mean of the last {LAST_STEPS} steps) are "
        f"{found['final_loss'][STOCK]:.4f} stock and {found['final_loss'][FUSED]:.4f} with evenkeel: "
        f"a difference of {small(abs(found['difference'])).replace('<', 'less than')}, "
        f"{'within' if found['same'] else 'which is more than'} the tolerance of {found['tolerance']}."
    )


def claim(found):
    """Which step is faster: 1 evenkeel's, -1 torch's; 0 where noise could have made the difference."""
    ratio = found["times"]["ratio"]
    if times.includes(ratio, 1):
        return 0
    return 1 if ratio["value"] > 1 else -1


def step_sentence(found):
    """How much faster a whole step is, or that this cannot be told."""
    if not found["replaced"]:
        return "evenkeel has replaced no norm of this model on this device, so nothing can change."
    ratio, step = found["times"]["ratio"], found["times"]["step"]
    if not claim(found):
        return (
            "Whether a step is faster, this run cannot tell: with evenkeel it is "
            f"{interval(ratio, 2)} times as fast, which includes 1. "
            "The machine is too noisy, or the difference too small."
        )
    return (
        f"A step takes {milliseconds(step[STOCK])} ms stock and {milliseconds(step[FUSED])} ms with evenkeel: "
        f"{ratio['value']:.2f} times as fast ({interval(ratio, 2)})."
    )


def norms_sentence(found):
    """How much of that is norms: what there is to win, and what was won."""
    norms_ms, share, saved = (found["times"][name] for name in ("norms", "share", "saved"))
    if times.includes(norms_ms[STOCK], 0):
        return (
            "How much of a step are norms, this run cannot tell either: "
            f"the stock norms take {interval(norms_ms[STOCK], 1)} ms of it."
        )
    text = (
        f"The stock norms are {milliseconds(norms_ms[STOCK])} ms of a step, {percent(share['value'])} of it: "
        "that is all there is to win."
    )
    if not found["replaced"] or not claim(found):
        return text
    return (
        f"{text} evenkeel's are {at_most(norms_ms[FUSED])} ms: "
        f"{abs(saved['value']):.1f} ms {'won' if saved['value'] > 0 else 'lost'}."
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
    sentences = (loss_sentence, step_sentence, norms_sentence, busy_sentence)
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
    """A step of both runs, with the part that norms have in it; nothing where that is not known."""
    figures = found["times"]
    if times.includes(figures["norms"][STOCK], 0):
        return ""
    about = "Solid: norms, with the SiLU behind group norms. Pale: everything else."
    rest = figures["rest"]["value"]
    norms_ms = {name: max(0.0, each["value"]) for name, each in figures["norms"].items()}
    longest = rest + max(norms_ms.values())
    bars = "\n".join(
        f'<div class="bar {kind}"><span>{title}</span>'
        f'<i><b style="width:{100 * norms_ms[name] / longest:.1f}%"></b>'
        f'<s style="width:{100 * rest / longest:.1f}%"></s></i>'
        f"<em>{at_most(figures['norms'][name]).replace('at most', '&lt;')} of "
        f"{milliseconds(figures['step'][name])} ms</em></div>"
        for name, title, kind in ((STOCK, "stock", "torch"), (FUSED, "evenkeel", "ours"))
    )
    return f'<div class="line">{bars}</div><p class="small">{about}</p>'


def lead(found):
    """Of evenkeel's norm over torch's, where both have a figure."""
    if not {"torch", "evenkeel"} <= found.keys():
        return ""
    ratio = found["torch"]["time_us"] / found["evenkeel"]["time_us"]
    return f'<strong class="{"ahead" if ratio >= 1 else "behind"}">{ratio:.2f}x</strong>'


def norm_bars(bench, busy):
    """Speed as a share of the limit, for each line and pass; who leads, where nothing else ran."""
    lines = []
    for what, pass_, found in norms.lines(bench):
        widest = max(1.0, *(row["of_limit"] for row in found.values()))
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
            f"{'' if busy else lead(found)}</h3>{''.join(bars)}</div>"
        )
    for each in bench["missing"]:
        text = f"{each['line']}: {each['library']}: {each['reason']}"
        lines.append(f"<p class=small>{html.escape(text)}</p>")
    return "\n".join(lines)


def facts(found):
    """Pairs for the table of circumstances."""
    sizes = ", ".join(f"{name} {value}" for name, value in found["network"].items())
    names = ("model", "size", "steps", "device", "dtype", "seed")
    options = (
        " ".join(f"--{name} {found[name]}" for name in names) + " --compile" * found["compile"]
    )
    return {
        "Machine": found["machine"],
        "Versions": f"evenkeel {found['evenkeel']} (commit {found['commit']}), torch {found['torch']}",
        "Model": f"{found['model']}, {found['size']}: {sizes}; {found['parameters']:,} parameters",
        "Data": found["data"],
        "Training": f"{found['steps']} steps of {found['batch']} x {found['length']}, {found['dtype']}"
        f"{' autocast' if found['dtype'] == 'bf16' else ''}, AdamW, seed {found['seed']}"
        f"{', torch.compile' if found['compile'] else ''}",
        "Taken": f"{found['date']} UTC, in {found['seconds']:.0f} s",
        "Again": f"make demo ARGS='{options}'",
    }


def step_tile(found):
    """Of the first row: (the figure, its title, what stands below)."""
    ratio, title = found["times"]["ratio"], "Speed of a whole step"
    if not claim(found):
        return "no claim", title, f"{interval(ratio, 2)}x: too noisy to tell, or nothing to tell"
    step = found["times"]["step"]
    return (
        f"{ratio['value']:.2f}x",
        title,
        f"{milliseconds(step[STOCK])} ms became {milliseconds(step[FUSED])} ms; "
        f"noise allows {interval(ratio, 2)}x",
    )


def norms_tile(found):
    title, figures = "Norms in a step, ms", found["times"]
    norms_ms = figures["norms"]
    if times.includes(norms_ms[STOCK], 0):
        return (
            "no claim",
            title,
            f"stock {interval(norms_ms[STOCK], 1)}: too noisy to tell",
        )
    ours = at_most(norms_ms[FUSED]).replace("at most ", "<\u00a0")
    return (
        f"{milliseconds(norms_ms[STOCK])} \u2192 {ours}",
        title,
        f"the stock ones are {percent(figures['share']['value'])} of it: all there is to win here",
    )


def loss_tile(found):
    title = "The loss is the same" if found["same"] else "The losses differ"
    below = f"difference of the final losses; {found['tolerance']} is allowed"
    return small(abs(found["difference"])), title, below


def tiles(found):
    """What a person wants to know first."""
    classes = ("same" if found["same"] else "different", "faster" if claim(found) > 0 else "", "")
    each = zip(classes, (loss_tile(found), step_tile(found), norms_tile(found)), strict=True)
    return "\n".join(
        f'<div class="tile {kind}"><strong>{html.escape(figure)}</strong>'
        f"<span>{html.escape(title)}</span><small>{html.escape(below)}</small></div>"
        for kind, (figure, title, below) in each
    )


def page(found, picture):
    values = {
        "style": (HERE / "page.css").read_text(),
        "model": TITLES[found["model"]],
        "loss_sentence": loss_sentence(found),
        "step_sentence": step_sentence(found),
        "norms_sentence": norms_sentence(found),
        "busy_sentence": busy_sentence(found),
        "surgery": found["surgery"],
        "about_norms": ABOUT_NORMS[found["model"]],
        "torch_norm": f"torch.nn.functional.{norms.OPERATIONS[found['model']]}",
        "level": f"{times.LEVEL:.0%}".replace("%", " %"),
    }
    values = {k: v if k == "style" else html.escape(v) for k, v in values.items()}
    values |= {
        "tiles": tiles(found),
        "losses": embedded(picture),
        "step_bars": step_bars(found),
        "norm_bars": norm_bars(found["bench"], busy_sentence(found)),
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
