"""torch's own test inputs for its norms, given to evenkeel's: values, gradients, layouts, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

import evenkeel.torch as ek
from support import NORMS, ROW_NORMS

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
modules = pytest.importorskip("torch.testing._internal.common_modules")

OPERATORS = {op.name.removeprefix("nn.functional."): op for op in invocations.op_db}
MODULES = {info.name.removeprefix("nn."): info for info in modules.module_db}
FORMATS = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]

norms = pytest.mark.parametrize("norm", NORMS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
kinds = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "GroupNorm"])


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


def samples(norm, device, dtype):
    """torch's inputs; a negative eps, which evenkeel refuses, becomes positive."""
    found = list(OPERATORS[norm].sample_inputs(device, dtype, requires_grad=True))
    assert found
    for sample in found:
        if sample.kwargs.get("eps", 0) < 0:
            sample.kwargs["eps"] = -sample.kwargs["eps"]
    return found


def in_format(tensor, memory_format):
    """The tensor in another memory format, if it has the dimensions for it."""
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    if tensor.dim() != dims.get(memory_format, tensor.dim()):
        return None
    return tensor.detach().contiguous(memory_format=memory_format).requires_grad_()


def check_like_torch(ours, theirs, leaves):
    """Result, layout and gradients."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.stride() == theirs.stride() or ours.numel() == 0
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(theirs)
    actual = torch.autograd.grad(ours, leaves, dy)
    expected = torch.autograd.grad(theirs, leaves, dy)
    for mine, reference in zip(actual, expected, strict=True):
        # torch sums gradients of half-precision parameters in half precision.
        scale = reference.abs().max().item() if reference.numel() else 0.0
        rounding = 2e-2 if mine.dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(mine, reference, rtol=rounding, atol=rounding * max(scale, 1))


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@dtypes
@norms
def test_functions(norm, dtype, memory_format, device):
    tried = 0
    for sample in samples(norm, device, dtype):
        x = in_format(sample.input, memory_format)
        if x is None:
            continue
        leaves = [x]
        tree_map_only(torch.Tensor, leaves.append, (sample.args, sample.kwargs))
        arguments = (x, *sample.args)
        ours = getattr(ek, norm)(*arguments, **sample.kwargs)
        theirs = getattr(F, norm)(*arguments, **sample.kwargs)
        check_like_torch(ours, theirs, leaves)
        tried += 1
    assert tried or memory_format is not torch.contiguous_format


@dtypes
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_residuals(norm, dtype, device):
    """As if x and the residual were added before."""
    for sample in samples(norm, device, dtype):
        if math.prod(sample.args[0]) == 1:
            continue  # its gradient is zero, but for what cancellation leaves
        x = sample.input.detach().requires_grad_()
        residual = torch.randn_like(x).requires_grad_()
        leaves = [x, residual]
        tree_map_only(torch.Tensor, leaves.append, (sample.args, sample.kwargs))
        y, total = getattr(ek, norm)(x, *sample.args, **sample.kwargs, residual=residual)
        assert torch.equal(total, x + residual)
        check_like_torch(y, getattr(F, norm)(x + residual, *sample.args, **sample.kwargs), leaves)


@norms
def test_vmap(norm, device):
    """Batches of x at every dimension, in the way of torch's own tests."""
    for sample in samples(norm, device, torch.float32):
        x = sample.input.detach()
        batch = torch.stack([x, x + 1])
        for dim in range(x.dim() + 1):
            got = torch.vmap(
                lambda x, sample=sample: getattr(ek, norm)(x, *sample.args, **sample.kwargs), dim
            )(batch.movedim(0, dim))
            expected = [getattr(ek, norm)(part, *sample.args, **sample.kwargs) for part in batch]
            assert torch.equal(got, torch.stack(expected))


@pytest.mark.parametrize("norm", [norm for norm in NORMS if OPERATORS[norm].error_inputs_func])
def test_errors(norm, device):
    """What torch refuses is refused, by an error of the same type, before anything is computed."""
    for error in OPERATORS[norm].error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type, match="evenkeel: "):
            getattr(ek, norm)(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@dtypes
@kinds
def test_modules(kind, dtype, memory_format, training, device):
    info = MODULES[kind]
    inputs = info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=training
    )
    tried = 0
    for given in inputs:
        x = in_format(given.forward_input.args[0], memory_format)
        if x is None:
            continue
        arguments, options = given.constructor_input.args, given.constructor_input.kwargs
        theirs = getattr(torch.nn, kind)(*arguments, device=device, dtype=dtype, **options)
        ours = getattr(ek, kind)(*arguments, device=device, dtype=dtype, **options)
        ours.load_state_dict(theirs.state_dict())
        ours.train(training)
        theirs.train(training)
        mine, reference = ours(x), theirs(x)
        check_like_torch(mine, reference, [x])
        tried += 1
    assert tried or memory_format is not torch.contiguous_format
