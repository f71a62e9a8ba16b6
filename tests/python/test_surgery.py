"""fuse: which modules it replaces, which it leaves alone and why, and what lives on in them.

A fused model is compared with a copy that was left alone: results, gradients, and everything that a
user may have hung on a module.
"""

import re
import warnings

import pytest
import torch
from handwritten import Gated, Llama, Renamed, RenamedTwice, Rms, Scaled
from surgery_support import (
    KINDS,
    NAMES,
    WIDTH,
    close,
    every_device,
    fused,
    names_with,
    net,
    randomize,
    reasons,
    replaced_names,
    result_and_gradients,
    same_values,
    snapshot,
    values,
    with_twin,
)
from torch import nn
from torch.nn.utils import parametrize

import evenkeel.torch as ek
from support import name_of

device = every_device


# ---- what is replaced ----


def test_all_norms_of_a_model(device):
    model, twin = with_twin(net(device))
    report = ek.fuse(model)
    assert report.model is model
    assert replaced_names(report) == NAMES
    for name, module in model.named_modules():
        before = type(twin.get_submodule(name))
        assert isinstance(module, before)
        if before in KINDS:
            assert type(module) is KINDS[before]
        elif before is not Llama:
            assert type(module) is before
    for entry in report.replaced:
        assert entry.module is model.get_submodule(entry.name)
        assert entry.names == (entry.name,)
        assert entry.original is type(twin.get_submodule(entry.name))
    recipes = {entry.original: entry.recipe for entry in report.replaced}
    assert (recipes[nn.LayerNorm], recipes[nn.RMSNorm]) == ("layer_norm", "rms_norm")
    assert recipes[Llama].startswith("rms_norm") and "llama" in recipes[Llama]
    assert not report.skipped
    x = values(device)
    y, gradients = result_and_gradients(model, x)
    expected, expected_gradients = result_and_gradients(twin, x)
    close(y, expected)
    for name, gradient in expected_gradients.items():
        close(gradients[name], gradient, 1e-4)


@pytest.mark.parametrize(
    ("make", "shape"),
    {
        "layer norm": (lambda: nn.LayerNorm(WIDTH), (4, WIDTH)),
        "layer norm, two dimensions": (lambda: nn.LayerNorm((3, 5)), (4, 3, 5)),
        "layer norm, no bias": (lambda: nn.LayerNorm(8, eps=1e-3, bias=False), (4, 8)),
        "layer norm, plain": (lambda: nn.LayerNorm(8, elementwise_affine=False), (4, 8)),
        "rms norm": (lambda: nn.RMSNorm(WIDTH), (4, WIDTH)),
        "rms norm, plain": (lambda: nn.RMSNorm(8, 1e-3, elementwise_affine=False), (4, 8)),
        "group norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 5)),
        "group norm, plain": (lambda: nn.GroupNorm(4, 8, affine=False), (4, 8, 3, 2)),
    }.values(),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_forms_of_torchs_norms_as_root(make, shape, dtype, device):
    model, twin = with_twin(randomize(make()).to(device, dtype))
    (entry,) = ek.fuse(model).replaced
    assert (entry.name, entry.names, entry.module) == ("", ("",), model)
    assert type(model) is KINDS[type(twin)]
    x = values(device, dtype, shape=shape)
    # torch's group norm for CUDA rounds means and inverse deviations to x's dtype, that for CPUs does not.
    same_values(model(x).cpu(), twin.cpu()(x.cpu()))


@pytest.mark.parametrize("make", [Renamed, RenamedTwice])
def test_subclass_with_torchs_forward_stays_one(make, device):
    model, twin = with_twin(randomize(make(WIDTH)).to(device))
    report = ek.fuse(model)
    assert isinstance(model, make) and type(model) is not make
    assert report.replaced[0].original is make
    same_values(model(values(device)), twin(values(device)))
    model.reset()
    assert torch.equal(model.weight, torch.ones_like(model.weight))
    report.undo()
    assert type(model) is make


def test_decay_filters_still_match(device):
    """Weights of norms are kept from weight decay by isinstance or by the name of the class."""

    def kept(model):
        kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, Llama)
        return [name for name, module in model.named_modules() if isinstance(module, kinds)]

    model, twin = with_twin(net(device))
    assert kept(fused(model)) == kept(twin)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_norm": False},
        {"rms_norm": False},
        {"group_norm": False},
        {"layer_norm": False, "rms_norm": False},
    ],
    ids=str,
)
def test_kinds_can_be_switched_off(options, device):
    model = net(device)
    kinds = {
        "norm": "layer_norm",
        "written": "rms_norm",
        "final": "rms_norm",
        "group": "group_norm",
    }
    off = {name: f"{kinds[name.split('.')[-1]]}=False" for name in NAMES}
    off = {name: reason for name, reason in off.items() if reason.split("=")[0] in options}
    if set(NAMES) <= off.keys():
        pytest.skip("nothing is left")
    report = ek.fuse(model, **options)
    assert replaced_names(report) == [name for name in NAMES if name not in off]
    assert reasons(report) == off


# Not norms over rows or groups, or with another forward, for these input shapes.
OTHERS = {
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), (4, WIDTH)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (4, 3, 5)),
    "plain instance norm": (lambda: nn.InstanceNorm1d(3), (4, 3, 5)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3), (4, 3, 5, 5)),
    "tracking instance norm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    "local response norm": (lambda: nn.LocalResponseNorm(2), (4, 3, 5)),
    "prelu": (lambda: nn.PReLU(WIDTH), (4, WIDTH)),
    "softmax": (lambda: nn.Softmax(-1), (4, WIDTH)),
    "identity": (lambda: nn.Identity(), (4, WIDTH)),
    "sequence": (lambda: nn.Sequential(), (4, WIDTH)),
    "attention": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, dropout=0.0), (4, 3, WIDTH)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:evenkeel")
def test_other_modules_do_as_before(name, device):
    make, shape = OTHERS[name]
    model, twin = with_twin(randomize(make()).to(device))
    ek.fuse(model)
    assert isinstance(model, type(twin))
    x = values(device, shape=shape)
    for mode in (True, False):
        close(model.train(mode)(x), twin.train(mode)(x))
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_stay_lazy(device):
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(4), nn.LayerNorm(4)).to(device)
    assert replaced_names(ek.fuse(model)) == ["2"]
    assert model[0].has_uninitialized_params() and model[1].has_uninitialized_params()
    assert model(values(device, shape=(4, WIDTH))).shape == (4, 4)


def replace_forward(module):
    forward = module.forward
    module.forward = lambda x: forward(x)


def with_parametrization(module):
    parametrize.register_parametrization(module, "weight", nn.Identity())


class MatrixNorm(Rms):
    """Named like a norm, with a weight that none has."""


class OwnCallNorm(Llama):
    def __call__(self, x):
        return 2 * super().__call__(x)


def with_activation(module):
    module.activation = "silu"


SKIPPED = {
    "gate": (lambda: Gated(WIDTH), None, "its forward takes other arguments: gate"),
    "forward": (lambda: nn.LayerNorm(8), replace_forward, "its forward was replaced on the"),
    "forward of a written one": (lambda: Llama(8), replace_forward, "its forward was replaced on"),
    "parametrized": (lambda: nn.LayerNorm(8), with_parametrization, "it has parametrizations"),
    "parametrized rms": (lambda: nn.RMSNorm(8), with_parametrization, "it has parametrizations"),
    "weight": (lambda: MatrixNorm((2, 8)), None, "its weight is not one-dimensional"),
    "call": (lambda: OwnCallNorm(8), None, "its class has a __call__ of its own"),
    "activation": (lambda: nn.LayerNorm(8), with_activation, "it has an attribute activation of"),
    "one element": (lambda: Llama(1), None, "its weight has a single element"),
    "ours": (lambda: ek.LayerNorm(8), None, "already evenkeel's"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_skipped_with_the_reason(name, device):
    make, change, reason = SKIPPED[name]
    model = nn.Sequential(make(), nn.LayerNorm(WIDTH)).to(device)
    if change is not None:
        change(model[0])
    before = snapshot(model[0])
    report = ek.fuse(model)
    assert replaced_names(report) == ["1"]
    (entry,) = (entry for entry in report.skipped if entry.name == "0")
    assert entry.reason.startswith(reason)
    assert entry.module is model[0] and entry.original is type(model[0]) and entry.names == ("0",)
    assert snapshot(model[0]) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_skipped():
    model = nn.Sequential(torch.jit.script(nn.LayerNorm(8)), nn.LayerNorm(8))
    report = ek.fuse(model)
    assert replaced_names(report) == ["1"]
    assert reasons(report) == {"0": "scripted"}


# ---- the walk ----


def test_aliases_are_one_module(device):
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.LayerNorm(8)), "b": nn.Sequential(nn.Linear(8, 8))}
    )
    shared = model["a"][0]
    model["a"].again = shared
    model["b"].borrowed = shared
    model["whole"] = model["a"]
    model.to(device)
    (entry,) = ek.fuse(model).replaced
    assert entry.name == "a.0"
    assert entry.names == ("a.0", "a.again", "b.borrowed", "whole.0", "whole.again")
    assert entry.module is shared
    assert model["a"].again is model["b"].borrowed is model["whole"][0] is shared
    assert type(shared) is ek.LayerNorm


def test_many_applications(device):
    model = net(device)
    x = values(device)
    first = ek.fuse(model.blocks[0])
    second = ek.fuse(model)
    assert replaced_names(first) == ["norm", "written"]
    assert replaced_names(second) == NAMES[2:]
    once, state = model(x), snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = ek.fuse(model)
    assert third.replaced == ()
    assert reasons(third) == dict.fromkeys(NAMES, "already evenkeel's")
    assert snapshot(model) == state
    assert torch.equal(model(x), once)
    third.undo()
    assert snapshot(model) == state
    first.undo()
    assert type(model.blocks[0].norm) is nn.LayerNorm
    assert type(model.blocks[1].norm) is ek.LayerNorm


CHOICES = {
    "pattern": ({"include": "*.norm"}, ["norm"]),
    "patterns": ({"include": ["*.norm", "fin?l"]}, ["norm", "final"]),
    "tuple": ({"include": ("blocks.0.*",)}, ["blocks.0"]),
    "class": ({"include": nn.LayerNorm}, ["norm"]),
    "classes": ({"include": {nn.LayerNorm, Llama}}, ["blocks"]),
    "mixed": ({"include": [nn.LayerNorm, "final"]}, ["norm", "final"]),
    "exclude": ({"exclude": "*.norm"}, ["written", "group", "final"]),
    "exclude class": ({"exclude": [Llama, "final"]}, ["norm", "group"]),
    "exclude wins": ({"include": "blocks*", "exclude": "*.1.*"}, ["blocks.0"]),
    "stars cross dots": ({"include": "b*m"}, ["norm"]),
    "a class that is no norm's": ({"include": "*norm", "exclude": nn.Linear}, ["norm"]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_include_and_exclude(name, device):
    options, chosen = CHOICES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = ek.fuse(net(device), **options)
    assert replaced_names(report) == names_with(*chosen)
    for reason in reasons(report).values():
        assert reason == "not in include" or reason.startswith("excluded by")


def test_entries_may_come_from_a_generator(device):
    names = ["*.norm", "final"]
    report = ek.fuse(net(device), include=(name for name in names), exclude=map(str, ["group"]))
    assert replaced_names(report) == names_with("norm", "final")


def test_reason_names_the_entry(device):
    report = ek.fuse(net(device), exclude=["*.0.norm", nn.RMSNorm], include=["blocks.*", "final"])
    found = reasons(report)
    assert found["blocks.0.norm"] == "excluded by '*.0.norm'"
    assert found["final"].startswith("excluded by") and "RMSNorm" in found["final"]
    assert found["group"] == "not in include"


def test_one_excluded_alias_is_enough(device):
    """A module under two names can only be replaced under both."""
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8)}).to(device)
    model["c"] = model["a"]
    assert replaced_names(ek.fuse(model, exclude="c")) == ["b"]
    assert replaced_names(ek.fuse(model, include="c")) == ["a"]


def test_what_is_excluded_is_not_called(device):
    class Watched(Rms):
        calls = 0

        def forward(self, x):
            Watched.calls += 1
            return super().forward(x)

    model = nn.Sequential(Watched(WIDTH), nn.LayerNorm(WIDTH)).to(device)
    ek.fuse(model, exclude=Watched)
    ek.fuse(model, include="1")
    assert Watched.calls == 0


@pytest.mark.parametrize("which", ["include", "exclude"])
@pytest.mark.parametrize("entry", ["blocks.7.*", nn.Conv1d], ids=str)
def test_entry_that_matches_nothing_is_named(which, entry, device):
    options = {which: ["blocks.0.*", entry]}
    with pytest.warns(UserWarning, match=re.escape(getattr(entry, "__name__", entry))):
        assert ek.fuse(net(device), **options).replaced


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: nn.Linear(8, 8), {}),
        (lambda: nn.Sequential(nn.LayerNorm(8)), {"exclude": "*"}),
        (lambda: nn.Sequential(nn.LayerNorm(8)), {"layer_norm": False}),
        (lambda: nn.Sequential(Scaled(8)), {}),
    ],
    ids=["no norm", "excluded", "off", "not proven"],
)
def test_nothing_to_replace_is_a_warning(make, options, device):
    with pytest.warns(UserWarning, match="evenkeel.fuse: no norm was replaced") as caught:
        report = ek.fuse(make().to(device), **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert report.replaced == ()
