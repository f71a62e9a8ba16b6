"""No norm is left out silently: each is replaced, or named with a reason that is true.

A norm is what torch has as one, a subclass of that, what is called a norm, and what looks like one.
What merely holds norms is not named; the norms in it are.
"""

import copy
import warnings

import pytest
import torch
from handwritten import (
    OF_CHANNELS,
    BatchNormAct,
    ConditionalNorm,
    ConvNormAct,
    ImageLayerNorm,
    InstanceOfAnImage,
    Mixer,
    NormAndLayer,
    NormOfParts,
    Norms,
    OtherImageLayerNormInEval,
    PreNorm,
    RmsNormAct,
    Router,
    RunningNorm,
    ScaledImageLayerNorm,
    ScaledNorm,
    SequenceLayerNorm,
    UnitLengthNorm,
    WithTorchsForward,
    WrittenOutImageLayerNorm,
)
from surgery_support import WIDTH, every_device, reasons, replaced_names, snapshot
from torch import nn

import evenkeel.torch as ek
from evenkeel.torch import probe

device = every_device


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no norm was replaced")
        yield


def reason_of(module):
    """Why a module is left alone; nothing else may be in the report, and nothing may change."""
    before = snapshot(module)
    (entry,) = ek.fuse(nn.ModuleDict({"norm": module})).skipped
    assert entry.name == "norm"
    assert snapshot(module) == before
    return entry.reason


# ---- torch's own ----

ARGUMENTS = {nn.GroupNorm: (2, 8), nn.LocalResponseNorm: (2,), nn.CrossMapLRN2d: (2,)}
OF_TORCH = {
    name: kind
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and ("norm" in name.lower() or "LRN" in name)
}


def of_torch(kind):
    if issubclass(kind, nn.modules.lazy.LazyModuleMixin):
        return kind()
    return kind(*next((given for base, given in ARGUMENTS.items() if issubclass(kind, base)), (8,)))


def test_torchs_norms_are_found():
    assert len(OF_TORCH) >= 18 and {"LayerNorm", "CrossMapLRN2d"} <= OF_TORCH.keys()


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_every_norm_of_torch(name, device):
    module = of_torch(OF_TORCH[name]).to(device)
    if name in ("LayerNorm", "RMSNorm", "GroupNorm"):
        assert replaced_names(ek.fuse(module)) == [""]
        return
    words = {"Batch": "batch norm", "Instance": "instance norm", "L": "local response norm"}
    assert reason_of(module) == "evenkeel has no " + next(
        text for word, text in words.items() if word in name
    )


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_subclass_with_a_forward_of_its_own(name, device):
    """Its name says nothing."""

    class Own(OF_TORCH[name]):
        def forward(self, x):
            return 2 * super().forward(x)

    reason = reason_of(of_torch(Own).to(device))
    if name in ("LayerNorm", "RMSNorm", "GroupNorm"):
        assert reason.startswith("no candidate reproduces it: ")
    else:
        assert reason.startswith("evenkeel has no ")


class NoNorm(nn.Identity):
    pass


def test_forward_that_torch_has_for_something_else(device):
    assert reason_of(NoNorm().to(device)) == "its forward is torch's Identity.forward"


# ---- what holds other modules ----

WITH_CHILDREN = {
    "batch norm": (lambda: BatchNormAct(8), "evenkeel has no batch norm"),
    "written in parts": (lambda: NormOfParts(8), "it holds other modules: scale"),
    "with a layer": (lambda: NormAndLayer(8), "it holds other modules: layer"),
    "condition": (lambda: ConditionalNorm(8), "its forward takes other arguments: condition"),
    "called a norm": (
        lambda: PreNorm(nn.Identity(), nn.PReLU()),
        "it holds other modules: norm, inner",
    ),
}


@pytest.mark.parametrize("name", WITH_CHILDREN)
def test_norm_that_holds_other_modules_is_named(name, device):
    make, reason = WITH_CHILDREN[name]
    assert reason_of(make().to(device)) == reason


def test_at_most_four_children_are_named(device):
    module = RmsNormAct(8).to(device)
    module.act = nn.PReLU()
    for name in "ab":
        setattr(module, name, nn.Identity())
    assert reason_of(module) == "it holds other modules: drop, act, a, b"
    module.c = nn.Identity()
    assert reason_of(module) == "it holds other modules: drop, act, a, b, ..."


class ScriptedNormAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_norms_are_named():
    block, layer = PreNorm(nn.LayerNorm(8), nn.ReLU()), ConvNormAct(nn.Identity())
    model = nn.ModuleList(map(torch.jit.script, (ScriptedNormAct(), block, layer)))
    assert reasons(ek.fuse(model)) == {"0": "scripted", "1.norm": "scripted"}


def test_children_do_not_matter_to_torchs_forward(device):
    module = WithTorchsForward(WIDTH).to(device)
    assert replaced_names(ek.fuse(module)) == [""]


HOLDERS = {
    "block": (lambda: PreNorm(nn.LayerNorm(8), nn.Linear(8, 8)), ["norm"]),
    "blocks": (lambda: PreNorm(nn.LayerNorm(8), PreNorm(nn.RMSNorm(8), nn.Linear(8, 8))), None),
    "skipped norm": (lambda: PreNorm(RmsNormAct(8), nn.Linear(8, 8)), ["norm"]),
    "vector and eps": (lambda: ScaledNorm(8), ["norm"]),
    "list": (lambda: Norms([nn.ReLU(), nn.LayerNorm(8)]), ["1"]),
    "deep": (lambda: PreNorm(nn.Sequential(nn.LayerNorm(8)), nn.ReLU()), ["norm.0"]),
    "layer": (lambda: ConvNormAct(nn.BatchNorm2d(8)), ["norm"]),
    "layer without its norm": (lambda: ConvNormAct(nn.Identity()), []),
    "layer that is not initialized": (lambda: Norms([nn.LazyLinear(8)]), []),
    "layer, vector and eps": (lambda: Mixer(8), []),
    "matrix, vector and eps": (lambda: Router(8), []),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_holds_norms_is_not_named(name, device):
    make, expected = HOLDERS[name]
    report = ek.fuse(make().to(device))
    named = [entry.name for entry in (*report.replaced, *report.skipped)]
    assert named == (["norm", "inner.norm"] if expected is None else expected)


def test_shared_norm_speaks_for_all_that_hold_it(device):
    norm = nn.LayerNorm(8)
    model = nn.ModuleList([norm, PreNorm(norm, nn.Linear(8, 8))]).to(device)
    report = ek.fuse(model)
    assert [entry.names for entry in report.replaced] == [("0", "1.norm")]
    assert not report.skipped


# ---- norms of channels ----


def with_gradients(module, x):
    x = x.detach().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device)
    return y, torch.autograd.grad(y, [x, *module.parameters()], dy)


@pytest.mark.parametrize("width", [WIDTH, 3, 4, 12])
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_norm_of_channels_is_replaced(name, width, device):
    make, norm, layout = OF_CHANNELS[name]
    module = make(width).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    twin = copy.deepcopy(module)
    (entry,) = ek.fuse(module).replaced
    kind, *eps = norm.split(", ")
    assert entry.recipe.startswith(", ".join([f"{kind} over channels", *eps]))
    x = torch.randn(2, width, *(6, 5)[: layout.count(",") - 1]).to(device)
    formats = [x] if x.dim() == 3 else [x, x.to(memory_format=torch.channels_last)]
    for given in formats:
        (y, actual), (expected, theirs) = (with_gradients(m, given) for m in (module, twin))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual, theirs, rtol=1e-4, atol=1e-4)
        assert y.stride() == expected.stride()


def test_norm_of_channels_that_rounds_otherwise(device):
    """In float32 it would be one."""
    reason = reason_of(WrittenOutImageLayerNorm(WIDTH).to(device))
    assert reason.startswith(
        "no candidate reproduces it: layer_norm, eps=1e-06 over the channels of (N, C, H, W) has "
    )


def test_affine_norm_of_channels(device):
    """Weight and bias are told apart, and an epsilon that is set is read."""
    for module in (
        ImageLayerNorm(WIDTH, 1e-3, elementwise_affine=False),
        SequenceLayerNorm(WIDTH, 1e-3, bias=False),
    ):
        (entry,) = ek.fuse(module.to(device)).replaced
        assert entry.recipe.startswith("layer_norm over channels")
        module.eps = 0.5
        x = torch.randn(2, WIDTH, 6, 5).to(device)
        x = x if entry.original is ImageLayerNorm else x.flatten(2)
        torch.testing.assert_close(module(x), entry.original.forward(module, x))


@pytest.mark.parametrize("make", [ScaledImageLayerNorm, InstanceOfAnImage])
def test_reason_of_what_takes_images_alone(make, device):
    reason = probe.prove(make(WIDTH).to(device))
    assert reason.startswith("no candidate reproduces it: layer_norm")
    assert "over the channels of (N, C, H, W) is the closest, " in reason


def test_norm_of_channels_in_training_alone(device):
    assert reason_of(OtherImageLayerNormInEval(WIDTH).to(device)) == (
        "no candidate reproduces it: layer_norm, eps=1e-05 over the channels of (N, C, H, W) "
        "is 50 % off with 4 dimensions in evaluation"
    )


def test_reason_of_what_takes_rows_is_about_rows(device):
    reason = probe.prove(UnitLengthNorm().to(device))
    assert reason.startswith("no candidate reproduces it: ")
    assert "channels" not in reason


def test_batch_norm_by_hand(device):
    assert reason_of(RunningNorm(WIDTH).to(device)) == "its forward changes the module"


def test_error_is_told_with_the_shape_that_caused_it(device):
    class OnlyTwoNorm(nn.Module):
        def forward(self, x):
            torch.einsum("nchwd->n", x)

    assert reason_of(OnlyTwoNorm().to(device)).startswith(
        "its forward raised RuntimeError for float32 of shape (3, 2, 2, 96): einsum()"
    )


class AssertingNorm(nn.Module):
    def forward(self, x):
        raise AssertionError


def test_error_without_a_text(device):
    reason = reason_of(AssertingNorm().to(device))
    assert reason == "its forward raised AssertionError for float32 of shape (3, 2, 2, 96)"
