"""The surgery on whole models: what is replaced, what the model then computes, and the way back.

What is expected stands in zoo.py and was found without evenkeel. Every model runs a training step, with
dropout that drops the same elements each time, as it is and after the surgery.
"""

import warnings

import pytest
import torch
from zoo import ZOO, MissingError, difference, norms_of

import evenkeel.torch as ek
from evenkeel import _native

# Relative to the largest element of a tensor. The roundings of float32, 6e-8, fall differently in two norms
# that sum in another order, and the rest of a model passes that on enlarged: 4e-6 is the most that was
# seen on a CPU. A weight, an offset or an epsilon that is not the model's own changes 1e-3 and more.
FLOAT_TOLERANCE = 1e-5
# One rounding of bfloat16 is 4e-3. Most results are even the same; under autocast, where torch's norms
# return float32, one more rounding is made.
HALF_TOLERANCE = 2e-2
# How much farther from the float32 model than the original may a half-precision model be.
HALF_EXCESS = 1.5

entries = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        if "cuda" not in _native.backends():
            pytest.skip("this build has no CUDA backend")
        # A convolution that rounds its inputs to 10 bits would make a difference of its own.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


def build(entry, *options):
    try:
        return entry.build(*options)
    except MissingError as error:
        pytest.skip(str(error))


def fuse(entry, model):
    """Quietly, unless nothing can be replaced."""
    if not entry.expected(model)[0]:
        with pytest.warns(UserWarning, match="no norm was replaced"):
            return ek.fuse(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ek.fuse(model)


def classes_of(model):
    return {name: type(module) for name, module in model.named_modules()}


@entries
def test_what_is_replaced(entry, device):
    model = build(entry, device)
    before = classes_of(model)
    replaced, left = entry.expected(model)
    assert len(norms_of(model)) == entry.norms
    report = fuse(entry, model)
    assert {item.name for item in report.replaced} == replaced
    reasons = {item.name: item.reason for item in report.skipped}
    assert reasons.keys() == left.keys()
    for name, reason in left.items():
        assert reasons[name].startswith(reason), name
    changed = {name for name, kind in classes_of(model).items() if kind is not before[name]}
    assert changed == replaced


@entries
def test_float32(entry, device):
    model = build(entry, device)
    before = entry.run(model)
    fuse(entry, model)
    logits, gradients, name = difference(entry.run(model), before)
    assert logits <= FLOAT_TOLERANCE
    assert gradients <= FLOAT_TOLERANCE, name


def norm_of_error(tensors, expected):
    """Of all tensors together, relative to their norm."""
    pairs = [(tensors[name].float(), expected[name].float()) for name in expected]
    error = sum((a - b).square().sum() for a, b in pairs)
    return (error / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def check_half(exact, before, after):
    """Runs of the float32 model, of the half-precision one, and of that one after the surgery."""
    assert after[0].dtype == before[0].dtype
    assert after[1].item() == pytest.approx(before[1].item(), rel=HALF_TOLERANCE)
    exact, before, after = (
        {"logits": {"": logits}, "gradients": gradients}
        for logits, _, gradients in (exact, before, after)
    )
    assert norm_of_error(after["logits"], before["logits"]) <= HALF_TOLERANCE
    for what, wanted in exact.items():
        error, usual = norm_of_error(after[what], wanted), norm_of_error(before[what], wanted)
        assert error <= HALF_EXCESS * usual, what


@entries
def test_bfloat16(entry, device):
    exact = entry.run(build(entry, device))
    model = build(entry, device, torch.bfloat16)
    before = entry.run(model)
    fuse(entry, model)
    check_half(exact, before, entry.run(model))


@entries
def test_autocast(entry, device):
    """In evaluation: which elements CUDA's dropout drops depends on the dtype that it gets."""
    model = build(entry, device).eval()
    exact = entry.run(model)
    try:
        before = entry.run(model, autocast=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"{entry.name} itself cannot run under autocast: {error}")
    fuse(entry, model)
    check_half(exact, before, entry.run(model, autocast=torch.bfloat16))


@entries
def test_undo(entry, device):
    model = build(entry, device)
    classes, before = classes_of(model), entry.run(model)
    parameters = dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}

    report = fuse(entry, model)
    fused = model.state_dict()
    assert list(fused) == list(state)
    for name, value in state.items():
        assert torch.equal(fused[name], value), name
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], name

    report.undo()
    assert classes_of(model) == classes
    after = entry.run(model)
    assert torch.equal(after[0], before[0])
    if device == "cpu":  # on a GPU the order of some of torch's sums varies
        for name, gradient in after[2].items():
            assert torch.equal(gradient, before[2][name]), name
