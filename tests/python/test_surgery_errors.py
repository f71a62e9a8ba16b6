"""Calls of the surgery that are wrong, and the words for precision: each error, with nothing changed.

All four functions share their checks, so most errors are asked of all that take the argument.
"""

import contextlib
import enum
import warnings

import pytest
import torch
from handwritten import Llama
from surgery_support import (
    KINDS,
    close,
    every_device,
    net,
    reasons,
    same_values,
    snapshot,
    values,
    with_twin,
)
from torch import nn

import evenkeel.torch as ek

device = every_device

LOW_PRECISION = {
    nn.LayerNorm: ek.apply_low_precision_layernorm,
    nn.GroupNorm: ek.apply_low_precision_groupnorm,
}
WITH_OPTIMIZERS = [ek.apply_fused_layernorm, *LOW_PRECISION.values()]
ALL = [ek.fuse, *WITH_OPTIMIZERS]

every_function = pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
with_optimizers = pytest.mark.parametrize("function", WITH_OPTIMIZERS, ids=lambda f: f.__name__)
low_precision = pytest.mark.parametrize(
    ("kind", "function"), LOW_PRECISION.items(), ids=lambda f: f.__name__
)


@contextlib.contextmanager
def refused(error, match, model):
    """Checks that the block raises, and leaves the model as it was."""
    before = snapshot(model)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert snapshot(model) == before


# ---- the model ----


@every_function
@pytest.mark.parametrize(
    "wrong",
    [None, "model", 3, [nn.LayerNorm(8)], nn.LayerNorm, torch.ones(3), {"model": nn.LayerNorm(8)}],
    ids=lambda wrong: type(wrong).__name__,
)
def test_no_module(function, wrong):
    with pytest.raises(TypeError, match=rf"model.*{type(wrong).__name__}"):
        function(wrong)


@every_function
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_model(function):
    model = torch.jit.script(nn.Sequential(nn.LayerNorm(8)))
    with pytest.raises(ValueError, match="Fuse the model that it was made of"):
        function(model)


@every_function
def test_model_is_required(function):
    with pytest.raises(TypeError):
        function()


def test_options_go_by_keyword(device):
    model = net(device)
    with refused(TypeError, "positional", model):
        ek.fuse(model, True)
    with refused(TypeError, "unexpected keyword", model):
        ek.fuse(model, batch_norm=True)


# ---- include and exclude ----


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    "wrong",
    [3, [3], ["*", None], True, 1.5, nn.LayerNorm(8), [b"norm"], [["*"]]],
    ids=lambda wrong: str(wrong),
)
def test_wrong_entry(argument, wrong, device):
    model = net(device)
    entry = wrong[-1] if isinstance(wrong, list) else wrong
    with refused(TypeError, f"(?s){argument}.*pattern.*class", model) as caught:
        ek.fuse(model, **{argument: wrong})
    assert type(entry).__name__ in str(caught.value)


def test_strict_warnings_come_before_the_first_change(device):
    """Where warnings are errors, they are failures like any other."""
    model = net(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(UserWarning, "nowhere", model):
            ek.fuse(model, exclude="nowhere")
        with refused(UserWarning, "no norm was replaced", model):
            ek.fuse(model, exclude="*")


# ---- optimizers ----


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@with_optimizers
@pytest.mark.parametrize(
    "wrong",
    [
        3,
        "adam",
        torch.optim.SGD,
        {"optimizer": 1},
        [None],
        [nn.LayerNorm(8)],
        [torch.nn.Parameter(torch.ones(3))],
    ],
    ids=str,
)
def test_no_optimizer(function, wrong, device):
    model = net(device)
    with refused(TypeError, "optimizers", model):
        function(model, optimizers=wrong)


@with_optimizers
def test_optimizer_of_another_model(function, device):
    model, other = net(device), net(device)
    for optimizers in (sgd(other), [sgd(model), sgd(other)]):
        with refused(ValueError, "optimizer", model):
            function(model, optimizers=optimizers)


@with_optimizers
@pytest.mark.parametrize(
    "make", [lambda _: None, sgd, lambda m: [sgd(m)], lambda m: (sgd(m), sgd(m)), lambda _: []]
)
@pytest.mark.filterwarnings("ignore:evenkeel")
def test_right_optimizers(function, make, device):
    model = net(device)
    optimizers = make(model)
    before = repr(optimizers)
    function(model, optimizers=optimizers)
    assert repr(optimizers) == before


def test_optimizer_of_a_part(device):
    model = net(device)
    assert ek.apply_fused_layernorm(model, sgd(model.head)).replaced


# ---- what each function replaces ----


@with_optimizers
@pytest.mark.filterwarnings("ignore:evenkeel.*no norm was replaced")
def test_functions_of_one_kind(function, device):
    model, twin = with_twin(net(device))
    report = function(model)
    kind = nn.GroupNorm if "group" in function.__name__ else nn.LayerNorm
    assert {entry.original for entry in report.replaced} == {kind}
    skipped = {entry.name for entry in report.skipped}
    assert skipped | {entry.name for entry in report.replaced} == {
        name for name, module in twin.named_modules() if type(module) in (*KINDS, Llama)
    }
    assert reasons(report)["final"] == "rms_norm=False"
    close(model(values(device)), twin(values(device)))


# ---- precision ----


class Precision(enum.Enum):
    """As Composer writes it."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"


@pytest.mark.parametrize(
    "precision",
    [None, "amp", "amp_bf16", "amp_fp16", Precision.AMP_BF16, Precision.AMP_FP16],
    ids=str,
)
@low_precision
def test_mixed_precision(kind, function, precision, device):
    model, twin = with_twin(net(device))
    report = function(model, precision)
    assert {entry.original for entry in report.replaced} == {kind}
    norm = report.replaced[0].module
    x = values(device)
    same_values(norm(x), twin.get_submodule(report.replaced[0].name)(x))
    with torch.autocast(device, torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "fp16", Precision.FP32], ids=str)
@low_precision
def test_other_precisions_have_no_effect(kind, function, precision, device):
    model = net(device)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = function(model, precision)
    assert snapshot(model) == before
    assert report.replaced == ()
    word = getattr(precision, "value", precision)
    expected = f"precision {word} is not mixed: nothing to lower"
    for entry in report.skipped:
        if entry.original is kind:
            assert entry.reason == expected
    assert kind in {entry.original for entry in report.skipped}
    report.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "precision",
    ["", "bf16", "amp_fp8", "AMP", "16-mixed", Precision.AMP_FP8, 16, torch.bfloat16, True],
    ids=str,
)
@low_precision
def test_unknown_precision(kind, function, precision, device):
    model = net(device)
    with refused((ValueError, TypeError), "precision.*amp_bf16", model):
        function(model, precision)
    if isinstance(precision, str):
        with pytest.raises(ValueError) as caught:
            function(model, precision=precision)
        assert repr(precision) in str(caught.value)
        for word in ("amp", "amp_fp16", "amp_bf16", "fp32", "fp16"):
            assert word in str(caught.value)
