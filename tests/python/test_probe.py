"""The proof that a hand-written module is a norm: what it accepts, what it refuses, what it leaves.

HONEST norms must be accepted with the right recipe, and then give what they gave before, in all
combinations of dtypes. LIARS must be refused with a reason. And nobody may notice the probing.
"""

import contextlib
import copy
import random as python_random

import numpy
import pytest
import torch
from handwritten import (
    HONEST,
    LIARS,
    T5,
    Configured,
    Counting,
    CountingElsewhere,
    CountingInAnObject,
    DropoutInside,
    Gated,
    Llama,
    Rms,
    Scaled,
)
from surgery_support import (
    WIDTH,
    add_hooks,
    close,
    every_device,
    fused,
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
from torch.nn.modules import module as global_hooks

import evenkeel.torch as ek
from evenkeel.torch import probe
from support import name_of

device = every_device

honest = pytest.mark.parametrize("name", HONEST)
liars = pytest.mark.parametrize("name", LIARS)


def made(name, device, dtype=torch.float32):
    return randomize(HONEST[name].make(WIDTH)).to(device, dtype)


# ---- what is accepted ----


@honest
def test_recipe(name, device):
    case, recipe = HONEST[name], probe.prove(made(name, device))
    assert isinstance(recipe, probe.Recipe), recipe
    for field in ("norm", "weight", "bias", "eps", "weight_offset"):
        assert getattr(recipe, field) == getattr(case, field), field
    assert (recipe.casting == "llama") == case.llama


# (of x, of the parameters)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("dtype", "parameters"), DTYPES, ids=name_of)
@pytest.mark.parametrize("when", ["before", "after"])
@honest
def test_results_stay(name, when, dtype, parameters, device):
    """Whether the weights get their dtype before or after the surgery."""
    model, twin = with_twin(made(name, device))
    twin.to(parameters)
    fused(model.to(parameters) if when == "before" else model)
    model.to(parameters)
    x = values(device, dtype, shape=(40, WIDTH))
    # Small rows tell one eps from another; in float16, gradients of smaller ones are infinite.
    smallest = -2 if dtype == torch.float16 else -5
    x = x * torch.logspace(smallest, 0, 40, device=device).to(dtype)[:, None]
    try:
        expected, expected_gradients = result_and_gradients(twin, x)
    except RuntimeError as error:
        assert "mixed dtype" in str(error) or "expected scalar type" in str(error)
        return  # torch's own function does not take these dtypes together
    y, gradients = result_and_gradients(model, x)
    same_values(y, expected)
    halves = torch.bfloat16 in (dtype, parameters) or dtype == torch.float16
    for parameter, gradient in expected_gradients.items():
        assert gradients[parameter].dtype == gradient.dtype, parameter
        # dx is of the size of 1 / |row|: a row at a time.
        ours, theirs = (g.reshape(-1, WIDTH).double() for g in (gradients[parameter], gradient))
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert error.max() < (0.02 if halves else 2e-5), (parameter, error.max())


@honest
def test_shapes(name, device):
    model, twin = with_twin(made(name, device))
    fused(model)
    for shape in [(WIDTH,), (3, WIDTH), (2, 3, WIDTH), (2, 1, 3, WIDTH), (0, WIDTH)]:
        x = values(device, shape=shape)
        y = model(x)
        assert y.shape == x.shape
        if x.numel():
            same_values(y, twin(x))
    x = values(device, shape=(3, 2 * WIDTH))[:, ::2]
    same_values(model(x), twin(x))


@pytest.mark.parametrize("width", [3, 8, 100, 4096])
@pytest.mark.parametrize("name", ["Llama", "Gemma", "FloatLayerNorm"])
def test_widths(name, width, device):
    model, twin = with_twin(randomize(HONEST[name].make(width)).to(device))
    assert ek.fuse(model).replaced
    x = values(device, shape=(5, width))
    same_values(model(x), twin(x))


def test_fused_norm_reads_its_attributes(device):
    """A later change of eps or of the weight counts."""
    model, twin = with_twin(made("Llama", device))
    fused(model)
    x = 0.01 * values(device)
    for each in (model, twin):
        each.variance_epsilon = 1e-2
        each.weight = nn.Parameter(torch.full_like(each.weight, 3.0))
    same_values(model(x), twin(x))


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("eps", [1e-12, 1e-3])
def test_eps_of_subclasses(make, eps, device):
    class Own(make):
        def forward(self, x):
            return super().forward(x)

    model, twin = with_twin(randomize(Own(WIDTH, eps=eps)).to(device))
    (entry,) = ek.fuse(model).replaced
    assert isinstance(model, Own)
    assert entry.original is Own
    x = 0.01 * values(device)
    same_values(model(x), twin(x))


def test_keyword_argument_of_forward(device):
    model, twin = with_twin(made("Llama", device))
    x = values(device)
    same_values(fused(model)(hidden_states=x), twin(hidden_states=x))


def test_other_methods_and_attributes_stay(device):
    class Handy(Llama):
        def twice(self, x):
            return self(self(x))

        @property
        def width(self):
            return self.weight.numel()

    model, twin = with_twin(randomize(Handy(WIDTH)).to(device))
    fused(model).note = "mine"
    assert (model.width, model.note) == (WIDTH, "mine")
    close(model.twice(values(device)), twin.twice(values(device)))
    assert isinstance(model, Handy) and isinstance(model, Llama)
    assert "Handy" in type(model).__name__


def test_meta_weights_are_probed_elsewhere():
    with torch.device("meta"):
        modules = {name: case.make(WIDTH) for name, case in HONEST.items()}
        recipes = {name: probe.prove(module) for name, module in modules.items()}
    for name, recipe in recipes.items():
        assert recipe == probe.prove(made(name, "cpu")), name


# ---- what is refused ----

# What the reason has to say beyond that no candidate fits; the others are wrong numbers.
TOLD = {
    "Raising": "its forward raised RuntimeError for float32 of shape (3, 2, 2, 16): not today",
    "WrongAxis": "",
    "TwoResults": "",
    "Growing": "",
    "Counting": "",
    "CountingInAnObject": "",
    "CountingElsewhere": "",
    "DropoutInside": "",
    "OtherInEval": "",
    "OtherInTraining": "",
}


@liars
def test_liars_are_refused(name, device):
    liar = LIARS[name](WIDTH).to(device)
    reason = probe.prove(liar)
    assert isinstance(reason, str), reason
    assert TOLD.get(name, "no candidate reproduces it: ") in reason
    assert len(reason) > 10 and "\n" not in reason


@liars
@pytest.mark.filterwarnings("ignore:evenkeel")
def test_liars_go_on_lying(name, device):
    model = LIARS[name](WIDTH).to(device)
    before = snapshot(model)
    report = ek.fuse(model)
    assert report.replaced == ()
    assert reasons(report) == {"": probe.prove(model)}
    assert snapshot(model) == before


def test_reason_names_the_closest(device):
    reason = probe.prove(Scaled(WIDTH).to(device))
    assert "rms_norm" in reason
    assert any(digit in reason for digit in "0123456789")


def test_gated_norms_are_left_alone(device):
    model = nn.Sequential(Gated(WIDTH)).to(device)
    with pytest.warns(UserWarning, match="no norm was replaced"):
        report = ek.fuse(model)
    assert reasons(report) == {"0": "its forward takes other arguments: gate"}


def test_norm_with_children_is_no_candidate(device):
    class WithDropoutNorm(Rms):
        def __init__(self, n):
            super().__init__(n)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(super().forward(x))

    model = nn.Sequential(WithDropoutNorm(WIDTH), nn.LayerNorm(WIDTH)).to(device)
    assert replaced_names(ek.fuse(model)) == ["1"]


# ---- what is remembered from one instance to the next ----


def counted(base):
    """A class of its own, that counts the calls of all its instances."""

    class Counted(base):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)

    return Counted


def test_equal_norms_are_probed_once(device):
    one, many = counted(Rms), counted(Rms)
    fused(one(WIDTH).to(device))
    report = ek.fuse(nn.Sequential(*(many(WIDTH) for _ in range(64))).to(device))
    assert len(report.replaced) == 64
    assert many.calls == one.calls > 0


@pytest.mark.parametrize("what", ["factor", "config"])
def test_what_one_instance_proves_is_not_true_of_another(what, device):
    """The same class and shape, but a scalar or an object with another value."""
    model = nn.Sequential(Configured(WIDTH), Configured(WIDTH, **{what: 1.001})).to(device)
    assert replaced_names(ek.fuse(model)) == ["0"]
    assert "no candidate reproduces it" in probe.prove(model[1])
    backwards = nn.Sequential(Configured(WIDTH, **{what: 1.001}), Configured(WIDTH)).to(device)
    assert replaced_names(ek.fuse(backwards)) == ["1"]


def test_eps_of_each_instance(device):
    model = nn.Sequential(*(Llama(WIDTH, eps) for eps in (1e-6, 1e-5, 1e-3))).to(device)
    model, twin = with_twin(model)
    assert len(ek.fuse(model).replaced) == 3
    for ours, theirs in zip(model, twin, strict=True):
        same_values(ours(0.01 * values(device)), theirs(0.01 * values(device)))


def test_proof_does_not_outlive_what_it_depended_on(device):
    """An object that instances share has other values now."""
    first, second = Configured(WIDTH).to(device), Configured(WIDTH).to(device)
    second.config = first.config
    assert isinstance(probe.prove(first), probe.Recipe)
    first.config.factor = 1.001
    assert isinstance(probe.prove(second), str)


def test_another_forward_of_the_class_is_another_proof(device):
    class Changing(Rms):
        pass

    assert isinstance(probe.prove(Changing(WIDTH).to(device)), probe.Recipe)
    Changing.forward = Scaled.forward
    assert isinstance(probe.prove(Changing(WIDTH).to(device)), str)


# ---- what nobody may notice ----


def all_random_states(device):
    states = [torch.get_rng_state(), python_random.getstate(), str(numpy.random.get_state())]
    return [*states, torch.cuda.get_rng_state() if device == "cuda" else None]


class Dice(Rms):
    """Draws from every generator there is."""

    def forward(self, x):
        factor = 1 + 0 * torch.rand_like(x) * numpy.random.rand() * python_random.random()
        return super().forward(x) * factor.to(x.dtype)


@pytest.mark.filterwarnings("ignore:evenkeel")
@pytest.mark.parametrize("make", [Dice, DropoutInside, Llama, nn.LayerNorm])
def test_random_numbers_go_on(make, device):
    class Fresh(make):  # so that nothing is remembered
        def forward(self, x):
            return super().forward(x)

    model = nn.Sequential(Fresh(WIDTH)).to(device)
    before = all_random_states(device)
    ek.fuse(model)
    for was, now in zip(before, all_random_states(device), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


def test_attributes_buffers_and_gradients_stay(device):
    """Counting's forward changes a buffer, an integer and a list."""
    model = nn.Sequential(Counting(WIDTH), randomize(counted(Rms)(WIDTH))).to(device)
    model(values(device)).square().sum().backward()
    before, gradients = snapshot(model), [p.grad.clone() for p in model.parameters()]
    (seen, calls, shapes) = model[0].seen.clone(), model[0].calls, list(model[0].shapes)
    ek.fuse(model).undo()
    assert snapshot(model) == before
    assert torch.equal(model[0].seen, seen)
    assert (model[0].calls, model[0].shapes) == (calls, shapes)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_objects_of_a_module_stay(device):
    model = nn.Sequential(CountingInAnObject(WIDTH), CountingElsewhere(WIDTH)).to(device)
    assert all(isinstance(probe.prove(module), str) for module in model)
    assert [module.meter.factor for module in model] == [0, 0]
    assert model[1].log == {"shapes": []}


def test_parameters_without_gradients_get_none(device):
    model = counted(Rms)(WIDTH).to(device)
    fused(model)
    assert model.weight.grad is None


def test_hooks_are_not_called(device):
    log, model = [], nn.Sequential(counted(Rms)(WIDTH), Counting(WIDTH)).to(device)
    for module in model:
        add_hooks(module, log)

    def note(*_):
        log.append("global")

    handles = [
        global_hooks.register_module_forward_pre_hook(note),
        global_hooks.register_module_forward_hook(note),
        global_hooks.register_module_full_backward_hook(note),
    ]
    try:
        assert ek.fuse(model).replaced
    finally:
        for handle in handles:
            handle.remove()
    assert log == []


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENT = {
    "no_grad": lambda _: torch.no_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "default dtype": lambda _: default_dtype(torch.float64),
    "default bfloat16": lambda _: default_dtype(torch.bfloat16),
    "default device": lambda _: torch.device("meta"),
    "anomaly": lambda _: torch.autograd.set_detect_anomaly(True, check_nan=True),
}


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_proof_does_not_depend_on_what_is_around(ambient, device):
    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )

    truth, lie = counted(Llama), counted(Scaled)
    expected = probe.prove(made("Llama", device))
    modules = truth(WIDTH).to(device), lie(WIDTH).to(device)
    with AMBIENT[ambient](device):
        before = modes()
        recipe, reason = map(probe.prove, modules)
        assert modes() == before
    assert recipe == expected
    assert isinstance(reason, str)


def test_proof_does_not_depend_on_the_state_of_the_module(device):
    expected = probe.prove(made("Llama", device))
    for change in (
        lambda m: m.eval(),
        lambda m: m.requires_grad_(False),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: nn.init.zeros_(m.weight),
        lambda m: nn.init.constant_(m.weight, torch.nan),
    ):
        module = counted(Llama)(WIDTH).to(device)
        change(module)
        before = snapshot(module)
        assert probe.prove(module) == expected
        assert snapshot(module) == before


def test_proof_is_the_same_every_time(device):
    recipes = [probe.prove(copy.deepcopy(counted(T5)(WIDTH)).to(device)) for _ in range(3)]
    assert recipes[0] == recipes[1] == recipes[2]
    reports = [probe.prove(counted(Scaled)(WIDTH).to(device)) for _ in range(3)]
    assert len(set(reports)) == 1
