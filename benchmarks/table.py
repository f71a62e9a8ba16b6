"""The tables of docs/performance.md, made from the CSV files that rivals.py (CPU), training.py and
`python -m evenkeel bench` (GPU) write.

For every problem and pass: the share of copy bandwidth that evenkeel and the best baseline reach, and the speedup (the
best baseline's time / evenkeel's); for training steps, their time and memory. Rewrites what lies between the markers;
nothing in the tables is typed by hand. A file belongs to the table whose name its own begins with:
cpu-residual-<machine>-<date>.csv to "cpu residual".

    python benchmarks/table.py benchmarks/results/<file>.csv
"""

import csv
import pathlib
import statistics
import sys

DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "performance.md"
RIVALS = ("torch", "torch.compile", "onednn")


def read(path):
    """{threads: {problem: {(dtype, pass): {contender: (time, of limit)}}}}, and the rows themselves."""
    table = {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        problem = " ".join(word for word in (row["op"], row["shape"], row["layout"]) if word)
        cell = table.setdefault(int(row["threads"]), {}).setdefault(problem, {})
        figures = (float(row["time_us"]), float(row["of_limit"]))
        contender, _, variant = row["contender"].partition(",")
        if contender == "evenkeel" and variant:
            continue  # with parameters of another type: a line of its own in the CSV
        found = cell.setdefault((row["dtype"], row["pass"]), {})
        # A rival that was measured with several parameter types, and who was measured twice, is shown at its best.
        found[contender] = min(found.get(contender, figures), figures)
    return table, rows


def cell_text(contenders):
    rivals = [contenders[name] for name in RIVALS if name in contenders]
    if "evenkeel" not in contenders or not rivals:
        return "-"
    ours, best = contenders["evenkeel"], min(rivals)
    lead = best[0] / ours[0]
    text = f"{ours[1]:.2f} / {best[1]:.2f} ({lead:.2f}x)"
    return text if lead >= 1 else f"*{text}*"


def markdown(path):
    table, rows = read(path)
    columns = list(dict.fromkeys((row["dtype"], row["pass"]) for row in rows))
    lines = [f"From `{path.name}`: {rows[0]['cpu']}, {rows[0]['versions']}, {commits(rows)}."]
    for threads, problems in sorted(table.items(), reverse=True):
        heads = " | ".join(f"{dtype} {pass_}" for dtype, pass_ in columns)
        lines += ["", f"### {threads} thread{'s' if threads > 1 else ''}", ""]
        lines += [
            f"| share of copy: evenkeel / best baseline (speedup) | {heads} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for problem, cells in problems.items():
            texts = " | ".join(cell_text(cells.get(column, {})) for column in columns)
            lines.append(f"| {problem} | {texts} |")
        found = [
            cell
            for cells in problems.values()
            for cell in map(cell_text, cells.values())
            if cell != "-"
        ]
        ahead = sum(not cell.startswith("*") for cell in found)
        lines += [
            "",
            f"Ahead of the best baseline in {ahead} of {len(found)} lines; the others are in italics.",
        ]
    return "\n".join(lines)


def commits(rows):
    """Of all rows, which may come from several runs."""
    found = list(dict.fromkeys(row["commit"] for row in rows))
    return f"commit{'s' if len(found) > 1 else ''} {', '.join(found)}"


def gpu_lines(rows):
    """{(op, shape, dtype, pass): {library: row}}: of kernels, and of the host's part of a call."""
    lines, hosts = {}, {}
    for row in rows:
        table = hosts if row["pass"].startswith("host") else lines
        key = (row["op"], row["shape"], row["dtype"], row["pass"])
        table.setdefault(key, {})[row["library"]] = row
    return lines, hosts


def lead(found):
    """evenkeel's row, the best rival's, and how many times as long that takes; None where one is missing."""
    rivals = [row for library, row in found.items() if library != "evenkeel"]
    if "evenkeel" not in found or not rivals:
        return None
    best = min(rivals, key=lambda row: float(row["time_us"]))
    return found["evenkeel"], best, float(best["time_us"]) / float(found["evenkeel"]["time_us"])


def gpu_markdown(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines, hosts = gpu_lines(rows)
    text = [
        f"From `{path.name}`: {rows[0]['machine']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}, "
        f"{commits(rows)}.",
        "",
        "| | copy, µs | evenkeel, µs | share of copy | best baseline | share | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    ahead = compared = 0
    for key, found in lines.items():
        compare = lead(found)
        if not compare:
            text.append(f"| {' '.join(key)} |" + " - |" * 6)
            continue
        ours, best, times = compare
        compared += 1
        ahead += times >= 1
        mark = "" if times >= 1 else "*"
        text.append(
            f"| {' '.join(key)} | {float(ours['ceiling_us']):.1f} | {float(ours['time_us']):.1f} | "
            f"{mark}{float(ours['of_limit']):.2f}{mark} | {best['library']} | "
            f"{float(best['of_limit']):.2f} | {mark}{times:.2f}x{mark} |"
        )
    text += [
        "",
        f"Ahead of these baselines in {ahead} of {compared} lines; the others are in italics.",
    ]
    if hosts:
        text += ["", "| host cost of a call, µs | evenkeel | torch |", "|---|---|---|"]
        for key, found in hosts.items():
            figures = (f"{float(found[name]['time_us']):.1f}" for name in ("evenkeel", "torch"))
            text.append(f"| {' '.join(key)} | {' | '.join(figures)} |")
    return "\n".join(text)


def summary_markdown(path):
    """What gpu_markdown's lines have in common, by op and pass, and the ones that are behind."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines, hosts = gpu_lines(rows)
    groups, behind = {}, []
    for key, found in (lines | hosts).items():
        compare = lead(found)
        if not compare:
            continue
        ours, best, times = compare
        if key in lines:
            groups.setdefault((key[0], key[3]), []).append((float(ours["of_limit"]), times))
        if times < 1:
            behind.append(
                f"- {' '.join(key)}: {float(ours['time_us']):.1f} us; {best['library']} "
                f"{float(best['time_us']):.1f}"
            )
    text = [
        f"From `{path.name}`: {rows[0]['machine']}, {commits(rows)}; medians, with the lowest and the highest.",
        "",
        "| | share of copy bandwidth | speedup over the best baseline | ahead |",
        "|---|---|---|---|",
    ]
    for key, found in groups.items():
        shares, speedups = (sorted(column) for column in zip(*found, strict=True))
        cells = (
            f"{statistics.median(column):.2f} ({column[0]:.2f} to {column[-1]:.2f})"
            for column in (shares, speedups)
        )
        ahead = sum(times >= 1 for times in speedups)
        text.append(f"| {' '.join(key)} | {' | '.join(cells)} | {ahead} of {len(found)} |")
    return "\n".join([*text, "", "Behind, with the host's part of a call:", "", *behind])


def tutorial_markdown(path):
    """GB/s over the length of a row, as Triton's tutorial prints them."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lengths, names = {}, {}
    for row in rows:
        lengths.setdefault(int(row["shape"].split("x")[1]), {})[row["library"]] = row["gb_per_s"]
        names[row["library"]] = None
    first = rows[0]
    text = [
        f"From `{path.name}`: {first['machine']}, torch {first['torch']}, triton {first['triton']}, "
        f"{commits(rows)}. {first['op']} {first['pass']}, {first['dtype']}, "
        f"{first['shape'].split('x')[0]} rows, GB/s.",
        "",
        f"| N | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for length, rates in sorted(lengths.items()):
        text.append(f"| {length} | {' | '.join(rates.get(name, '-') for name in names)} |")
    return "\n".join(text)


def training_steps(rows):
    """{(model, batch, mode): {variant: row}}"""
    steps = {}
    for row in rows:
        step = steps.setdefault((row["model"], row["batch"], row["mode"]), {})
        step[row["variant"]] = row
    return steps


def training_markdown(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    steps = training_steps(rows)
    variants = ("native", "fused", "none")
    heads = ("native", "fused", "floor")
    text = [
        f"From `{path.name}`: {rows[0]['machine']}, torch {rows[0]['torch']}, transformers "
        f"{rows[0]['transformers']}, {commits(rows)}.",
        "",
        f"| step, ms (peak memory, GiB) | {' | '.join(heads)} | gap closed |",
        "|---" * (len(variants) + 2) + "|",
    ]
    for key, found in steps.items():
        cells = [
            f"{found[v]['step_ms']} ({found[v]['peak_gib']})" if v in found else "-"
            for v in variants
        ]
        share = found["fused"]["share"] if "fused" in found else "-"
        text.append(f"| {' '.join(key)} | {' | '.join(cells)} | {share} |")
    return "\n".join(text)


TABLES = {
    "gpu": gpu_markdown,
    "summary": summary_markdown,
    "others": gpu_markdown,
    "residual": gpu_markdown,
    "modulation": gpu_markdown,
    "tutorial": tutorial_markdown,
    "training": training_markdown,
    "cpu": markdown,
    "cpu avx2": markdown,
    "cpu residual": markdown,
}


def table_of(path):
    """The name of the table that a CSV file is for, or None."""
    found = (name for name in TABLES if path.name.startswith(name.replace(" ", "-") + "-"))
    return max(found, key=len, default=None)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[1])
    name = table_of(path)
    if name is None:
        sys.exit(f"table.py: the name of {path} must begin with one of: {', '.join(TABLES)}")
    table = TABLES[name]
    begin, end = f"<!-- {name}: begin (benchmarks/table.py) -->", f"<!-- {name}: end -->"
    head, rest = DOCUMENT.read_text().split(begin)
    _, tail = rest.split(end)
    DOCUMENT.write_text(f"{head}{begin}\n{table(path)}\n{end}{tail}")


if __name__ == "__main__":
    main()
