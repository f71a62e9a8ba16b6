"""The two charts of README.md and what stands beside them, made from the CSV files of the GPU machine.

  bandwidth   share of copy bandwidth that each library reaches, at one size
  steps       time of a training step after `fuse`, as a share of the time before, with the floor

Each chart is an SVG for light and for dark pages, wide and, for phones, narrow: README.md's <picture> chooses.
scripts/docs.py writes all of them; nothing in them is typed by hand.
"""

import csv
from html import escape

import table

OP_TITLES = {"layer_norm": "Layer norm", "rms_norm": "RMS norm"}
LIBRARIES = {
    "evenkeel": "evenkeel",
    "compile": "torch.compile",
    "apex-fast": "Apex",
    "liger": "Liger",
    "quack": "QuACK",
    "flash-attn": "flash-attn",
    "torch": "torch",
}
SHAPE, DTYPE = "16384x4096", "bf16"
MODELS = {
    "bert-base": "BERT base",
    "gpt2-medium": "GPT-2 medium",
    "vit-base": "ViT base",
    "conv-net-nchw": "Conv NCHW",
    "conv-net-nhwc": "Conv NHWC",
}

THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "ours": "#0f766e", "bar": "#c3cad2"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "ours": "#2dd4bf", "bar": "#3d444d"},
}
PANEL, GAP, NAME, VALUE = 370, 30, 126, 46  # widths: of a panel, between two, of names, of figures
HEAD, LINE, BAR = 34, 24, 15  # heights: of a panel's title, of a line, of its bar


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


# ---- SVG ----


def text(x, y, words, color, *, anchor="start", weight="normal", size=14):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-size="{size}">{escape(words)}</text>'
    )


def rectangle(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def panel(x, y, title, lines, limit, colors):
    """Bars under a title. A line: (name, share, figure, whether it is ours, floor or None)."""
    yield text(x, y + 16, title, colors["text"], weight="600", size=15)
    left, scale = x + NAME, (PANEL - NAME - VALUE) / limit
    for index, (name, share, figure, ours, floor) in enumerate(lines):
        top = y + HEAD + index * LINE
        color, weight = (colors["ours"], "600") if ours else (colors["bar"], "normal")
        name_color = colors["text"] if ours else colors["muted"]
        yield text(left - 8, top + 12, name, name_color, anchor="end", weight=weight)
        yield rectangle(left, top, share * scale, BAR, color)
        yield text(left + limit * scale + 6, top + 12, figure, name_color, weight=weight)
        if floor is not None:
            yield rectangle(left + floor * scale - 1, top - 3, 2.5, BAR + 6, colors["text"])
    bottom = y + HEAD + len(lines) * LINE - 4
    yield rectangle(left + scale - 0.5, y + HEAD - 5, 1, bottom - y - HEAD + 3, colors["muted"])


def chart(panels, columns, theme, about, limit):
    """An SVG of panels (title, lines), in so many columns."""
    colors = THEMES[theme]
    width = columns * PANEL + (columns - 1) * GAP
    parts, y = [], 0
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for column, (title, lines) in enumerate(row):
            parts += panel(column * (PANEL + GAP), y, title, lines, limit, colors)
        y += HEAD + max(len(lines) for _, lines in row) * LINE + 14
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, '
        f'Arial, sans-serif">\n<title>{escape(about)}</title>\n{body}\n</svg>\n'
    )


def picture(name, about):
    """The lines of README.md that choose one of a chart's files."""

    def image(theme, layout):
        return f"docs/images/{name}-{theme}{layout}.svg"

    dark, narrow = "(prefers-color-scheme: dark)", "(max-width: 600px)"
    return "\n".join(
        [
            "<picture>",
            f'<source media="{dark} and {narrow}" srcset="{image("dark", "-narrow")}">',
            f'<source media="{narrow}" srcset="{image("light", "-narrow")}">',
            f'<source media="{dark}" srcset="{image("dark", "")}">',
            f'<img alt="{about}" src="{image("light", "")}">',
            "</picture>",
        ]
    )


def files(name, panels, about, limit):
    """{name of a file: SVG}"""
    return {
        f"{name}-{theme}{layout}.svg": chart(panels, columns, theme, about, limit)
        for theme in THEMES
        for layout, columns in (("", 2), ("-narrow", 1))
    }


# ---- share of copy bandwidth ----

BANDWIDTH = "Share of copy bandwidth of layer norm and RMS norm, forward and backward, by library"


def bandwidth_files(path):
    lines, _ = table.gpu_lines(read(path))
    panels = []
    for op, title in OP_TITLES.items():
        for pass_ in ("forward", "backward"):
            found = lines[op, SHAPE, DTYPE, pass_]
            shares = [
                (name, float(found[key]["of_limit"]), key)
                for key, name in LIBRARIES.items()
                if key in found
            ]
            bars = [
                (name, share, f"{share:.2f}", key == "evenkeel", None)
                for name, share, key in shares
            ]
            panels.append((f"{title}, {pass_}", bars))
    return files("bandwidth", panels, BANDWIDTH, 1.02)


def bandwidth(path):
    rows = read(path)
    lines, _ = table.gpu_lines(rows)
    leads = [compared[2] for compared in map(table.lead, lines.values()) if compared]
    return (
        f"**Share of copy bandwidth** on an {rows[0]['machine']}, {DTYPE}, {SHAPE.replace('x', ' x ')}. Over all sizes and "
        f"dtypes, evenkeel is\nthe fastest in {sum(lead >= 1 for lead in leads)} of {len(leads)} "
        f"[lines](docs/performance.md).\n\n{picture('bandwidth', BANDWIDTH)}\n\n"
        f"<sub>From `{path.name}`: {table.commits(rows)}. The line at 1 is a copy (backward: an addition) of the "
        "same tensors.</sub>"
    )


# ---- training steps ----

STEPS = (
    "Time of a training step after fuse as a share of the time before, by model, eager and compiled"
)


def shares_of_steps(path):
    """{mode: [(model, fused / native, floor / native)]}"""
    modes = {}
    for (model, _, mode), found in table.training_steps(read(path)).items():
        native, fused, none = (float(found[v]["step_ms"]) for v in ("native", "fused", "none"))
        modes.setdefault(mode, []).append((MODELS[model], fused / native, none / native))
    return modes


def steps_files(path):
    titles = {"eager": "Eager", "compiled blocks": "torch.compile"}
    panels = [
        (titles[mode], [(name, share, f"{share:.2f}", True, floor) for name, share, floor in lines])
        for mode, lines in shares_of_steps(path).items()
    ]
    return files("steps", panels, STEPS, 1.06)


def steps(path):
    rows = read(path)
    shares = [share for lines in shares_of_steps(path).values() for _, share, _ in lines]
    return (
        f"**Time of a training step** after `fuse`, as a share of the time before: "
        f"{sum(share < 1 for share in shares)} of {len(shares)} are faster, the best by {1 - min(shares):.0%}; the\n"
        f"[slowest](docs/performance.md#training-steps) takes {max(shares):.2f} times as long.\n\n"
        f"{picture('steps', STEPS)}\n\n"
        f"<sub>From `{path.name}`: {rows[0]['machine']}, bfloat16 autocast, fused AdamW, {table.commits(rows)}. The mark is "
        "the floor: norms that only pass x on, autocast's casts around them included.</sub>"
    )


MARKDOWN = {"bandwidth": bandwidth, "steps": steps}
FILES = {"bandwidth": bandwidth_files, "steps": steps_files}
