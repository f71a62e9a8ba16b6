"""Pictures, as PNG and SVG, and the look that all of the project's pictures share.

Backgrounds are transparent and text is a middle grey, so that a picture can be read on a light page and
on a dark one. evenkeel always has the same strong colour; rivals are muted.
"""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

from evenkeel.bench.contenders import TITLES
from evenkeel.bench.report import figures_of_sweep
from evenkeel.bench.timing import NO_FIGURE

TEXT, GRID = "#7d8590", "#8b949e40"
COLORS = {
    "evenkeel": "#0f766e",
    "torch": "#d08a5b",
    "compile": "#8f7fc4",
    "triton": "#6f9bc8",
    "apex": "#a3a552",
    "apex-fast": "#7d8a3c",
    "liger": "#c9829b",
    "quack": "#b59a6a",
    "flash-attn": "#9c9c9c",
    "limit": TEXT,
}
BAR = 0.8  # of the height between two lines is for their bars


def style():
    """Gives matplotlib the project's look, for all figures from here on."""
    plt.rcParams.update(
        {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "savefig.bbox": "tight",
            "savefig.dpi": 160,
            "svg.fonttype": "none",
            "svg.hashsalt": "evenkeel",
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.edgecolor": TEXT,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
        }
        | dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), TEXT
        )
    )


def save(figure, folder, stem):
    """Writes <stem>.png and <stem>.svg, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    figure.savefig(paths[0])
    figure.savefig(paths[1], metadata={"Date": None})  # the same bytes for the same figures
    plt.close(figure)
    return paths


def emphasis(name):
    """How a contender's curve stands out."""
    return {"linewidth": 2.8, "zorder": 3} if name == "evenkeel" else {}


def draw_rates(results, names, title):
    """GB/s over the row length, as Triton's tutorial has it."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    cols = [result.line.cols for result in results]
    limit = [result.line.gb_per_s(result.pass_, result.ceiling) for result in results]
    axes.plot(cols, limit, "--", color=COLORS["limit"], linewidth=1.2, label="limit")
    for name in names:
        points = [(r.line.cols, r.gb_per_s(name)) for r in results if r.gb_per_s(name)]
        if points:
            axes.plot(*zip(*points, strict=True), color=COLORS[name], label=TITLES[name])
            axes.lines[-1].set(**emphasis(name))
    axes.set(title=title, xlabel="N, the length of a row", ylabel="GB/s", ylim=(0, None))
    axes.legend(ncols=2, fontsize=9)
    return figure


def draw_bars(results, names, title):
    """A group of bars for every line: shares of the limit, or microseconds where there is none."""
    limited = all(result.ceiling for result in results)
    height = BAR / len(names)
    figure, axes = bar_axes(len(results), len(names))
    for place, name in enumerate(names):
        at = [i + (place + 0.5) * height - BAR / 2 for i in range(len(results))]
        values = [bar_value(result, name, limited) for result in results]
        words = [bar_word(result, name, limited) for result in results]
        bars = axes.barh(at, values, 0.9 * height, color=COLORS[name], label=TITLES[name])
        axes.bar_label(bars, words, padding=3, fontsize=7, color=TEXT)
    axes.set_yticks(range(len(results)), [f"{r.line.where} {r.line.dtype}" for r in results])
    if limited:
        axes.axvline(1, color=COLORS["limit"], linestyle="--", linewidth=1)
    axes.set(title=title, xlabel="share of the limit" if limited else "µs: less is better")
    figure.legend(ncols=min(len(names), 5), fontsize=8, loc="outside upper center")
    return figure


def bar_axes(groups, bars):
    """For so many groups of so many horizontal bars, from the top down."""
    size = 8, 1.4 + groups * (0.15 + 0.14 * bars)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_ylim(groups - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    return figure, axes


def bar_value(result, name, limited):
    """The length of a bar: 0 where there is no figure."""
    value = result.of_limit(name) if limited else result.times[name]
    return value if isinstance(value, float) else 0


def bar_word(result, name, limited):
    value = bar_value(result, name, limited)
    if not value:
        return result.times[name]
    return f"{value:.2f}" if limited else f"{value:.1f}"


def draw_steps(rows, title):
    """Milliseconds of a training step: native, fused and without norms. Rows are those of steps.Report."""
    style()
    colors = {"native": COLORS["torch"], "fused": COLORS["evenkeel"], "none": COLORS["limit"]}
    figure, axes = bar_axes(len(rows), len(colors))
    height = BAR / len(colors)
    for place, (variant, color) in enumerate(colors.items()):
        at = [i + (place + 0.5) * height - BAR / 2 for i in range(len(rows))]
        values = [f[variant].milliseconds if variant in f else 0 for *_, f in rows]
        label = "without norms" if variant == "none" else variant
        bars = axes.barh(at, values, 0.9 * height, color=color, label=label)
        axes.bar_label(bars, [f"{v:.1f}" for v in values], padding=3, fontsize=7, color=TEXT)
    axes.set_yticks(range(len(rows)), [f"{name}\n{batch}" for name, batch, *_ in rows])
    axes.set(title=title, xlabel="ms of a training step: less is better")
    figure.legend(ncols=len(colors), fontsize=8, loc="outside upper center")
    return figure


# Of a heat map: behind, as good, ahead. The text on them has to be read on all three.
HEAT = LinearSegmentedColormap.from_list("evenkeel", ["#b4532a", "#efe9dc", "#0f766e"])
SHARE_RANGE, LEAD_RANGE = (0, 0.7, 1.4), (0.5, 1, 4)


def draw_sweep(rows, folder, machine):
    """A heat map of a sweep's CSV rows: a row for each size, by length; share of the limit, and lead over the best rival."""
    style()
    found = figures_of_sweep(rows)
    sizes = sorted(
        {key[:2] for key in found}, key=lambda size: [*map(int, size[1].split("x"))][::-1]
    )
    columns = list(dict.fromkeys(key[2:] for key in found))
    figure, panels = plt.subplots(
        1,
        2,
        figsize=(3 + 1.1 * len(columns), 2 + 0.22 * len(sizes)),
        layout="constrained",
        sharey=True,
    )
    titles = "share of the limit", "lead: best rival's time / evenkeel's"
    for which, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        values = [
            [found.get(size + column, (None, None))[which] for column in columns] for size in sizes
        ]
        least, middle, most = (SHARE_RANGE, LEAD_RANGE)[which]
        filled = [[float("nan") if v is None else v for v in line] for line in values]
        axes.imshow(filled, cmap=HEAT, norm=TwoSlopeNorm(middle, least, most), aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if value is not None:
                    dark = value < middle - 0.6 * (middle - least) or value > middle + 0.6 * (
                        most - middle
                    )
                    color = "#ffffff" if dark else "#24292f"
                    axes.text(
                        x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color
                    )
        axes.set_title(title)
        axes.set_xticks(range(len(columns)), ["\n".join(column) for column in columns], fontsize=7)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    names = [f"{shape}  {op.split('_')[0]}" for op, shape in sizes]
    panels[0].set_yticks(range(len(sizes)), names, fontsize=7)
    figure.suptitle(
        f"norms of rows, sizes drawn at random\n{machine}",
        x=0.01,
        ha="left",
        color=TEXT,
        fontsize=11,
    )
    return save(figure, folder, "sweep")


def draw(results, names, folder, machine, curves=False):
    """A picture of every operation and pass; returns the paths."""
    style()
    groups = {}
    for result in results:
        groups.setdefault((result.line.op, result.pass_), []).append(result)
    paths = []
    for (op, pass_), found in groups.items():
        offered = [name for name in names if any(r.times[name] != NO_FIGURE for r in found)]
        if not offered:
            continue
        kind = draw_rates if curves else draw_bars
        same = f", {found[0].line.rows} rows, {found[0].line.dtype}" if curves else ""
        title = f"{op.replace('_', ' ')}, {pass_}{same}\n{machine}"
        stem = f"{op}-{pass_.replace(' ', '-').replace('+', '-')}"
        paths += save(kind(found, offered, title), folder, stem)
    return paths
