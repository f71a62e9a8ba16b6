"""The surgery on real models of timm: every norm is replaced, or named with a reason that is true.

timm needs torchvision, and so the environment that Composer has. Nothing is downloaded; models whose
values do not matter are built without any.
"""

import collections
import importlib.util
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from documents import ROOT
from torch import nn

if not all(map(importlib.util.find_spec, ("timm", "torchvision"))):
    pytest.skip(
        "needs timm and torchvision: scripts/setup puts them into .venv-composer",
        allow_module_level=True,
    )

sys.path.insert(0, str(ROOT / "benchmarks"))
import torchvision_names  # noqa: F401  isort: skip
import timm
import timm.layers
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import Conv2dNormActivation

import evenkeel.torch as ek

RELU, GELU = ", activation='relu'", ", activation='gelu'"
BATCH = "evenkeel has no batch norm"
LAYER_2D = "layer_norm over channels"
# It rounds in between, which shows in bfloat16.
RMS_2D = "no candidate reproduces it: rms_norm, casting='gemma'"

# How many norms of which class a model has, and what becomes of them: a recipe or a reason.
MODELS = {
    "resnetv2_50x1_bit": {("GroupNormAct", "group_norm" + RELU): 49},
    "resnetv2_50": {("BatchNormAct2d", BATCH): 49},
    "resnet18": {("BatchNorm2d", BATCH): 20},
    "efficientnet_b0": {("BatchNormAct2d", BATCH): 49},
    "mobilevitv2_050": {("GroupNorm1", "group_norm"): 21, ("BatchNormAct2d", BATCH): 25},
    "convnext_atto": {("LayerNorm2d", LAYER_2D): 17},
    "convnext_tiny": {("LayerNorm", "layer_norm"): 18, ("LayerNorm2d", LAYER_2D): 5},
    "convnext_atto_rms": {("RmsNorm2d", RMS_2D): 17},
    "samvit_base_patch16": {("LayerNorm", "layer_norm"): 24, ("LayerNorm2d", LAYER_2D): 2},
    "vitamin_small_224": {
        ("LayerNorm", "layer_norm"): 43,
        ("LayerNormAct2d", LAYER_2D): 6,
        ("LayerNormAct2d", LAYER_2D + GELU): 1,
        ("LayerNorm2d", LAYER_2D): 1,
    },
    "vit_tiny_patch16_224": {("LayerNorm", "layer_norm"): 25},
    "swin_tiny_patch4_window7_224": {("LayerNorm", "layer_norm"): 29},
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no norm was replaced")
        yield


def outcomes(report):
    return {id(e.module): e.recipe for e in report.replaced} | {
        id(e.module): e.reason.partition(" over the channels")[0] for e in report.skipped
    }


@pytest.mark.parametrize("name", MODELS)
def test_norms_of_a_model(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    modules = {id(module): type(module).__name__ for module in model.modules()}
    found = outcomes(ek.fuse(model))
    assert collections.Counter((modules[i], text) for i, text in found.items()) == MODELS[name]
    for module in model.modules():
        norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm2d))
        if norm or "norm" in modules[id(module)].lower():
            assert any(id(inner) in found for inner in module.modules()), module


# ---- classes ----

NORMS = {
    name: kind
    for name, kind in vars(timm.layers).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and "Norm" in name
}
# What stands around norms.
BLOCKS = {
    "ClNormMlpClassifierHead",
    "ConvNormAct",
    "ConvNormActAa",
    "GlobalResponseNormMlp",
    "NormMlpClassifierHead",
    "SeparableConvNormAct",
}
# The others need only be named.
TOLD = {
    "LayerNorm": "layer_norm",
    "LayerNormFp32": "layer_norm",
    "RmsNorm": "rms_norm, casting='gemma'",
    "RmsNormFp32": "rms_norm, casting='gemma'",
    "LayerNorm2d": LAYER_2D,
    "LayerNorm2dFp32": LAYER_2D,
    "RmsNorm2d": RMS_2D,
    "RmsNorm2dFp32": "rms_norm over channels, casting='gemma'",
    "LayerNormAct": "layer_norm" + RELU,
    "LayerNormAct2d": LAYER_2D + RELU,
    "RmsNormAct2d": RMS_2D,
    "GroupNorm": "group_norm",
    "GroupNormAct": "group_norm" + RELU,
    "GroupNorm1Act": "group_norm" + RELU,
    "BatchNormAct2d": BATCH,
    "SyncBatchNormAct": BATCH,
    "EvoNorm2dB0": "its forward changes the module",
}


@pytest.mark.parametrize("name", sorted(NORMS.keys() - BLOCKS))
def test_every_norm_of_timm(name):
    module = NORMS[name](64)
    found = outcomes(ek.fuse(module))
    assert found[id(module)] == TOLD.get(name, found[id(module)])


def test_norms_of_torchvision():
    module = LayerNorm2d(16)
    assert outcomes(ek.fuse(module))[id(module)] == LAYER_2D
    for options in ({}, {"norm_layer": None}):
        module = Conv2dNormActivation(3, 16, **options)
        assert id(module) not in outcomes(ek.fuse(module))


@pytest.mark.parametrize("kind", [timm.layers.LayerNorm2d, LayerNorm2d])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_layer_norm_of_images(kind, last):
    """In memory the result lies as before."""
    module, x = kind(16), torch.randn(2, 16, 5, 4)
    x = x.to(memory_format=torch.channels_last) if last else x
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    expected = module(x)
    assert ek.fuse(module).replaced
    y = module(x)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()


# ---- values ----


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 32}),
        ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}),
    ],
    ids=["vit", "convnext"],
)
def test_model_computes_as_before(name, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **options)
    x, target = torch.randn(4, 3, 32, 32), torch.randn(4, 10)

    def step():
        model.zero_grad()
        y = model(x)
        F.mse_loss(y, target).backward()
        return y.detach(), [p.grad.clone() for p in model.parameters()]

    expected, expected_gradients = step()
    assert ek.fuse(model).replaced
    actual, gradients = step()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
