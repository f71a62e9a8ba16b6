"""The CUDA kernels of group norm: values, gradients, bits, streams, graphs, memory.

What an H200 does with the shapes here (see src/cuda/group/tuning.h): a block or a cluster of blocks keeps
a unit, or its chunks are read twice. Only what can be loaded 16 bytes at a time is kept, which takes a
number of pixels (channels first) or channels (last) to match, and kernels compiled for the types.
"""

import functools
import math

import pytest
import torch
from cuda_support import (
    all_dtypes,
    backends,
    check_autocast,
    check_bits_beside_other_work,
    check_compiled,
    check_everything_is_written,
    check_gradients,
    check_graph,
    check_on_gpu,
    check_parts_alone,
    check_two_streams,
    dtype_pairs,
    floats,
    gradient_for,
    large,
    moved,
    needs_kernels,
    needs_two_gpus,
)

from support import Call, check_same, make, name_of, random, with_gradients

pytestmark = needs_kernels

layouts = pytest.mark.parametrize("last", [False, True], ids=["first", "last"])


def shapes(named):
    """Parametrizes by (channels, pixels) or (samples, channels, pixels), and groups."""
    return pytest.mark.parametrize(("shape", "groups"), named.values(), ids=named.keys())


# Small ones, with an odd number of pixels, of channels, or of neither, in 1 to 3 dimensions.
SMALL = {
    "7x7, 3 channels a group": ((3, 12, 7, 7), 4),
    "13x5, 5 channels a group": ((2, 10, 13, 5), 2),
    "1x1, 5 channels a group": ((4, 40, 1, 1), 8),
    "a channel a group": ((2, 8, 16, 16), 8),
    "40 channels a group": ((2, 80, 9, 8), 2),
    "65 channels a group": ((1, 130, 9, 9), 2),
    "one group": ((2, 24, 8, 8), 1),
    "one dimension": ((2, 16, 1000), 4),
    "one dimension, odd": ((2, 9, 333), 3),
    "three dimensions": ((2, 16, 4, 6, 8), 4),
    "three dimensions, odd": ((2, 6, 3, 5, 7), 2),
    "small clusters": ((3, 16, 56, 56), 2),
    "middle clusters": ((1, 96, 40, 40), 2),
    "large clusters": ((1, 64, 128, 128), 8),
    "odd pixels in many chunks": ((2, 6, 101, 103), 2),
    "odd channels in many chunks": ((2, 15, 72, 72), 3),
}
# More than a cluster holds, and many units that are read twice.
LARGE = {
    "two groups": ((1, 8, 1024, 1024), 2),
    "two groups, odd": ((1, 6, 1021, 1023), 2),
    "many groups": ((1, 128, 512, 512), 32),
    "many small groups, odd": ((40, 6, 101, 103), 2),
    "wide groups": ((1, 512, 96, 96), 2),
    "wide groups that tiles do not divide": ((1, 320, 120, 120), 2),
}
# One of each way, without samples.
WAYS = {
    "kept by blocks": ((32, 16, 16), 8),
    "kept by clusters": ((96, 40, 40), 2),
    "read twice": ((8, 600, 600), 1),
    "odd pixels": ((12, 37, 29), 4),
    "odd channels": ((15, 24, 24), 3),
}


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def on_gpu(shape, groups, last=False, dtype=torch.float32, parameters=torch.float32, **options):
    device, bias = options.pop("device", "cuda"), options.pop("bias", parameters)
    call = make("group_norm", shape, groups, dtype, parameters, bias, **options)
    return moved(call.replaced(x=channels_last(call.x)) if last else call, device)


def around(x, groups, **options):
    """A call with this x, which may be large."""
    return on_gpu((1, x.shape[1], 1), groups, **options).replaced(x=x)


def image(memory, shape, last):
    """A tensor of this shape, made of what `memory` gives for a shape."""
    samples, channels, *pixels = shape
    return memory((samples, *pixels, channels)).movedim(-1, 1) if last else memory(shape)


def large_image(shape, last, dtype, seed):
    return image(functools.partial(large, dtype=dtype, seed=seed), shape, last)


def large_call(shape, groups, last, dtype=torch.float32, **options):
    """A call and a gradient for it."""
    x, dy = (large_image(shape, last, dtype, seed) for seed in (1, 2))
    return around(x, groups, **options), dy


def is_dense(x, last):
    return (x.movedim(1, -1) if last else x).is_contiguous()


def check_image(call, dy=None, *, last):
    """As check_on_gpu; y and dx have the layout of x, but no gaps."""
    result = check_on_gpu(call, dy=dy)
    assert is_dense(result["y"], last)
    assert is_dense(result["dx"], last)


# ---- values and gradients ----


@shapes(SMALL)
@layouts
@dtype_pairs
def test_values_and_gradients(dtype, parameters, last, shape, groups):
    check_image(on_gpu(shape, groups, last, dtype, parameters), last=last)


@shapes(LARGE)
@layouts
@floats
def test_large_images(dtype, last, shape, groups):
    check_image(*large_call(shape, groups, last, dtype), last=last)


@shapes(WAYS)
@layouts
@all_dtypes
def test_silu(dtype, last, shape, groups):
    check_image(*large_call((2, *shape), groups, last, dtype, activation="silu"), last=last)


# Parameters that are absent or differ, and results of another type than x, which is looked up at run time.
MIXED = {
    "no parameters": {"parameters": None},
    "no bias": {"bias": None},
    "no weight": {"parameters": None, "bias": torch.float32},
    "parameters that differ": {"bias": torch.float16},
    "wider parameters": {"dtype": torch.bfloat16, "parameters": torch.float64},
    "wider result": {"dtype": torch.bfloat16, "out_dtype": torch.float32},
    "narrower result": {"out_dtype": torch.bfloat16, "activation": "silu"},
    "another half": {"dtype": torch.float16, "out_dtype": torch.bfloat16},
}


@shapes(WAYS)
@layouts
@pytest.mark.parametrize("mix", MIXED)
def test_mixed_types(mix, last, shape, groups):
    check_image(*large_call((2, *shape), groups, last, **MIXED[mix]), last=last)


@layouts
@floats
def test_one_value_a_group(dtype, last):
    """It is its own mean, which leaves the bias."""
    call = on_gpu((3, 16, 1, 1), 16, last, dtype)
    dy = gradient_for(call)
    result = with_gradients(Call.ours, call, dy)
    assert torch.equal(result["y"], call.bias.to(dtype).reshape(1, 16, 1, 1).expand(3, 16, 1, 1))
    assert torch.equal(result["dweight"], torch.zeros_like(call.weight))
    scale = dy.abs().max().item() / math.sqrt(call.eps) * call.weight.abs().max().item()
    assert result["dx"].abs().max().item() <= 1e-6 * scale


@layouts
def test_empty_batch(last):
    call = on_gpu((0, 8, 3, 5), 4, last)
    result = with_gradients(Call.ours, call, torch.ones_like(call.x))
    assert result["y"].shape == result["dx"].shape == (0, 8, 3, 5)
    for name in ("dweight", "dbias"):
        assert torch.equal(result[name], torch.zeros(8, device="cuda")), name


@shapes(WAYS)
@layouts
@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bias"], ["weight", "bias"]], ids=str)
def test_some_gradients(wanted, last, shape, groups):
    """They have the bits that they have beside the others."""
    call, dy = large_call((2, *shape), groups, last, torch.bfloat16)
    everything = with_gradients(Call.ours, call, dy)
    some = with_gradients(Call.ours, call, dy, wanted)
    check_same(some, {name: everything[name] for name in ("y", *(f"d{w}" for w in wanted))})


@needs_two_gpus
@layouts
def test_device_that_is_not_the_current_one(last):
    for shape, groups in (WAYS["kept by clusters"], WAYS["odd pixels"]):
        check_image(on_gpu((2, *shape), groups, last, device="cuda:1"), last=last)
    assert torch.cuda.current_device() == 0


# ---- layouts in memory ----

# Views of this shape, made of what `memory` gives for a shape.
VIEWS = {
    "storage offset": lambda memory, n, c, h, w: memory((n, c, h, w), offset=1),
    "some channels": lambda memory, n, c, h, w: memory((n, c + 8, h, w))[:, 4 : 4 + c],
    "some channels, odd": lambda memory, n, c, h, w: memory((n, c + 1, h, w))[:, 1:],
    "some samples": lambda memory, n, c, h, w: memory((2 * n, c, h, w))[::2],
    "some lines": lambda memory, n, c, h, w: memory((n, c, h + 3, w))[:, :, 2 : 2 + h],
}
VIEWED = {
    "kept by blocks": ((3, 16, 24, 24), 4),
    "kept by clusters": ((3, 96, 40, 40), 2),
    "wide": ((2, 320, 8, 8), 2),
    "odd": ((3, 15, 7, 9), 3),
}


@shapes(VIEWED)
@layouts
@pytest.mark.parametrize("view", VIEWS)
@floats
def test_views(dtype, view, last, shape, groups):
    """They are as good as dense tensors, both as x and as dy."""

    def memory(shape, offset=0):
        values = random(math.prod(shape) + offset, dtype, seed=3).cuda()[offset:]
        return image(values.view, shape, last)

    tensor = VIEWS[view](memory, *shape)
    assert tensor.shape == shape
    call = around(tensor, groups)
    check_image(call, last=last)
    check_image(call.replaced(x=gradient_for(call)), tensor, last=last)


@layouts
def test_gradient_in_another_layout(last):
    """dx lies as x does."""
    call = on_gpu((2, 16, 12, 12), 4, last)
    dy = gradient_for(call)
    check_image(call, dy.contiguous() if last else channels_last(dy), last=last)


# ---- determinism ----


@shapes(WAYS)
@layouts
@floats
def test_bits_are_the_same_beside_other_work(dtype, last, shape, groups):
    check_bits_beside_other_work(*large_call((2, *shape), groups, last, dtype))


@shapes(WAYS)
@layouts
@floats
def test_samples_do_not_depend_on_their_batch(dtype, last, shape, groups):
    """Among many others, too, where units that are read twice alternate with each other."""
    for samples in (5, 40 if math.prod(shape) < 2**20 else 7):
        call, dy = large_call((samples, *shape), groups, last, dtype)
        check_parts_alone(call, dy, counts=(1, 2), firsts=(0, 2))


# ---- streams and graphs ----


@shapes(WAYS)
@layouts
def test_two_streams_at_once(last, shape, groups):
    x, y, dy = (large_image((2, *shape), last, torch.bfloat16, seed) for seed in (1, 2, 3))
    check_two_streams([around(x, groups), around(y, groups)], dy)


@shapes(WAYS)
@layouts
@floats
def test_graph(dtype, last, shape, groups):
    check_graph(*large_call((2, *shape), groups, last, dtype))


# ---- memory ----


@shapes(WAYS)
@layouts
@all_dtypes
def test_everything_is_written(dtype, last, shape, groups):
    check_everything_is_written(*large_call((3, *shape), groups, last, dtype))


# ---- what torch does besides calling ----


@backends
@layouts
def test_compile(last, backend):
    call = on_gpu((4, 32, 16, 16), 8, last, torch.bfloat16, activation="silu")
    result = check_compiled(call, gradient_for(call), backend)
    assert is_dense(result["y"], last)
    assert is_dense(result["dx"], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@layouts
def test_autocast(last, dtype):
    check_autocast(on_gpu((4, 32, 9, 10), 8, last, dtype))


@pytest.mark.parametrize("activation", [None, "silu"])
@layouts
def test_gradcheck(last, activation):
    both = {"dtype": torch.float64, "parameters": torch.float64}
    check_gradients(on_gpu((2, 4, 3, 2), 2, last, activation=activation, **both))
