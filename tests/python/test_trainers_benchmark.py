"""benchmarks/trainers.py in small form on the CPU: what it fits, judges, skips by name and writes."""

import csv
import os
import pathlib
import sys

import pytest
from commands import run
from trainers_support import needs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import trainers
from trainer_fits import Fit


def benchmark(*words, **environment):
    return run(
        trainers.__file__, "--device", "cpu", "--tiny", "--steps", "40", *words, **environment
    )


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@needs("accelerate")
def test_fits_are_written_with_their_curves(tmp_path):
    path = tmp_path / "trainers.csv"
    words = ["--trainers", "accelerate", "--csv", str(path), "--commit", "abc"]
    result = benchmark(*words)
    assert result.returncode == 0, result.stderr
    assert "1 cases ran, 0 failed, 1 were skipped" in result.stdout
    reason = "float16 with a gradient scaler needs a GPU"
    assert f"skipped: accelerate fp16 fuse gpt: {reason}" in result.stdout
    (row,) = read(path)
    assert (row["trainer"], row["mode"], row["commit"], row["replaced"]) == (
        *("accelerate", "bf16", "abc"),
        "5",
    )
    assert row["verdict"] == "ok"
    assert float(row["steps_per_s_fused"]) > 0
    curve = read(tmp_path / "trainers-curves.csv")
    assert [int(each["step"]) for each in curve] == list(range(5, 41, 5))
    for name in ("unfused", "fused"):
        losses = [float(each[name]) for each in curve]
        assert losses[-1] < losses[0]
        assert sum(losses[-4:]) / 4 == pytest.approx(float(row[f"loss_{name}"]), abs=1e-4)


def test_what_is_not_installed_is_skipped_by_name(tmp_path):
    absent = dict.fromkeys(["lightning", "pytorch_lightning", "composer"])
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update({absent})\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    result = benchmark(
        "--trainers",
        "composer,lightning",
        PYTHONPATH=path,
        EVENKEEL_COMPOSER_PYTHON=sys.executable,
    )
    assert result.returncode == 1  # nothing ran
    assert "skipped: composer amp_bf16 FusedLayerNorm, init gpt: needs composer" in result.stdout
    reason = "needs lightning or pytorch_lightning"
    assert f"skipped: lightning 16-mixed Fuse conv: {reason}" in result.stdout
    assert "0 cases ran, 0 failed, 16 were skipped" in result.stdout


def test_a_python_for_composer_that_fails_is_a_failure():
    result = benchmark("--trainers", "composer", EVENKEEL_COMPOSER_PYTHON="/bin/false")
    assert result.returncode == 1
    assert "FAILED: composer: /bin/false ended with status 1" in result.stdout


FALLING = [4.0 - 0.01 * step for step in range(60)]


def judged(**changes):
    case = next(trainers.composer_cases())
    fits = {
        "unfused": Fit(FALLING, 1.0, 0),
        "fused": Fit([loss + 0.01 for loss in FALLING], 2.0, 5),
        "resumed": Fit(FALLING[30:], 2.0, 5),
    } | changes
    return trainers.Result(case, "1.0", **fits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"resumed": None}, ""),
        ({"fused": Fit(FALLING, 1.0, 0)}, "no norm was replaced"),
        ({"fused": Fit([x + 0.06 for x in FALLING], 1.0, 5)}, "the loss is off by +0.0600"),
        ({"fused": Fit([float("nan")] * 60, 1.0, 5)}, "the loss is off by +nan"),
        ({"resumed": Fit([x - 0.06 for x in FALLING], 1.0, 5)}, "the resumed loss is off by -0.07"),
        ({"unfused": Fit(FALLING[::-1], 1.0, 0)}, "the unfused loss did not fall"),
    ],
    ids=str,
)
def test_judgement(changes, message):
    wrong = judged(**changes).wrong()
    assert message in wrong
    assert bool(wrong) == bool(message)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("--steps=42", "multiple of 5, at least 40"),
        ("--trainers=keras", "hugging-face"),
        ("--modes=fp8", "bf16-mixed"),
    ],
)
def test_bad_options(option, allowed, capsys):
    with pytest.raises(SystemExit) as error:
        trainers.main(["--device=cpu", option])
    assert error.value.code == 2
    assert allowed in capsys.readouterr().err
