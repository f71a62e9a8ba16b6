"""docs/api.md has every public name, and says something about each; scripts/api.py makes it from the code.

Composer's names are test_composer.py's, TensorFlow's tests/tensorflow/test_docs.py's.
"""

import importlib
import importlib.util
import pkgutil
import re

import pytest
from commands import run
from documents import API, ROOT, api_names

import evenkeel
from evenkeel import __main__


def test_something_is_said_about_each():
    assert len(API) > 60
    for part, signature, about in API:
        assert len(about.split()) > 1, f"{part}: {signature}"


def test_every_module_has_its_part():
    found = {module.name for module in pkgutil.iter_modules(evenkeel.__path__)}
    public = {name for name in found if not name.startswith("_")}
    commands = {module.split(".")[1] for _, module in __main__.EXTRAS.values()}
    parts = {part.split(".")[1] for part, *_ in API if part.startswith("evenkeel.")}
    assert public == commands | parts


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        ("evenkeel.torch", "torch"),
        ("evenkeel.lightning", "lightning"),
        ("evenkeel.transformers", "transformers"),
    ],
)
def test_every_name_of_a_module(module, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    found = vars(importlib.import_module(module))
    own = {name for name, value in found.items() if getattr(value, "__module__", None) == module}
    public = found.get("__all__") or {name for name in own if not name.startswith("_")}
    assert api_names(module) == set(public)


def test_every_command_and_option():
    usage = run("-m", "evenkeel", "--help").stdout
    listed = set(re.findall(r"^    ([\w-]+)\b", usage, re.M))
    entries = {sig.split()[1]: sig for part, sig, _ in API if part == "commands"}
    assert listed == set(entries)
    for command, signature in entries.items():
        options = set(re.findall(r"--[a-z-]+", run("-m", "evenkeel", command, "--help").stdout))
        assert set(re.findall(r"--[a-z-]+", signature)) == options - {"--help"}, command


def test_every_function_of_the_c_interface():
    header = (ROOT / "include" / "evenkeel" / "evenkeel.h").read_text()
    assert api_names("C") == set(re.findall(r"^EK_API .*?(ek_\w+)\(", header, re.M))


def test_every_function_and_class_of_the_cpp_wrapper():
    header = (ROOT / "include" / "evenkeel" / "evenkeel.hpp").read_text()
    before, behind = re.split(r"(?s)\nnamespace detail.*// namespace detail\n", header)
    found = re.findall(
        r"^(?:inline (?!constexpr)[\w:]+ |class |struct |using )(\w+)", before + behind, re.M
    )
    assert api_names("C++") == set(found)
