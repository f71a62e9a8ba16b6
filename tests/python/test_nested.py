"""Nested tensors: norms of the rows of all parts, or an error that says what is wrong."""

import pytest
import torch

import evenkeel.torch as ek
from support import ROW_NORMS, random

SIZES = (3, 1, 5)
WIDTH = 16

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)


def parts(*shape):
    return [random((size, *shape, WIDTH), seed=size) for size in SIZES]


def jagged(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def function_of(norm, weight=None, **options):
    return lambda x: getattr(ek, norm)(x, (WIDTH,), weight, **options)


@pytest.mark.parametrize("shape", [(), (4,)], ids=["rows", "heads"])
@row_norms
def test_values_and_gradients(norm, shape):
    weight = random(WIDTH, seed=9).requires_grad_()
    function = function_of(norm, weight, activation="silu")
    tensors = parts(*shape)
    x = jagged(tensors).requires_grad_()
    y = function(x)
    assert y.layout is torch.jagged
    assert y.shape == x.shape
    for part, tensor in zip(y.unbind(), tensors, strict=True):
        assert torch.equal(part, function(tensor))

    y.values().square().sum().backward()
    dweight, weight.grad = weight.grad, None
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    sum(function(leaf).square().sum() for leaf in leaves).backward()
    for part, leaf in zip(x.grad.unbind(), leaves, strict=True):
        assert torch.equal(part, leaf.grad)
    torch.testing.assert_close(dweight, weight.grad)


@row_norms
def test_the_result_goes_on_with_x(norm):
    """It has the ragged dimension of x, and not one of its own."""
    x = jagged(parts())
    y = x + function_of(norm)(x)
    assert y.shape == x.shape
    assert function_of(norm)(x).offsets() is x.offsets()


@pytest.mark.parametrize("kind", [ek.LayerNorm, ek.RMSNorm])
def test_modules(kind):
    tensors = parts()
    norm = kind(WIDTH)
    for part, tensor in zip(norm(jagged(tensors)).unbind(), tensors, strict=True):
        assert torch.equal(part, norm(tensor))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = ek.layer_norm(jagged(parts()), (WIDTH,))
    assert y.dtype == torch.bfloat16


@row_norms
def test_compiled(norm):
    torch.compiler.reset()
    x = jagged(parts())
    function = function_of(norm, random(WIDTH))
    y = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y.values(), function(x).values())


def gaps():
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(random((2, 6, WIDTH)), 1, starts, lengths, layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ek.layer_norm(jagged([random((2, 3)), random((2, 3))]).transpose(1, 2), (3,)),
            ValueError,
            "normalized_shape must leave out the ragged dimension 2",
        ),
        (
            lambda: ek.rms_norm(jagged(parts(4)), (5, 4, WIDTH)),
            ValueError,
            "normalized_shape must leave out the ragged dimension 1",
        ),
        (lambda: ek.layer_norm(gaps(), (WIDTH,)), NotImplementedError, "x must be contiguous"),
        (
            lambda: ek.group_norm(jagged(parts()), 2),
            NotImplementedError,
            "x of group_norm must be a dense tensor, but is nested",
        ),
        (
            lambda: ek.layer_norm(jagged(parts()), (WIDTH + 1,)),
            RuntimeError,
            "x must end with the dimensions of normalized_shape",
        ),
        (
            lambda: ek.rms_norm(torch.nested.nested_tensor(parts()), (WIDTH,)),
            NotImplementedError,
            "x must be a dense tensor, but is nested .* torch.jagged",
        ),
        (
            lambda: ek.rms_norm(random((3, WIDTH)), (WIDTH,), jagged(parts())),
            NotImplementedError,
            "weight of rms_norm must be a dense tensor, but is nested",
        ),
    ],
    ids=["transposed", "ragged", "gaps", "group norm", "width", "strided", "weight"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
