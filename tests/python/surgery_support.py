"""What the tests of the surgery share: the device, models, snapshots of them, and comparisons.

Every test of them takes the fixture `every_device`, and so runs on a GPU too, where there is one.
"""

import copy

import pytest
import torch
from handwritten import Llama
from torch import nn

import evenkeel.torch as ek
from evenkeel import _native
from support import random, ulps

TOKENS, WIDTH = 6, 16
KINDS = {nn.LayerNorm: ek.LayerNorm, nn.RMSNorm: ek.RMSNorm, nn.GroupNorm: ek.GroupNorm}


@pytest.fixture(params=["cpu", "cuda"])
def every_device(request):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        if "cuda" not in _native.backends():
            pytest.skip("this build has no CUDA backend")
    return request.param


# ---- models ----


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.written = Llama(WIDTH)

    def forward(self, x):
        return x + self.written(self.linear(self.norm(x)))


class Net(nn.Module):
    """Norms of all kinds, for x (batch, TOKENS, WIDTH)."""

    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.group = nn.GroupNorm(3, TOKENS)
        self.final = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(self.group(x)))


def randomize(model, seed=0):
    """Gives all parameters values that differ, around one where they are weights of norms."""
    for i, parameter in enumerate(model.parameters()):
        shift = 1.0 if parameter.dim() == 1 else 0.0
        with torch.no_grad():
            parameter.copy_(random(parameter.shape, seed=100 * seed + i, scale=0.4, shift=shift))
    return model


def net(device, dtype=torch.float32, blocks=2):
    return randomize(Net(blocks)).to(device, dtype)


def values(device, dtype=torch.float32, seed=7, shape=(4, TOKENS, WIDTH)):
    return random(shape, dtype, seed, scale=1.5, shift=0.25).to(device)


def with_twin(model):
    """The model, and a copy that stays as it is."""
    return model, copy.deepcopy(model)


# The norms of Net, in the order of the walk.
NAMES = ["blocks.0.norm", "blocks.0.written", "blocks.1.norm", "blocks.1.written", "group", "final"]


def names_with(*parts):
    """Those of NAMES that have one of these parts."""
    return [name for name in NAMES if any(part in name for part in parts)]


def fused(model, **options):
    report = ek.fuse(model, **options)
    assert report.replaced, report
    return model


def replaced_names(report):
    return [entry.name for entry in report.replaced]


def reasons(report):
    return {entry.name: entry.reason for entry in report.skipped}


def contents(value):
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.requires_grad, value.is_leaf and id(value.grad)
    if isinstance(value, dict):
        return [(key, contents(item)) for key, item in value.items()]
    return id(value)


def snapshot(model):
    """All that surgery could change in a model, by identity."""
    return {
        name: (id(module), type(module), contents(vars(module)))
        for name, module in model.named_modules(remove_duplicate=False)
    }


def add_hooks(module, log):
    """One of each kind."""

    def note(kind):
        def hook(*_, **__):
            log.append(kind)

        return hook

    module.register_forward_pre_hook(note("forward pre"))
    module.register_forward_pre_hook(note("forward pre with kwargs"), with_kwargs=True)
    module.register_forward_hook(note("forward"))
    module.register_forward_hook(note("first forward"), prepend=True)
    module.register_full_backward_pre_hook(note("backward pre"))
    module.register_full_backward_hook(note("backward"))
    module.register_state_dict_pre_hook(note("state dict pre"))
    module.register_state_dict_post_hook(note("state dict post"))
    module.register_load_state_dict_pre_hook(note("load pre"))
    module.register_load_state_dict_post_hook(note("load post"))
    module.weight.register_hook(note("gradient"))
    module.weight.register_post_accumulate_grad_hook(note("accumulated"))


# ---- comparisons ----


def close(actual, expected, tolerance=1e-5):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same_values(actual, expected):
    """Asserts that two ways to compute a norm agree as well as their dtype lets them."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype in (torch.float16, torch.bfloat16):
        # Values in the middle between two halves may be rounded to either, before the weight too.
        distance = ulps(actual.cpu(), expected.cpu())
        assert distance.max() <= 2
        assert (distance > 0).double().mean() < 0.02
    else:
        scale = expected.abs().amax().item()
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6 * scale)


def result_and_gradients(model, x):
    """The result, and the gradients of x and of all parameters by name."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dy = random(y.shape, y.dtype, seed=9).to(y.device)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy, materialize_grads=True)
    return y.detach(), dict(zip(["x", *parameters], gradients, strict=True))
