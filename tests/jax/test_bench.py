"""`python -m evenkeel bench-jax`: every line beside its rivals, and what is wrong is left out by name."""

import csv

import pytest

from evenkeel.__main__ import main
from evenkeel.bench import jax_norms
from evenkeel.bench.jax_lines import EVENKEEL, FLAX, FORMULAS

LINES = {"layer_norm": 10, "rms_norm": 10, "group_norm": 6}  # of both passes


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The command on small arrays: a function from its arguments to the rows of its file."""
    monkeypatch.setattr(jax_norms, "ROWS", {"cpu": [(6, 96)], "cuda": [(6, 96)]})
    monkeypatch.setattr(jax_norms, "IMAGES", {"cpu": [(2, 4, 4, 64)], "cuda": [(2, 4, 4, 64)]})
    monkeypatch.setattr(jax_norms.measure, "keep_pages", lambda: None)
    path = tmp_path / "figures.csv"

    def run(*arguments):
        main(["bench-jax", "--seconds", "0.01", "--csv", str(path), "--commit", "abc", *arguments])
        with path.open() as file:
            return list(csv.DictReader(file))

    return run


@pytest.mark.parametrize("norm", LINES)
def test_every_line_has_its_rivals(bench, norm, capsys):
    rows = bench(norm)
    for contender in (EVENKEEL, FORMULAS, FLAX):
        assert sum(row["contender"] == contender for row in rows) == LINES[norm], contender
    assert {row["op"] for row in rows} == {norm} and {row["commit"] for row in rows} == {"abc"}
    assert all(float(row["time_us"]) > 0 for row in rows)
    printed = capsys.readouterr()
    assert printed.out.count(f"{norm} ") == LINES[norm]
    assert all("Pallas is left out" in line for line in printed.err.splitlines())


def test_wrong_results_are_left_out(bench, monkeypatch, capsys):
    monkeypatch.setattr(jax_norms, "flax_layer", lambda norm, x, *parameters: x)
    rows = bench("rms_norm")
    assert {EVENKEEL, FORMULAS} <= {row["contender"] for row in rows}
    assert FLAX not in {row["contender"] for row in rows}
    assert capsys.readouterr().err.count("flax is left out: its results are wrong") == 10


def test_a_gpu_that_is_not_there(bench, monkeypatch, capsys):
    monkeypatch.setattr(jax_norms.jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit):
        bench("--device", "cuda")
    assert "--device cuda: JAX sees no GPU" in capsys.readouterr().err
