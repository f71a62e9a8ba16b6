"""What documents refer to is there: links, files, tests, names of the interface, figures.

docs/comparison.md links a test or a figure for every claim about evenkeel, docs/migration.md names
arguments that exist, and every table of figures is what scripts/docs.py makes of a committed CSV file.
"""

import ast
import importlib.util
import inspect
import re

import pytest
import yaml
from documents import DOCUMENTS, FENCED, GENERATED, ROOT, name_of, prose

import evenkeel.torch

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
COMPARISON, MIGRATION = ROOT / "docs" / "comparison.md", ROOT / "docs" / "migration.md"


def text_of(path):
    """The prose of a document, without its blocks of code."""
    return FENCED.sub("", prose(path))


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def rows(path, section=None):
    """The cells of each line of the tables in a document, without heads."""
    text = text_of(path)
    if section:
        text = text.split(f"## {section}\n")[1].split("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for _, target in LINK.findall(FENCED.sub("", path.read_text())):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        assert to.exists(), f"{name_of(path)}: {target}"
        if anchor:
            assert anchor in anchors(to), f"{name_of(path)}: {target}"


# A change may name what is gone since.
@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.stem != "CHANGELOG"], ids=name_of)
def test_files_that_are_named_exist(path):
    for span in SPAN.findall(text_of(path)):
        word = span.split(":")[0]
        top, slash, _ = word.partition("/")
        if slash and top in TOP_FOLDERS - {"build", "dist"} and re.fullmatch(r"[\w./*-]+", word):
            found = list(ROOT.glob(word.rstrip("/")))
            assert found, f"{name_of(path)}: {word}"


def test_front_page_links_every_document():
    linked = {
        target.partition("#")[0] for _, target in LINK.findall((ROOT / "README.md").read_text())
    }
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


# ---- docs/extending.md ----


# Files that use what there is, whatever else there may be: a kernel that is asked what holds for all of
# them, models to measure and their precision, values to try hand-written norms with.
USERS = {
    "src/cuda/launch.cc",
    *(f"python/evenkeel/bench/{name}.py" for name in ("models", "steps", "surgery")),
    "python/evenkeel/torch/replica.py",
}


@pytest.mark.parametrize(
    ("section", "pattern"),
    [
        ("A fusion behind the norm (an activation)", r"(?i)silu|gelu"),
        ("A dtype", r"BF16|(?i:bfloat16)|\"bf16\""),
    ],
)
def test_recipes_name_every_file(section, pattern):
    """Files that mention the newest of its kind, but for comments, are where the next one goes."""
    recipe = (ROOT / "docs" / "extending.md").read_text().split(f"## {section}\n")[1]
    named = set(SPAN.findall(recipe.split("\n## ")[0]))
    folders = [
        "include",
        "src",
        "bindings",
        "tests/support",
        "python/evenkeel",
        "benchmarks/driver",
    ]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    mentioned = {
        name_of(path)
        for path in files
        if path.suffix not in (".pyc", ".txt")
        and re.search(pattern, re.sub(r"(//|#).*", "", path.read_text()))
    }
    missing = mentioned - named - USERS
    assert not missing, "docs/extending.md does not name all files"
    assert len(mentioned) > 10


# ---- docs/comparison.md ----


def defines(path, name):
    pattern = rf"def {name}\(|^{name} = |^TEST(_[PF])?\(\w+, {name}\)"
    return re.search(pattern, path.read_text(), re.M) is not None


def test_tests_that_are_named_exist():
    found = [
        (name.strip("`"), target)
        for name, target in LINK.findall(COMPARISON.read_text())
        if target.startswith("../tests/") and name.startswith("`")
    ]
    assert len(found) > 30
    for name, target in found:
        assert defines((COMPARISON.parent / target).resolve(), name), f"{target} has no {name}"


def test_every_claim_has_its_proof():
    claims = list(rows(COMPARISON))
    assert len(claims) > 30
    for feature, ours, *_ in claims:
        proven = LINK.search(ours) or "python -m evenkeel bench" in ours
        assert ours == "-" or proven, f"{feature}: {ours}"


# ---- docs/migration.md ----


def tensorflow_names():
    tree = ast.parse((ROOT / "python/evenkeel/tensorflow/__init__.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (names,) = [node.value for node in assigned if node.targets[0].id == "__all__"]
    return ast.literal_eval(names)


def accepts(function, keyword):
    """Whether a function or class takes an argument of that name; modules pass torch's on."""
    parameters = set(inspect.signature(function).parameters)
    if isinstance(function, type):
        for base in function.__mro__:
            parameters |= set(inspect.signature(base.__init__).parameters)
    return keyword in parameters


def used(code):
    """(name, keywords) of what a piece of code takes from ek."""
    for node in ast.walk(ast.parse(code)):
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute) and getattr(called.value, "id", None) == "ek":
            keywords = [k.arg for k in node.keywords] if isinstance(node, ast.Call) else []
            yield called.attr, keywords


def check_migration(line, section):
    for span in SPAN.findall(line):
        if not re.search(r"\bek\.", span):
            continue
        for name, keywords in used(span):
            if section == "From fast-LayerNorm-TF":
                assert name in tensorflow_names(), span
                continue
            assert hasattr(evenkeel.torch, name), span
            for keyword in keywords:
                assert accepts(getattr(evenkeel.torch, name), keyword), f"{span}: {keyword}"


SECTIONS = re.findall(r"^## (.+)$", MIGRATION.read_text(), re.M)


@pytest.mark.parametrize("section", SECTIONS)
def test_names_of_the_migration_exist(section):
    lines = list(rows(MIGRATION, section))
    assert lines
    for _, ours, *differences in lines:
        check_migration(" ".join([ours, *differences]), section)


def test_wrong_names_are_noticed():
    for span in ("`ek.batch_norm(x)`", "`ek.layer_norm(x, shape, epsilon=1)`"):
        with pytest.raises(AssertionError):
            check_migration(span, "From torch")
    check_migration("`ek.LayerNorm(size, eps=1e-5, elementwise_affine=True)`", "From torch")


# ---- figures ----


@pytest.fixture(scope="module")
def docs():
    """scripts/docs.py as a module."""
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WITH_FIGURES = [path for path in DOCUMENTS if GENERATED.search(path.read_text())]


@pytest.mark.parametrize("path", WITH_FIGURES, ids=name_of)
def test_figures_are_those_of_the_csv_files(path, docs):
    assert path.read_text() == docs.made_again(path.read_text(), name_of(path)), (
        "run scripts/docs.py"
    )


def test_charts_are_those_of_the_csv_files(docs):
    charts = {path: svg for path, svg in docs.documents().items() if path.suffix == ".svg"}
    assert len(charts) == 8  # two, for light and dark pages, wide and narrow
    for path, svg in charts.items():
        assert path.read_text() == svg, f"{path.name}: run scripts/docs.py"
        assert path.name in (ROOT / "README.md").read_text()


def test_typed_figures_are_noticed(docs):
    path = ROOT / "docs" / "performance.md"
    names = [name for name, _, text in GENERATED.findall(path.read_text()) if text]
    assert {"cpu", "gpu", "training", "overhead"} <= set(names)
    for name in names:
        begin = path.read_text().index(f"<!-- {name}: begin")
        head, tail = path.read_text()[:begin], path.read_text()[begin:]
        figure = re.search(r"\n\| [^|]*\|[^|\d]*(\d[\d.]*)", tail)  # of the first line
        typed = f"{head}{tail[: figure.start(1)]}99.99{tail[figure.end(1) :]}"
        assert docs.made_again(typed, "performance.md") != typed
        assert docs.made_again(typed, "performance.md") == path.read_text()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("<!-- gpu: begin (x) -->\n1.0\n<!-- gpu: end -->", "has no From"),
        ("<!-- gpu: begin (x) -->\nFrom `no.csv`: 1\n<!-- gpu: end -->", "there is no"),
        ("<!-- odd: begin (x) -->\nFrom `no.csv`: 1\n<!-- odd: end -->", "is none of"),
    ],
)
def test_figures_without_a_file_are_refused(docs, part, message):
    with pytest.raises(ValueError, match=message):
        docs.made_again(part, "odd.md")


def test_parts_that_are_not_measured_yet_stay_empty(docs):
    for name in ("residual", "cpu residual", "tensorflow cuda"):
        part = f"<!-- {name}: begin (x) -->\n<!-- {name}: end -->"
        assert docs.made_again(part, "new.md") == part


def test_each_device_has_its_part_of_the_tensorflow_guide(docs, tmp_path):
    """A rival that could not be measured, say XLA without its compiler, leaves a dash."""
    report = docs.tensorflow_report
    source = next((ROOT / "benchmarks" / "results").glob("tensorflow-cpu-*.csv"))
    rows = [row for row in docs.reports.read(source) if row["contender"] != report.KERAS_XLA]
    document = tmp_path / "tensorflow.md"
    document.write_text(report.DOCUMENT.read_text())
    report.rewrite(document, [row | {"device": "cuda", "machine": "GPU"} for row in rows], "f.csv")
    before, found = report.DOCUMENT.read_text(), document.read_text()
    begin = found.index("<!-- tensorflow cuda: begin")
    assert found[:begin] == before[: before.index("<!-- tensorflow cuda: begin")]
    assert "From `f.csv`: GPU, TensorFlow" in found[begin:]
    assert re.search(r"^\| 64 \| [\d.]+ \| [\d.]+ \| - \| [\d.]+ \|", found[begin:], re.M)
    for axis in ("units", "batch-size"):
        assert (tmp_path / "images" / f"tensorflow-cuda-{axis}.png").exists()


# ---- .github ----


def test_workflow_runs_what_everybody_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "make test"
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    # YAML reads the key `on` as true.
    assert set(workflow[True]) == {"push", "pull_request"}


@pytest.mark.parametrize(("name", "field"), [("bug", "check"), ("speed", "bench")])
def test_forms_ask_for_what_is_needed(name, field):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = {entry["id"]: entry for entry in form["body"]}
    assert fields[field]["validations"]["required"]
    assert f"python -m evenkeel {field}" in fields[field]["attributes"]["label"]
