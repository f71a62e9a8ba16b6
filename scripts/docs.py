"""Rewrites what scripts have made of README.md and docs/: everything between the markers.

A part with figures has "From `<file>.csv`", and that file under benchmarks/results is what
it is made of again; so are the charts of README.md. Another file takes its place by the script that the part's marker names. The parts
whose names begin with "api" are made from the code. With --check nothing is written, and the exit status
says whether something would change.

    .venv/bin/python scripts/docs.py
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import api
import front_page
import jax_report
import reports
import table
import tensorflow_report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- ([\w+. ]+): begin \((.+?)\) -->\n)(.*?)(<!-- \2: end -->)", re.S)
SOURCE = re.compile(r"From `([^`/]+\.csv)`")
# What models do is found out by running them, not measured: there is no file of figures.
ELSEWHERE = {"surgery"}


def tensorflow(path):
    return "\n".join(tensorflow_report.markdown(reports.read(path), path.name))


def convergence(path):
    from convergence import markdown  # with torch and evenkeel, which the others do without

    return "\n".join(markdown(path))


# Name of a part: what makes its text from the path of a CSV file.
MAKERS = {
    **table.TABLES,
    **front_page.MARKDOWN,
    "accuracy": reports.accuracy,
    "convergence": convergence,
    "jax": jax_report.markdown,
    "jax cuda": jax_report.markdown,
    "overhead": reports.overhead,
    "tensorflow": tensorflow,
    "tensorflow cuda": tensorflow,
}
FROM_CODE = {f"api {name}": make for name, make in api.TABLES.items()}


def made_again(text, document):
    """The text of a document with all of its parts made anew."""

    def replaced(part):
        begin, name, _, old, end = part.groups()
        if name in ELSEWHERE:
            return part.group()
        if name in FROM_CODE:
            return f"{begin}{FROM_CODE[name]()}\n{end}"
        if name not in MAKERS:
            raise ValueError(f"{document}: '{name}' is none of {', '.join(MAKERS)}")
        if not old:  # not measured yet
            return part.group()
        source = SOURCE.search(old)
        if source is None:
            raise ValueError(f"{document}: '{name}' has no From `<file>.csv`")
        path = RESULTS / source.group(1)
        if not path.exists():
            raise ValueError(f"{document}: '{name}': there is no {path.relative_to(ROOT)}")
        return f"{begin}{MAKERS[name](path)}\n{end}"

    return PART.sub(replaced, text)


def documents():
    """{path: text} of everything that is made: documents, and the charts of the parts that have some."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found[path] = made_again(path.read_text(), path.relative_to(ROOT))
        for _, name, _, text, _ in PART.findall(found[path]):
            if name in front_page.FILES:
                charts = front_page.FILES[name](RESULTS / SOURCE.search(text).group(1))
                found |= {ROOT / "docs" / "images" / file: svg for file, svg in charts.items()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, tell what is not up to date"
    )
    check = parser.parse_args().check
    stale = 0
    try:
        made = documents()
    except ValueError as error:
        sys.exit(f"docs: {error}")
    for path, text in made.items():
        if not path.exists() or text != path.read_text():
            stale += 1
            name = path.relative_to(ROOT)
            print(f"docs: {name} {'is not what its CSV files say' if check else 'rewritten'}")
            if not check:
                path.write_text(text)
    return check and stale > 0


if __name__ == "__main__":
    sys.exit(main())
