"""`python -m evenkeel check`: it passes here, and a library that is wrong, writes past its tensors or crashes does not."""

import importlib.util
import json
import shlex
import shutil
import subprocess

import numpy as np
import pytest
import torch
from commands import run

from evenkeel import _abi, _native
from evenkeel.check import cases, judge, memory

ONE_OF_EACH = [
    "layer_norm rows=9 cols=65 x=bf16 activation=silu x_row_stride=70 y_row_stride=66 misalign=2",
    "layer_norm rows=4 cols=17 x=f32 in_place=dy",
    "layer_norm rows=4 cols=17 x=f32 mean=no rstd=no",
    "layer_norm rows=12 cols=19 inner_rows=4 x=f16 x_row_stride=57 x_outer_stride=19 in_place=x dx=f16",
    "rms_norm rows=6 cols=333 x=bf16 casting=llama offset=1 weight=bf16",
    "layer_norm rows=7 cols=64 x=f32 values=nan",
    "layer_norm rows=0 cols=7 x=f64",
    "layer_norm rows=9 cols=65 x=bf16 residual=f32 dsum=f32 dresidual=f32 x_row_stride=70 residual_row_stride=66 "
    "sum_row_stride=68 dsum_row_stride=67 dresidual_row_stride=69",
    "layer_norm rows=9 cols=33 x=bf16 residual=f32 dsum=f32 dresidual=f32 in_place=residual",
    "layer_norm rows=9 cols=33 x=f32 residual=f32 dsum=f32 in_place=x sum_row_stride=40",
    "rms_norm rows=6 cols=333 x=bf16 residual=bf16 dsum=bf16 in_place=sum casting=llama weight=bf16",
    "rms_norm rows=6 cols=40 x=f16 residual=bf16 sum=none dsum=f64 dresidual=f16",
    "layer_norm rows=6 cols=40 x=f32 residual=bf16 sum=f64 rstd=no",
    "group_norm samples=2 channels=12 spatial=35 groups=4 layout=nhwc x=f32 bias=none",
    "group_norm samples=2 channels=12 spatial=35 groups=4 layout=nchw x=bf16 y=f32 activation=silu",
]


def parse(text):
    (case,) = cases.parse_line(text)
    return case


@pytest.fixture(scope="module")
def library():
    return _abi.Evenkeel(_native.find("libevenkeel.so"))


def test_the_command_passes_and_says_where(tmp_path):
    path = tmp_path / "check.json"
    case = "layer_norm rows=5 cols=33 x=f32,bf16"
    result = run("-m", "evenkeel", "check", "--device", "cpu", "--case", case, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "evenkeel check: PASSED" in result.stdout
    assert _native.version() in result.stdout
    assert "2 cases" in result.stdout
    found = json.loads(path.read_text())
    assert found["passed"]
    names = [f"cpu:{target}" for target in _native.cpu_targets()] + ["reference"]
    if importlib.util.find_spec("jax") and _native.find("evenkeel_jax.so"):
        names.append("jax")
    assert [each["backend"] for each in found["backends"]] == names
    assert all(each["passed"] == 2 for each in found["backends"])
    assert found["info"]["evenkeel"].startswith(_native.version())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("text", ONE_OF_EACH)
def test_backends_are_right(library, backend, text):
    runner = judge.Runner(library, backend, memory.Host())
    assert judge.check_case(parse(text), runner) is None


@pytest.mark.parametrize("text", ONE_OF_EACH)
def test_tensors_of_a_device_serve_as_well(library, text):
    runner = judge.Runner(library, "cpu", memory.Device("cpu"))
    assert judge.check_case(parse(text), runner) is None


class Corrupt(judge.Runner):
    """Changes one element of one output, by a little."""

    output = None

    def run(self, case, pass_, buffers, used):
        super().run(case, pass_, buffers, used)
        outputs = {
            "forward": ("y", "sum", "mean", "rstd"),
            "backward": ("dx", "dresidual", "dweight", "dbias"),
        }
        if self.output in outputs[pass_]:
            values = buffers[self.output].read()
            place = tuple(size // 2 for size in values.shape)
            values[place] = values[place] * (1 + 2.0**-15) + 2.0**-15
            buffers[self.output].write(values)


OUTPUTS = ["y", "mean", "rstd", "dx", "dweight", "dbias"]
RESIDUAL = "layer_norm rows=9 cols=64 residual=f32 dsum=f32 dresidual=f32"


@pytest.mark.parametrize(
    ("norm", "output"),
    [
        *(("layer_norm rows=9 cols=64", output) for output in OUTPUTS),
        *(("group_norm samples=2 channels=12 spatial=35 groups=4", output) for output in OUTPUTS),
        *((RESIDUAL, output) for output in (*OUTPUTS, "sum", "dresidual")),
    ],
)
def test_one_wrong_element_is_found(library, norm, output):
    runner = Corrupt(library, "cpu", memory.Host())
    runner.output = output
    found = judge.check_case(parse(f"{norm} x=f32"), runner)
    assert f"{output}[" in found
    assert "1 of" in found


@pytest.mark.parametrize(("lost", "output"), [("residual", "y["), ("dsum", "dx[")])
def test_an_input_that_is_not_added_is_found(library, lost, output):
    class Forgetful(judge.Runner):
        def run(self, case, pass_, buffers, used):
            buffers[lost].write(0 * buffers[lost].read())
            super().run(case, pass_, buffers, used)

    found = judge.check_case(parse(f"{RESIDUAL} x=f32"), Forgetful(library, "cpu", memory.Host()))
    assert output in found


def test_a_sum_must_have_the_bits_of_the_addition(library):
    class Neighbour(judge.Runner):
        def run(self, case, pass_, buffers, used):
            super().run(case, pass_, buffers, used)
            values = buffers["sum"].read()
            values[2, 3] += 2.0**-7 * abs(values[2, 3])  # at most one ulp
            buffers["sum"].write(values)

    case = parse("rms_norm rows=4 cols=8 x=bf16 residual=f32 sum=bf16")
    found = judge.check_case(case, Neighbour(library, "cpu", memory.Host()))
    assert "sum[2, 3]" in found


def test_a_number_in_place_of_nan_is_found(library):
    class Cleaned(judge.Runner):
        def run(self, case, pass_, buffers, used):
            super().run(case, pass_, buffers, used)
            buffers["y"].write(np.nan_to_num(buffers["y"].read()))

    found = judge.check_case(
        parse("layer_norm rows=4 cols=8 values=nan"), Cleaned(library, "cpu", memory.Host())
    )
    assert "but must be nan" in found


BROKEN = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include "evenkeel/evenkeel.h"

static void* real(const char* name) {
  static void* library;
  if (!library) library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  return dlsym(library, name);
}
#define PASS(result, name, parameters, arguments) \\
  result name parameters { return ((result(*) parameters)real(#name)) arguments; }
PASS(ek_status, ek_forward_workspace, (const ek_problem* p, const ek_forward_args* a, const ek_execution* e, size_t* n), (p, a, e, n))
PASS(ek_status, ek_backward_workspace, (const ek_problem* p, const ek_backward_args* a, const ek_execution* e, size_t* n), (p, a, e, n))
PASS(ek_status, ek_backward, (const ek_problem* p, const ek_backward_args* a, const ek_execution* e), (p, a, e))
PASS(const char*, ek_last_error, (void), ())
PASS(const char*, ek_version, (void), ())
PASS(const char*, ek_backend_name, (int32_t i), (i))
PASS(const char*, ek_cpu_target_name, (int32_t i), (i))

ek_status ek_forward(const ek_problem* p, const ek_forward_args* a, const ek_execution* e) {
  ek_status status = ((ek_status(*)(const ek_problem*, const ek_forward_args*, const ek_execution*))real("ek_forward"))(p, a, e);
  if (p->cols == 13) { DEFECT }
  return status;
}
"""
DEFECTS = {
    "wrong": ("((float*)a->y.data)[5] += 0.001f;", "y[0, 5] is"),
    "past the end": ("((float*)a->y.data)[3 * 13] = 1;", "the guards around it were written to"),
    "crash": ("abort();", "the process ended here (SIGABRT)"),
}


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_library_fails_with_its_case(tmp_path, defect):
    code, words = DEFECTS[defect]
    source = tmp_path / "broken.c"
    source.write_text(BROKEN)
    include = cases.folder().parent.parent / "include"
    real = _native.find("libevenkeel.so").resolve()
    flags = [f'-DREAL="{real}"', f"-DDEFECT={code}", f"-I{include}", "-shared", "-fPIC"]
    compiled = ["cc", *flags, str(source), "-o", str(tmp_path / "libevenkeel.so"), "-ldl"]
    subprocess.run(compiled, check=True)

    case = "layer_norm rows=3 cols=12,13,14 x=f32"
    result = run(
        *("-m", "evenkeel", "check", "--backend", "reference", "--case", case),
        EVENKEEL_LIBRARY_PATH=str(tmp_path),
    )
    assert result.returncode == 1, result.stdout
    assert "evenkeel check: FAILED" in result.stdout
    assert "reference: layer_norm rows=3 cols=13 x=f32" in result.stdout
    assert words in result.stdout
    (again,) = (line for line in result.stdout.splitlines() if line.startswith("  again:"))
    arguments = shlex.split(again)[2:]
    again = run(*arguments, EVENKEEL_LIBRARY_PATH=str(tmp_path))
    assert again.returncode == 1
    assert words in again.stdout
    assert run(*arguments).returncode == 0  # the real one


def test_all_lists_are_read():
    found = cases.read()
    texts = [case.text for case in found]
    assert len(texts) == len(set(texts)) > 2000
    for text in texts:
        assert parse(text).text == text


def test_defaults_follow_the_line():
    case = parse("rms_norm rows=2 cols=3 x=bf16 in_place=dy dy=f32 dy_row_stride=5 y=bf16")
    assert (case["y"], case["dx"], case["bias"], case["dbias"], case["mean"]) == (
        "bf16",
        "f32",
        "none",
        "none",
        "no",
    )
    assert case["dx_row_stride"] == 5
    assert case["y_row_stride"] == 0
    assert parse("layer_norm rows=2 cols=3 weight=none")["dweight"] == "none"


def test_defaults_with_a_residual():
    case = parse("rms_norm rows=2 cols=3 x=bf16 residual=f32 residual_row_stride=5 dsum=f16")
    assert (case["sum"], case["y"], case["dx"]) == ("f32", "bf16", "bf16")
    assert (case["sum_row_stride"], case.normalized_dtype) == (0, "f32")
    case = parse("rms_norm rows=2 cols=3 x=bf16 residual=f32 in_place=sum dsum=f16 x_row_stride=5")
    assert (case["sum"], case["dx"], case["sum_row_stride"]) == ("bf16", "f16", 5)
    case = parse("rms_norm rows=2 cols=3 residual=f64 sum=none")
    assert (case.normalized_dtype, case.statistics_dtype) == ("f64", "f64")
    assert case.computes_in_f64("forward") and case.computes_in_f64("backward")
    assert parse("layer_norm rows=2 cols=3 dsum=f32")["sum"] == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "cpu:AVX9"], ["cpu:AVX9", "reference"]),
        (["--case", "layer_norm rows=2"], ["layer_norm needs cols"]),
        (["--case", "batch_norm rows=2"], ["batch_norm", "rms_norm"]),
        (["--case", "layer_norm rows=2 cols=3 x=f8"], ["x=f8", "bf16"]),
        (["--case", "layer_norm rows=2 cols=three"], ["cols=three", "an integer"]),
        (["--case", "layer_norm rows=2 cols=3 color=red"], ["color=red", "activation"]),
    ],
)
def test_bad_arguments_name_what_is_allowed(arguments, words):
    result = run("-m", "evenkeel", "check", *arguments)
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif("cuda" not in _native.backends(), reason="the library has no CUDA backend")
def test_nothing_checked_is_not_passed():
    result = run("-m", "evenkeel", "check", "--device", "cuda")
    assert result.returncode == 1
    assert "skipped torch finds no CUDA device" in result.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("text", ONE_OF_EACH)
def test_cuda_is_right(library, text):
    runner = judge.Runner(library, "cuda", memory.Device("cuda"))
    assert judge.check_case(parse(text), runner) is None


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_rounding_is_that_of_the_hardware(dtype):
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    generator = np.random.default_rng(0)
    # Numbers of float32, so that torch rounds once; all exponents, subnormal numbers and overflow.
    values = generator.standard_normal(20000) * 2.0 ** generator.integers(-150, 120, 20000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 3.3895e38, 3.4e38, 1 + 2.0**-8]
    values = np.concatenate([values, special]).astype(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        rounded = memory.round_to(values, dtype)
    expected = torch.from_numpy(values).float().to(kinds[dtype]).double().numpy()
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(memory.decode(memory.encode(rounded, dtype), dtype), rounded)


def test_missing_numpy_names_the_extra():
    program = """
import sys
sys.modules["numpy"] = None
import evenkeel.__main__
evenkeel.__main__.main(["check"])
"""
    result = run("-c", program)
    assert result.returncode == 1
    assert "needs numpy" in result.stderr
    assert "evenkeel[bench]" in result.stderr
