"""Norms under vmap: one kernel where x alone is batched, right results whatever else is."""

import itertools

import pytest
import torch
from test_transforms import Recorder
from torch.func import grad, stack_module_state, vmap

import evenkeel.torch as ek
from support import NORMS, Call, make, ordinary, random

# What torch says where it takes the samples of a vmap one by one.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")

SIZE = 3
HALF = torch.bfloat16

norms = pytest.mark.parametrize("norm", NORMS)


def batch_of(tensor):
    """Tensors of the same shape with other values."""
    return torch.stack([tensor, tensor * 2 + 1, tensor.flip(-1)])


def one_by_one(function, dims, tensors):
    """What vmap means."""
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)))
        for i in range(SIZE)
    ]
    return torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def of_tensors(call):
    names = list(call.inputs())
    return lambda *tensors: call.replaced(**dict(zip(names, tensors, strict=True))).ours()


def batched(call, names, dim=0):
    """The tensors of a call, those of `names` with a batch, and where it is."""
    tensors, dims = [], []
    for name, tensor in call.inputs().items():
        at = min(dim, tensor.dim()) if name in names else None
        tensors.append(tensor if at is None else batch_of(tensor).movedim(0, at))
        dims.append(at)
    return tensors, tuple(dims)


def image(**options):
    call = make("group_norm", (2, 8, 5, 3), 4, bias=torch.float32, **options)
    return call.replaced(x=call.x.to(memory_format=torch.channels_last))


CALLS = {
    **{norm: ordinary(norm) for norm in NORMS},
    **{f"{norm}-silu": ordinary(norm, activation="silu", weight_offset=1.0) for norm in NORMS},
    **{
        f"layer_norm-{activation}": ordinary("layer_norm", activation=activation)
        for activation in ("relu", "gelu", "gelu_tanh")
    },
    **{f"{norm}-half": ordinary(norm, HALF, out_dtype=torch.float32) for norm in NORMS},
    **{f"{norm}-plain": ordinary(norm, weight=None, bias=None) for norm in NORMS},
    "rms_norm-llama": ordinary("rms_norm", HALF, HALF, casting="llama"),
    "layer_norm-planes": make("layer_norm", (4, 6, 5), (6, 5), bias=torch.float32),
    "layer_norm-vector": make("layer_norm", (16,), (16,), bias=torch.float32),
    "group_norm-channels_last": image(activation="silu"),
}
calls = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize("dim", [0, 1, 9], ids=["first", "second", "last"])
@calls
def test_x_alone_is_one_kernel(name, dim):
    """Bit by bit what the samples give one by one."""
    call = CALLS[name]
    tensors, dims = batched(call, ["x"], dim)
    with Recorder() as recorder:
        y = vmap(of_tensors(call), dims)(*tensors)
    assert [operator.name() for operator, _ in recorder.calls] == ["evenkeel::forward"]
    assert torch.equal(y, one_by_one(of_tensors(call), dims, tensors))


def test_channels_last_stays():
    call = CALLS["group_norm-channels_last"]
    tensors, dims = batched(call, ["x"])
    x = torch.stack([tensors[0][i] for i in range(SIZE)], dim=0)
    x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    y = vmap(of_tensors(call), dims)(x, *tensors[1:])
    assert y.stride() == x.stride()


def check_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        # The parameters are applied by torch: a rounding may differ.
        rounding = 2e-2 if ours.dtype == HALF else 1e-4
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * scale)


def subsets():
    """Calls, and which of their tensors are batched."""
    for name, call in CALLS.items():
        for size in range(1, 1 + len(call.inputs())):
            for subset in itertools.combinations(call.inputs(), size):
                yield pytest.param(name, subset, id=f"{name}-{'+'.join(subset)}")


@pytest.mark.parametrize(("name", "subset"), list(subsets()))
def test_values(name, subset):
    call = CALLS[name]
    tensors, dims = batched(call, subset)
    with Recorder() as recorder:
        y = vmap(of_tensors(call), dims)(*tensors)
    assert [operator.name() for operator, _ in recorder.calls] == ["evenkeel::forward"]
    check_close([y], [one_by_one(of_tensors(call), dims, tensors)])


@pytest.mark.parametrize(("name", "subset"), list(subsets()))
def test_gradients_of_each_sample(name, subset):
    call = CALLS[name]
    tensors, dims = batched(call, subset)
    dy = random(call.x.shape, seed=7)

    def loss(*given):
        return (of_tensors(call)(*given) * dy).sum()

    gradients = grad(loss, tuple(range(len(tensors))))
    check_close(vmap(gradients, dims)(*tensors), one_by_one(gradients, dims, tensors))


@pytest.mark.parametrize("wanted", [["x"], ["x", "weight", "bias"]], ids=["dx", "all"])
@calls
def test_batch_of_dy(name, wanted):
    """torch.autograd.grad under vmap runs the backward kernel: for dx once, and bit by bit the same."""
    call = CALLS[name]
    leaves = [t.detach().requires_grad_(k in wanted) for k, t in call.inputs().items()]
    y = of_tensors(call)(*leaves)
    dys = batch_of(random(y.shape, y.dtype, seed=7))
    sought = [leaf for leaf in leaves if leaf.requires_grad]

    def gradients(dy):
        return torch.autograd.grad(y, sought, dy, retain_graph=True)

    with Recorder() as recorder:
        got = vmap(gradients)(dys)
    names = [operator.name() for operator, _ in recorder.calls]
    expected = one_by_one(gradients, (0,), (dys,))
    assert names.count("evenkeel::backward") == 1
    assert len(names) == (1 if len(sought) == 1 else 2)  # the second one normalizes x again
    assert torch.equal(got[0], expected[0])
    check_close(got, expected)


@norms
def test_nested_vmap(norm):
    call = ordinary(norm)
    xs = torch.stack([batch_of(call.x), batch_of(call.x) + 1])
    weights = batch_of(call.weight)
    others = [tensor for key, tensor in call.inputs().items() if key == "bias"]

    def function(x, weight):
        return of_tensors(call)(x, weight, *others)

    got = vmap(vmap(function, (0, None)), (0, None))(xs, call.weight)
    expected = torch.stack([torch.stack([function(x, call.weight) for x in row]) for row in xs])
    assert torch.equal(got, expected)
    got = vmap(vmap(function, (0, None)), (None, 0))(xs[0], weights)
    expected = torch.stack([torch.stack([function(x, w) for x in xs[0]]) for w in weights])
    torch.testing.assert_close(got, expected)


def test_ensemble():
    """Models with weights of their own in one call, as torch.func does it."""
    models = [
        torch.nn.Sequential(ek.LayerNorm(8), torch.nn.Linear(8, 8), ek.RMSNorm(8))
        for _ in range(SIZE)
    ]
    for i, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data = random(parameter.shape, seed=i)
    parameters, buffers = stack_module_state(models)
    x = random((4, 8))

    def run(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    got = vmap(run)(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))


def test_batch_of_gradients():
    """The other vmap of torch: is_grads_batched."""
    call = ordinary("layer_norm")
    x = call.x.requires_grad_()
    y, dys = call.ours(), batch_of(random(call.x.shape))
    (got,) = torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys]
    torch.testing.assert_close(got, torch.stack(expected))


def test_compiled():
    torch.compiler.reset()
    call = ordinary("layer_norm")
    tensors, dims = batched(call, ["x"])
    function = vmap(of_tensors(call), dims)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.equal(got, function(*tensors))


def test_calls_are_what_the_samples_are():
    """The comparison itself: another sample is another result."""
    call = CALLS["layer_norm"]
    tensors, dims = batched(call, ["x"])
    y = one_by_one(of_tensors(call), dims, tensors)
    assert y.shape == (SIZE, *call.x.shape)
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y[0], Call.ours(call))
