"""`python -m evenkeel check` where JAX is: the case lists by XLA."""

import os

import pytest
from commands import program

if os.environ["EVENKEEL_TEST_DEVICE"] != "cpu":
    pytest.skip("check calls XLA's CPU only", allow_module_level=True)

from evenkeel import _abi
from evenkeel.check import cases, cli, jax_runner, judge

ONE_OF_EACH = [
    "layer_norm rows=5 cols=33 x=bf16 weight=f32 bias=f16 activation=silu",
    "layer_norm rows=4 cols=16 x=f16 residual=f32 sum=f32 dsum=f32 dresidual=f32",
    "rms_norm rows=7 cols=64 x=f64 weight=f32 offset=1 bias=none dbias=none",
    "rms_norm rows=3 cols=40 x=bf16 weight=bf16 casting=llama bias=none dbias=none",
    "rms_norm rows=3 cols=40 weight=none bias=none dweight=none dbias=none values=nan",
    "group_norm samples=2 channels=12 spatial=9 groups=3 x=f32",
    "group_norm samples=2 channels=12 spatial=9 groups=3 layout=nhwc x=bf16 activation=silu",
    "layer_norm rows=0 cols=8",
    # XLA's own threads flush what is denormal.
    "layer_norm rows=5 cols=33 x=bf16 residual=bf16 dsum=f32 values=denormal",
    "layer_norm rows=700 cols=400 x=bf16 residual=bf16 values=denormal pass=forward",
]


@pytest.mark.parametrize("text", ONE_OF_EACH)
def test_cases_pass(text):
    (case,) = cases.parse_line(text)
    assert judge.check_case(case, jax_runner.JaxRunner()) is None


def test_wrong_results_are_found(monkeypatch):
    (case,) = cases.parse_line(ONE_OF_EACH[0])
    monkeypatch.setitem(jax_runner.DTYPES, "f16", "bfloat16")  # the bias is read as another type
    assert judge.check_case(case, jax_runner.JaxRunner()).startswith("forward: y")


def test_what_xla_does_not_have_is_declined():
    for text, reason in (
        ("layer_norm rows=4 cols=8 x_row_stride=9", "no strides"),
        ("layer_norm rows=4 cols=8 weight=none dweight=f32", "no gradient of a weight"),
    ):
        (case,) = cases.parse_line(text)
        with pytest.raises(_abi.UnsupportedError, match=reason):
            judge.check_case(case, jax_runner.JaxRunner())


def test_the_command_has_it():
    assert list(cli.backends("cpu"))[-1] == "jax"
    assert "jax" not in cli.backends("cuda")
    source = "import sys; from evenkeel.__main__ import main; sys.exit(main(sys.argv[1:]))"
    case = ("--backend", "jax", "--case", ONE_OF_EACH[1])
    text = program(source, "check", *case)
    assert "jax  pass    1 passed" in text and "evenkeel check: PASSED" in text
