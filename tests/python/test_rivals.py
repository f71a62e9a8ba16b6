"""benchmarks/rivals.py on small shapes: what its contenders compute, what its limit moves, and the tables that come of it.

oneDNN is in the rivals' environment alone; there benchmarks/accuracy.py compares it in the same way.
"""

import csv
import pathlib
import sys

import pytest
import torch

from evenkeel import _abi, _native
from evenkeel.bench import measure

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import accuracy
import cpu_contenders
import problems
import rivals
import table

LIBRARY = _native.find("libevenkeel.so")
THREADS = 2
DTYPES = ("f32", "bf16", *problems.WITH_RESIDUAL)
CASES = """
layer_norm rows=8,12 cols=64 x=f32
rms_norm rows=8 cols=64 x=f32
group_norm samples=2 channels=64 spatial=16 groups=32 x=f32
"""
# Of the largest exact value; sums of bf16 in bf16 are torch's way to a weight's gradient.
TOLERANCES = {"f32": 1e-5, "bf16": 2e-2}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Figures need not be good here."""
    monkeypatch.setattr(measure, "PAUSE", 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contenders_are_right(dtype, monkeypatch):
    small = [problems.Problem(op, rows=33, cols=200) for op in ("layer_norm", "rms_norm")]
    monkeypatch.setattr(accuracy, "PROBLEMS", small)
    libraries = {
        "evenkeel": accuracy.outputs_of_evenkeel(_abi.Evenkeel(LIBRARY), THREADS, None),
        "torch": accuracy.outputs_of_torch(True),
        "torch, f32 weight": accuracy.outputs_of_torch(False),
    }
    found = list(accuracy.figures(libraries, dtype, 0.25))
    assert {"y", "dx", "dweight", "dbias"} <= {row["output"] for row in found}
    assert ("sum" in {row["output"] for row in found}) == ("+" in dtype)
    for row in found:
        assert float(row["largest"]) < TOLERANCES["bf16" if "bf16" in dtype else "f32"], row


@pytest.fixture(scope="module")
def ceiling():
    return cpu_contenders.Ceiling(THREADS)


def words(tensor, half=False):
    """As the ceiling sees a tensor: unsigned numbers."""
    if half:
        return tensor.view(torch.int16).long() & 0xFFFF
    return tensor.view(torch.int32).long() & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", DTYPES)
def test_limit_moves_every_byte_of_the_pass(dtype, ceiling):
    t = problems.Tensors(problems.Problem("layer_norm", rows=301, cols=256), dtype)
    half = t.x.dtype != t.dx.dtype
    x, dy = words(t.x, half), words(t.dy, half)
    ceiling.prepare(t, backward=False)()
    if t.adds:
        total = (x + words(t.residual)) & 0xFFFFFFFF
        assert torch.equal(words(t.dx), total)
        assert torch.equal(words(t.y, half), total & 0xFFFF if half else total)
    else:
        assert torch.equal(words(t.y), x)
    gradients = [dy, words(t.sum), words(t.dsum)] if t.adds else [x, dy]
    ceiling.prepare(t, backward=True)()
    assert torch.equal(words(t.dx), sum(gradients) & 0xFFFFFFFF)


def test_limit_leaves_the_sum_for_the_backward_pass(ceiling):
    t = problems.Tensors(problems.Problem("rms_norm", rows=8, cols=64), "bf16+f32")
    before = t.sum.clone()
    for limit in (ceiling.prepare, cpu_contenders.torch_limit):
        for backward in (False, True):
            limit(t, backward=backward)()
    assert torch.equal(t.sum, before)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures the list above with some options; gives the path of the CSV file."""

    def run(name, *words):
        (tmp_path / "cases.txt").write_text(CASES)
        path = tmp_path / name
        options = ("--library", str(LIBRARY), "--cases", str(tmp_path / "cases.txt"))
        options += ("--contenders", "evenkeel,torch", "--csv", str(path), "--worker", "1")
        monkeypatch.setattr(sys, "argv", ["rivals.py", *options, "--seconds", "0", *words])
        assert rivals.work(rivals.arguments())
        return path

    return run


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_residuals_are_told_by_the_dtype(measured, capsys):
    rows = read(measured("cpu-residual-test.csv", "--residual"))
    assert list(rows[0]) == rivals.COLUMNS
    assert {row["dtype"] for row in rows} == set(problems.WITH_RESIDUAL)
    assert {row["op"] for row in rows} == {"layer_norm", "rms_norm"}  # group norm takes none
    assert {row["contender"] for row in rows if row["dtype"] == "bf16+f32"} == {
        *(cpu_contenders.LIMIT, cpu_contenders.TORCH_LIMIT, "evenkeel", "torch")
    }
    assert "layer_norm 8x64 bf16+bf16 backward" in capsys.readouterr().out


def test_parts_are_the_whole_list(measured):
    few = ("--dtypes", "f32", "--passes", "forward")
    whole = [(row["op"], row["shape"]) for row in read(measured("whole.csv", *few))]
    for which in ("1/3", "2/3", "3/3"):
        path = measured("parts.csv", *few, "--part", which)
    parts = [(row["op"], row["shape"]) for row in read(path)]
    assert sorted(parts) == sorted(whole)
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(SystemExit):
            measured("wrong.csv", "--part", wrong)


def test_c_interface_stands_beside(measured, capsys):
    path = measured("cpu-test.csv", "--contenders", "evenkeel,torch,C interface")
    found = {row["contender"] for row in read(path) if row["dtype"] == "bf16"}
    assert found == {
        *(cpu_contenders.LIMIT, cpu_contenders.TORCH_LIMIT, cpu_contenders.C_INTERFACE),
        *("evenkeel", "evenkeel, bf16 weight", "torch", "torch, f32 weight"),
    }
    assert "C interface" in capsys.readouterr().out


def test_plain_norms_stay_the_default(measured):
    rows = read(measured("cpu-test.csv"))
    assert {row["dtype"] for row in rows} == {"f32", "bf16"}
    assert {row["op"] for row in rows} == {"layer_norm", "rms_norm", "group_norm"}


def test_table_of_residuals(measured, monkeypatch, tmp_path):
    path = measured("cpu-residual-test-2026-01-01.csv", "--residual")
    document = tmp_path / "performance.md"
    document.write_text(table.DOCUMENT.read_text())
    before = document.read_text()
    monkeypatch.setattr(table, "DOCUMENT", document)
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    begin, end = "<!-- cpu residual: begin (benchmarks/table.py) -->\n", "<!-- cpu residual: end"
    head, rest = document.read_text().split(begin)
    part, tail = rest.split(end)
    assert (head, tail) == (before.split(begin)[0], before.split(end)[1])
    assert part.startswith(f"From `{path.name}`: ")
    heads = [
        f"{dtype} {pass_}" for dtype in problems.WITH_RESIDUAL for pass_ in ("forward", "backward")
    ]
    assert " | ".join(heads) in part
    lines = [line.split(" | ") for line in part.splitlines() if "_norm" in line]
    assert [line[0] for line in lines] == [
        f"| {norm}" for norm in ("layer_norm 8x64", "layer_norm 12x64", "rms_norm 8x64")
    ]
    assert all(len(line) == 7 and "-" not in line[1:] for line in lines)
    assert "of 18 lines" in part


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("cpu-amd-2026-11-16.csv", "cpu"),
        ("cpu-residual-amd-2026-11-18.csv", "cpu residual"),
        ("residual-h200-2026-11-18.csv", "residual"),
        ("odd-2026-11-18.csv", None),
    ],
)
def test_files_find_their_table(file, name):
    assert table.table_of(pathlib.Path(file)) == name
