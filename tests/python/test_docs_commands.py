"""Commands that documents and templates name can be run: targets, scripts, options, presets exist.

They are looked at, not run: most of them build or measure. A kind of command that is not known here is an
error, so that none is passed over.
"""

import functools
import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from documents import DOCUMENTS, ROOT, blocks, name_of, prose

FORMS = sorted((ROOT / ".github").rglob("*.yml"))
# What a command begins with where it stands in a line of prose.
IN_PROSE = re.compile(
    r"`((?:make|scripts/[^\s`]+|python -m|pip|cmake|ctest|\.venv[^\s`]*/bin/[^\s`]+) [^`\n]+)`"
)
PLACEHOLDER = re.compile(r"<[^>]*>")
PYTHONS = re.compile(r"(python3?|\.venv(-\w+)?/bin/python)$")


def commands(path):
    """The commands of a document as words, with where they stand."""
    for block in blocks(path):
        if block.language == "sh":
            for number, line in enumerate(block.text.splitlines()):
                for part in re.split(r"\s+#\s.*|&&", line):
                    if part and part.strip():
                        yield f"{block.document}:{block.line + number}", part.strip()
    for found in IN_PROSE.finditer(prose(path)):
        yield name_of(path), found.group(1)


def words_of(command):
    """Without placeholders, settings of the environment and extras in quotes."""
    words = shlex.split(PLACEHOLDER.sub("<>", command))
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


@functools.cache
def makefile_targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@functools.cache
def presets(kind):
    text = (ROOT / "CMakePresets.json").read_text()
    return {preset["name"] for preset in json.loads(text)[f"{kind}Presets"]}


@functools.cache
def help_of(subcommand):
    done = subprocess.run(
        [sys.executable, "-m", "evenkeel", subcommand, "--help"],
        env=os.environ | {"COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_word(text, word):
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def is_own_value(word):
    """Names of files, numbers and shapes are the caller's."""
    return re.search(r"[\d/.<]", word) is not None


def check_make(words):
    for target in words:
        assert target in makefile_targets(), f"no target '{target}'"


def check_script(path, words):
    script = ROOT / path
    assert script.exists(), f"no {path}"
    text = script.read_text()
    for word in words:
        assert is_own_value(word) or has_word(text, word), f"{path} does not know '{word}'"


def check_evenkeel(words):
    subcommand, *others = words
    for word in others:
        known = has_word(help_of(subcommand), word)
        assert known or is_own_value(word), f"evenkeel {subcommand} does not know '{word}'"
    help_of(subcommand)


def check_pip(words):
    assert words[0] == "install", words
    text = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", text, re.M), f"pyproject.toml has no extra '{extra}'"


def check_python(words):
    if words[0] != "-m":
        assert os.access(ROOT / words[0], os.R_OK), f"no {words[0]}"
        return check_script(words[0], words[1:])
    module, *others = words[1:]
    if module == "evenkeel":
        return check_evenkeel(others)
    if module == "pip":
        return check_pip(others)
    assert module == "pytest", f"python -m {module}"
    for path in others:
        assert "<" in path or (ROOT / path).exists(), f"no {path}"


def check_cmake(words):
    kind = "build" if "--build" in words else "configure"
    for option, value in itertools.pairwise(words):
        if option == "--preset":
            assert value in presets(kind), f"no preset '{value}'"
        if option == "--install":
            assert value.removeprefix("build/") in presets("configure"), f"no preset for '{value}'"


def check_ctest(words):
    assert words[words.index("--preset") + 1] in presets("test"), words


def check(command):
    first, *words = words_of(command)
    if first == "make":
        check_make(words)
    elif first.startswith("scripts/"):
        assert os.access(ROOT / first, os.X_OK), f"{first} cannot be run"
        check_script(first, words)
    elif PYTHONS.match(first):
        check_python(words)
    elif first == "pip":
        check_pip(words)
    elif first == "cmake":
        check_cmake(words)
    elif first == "ctest":
        check_ctest(words)
    elif first.startswith(".venv"):
        # Tools of requirements-dev.txt; the environment itself need not be this one.
        assert (
            first.rpartition("/")[2] in (ROOT / "requirements-dev.txt").read_text() or words == []
        )
    else:
        raise AssertionError(f"'{first}' is not known to {__name__}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_of_documents(path):
    for where, command in commands(path):
        try:
            check(command)
        except AssertionError as error:
            raise AssertionError(f"{where}: {command}: {error}") from error


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_commands_of_forms(path):
    for found in IN_PROSE.finditer(path.read_text()):
        check(found.group(1))
    for label in re.findall(r"label: (python -m .+)$", path.read_text(), re.M):
        check(label)


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "scripts/nothing",
        "scripts/gpu nothing",
        "python -m evenkeel info --nothing",
        "pip install '.[nothing]'",
        "cmake --preset nothing",
        "cmake --build --preset nothing",
        ".venv/bin/python benchmarks/nothing.py",
        ".venv/bin/python scripts/docs.py --nothing",
        "nothing",
    ],
)
def test_wrong_commands_are_noticed(command):
    with pytest.raises(AssertionError):
        check(command)
