"""The Python snippets of README.md.

test_readme.py runs them as they stand, and test_composer.py those that need Composer.
"""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parent.parent.parent / "README.md"


def snippets(section):
    """Those under a heading, in order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", README.read_text(), re.S | re.M)
    return re.findall(r"```python\n(.*?)```", text, re.S)


def for_composer(snippet):
    return "evenkeel.composer" in snippet


def run(snippet, scope):
    exec(compile(snippet, str(README), "exec"), scope)
    return scope
