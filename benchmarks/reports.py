"""The tables that accuracy.py and overhead.py have in docs/, made from the CSV files that they write.

Apart from the measuring, so that they can be made again without torch, oneDNN and another run.
scripts/docs.py puts them into the documents.
"""

import csv


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def grouped(rows, *columns):
    """{values of the columns: rows}, in the order of measuring."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def overhead(path):
    rows = read(path)
    first = rows[0]
    lines = [
        f"From `{path.name}`: {first['machine']}, torch {first['torch']}, commit {first['commit']}.",
        "",
        "| 8 x 64, f32, one thread | evenkeel | torch | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{float(row[name]):.1f} us" for name in ("evenkeel_us", "torch_us"))
        lines.append(f"| {row['call']} | {times} | {float(row['ratio']):.2f} |")
    return "\n".join(lines)


def accuracy(path):
    rows = read(path)
    first = rows[0]
    lines = [
        f"From `{path.name}`: {first['versions']}; {first['threads']} threads, commit "
        f"{first['commit']}. Largest error (root mean square).",
    ]
    behind = []
    for (dtype, mean), table in grouped(rows, "dtype", "mean").items():
        names = list(grouped(table, "library"))
        heads = " | ".join(name for (name,) in names)
        lines += ["", f"### {dtype}, mean {mean}, spread 1", "", f"| | output | {heads} |"]
        lines.append("|---|---|" + "---|" * len(names))
        for (problem, output), cells in grouped(table, "problem", "output").items():
            texts = " | ".join(shown(cell) for cell in cells)
            lines.append(f"| {problem if output == 'y' else ''} | {output} | {texts} |")
            best = min(cells, key=lambda cell: float(cell["largest"]))
            ours = next(cell for cell in cells if cell["library"] == "evenkeel")
            if float(f"{float(ours['largest']):.1e}") > float(f"{float(best['largest']):.1e}"):
                behind.append(
                    f"- {problem} {dtype} mean {mean} {output}: {shown(ours)}, {best['library']} "
                    f"{float(best['largest']):.1e}"
                )
    if behind:
        lines += ["", "evenkeel's largest error is above a rival's at:", "", *behind]
    return "\n".join(lines)


def shown(cell):
    return f"{float(cell['largest']):.1e} ({float(cell['root_mean_square']):.1e})"
