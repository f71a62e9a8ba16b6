"""A norm and the activation behind it become one kernel, where nobody can tell the difference.

Behind a group norm in an nn.Sequential, and inside of a norm that holds its activation.
"""

import copy
import pickle

import pytest
import torch
from handwritten import CoarseGroupNormAct, GroupNormAct, LayerNormAct, NamelessAct, RmsNormAct
from surgery_support import every_device
from torch import nn

import evenkeel.torch as ek

device = every_device

DONE = "done by the norm before it"


def sequence(activation=None, *, inplace=False):
    torch.manual_seed(0)
    activation = nn.SiLU(inplace) if activation is None else activation
    return nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), activation, nn.Flatten())


def recipes(report):
    return {entry.name: entry.recipe for entry in report.replaced}


def image():
    return torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(1))


def with_gradients(model, x):
    y = model(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return y.detach(), gradients


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
def test_values_and_gradients(inplace):
    model = sequence(inplace=inplace)
    twin = copy.deepcopy(model)
    assert recipes(ek.fuse(model)) == {"1": "group_norm, activation='silu'", "2": DONE}
    (y, gradients), (expected, theirs) = (with_gradients(m, image()) for m in (model, twin))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
    ],
    ids=str,
)
def test_other_activations(activation, name):
    model = sequence(activation)
    twin = copy.deepcopy(model)
    report = ek.fuse(model)
    assert recipes(report) == {"1": f"group_norm, activation={name!r}", "2": DONE}
    (y, gradients), (expected, theirs) = (with_gradients(m, image()) for m in (model, twin))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[parameter], rtol=1e-4, atol=1e-4)
    assert torch.equal(pickle.loads(pickle.dumps(model))(image()), model(image()))
    report.undo()
    assert type(model[2]) is type(activation)


def test_autocast_returns_its_dtype():
    model = sequence()
    exact = model(image())
    ek.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(image())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=3e-2, atol=3e-2)


def test_channels_last_is_kept():
    model = sequence()[:3].to(memory_format=torch.channels_last)
    ek.fuse(model)
    y = model(image().to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_undo():
    model = sequence()
    before, shown = model(image()), repr(model)
    report = ek.fuse(model)
    assert "SpentSiLU" in repr(model)
    assert "activation='silu'" in repr(model)
    report.undo()
    assert repr(model) == shown
    assert torch.equal(model(image()), before)
    assert "activation" not in vars(model[1])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(copied):
    model = sequence()
    ek.fuse(model)
    assert torch.equal(copied(model)(image()), model(image()))


def test_a_second_time_changes_nothing():
    model = sequence()
    ek.fuse(model)
    report = ek.fuse(model)
    assert report.replaced == ()
    assert [entry.reason for entry in report.skipped] == ["already evenkeel's"] * 2


def used_twice(model):
    model.append(model[2])


def norm_used_twice(model):
    model.other = model[1]


def watched(where, hook):
    def watch(model):
        getattr(model[where], hook)(lambda *_: None)

    return watch


def of_a_class(model):
    class Mine(nn.SiLU):
        def forward(self, x):
            return super().forward(2 * x)

    model[2] = Mine()


def own_forward(model):
    model[2].forward = lambda x: x


LEFT = {
    "SiLU used twice": used_twice,
    "norm used twice": norm_used_twice,
    "hook on the norm": watched(1, "register_forward_hook"),
    "hook on the SiLU": watched(2, "register_forward_hook"),
    "hook before the SiLU": watched(2, "register_forward_pre_hook"),
    "hook on the norm's gradient": watched(1, "register_full_backward_hook"),
    "another class": of_a_class,
    "another forward": own_forward,
    "something between": lambda model: model.insert(2, nn.Identity()),
}


@pytest.mark.parametrize("change", LEFT.values(), ids=LEFT)
def test_left_alone(change):
    """The norm is replaced all the same."""
    model = sequence()
    change(model)
    twin = copy.deepcopy(model)
    report = ek.fuse(model)
    assert recipes(report) == {"1": "group_norm"}
    assert len(report.skipped) == 0
    if change is not used_twice and change is not norm_used_twice:
        torch.testing.assert_close(model(image()), twin(image()), rtol=1e-5, atol=1e-5)


def test_excluded():
    model = sequence()
    assert recipes(ek.fuse(model, exclude=nn.SiLU)) == {"1": "group_norm"}
    model = sequence()
    assert recipes(ek.fuse(model, exclude="2")) == {"1": "group_norm"}
    model = sequence()
    with pytest.warns(UserWarning, match="no norm was replaced"):
        assert recipes(ek.fuse(model, exclude="1")) == {}
    assert type(model[2]) is nn.SiLU


def test_composers_function_replaces_norms_only():
    model = sequence()
    assert recipes(ek.apply_low_precision_groupnorm(model)) == {"1": "group_norm"}


class Skipping(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x)).flatten(1)


def test_only_where_the_next_module_gets_the_result():
    model = Skipping(*sequence())
    assert recipes(ek.fuse(model)) == {"1": "group_norm"}
    model = nn.ModuleList(sequence())
    assert recipes(ek.fuse(model)) == {"1": "group_norm"}


# ---- norms that hold their activation ----

HELD = {
    "group norm": (lambda: GroupNormAct(2, 8), "group_norm"),
    "coarse group norm": (lambda: CoarseGroupNormAct(2, 8), "group_norm"),
    "layer norm": (lambda: LayerNormAct(8), "layer_norm"),
    "RMS norm": (lambda: RmsNormAct(8), "rms_norm"),
    "nameless": (lambda: NamelessAct(8), "rms_norm"),
}
held = pytest.mark.parametrize("name", HELD)
WORDS = {
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    None: nn.Identity(),
}


def made(name, activation="relu"):
    torch.manual_seed(0)
    module = HELD[name][0]()
    module.act = copy.deepcopy(WORDS[activation])
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def pixels(name):
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    return x.movedim(-1, 1).contiguous() if "group norm" in name else x


@pytest.mark.parametrize("activation", WORDS)
@held
def test_norm_that_holds_its_activation(name, activation, device):
    module, x = made(name, activation).to(device), pixels(name).to(device)
    twin = copy.deepcopy(module)
    report = ek.fuse(module)
    (entry,) = report.replaced
    assert entry.recipe.startswith(HELD[name][1])
    assert (f"activation={activation!r}" in entry.recipe) == (activation is not None)
    for form in (module, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        (y, gradients), (expected, theirs) = (
            with_gradients(m, x) for m in (form, copy.deepcopy(twin))
        )
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, theirs[parameter], rtol=1e-4, atol=1e-4)
        module.zero_grad()
    report.undo()
    assert type(module) is type(twin)


@pytest.mark.parametrize(("groups", "channels"), [(8, 64), (32, 256)])
def test_coarse_statistics_of_many_channels(groups, channels):
    """They move some values to the other side of the ReLU's zero, and all of their gradients with them."""
    assert ek.fuse(CoarseGroupNormAct(groups, channels)).replaced


@held
def test_activation_that_is_exchanged_later(name):
    module = made(name)
    assert ek.fuse(module).replaced
    module.act = nn.Tanh()
    x = pixels(name)
    assert torch.equal(module(x), type(made(name)).forward(module, x))


class Counting(nn.ReLU):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def watched_activation(module):
    module.act.register_forward_hook(lambda *_: None)


UNPROVEN = {
    "another function": (lambda m: setattr(m, "act", nn.Tanh()), "none of evenkeel's activations"),
    "a dropout": (lambda m: setattr(m, "drop", nn.Dropout(0.5)), "none of evenkeel's activations"),
    "a state": (lambda m: setattr(m, "act", Counting()), "its forward changes the module"),
    "a hook": (watched_activation, "it holds other modules: drop, act"),
    "a parameter": (lambda m: setattr(m, "act", nn.PReLU()), "it holds other modules: drop, act"),
}


@pytest.mark.parametrize("change", UNPROVEN)
@held
@pytest.mark.filterwarnings("ignore:.*no norm was replaced")
def test_what_is_held_is_something_else(name, change):
    module = made(name)
    UNPROVEN[change][0](module)
    random_state = torch.random.get_rng_state()
    (entry,) = ek.fuse(module).skipped
    assert UNPROVEN[change][1] in entry.reason
    assert getattr(module.act, "calls", 0) == 0
    assert torch.equal(torch.random.get_rng_state(), random_state)
