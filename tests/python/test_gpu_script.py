"""scripts/gpu with a stand-in for everything it starts, and scripts/suite.py on small files of tests.

What scripts/gpu says about a run must be what happened: a part that fails, or a test process that dies,
must not be lost among those that passed.
"""

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

CASES = ROOT / "tests" / "cases" / "gpu_tiers.txt"

# Each program tells how it was called, shows the file that it was called with, if any, and fails if the text of
# FAIL is in the call.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  *name*) echo "NVIDIA Test GPU" ;;
  *driver_version*) echo "1.2.3" ;;
esac
for last; do :; done
[ ! -f "$last" ] || cat "$last"
[ -z "$FAIL" ] || case "$(basename "$0") $*" in *"$FAIL"*) exit 1 ;; esac
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree with scripts/gpu and stand-ins."""
    for path in (ROOT / "scripts" / "gpu", CASES):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    programs = ["build/gpu/evenkeel-bench"]
    programs += [f"bin/{name}" for name in ("nvidia-smi", "python3", "compute-sanitizer", "cmake")]
    for name in programs:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return tmp_path


def gpu(tree, *words, fail="", **environment):
    """The process that ran scripts/gpu, and the calls that it made."""
    calls = tree / "calls"
    calls.write_text("")
    done = subprocess.run(
        [str(tree / "scripts" / "gpu"), *words],
        env={
            "PATH": f"{tree / 'bin'}:/usr/bin:/bin",
            "CALLS": str(calls),
            "FAIL": fail,
            "EVENKEEL_COMMIT": "abc",
        }
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, calls.read_text()


def logs(tree):
    return sorted(path.name for path in (tree / "benchmarks" / "results").iterdir())


def test_every_command_is_in_the_usage(tree):
    done, _ = gpu(tree)
    assert done.returncode == 2
    for command in ("build", "test", "sanitize", "bench", "trainers", "tensorflow", "jax", "all"):
        assert f"scripts/gpu {command} " in done.stderr
    assert "set -euo" not in done.stderr


def test_the_whole_python_suite_runs(tree):
    done, calls = gpu(tree, "test")
    assert done.returncode == 0, done.stderr
    assert "python3 scripts/suite.py --jobs 4 tests/python\n" in calls
    assert "-k" not in calls
    (log,) = logs(tree)
    assert log.startswith("gpu-nvidia-test-gpu-")
    text = (tree / "benchmarks" / "results" / log).read_text()
    assert text == done.stdout
    for words in ("commit abc", "NVIDIA Test GPU, driver 1.2.3", "---- summary of test"):
        assert words in text


@pytest.mark.parametrize(
    ("command", "fail", "part"),
    [
        ("test", "basic.txt", "case lists"),
        ("test", "suite.py", "python"),
        ("test", "evenkeel info", "python"),
        ("sanitize", "racecheck", "racecheck"),
        ("bench", "preset host", "preset host"),
        ("trainers", "trainers.py", "trainers"),
        ("tensorflow", "suite.py", "tests"),
        ("tensorflow", "tensorflow_layers.py", "benchmark"),
        ("jax", "suite.py", "tests"),
        ("jax", "bench-jax", "benchmark"),
    ],
)
def test_a_part_that_fails_is_named(tree, command, fail, part):
    done, _ = gpu(tree, command, fail=fail)
    assert done.returncode == 1
    summary = done.stdout.split(f"---- summary of {command}\n")[1].splitlines()
    failed = [line.split("FAILED")[0].strip() for line in summary if "FAILED" in line]
    assert failed == [part]
    assert gpu(tree, command)[0].returncode == 0


def test_some_parts_of_a_command(tree):
    done, calls = gpu(tree, "bench", "preset modulation", "preset residual", "preset host")
    assert done.returncode == 0, done.stderr
    presets = [
        line.split("--preset ")[1].split()[0] for line in calls.splitlines() if "bench" in line
    ]
    assert presets == ["host", "residual", "modulation"]
    summary = done.stdout.split("---- summary of bench\n")[1].splitlines()
    assert [line.split("passed")[0].strip() for line in summary] == [
        "preset host",
        "preset residual",
        "preset modulation",
    ]
    done, calls = gpu(tree, "sanitize", "racecheck", fail="memcheck")
    assert done.returncode == 0 and "memcheck" not in calls
    for words in (["nonsense"], ["preset host", "nonsense"]):
        done, _ = gpu(tree, "bench", *words)
        assert done.returncode == 1
        assert "gpu: bench has no part 'nonsense'" in done.stdout


def test_the_sanitizers_share_the_cases(tree):
    done, calls = gpu(tree, "sanitize", JOBS="3")
    assert done.returncode == 0, done.stderr
    assert calls.count("compute-sanitizer --tool racecheck") == 3
    cases = [line for line in CASES.read_text().splitlines() if line and not line.startswith("#")]
    seen = [line for line in done.stdout.splitlines() if line in cases]
    assert sorted(seen) == sorted(4 * cases)


def test_figures_have_their_files(tree):
    _, calls = gpu(tree, "trainers")
    assert "--device cuda --commit abc --csv benchmarks/results/trainers-nvidia-test-gpu-" in calls
    _, calls = gpu(tree, "tensorflow", EVENKEEL_TENSORFLOW_PYTHON="cmake", EVENKEEL_RESULTS="out")
    assert "cmake scripts/suite.py --jobs 4 tests/tensorflow\n" in calls
    assert "cmake benchmarks/tensorflow_layers.py --device cuda --commit abc" in calls
    assert "--csv out/tensorflow-nvidia-test-gpu-" in calls
    _, calls = gpu(tree, "jax", EVENKEEL_JAX_PYTHON="cmake", EVENKEEL_RESULTS="out")
    assert "cmake scripts/suite.py --jobs 4 tests/jax\n" in calls
    assert "cmake -m evenkeel bench-jax --device cuda --commit abc" in calls
    assert "--csv out/jax-nvidia-test-gpu-" in calls


def test_all_goes_on_after_a_failure(tree):
    done, calls = gpu(tree, "all", fail="suite.py --jobs")
    assert done.returncode == 1
    for command in ("test", "sanitize", "bench", "trainers", "tensorflow", "jax"):
        assert f"---- summary of {command}\n" in done.stdout
    assert calls.index("--preset gpu") < calls.index("basic.txt")
    for name, title in (("tensorflow", "TensorFlow"), ("jax", "JAX")):
        done, _ = gpu(tree, "all", fail=f"import {name}")
        assert done.returncode == 0
        assert f"{name} is skipped: python3 has no {title}" in done.stdout
        assert f"---- summary of {name}" not in done.stdout


def test_a_gpu_or_a_build_that_is_missing_is_named(tree):
    (tree / "build/gpu/evenkeel-bench").unlink()
    done, _ = gpu(tree, "test")
    assert done.returncode == 1
    assert "run scripts/gpu build first" in done.stderr
    (tree / "bin/nvidia-smi").unlink()
    if shutil.which("nvidia-smi", path="/usr/bin:/bin") is None:
        assert "nvidia-smi is missing" in gpu(tree, "test")[0].stderr


# ---- scripts/suite.py ----

FILES = {
    "test_mixed.py": """
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2

@pytest.mark.parametrize("x", range(3))
def test_skipped(x):
    pytest.skip("needs two GPUs")

@pytest.fixture
def broken():
    raise RuntimeError

def test_error(broken):
    pass
""",
    "test_dies.py": "import os, signal\ndef test_end():\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "test_hangs.py": "import time\ndef test_end():\n    time.sleep(60)\n",
    "test_absent.py": "import pytest\npytest.importorskip('absent', reason='needs absent')\n",
    "test_unreadable.py": "import absent\n",
    "test_empty.py": "x = 1\n",
    "test_right.py": "def test_right():\n    pass\n",
    "test_cuda_many_elements.py": "def test_right():\n    pass\n",
}


@pytest.fixture
def suite(tmp_path):
    """Runs scripts/suite.py on some of the files."""

    def run(*names, jobs=1):
        for name in names:
            (tmp_path / name).write_text(FILES[name])
        words = ["--jobs", str(jobs), "--seconds", "20", *(str(tmp_path / name) for name in names)]
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "suite.py"), *words],
            env=os.environ | {"PYTEST_ADDOPTS": f"--rootdir={tmp_path}"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_suite_counts_and_names(suite):
    done = suite(
        "test_mixed.py", "test_absent.py", "test_right.py", "test_cuda_many_elements.py", jobs=3
    )
    assert done.returncode == 1, done.stdout
    *lines, last = done.stdout.splitlines()
    assert last.startswith("FAILED: 9 tests: 3 passed, 2 failed, 4 skipped, in ")
    assert "skipped:     3 x needs two GPUs" in lines
    assert "skipped:     1 x needs absent" in lines
    failed = [line.rpartition("::")[2] for line in lines if line.startswith("failed: ")]
    assert failed == ["test_wrong", "test_error"]
    assert "assert 1 == 2" in done.stdout
    assert "test_cuda_many_elements.py" in lines[0]  # alone, before the others


def test_suite_passes(suite):
    done = suite("test_right.py", "test_absent.py")
    assert done.returncode == 0, done.stdout
    assert "PASSED: 2 tests: 1 passed, 0 failed, 1 skipped" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_dies.py", "ended by SIGSEGV"),
        ("test_hangs.py", "not finished after 20 s"),
        ("test_unreadable.py", "test_unreadable"),
        ("test_empty.py", "has no tests"),
    ],
)
def test_suite_takes_no_silence_for_success(suite, name, words):
    done = suite(name, "test_right.py")
    assert done.returncode == 1, done.stdout
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert name.removesuffix(".py") in failed
    assert words in failed
    assert "1 passed, 1 failed" in done.stdout.splitlines()[-1]


def test_suite_that_skips_everything_fails(suite):
    done = suite("test_absent.py")
    assert done.returncode == 1
    assert "failed: no test passed" in done.stdout


def test_suite_and_ctest_use_the_same_python():
    rules = (ROOT / "tests" / "CMakeLists.txt").read_text()
    (names,) = re.findall(r"set\(composer_tests (.*)\)", rules)
    assert names.split() == runpy.run_path(str(ROOT / "scripts" / "suite.py"))["COMPOSERS"]
