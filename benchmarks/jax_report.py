"""The table of docs/jax.md, made from the CSV files that `python -m evenkeel bench-jax` writes.

Apart from the measuring, so that it can be made again without JAX. scripts/docs.py puts it into the document.
"""

import checkout  # noqa: F401
import reports
from evenkeel.bench.jax_lines import EVENKEEL, PASSES, shown, speedup, title

SMALL = ("8x64", "2x4x4x64")
TITLES = {"kept": "Results in memory that was used before", "fresh": "Large results in new memory"}


def cell(found):
    times = {row["contender"]: float(row["time_us"]) for row in found}
    best, lead = speedup(found)
    text = f"{shown(times[EVENKEEL])} / {shown(times[best['contender']])} {best['contender']} ({lead:.2f}x)"
    return text if lead >= 1 else f"*{text}*"


def markdown(path):
    rows = reports.read(path)
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"From `{path.name}`: {first['machine']}, {first['threads']} threads, jax {first['jax']}, flax "
        f"{first['flax']}, evenkeel {first['evenkeel']} (build/{first['build']}), commit {commits}.",
    ]
    for (pages,), found in reports.grouped(rows, "pages").items():
        lines += ["", f"### {TITLES[pages]}", "", *table(found)]
    return "\n".join(lines)


def table(rows):
    lines = [
        f"| time: evenkeel / the best of the others (speedup) | {' | '.join(PASSES)} |",
        "|---|---|---|",
    ]
    ahead = total = 0
    for (*_, shape, _), found in reports.grouped(rows, "op", "residual", "shape", "dtype").items():
        measured = [[row for row in found if row["pass"] == pass_] for pass_ in PASSES]
        lines.append(f"| {title(found[0])} | {' | '.join(map(cell, measured))} |")
        if shape not in SMALL:
            total += len(measured)
            ahead += sum(speedup(line)[1] >= 1 for line in measured)
    behind = "" if ahead == total else "; the others are in italics"
    sentence = (
        f"Ahead of all others in {ahead} of {total} lines of arrays that no cache holds{behind}."
    )
    if any(row["shape"] in SMALL for row in rows):
        sentence += " The smallest shapes tell what a call costs the host."
    return [*lines, "", sentence]
