"""The Python snippets of README.md run as they stand, one after the other."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parent.parent.parent / "README.md"


def test_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(snippets) >= 2
    scope = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), scope)
