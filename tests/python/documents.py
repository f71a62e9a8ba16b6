"""The blocks of code in README.md, CONTRIBUTING.md and docs/, for the tests that run them as they stand.

A document is a program: its Python blocks run from top to bottom in one scope. What a block prints
stands in the block behind it, which is marked as text. What a script has made, between markers, is
left to that script.

Where a Python block runs: those of docs/tensorflow.md in tests/tensorflow/test_docs.py, those of
docs/jax.md in tests/jax/test_docs.py, those with
Composer's Trainer in test_composer.py, those with onnxruntime in test_onnx.py, all others in
test_docs.py.
"""

import contextlib
import io
import itertools
import pathlib
import re
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
GENERATED = re.compile(r"^<!-- (.+): begin \((.+)\) -->\n(.*?)^<!-- \1: end -->$", re.M | re.S)
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)

# The lines of docs/api.md: (part, signature, what is said about it).
API = [
    (part.removeprefix("api "), *entry)
    for part, _, text in GENERATED.findall((ROOT / "docs" / "api.md").read_text())
    for entry in re.findall(r"^\| `(.+?)` \| (.*) \|$", text, re.M)
]


def api_names(part):
    """The names that a part of docs/api.md has."""
    signatures = [signature for where, signature, _ in API if where == part]
    return {re.search(r"(\w+)(?=\(|$| =)", signature).group(1) for signature in signatures}


@dataclass(frozen=True)
class Block:
    document: str  # from the root of the project
    line: int  # of its first line of code
    language: str
    text: str

    def __str__(self):
        return f"{self.document}:{self.line}"


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """The text of a document, with blank lines for what scripts have made of it."""
    return GENERATED.sub(lambda found: "\n" * found.group(0).count("\n"), path.read_text())


def blocks(path):
    text = prose(path)
    return [
        Block(name_of(path), text.count("\n", 0, found.start()) + 2, found.group(2), found.group(3))
        for found in FENCED.finditer(text)
    ]


def environment(block):
    """Which tests run a Python block."""
    if block.document in ("docs/tensorflow.md", "docs/jax.md"):
        return pathlib.Path(block.document).stem
    if "import onnxruntime" in block.text:
        return "onnx"
    return "composer" if "from composer" in block.text else "torch"


def python_blocks(path, where):
    return [b for b in blocks(path) if b.language == "python" and environment(b) == where]


def run(block, scope):
    """Runs a Python block; returns what it has printed. Errors name the document and its line."""
    code = compile("\n" * (block.line - 1) + block.text, block.document, "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, scope)
    return printed.getvalue()


def with_output(path):
    """(block, the text behind it, or None) for every block of a document."""
    found = blocks(path)
    for block, behind in itertools.zip_longest(found, found[1:]):
        yield block, behind.text if behind and behind.language == "text" else None


def run_document(path, where, scope):
    """Runs the blocks of a document that belong to `where`; what they print must be in it."""
    for block, shown in with_output(path):
        if block.language == "python" and environment(block) == where:
            printed = run(block, scope)
            assert printed in ("", shown), (
                f"{block} prints\n{printed}and the document shows\n{shown}"
            )
    return scope
