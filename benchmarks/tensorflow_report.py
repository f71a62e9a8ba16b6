"""What tensorflow_layers.py found, as tables, plots and the marked part of docs/tensorflow.md.

Apart from the measuring, so that a document can be made again from a CSV file without TensorFlow and
without another run. Nothing between the markers is typed by hand.

    python benchmarks/tensorflow_report.py benchmarks/results/<file>.csv
"""

import csv
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import checkout  # noqa: F401
from evenkeel.bench import command

DOCUMENT = command.ROOT / "docs" / "tensorflow.md"
NO_FIGURE = "-"

NO_NORM, NO_NORM_AGAIN = "no norm", "no norm, again"
KERAS, KERAS_AGAIN, KERAS_XLA = "Keras LayerNormalization", "Keras, again", "Keras with XLA"
BATCH_NORM = "tf.nn.batch_normalization"
OPERATORS = ("layer_norm_custom", "layer_norm_bias_add_custom", "layer_norm_fused_custom")
LAYER = "evenkeel LayerNormalization"
OURS = (*OPERATORS, LAYER)
AGAIN = (NO_NORM_AGAIN, KERAS_AGAIN)

# Which number of a network's shape, batch x units, varies, and at which value the other one stays.
SERIES = {
    "units": (1, "128x{}", "batch size 128"),
    "batch size": (0, "{}x128", "128 units"),
}

# Okabe and Ito's colors; markers and dashes tell the lines apart without them too.
STYLES = {
    KERAS: {"color": "#D55E00", "marker": "s", "linestyle": "-"},
    KERAS_XLA: {"color": "#777777", "marker": "x", "linestyle": "-."},
    BATCH_NORM: {"color": "#E69F00", "marker": "D", "linestyle": "--"},
    "layer_norm_fused_custom": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "layer_norm_bias_add_custom": {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "layer_norm_custom": {"color": "#CC79A7", "marker": "v", "linestyle": ":"},
}


def lines_of(rows, benchmark):
    """{shape: {contender: row}}, in the order of measuring."""
    lines = {}
    for row in rows:
        if row["benchmark"] == benchmark:
            lines.setdefault(row["shape"], {})[row["contender"]] = row
    return lines


def series(rows, axis):
    """{size: {contender: row}} of the networks in which only `axis` varies, by size."""
    index, pattern, _ = SERIES[axis]
    found = {}
    for shape, line in lines_of(rows, "network").items():
        size = shape.split("x")[index]
        if shape == pattern.format(size):
            found[int(size)] = line
    return dict(sorted(found.items()))


def ratio(row):
    return float(row["ratio"])


def device(rows):
    """Files of the first days are a CPU's and do not say so."""
    return rows[0].get("device", "cpu")


def behind(line, name):
    """Whether one of ours is not faster than Keras's layer."""
    return name in OURS and ratio(line[name]) >= ratio(line[KERAS])


def mark(text, slanted):
    return f"*{text}*" if slanted else text


def network_table(rows, axis):
    names = [KERAS, KERAS_XLA, BATCH_NORM, *OPERATORS]
    cells = [
        [
            str(size),
            f"{float(line[NO_NORM]['time_us']) / 1e3:.2f}",
            *(
                mark(f"{ratio(line[name]):.2f}", behind(line, name)) if name in line else NO_FIGURE
                for name in names
            ),
        ]
        for size, line in series(rows, axis).items()
    ]
    title = f"Training step of 5 layers, {SERIES[axis][2]}: time / time with no norm"
    return title, [axis, "no norm, ms", *names], cells


def operator_table(rows):
    lines = lines_of(rows, "operator")
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    cells = [
        [
            name,
            *(
                mark(
                    f"{float(line[name]['time_us']) / 1e3:.2f} ({1 / ratio(line[name]):.2f}x)",
                    behind(line, name),
                )
                if name in line
                else NO_FIGURE
                for line in lines.values()
            ),
        ]
        for name in names
        if name not in AGAIN
    ]
    heads = ["ms (lead over Keras's layer)", *(f"[{s.replace('x', ', ')}]" for s in lines)]
    return "One norm alone, forward + backward", heads, cells


def tables(rows):
    """Title, heads and cells of each table."""
    return [*(network_table(rows, axis) for axis in SERIES), operator_table(rows)]


def verdict(rows):
    """Where evenkeel is not ahead, and how noisy the machine was."""
    pairs = [
        (f"{benchmark} {shape} {name}", behind(line, name))
        for benchmark in ("network", "operator")
        for shape, line in lines_of(rows, benchmark).items()
        for name in OURS
        if name in line
    ]
    ahead = sum(not late for _, late in pairs)
    text = f"Faster than Keras's layer in {ahead} of {len(pairs)} figures"
    yield text + ("." if ahead == len(pairs) else "; the others are in italics.")
    twins = sorted(ratio(row) for row in rows if row["contender"] in AGAIN)
    spreads = sorted(
        (float(row["ratio_high"]) - float(row["ratio_low"])) / 2 / ratio(row)
        for row in rows
        if row["contender"] not in (NO_NORM, KERAS)
    )
    yield (
        f"Noise: the baseline's twin came out at {twins[0]:.2f} to {twins[-1]:.2f} of it; the middle "
        f"half of a ratio's rounds lies within {spreads[len(spreads) // 2]:.0%} either way in the "
        f"median figure and {spreads[-1]:.0%} in the worst, of {min(int(r['rounds']) for r in rows)} "
        f"to {max(int(r['rounds']) for r in rows)} rounds each."
    )


def plot(rows, axis, path):
    found = series(rows, axis)
    sizes = list(found)
    figure, axes = plt.subplots(figsize=(10, 4.8), layout="constrained")
    for i, (name, style) in enumerate(STYLES.items()):
        measured = [
            (place, found[size][name]) for place, size in enumerate(sizes) if name in found[size]
        ]
        column = [row for _, row in measured]
        middle = list(map(ratio, column))
        whiskers = [
            [value - float(row["ratio_low"]) for value, row in zip(middle, column, strict=True)],
            [float(row["ratio_high"]) - value for value, row in zip(middle, column, strict=True)],
        ]
        # Side by side, or the whiskers would hide each other.
        places = [sizes[place] * 1.03 ** (i - len(STYLES) // 2) for place, _ in measured]
        axes.errorbar(
            places, middle, whiskers, label=name, linewidth=1.8, elinewidth=1, capsize=2.5, **style
        )
    axes.axhline(1, color="black", linewidth=1, label="no norm")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{axis} ({SERIES[axis][2]})")
    axes.set_ylabel("step time / step time with no norm")
    where = "CPU" if device(rows) == "cpu" else rows[0]["machine"]
    axes.set_title(f"Training step of 5 fully connected layers, {where}: lower is better")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def markdown(rows, source):
    first = rows[0]
    threads = f", {first['threads']} threads" if device(rows) == "cpu" else ""
    yield (
        f"From `{source}`: {first['machine']}{threads}, TensorFlow "
        f"{first['tensorflow']}, Keras {first['keras']}, evenkeel {first['evenkeel']} "
        f"(build/{first['build']}), commit {first['commit']}, {first['date']} UTC."
    )
    for (title, heads, cells), image in zip(tables(rows), [*images(rows), None], strict=True):
        yield from ("", f"### {title}", "")
        if image:
            yield from (f"![{title}](images/{image})", "")
        yield f"| {' | '.join(heads)} |"
        yield "|---" * len(heads) + "|"
        yield from (f"| {' | '.join(line)} |" for line in cells)
    yield ""
    yield "\n".join(verdict(rows))


def images(rows):
    stem = "tensorflow" if device(rows) == "cpu" else f"tensorflow-{device(rows)}"
    return [f"{stem}-{axis.replace(' ', '-')}.png" for axis in SERIES]


def draw(rows, folder):
    for axis, image in zip(SERIES, images(rows), strict=True):
        plot(rows, axis, folder / image)


def rewrite(document, rows, source):
    """`source` is the name of the CSV file. Each device has its part of the document."""
    draw(rows, document.parent / "images")
    name = "tensorflow" if device(rows) == "cpu" else f"tensorflow {device(rows)}"
    begin = f"<!-- {name}: begin (benchmarks/tensorflow_layers.py) -->"
    end = f"<!-- {name}: end -->"
    head, rest = document.read_text().split(begin)
    _, tail = rest.split(end)
    text = "\n".join(markdown(rows, source))
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[1])
    with path.open() as file:
        rewrite(DOCUMENT, list(csv.DictReader(file)), path.name)


if __name__ == "__main__":
    main()
