"""layer_norm and rms_norm with a residual: y and sum, their gradients, layouts in memory, modules, and wrong calls.

y and sum are what an addition and evenkeel's norm of its result give, bit by bit; gradients are compared with
float64.
"""

import copy
import pickle
import warnings
import weakref

import numpy
import pytest
import torch
from residual_support import (
    BF16,
    F16,
    F32,
    F64,
    Added,
    Block,
    added,
    block_in_two_steps,
    check_call,
    check_same,
    devices,
    directions,
    mixes,
    rounded,
    row_norms,
    typical_mixes,
    with_gradients,
)
from test_functional import ROWS_ELSEWHERE, ROWS_IN_PLACE
from test_transforms import Recorder
from torch import nn

import evenkeel.torch as ek
from support import COPIES, make, random, recorded

# ---- values and gradients ----


@devices
@mixes
@row_norms
def test_values_and_gradients(norm, mix, device):
    call = added(norm, mix).to(device)
    dy, dsum = directions(call, device)
    check_call(call, rounded(dy, mix[0]), rounded(dsum, mix[2]))


@devices
@mixes
@row_norms
def test_bits_are_those_of_addition_and_norm(norm, mix, device):
    for shape in ((6, 5, 40), (3, 1000)):
        call = added(norm, mix, shape).to(device)
        actual, expected = call.ours(), call.in_two_steps()
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"weight_offset": 1.0},
        {"activation": "silu", "weight_offset": -0.5},
        {"out_dtype": F32},
        {"out_dtype": BF16},
        {"eps": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None), (BF16, BF16, F32)], ids=str)
@row_norms
def test_options(norm, mix, options):
    call = added(norm, mix, **options)
    dy, dsum = directions(call)
    out_dtype = options.get("out_dtype") or mix[0]
    check_call(call, rounded(dy, out_dtype), rounded(dsum, call.type_of_sum()))
    for ours, theirs in zip(call.ours(), call.in_two_steps(), strict=True):
        assert torch.equal(ours, theirs)


@row_norms
def test_without_parameters(norm):
    call = added(norm, weight=None)
    check_call(call, *directions(call))


@pytest.mark.parametrize("mix", [(BF16, BF16, None), (BF16, F32, None), (F16, BF16, F16)], ids=str)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_casting_goes_by_the_sum(casting, mix):
    call = added("rms_norm", mix, casting=casting)
    for ours, theirs in zip(call.ours(), call.in_two_steps(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mix", [(F32, F32, None), (F32, F64, None), (BF16, F32, None)], ids=str)
def test_eps_none_goes_by_the_sum(mix):
    """So small that eps decides."""
    call = added("rms_norm", mix, eps=None)
    call = call.replaced(x=call.call.x * 1e-6, residual=call.residual * 1e-6)
    expected = call.in_two_steps()[0]
    torch.testing.assert_close(call.ours()[0], expected)


def test_a_branch_of_bfloat16_in_a_stream_of_float32():
    y, total = added("rms_norm", (BF16, F32, None)).ours()
    assert (y.dtype, total.dtype) == (BF16, F32)


@pytest.mark.parametrize("mix", [(F32, F32, F32), (BF16, F32, F32), (F32, BF16, BF16)], ids=str)
@row_norms
def test_autocast(norm, mix):
    x, residual, total = mix
    call = added(norm, (x, residual, None))
    with torch.autocast("cpu", BF16):
        got = with_gradients(Added.ours, call, *directions(call))
    assert (got["y"].dtype, got["sum"].dtype) == (BF16, total)
    call.call.options["out_dtype"] = BF16
    check_same(got, with_gradients(Added.ours, call, *directions(call)))
    with torch.autocast("cpu", BF16):
        call.call.options["out_dtype"] = F32
        assert call.ours()[0].dtype == F32


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None)], ids=str)
@row_norms
def test_no_rows(norm, mix, shape):
    call = added(norm, mix, shape)
    got = with_gradients(Added.ours, call, torch.ones(shape), torch.ones(shape))
    for name in ("y", "sum", "dx", "dresidual"):
        assert got[name].shape == shape
    assert torch.equal(got["dweight"], torch.zeros(8))


@row_norms
def test_more_dimensions_are_normalized(norm):
    call = make(norm, (4, 6, 5), (6, 5), bias=None if norm == "rms_norm" else F32)
    call = Added(call, random((4, 6, 5), seed=3))
    check_call(call, *directions(call))


@row_norms
def test_x_is_the_residual(norm):
    """Both gradients arrive at one tensor."""
    call = added(norm)
    x = call.call.x.clone().requires_grad_()
    y, total = call.replaced(x=x, residual=x).ours()
    assert torch.equal(total, 2 * x)
    dy, dsum = directions(call)
    torch.autograd.backward((y, total), (dy, dsum))
    separate = with_gradients(Added.ours, call.replaced(residual=call.call.x), dy, dsum)
    assert torch.equal(x.grad, separate["dx"] + separate["dresidual"])


# ---- which gradients ----

SOME = [
    "x",
    "residual",
    "weight",
    "bias",
    "x weight",
    "residual weight",
    "x residual",
    "weight bias",
]


@pytest.mark.parametrize("arriving", ["y", "sum", "both"])
@pytest.mark.parametrize("wanted", SOME)
@typical_mixes
@row_norms
def test_some_gradients(norm, mix, wanted, arriving):
    """Unused results and unwanted gradients: the rest is as if all were there."""
    call = added(norm, mix, activation="silu")
    wanted = set(wanted.split()) & call.inputs().keys()
    if not wanted:
        pytest.skip("RMS norm has no bias")
    dy, dsum = directions(call)
    dy, dsum = (dy if arriving != "sum" else None), (dsum if arriving != "y" else None)
    if not wanted & {"x", "residual"}:
        dsum = None
    if dy is None and dsum is None:
        pytest.skip("the sum does not depend on parameters")
    complete = with_gradients(Added.ours, call, dy, dsum)
    expected = {
        name: complete[name]
        for name in ["y", "sum", *(f"d{n}" for n in call.inputs() if n in wanted)]
    }
    check_same(with_gradients(Added.ours, call, dy, dsum, wanted), expected)


@pytest.mark.parametrize("arriving", ["y", "sum"])
@typical_mixes
@row_norms
def test_one_result_is_not_used(norm, mix, arriving):
    call = added(norm, mix)
    dy, dsum = directions(call)
    dy, dsum = rounded(dy, mix[0]), rounded(dsum, call.type_of_sum())
    check_call(call, *((dy, None) if arriving == "y" else (None, dsum)))


@pytest.mark.parametrize("arriving", [0, 1], ids=["y", "sum"])
@row_norms
def test_no_zeros_are_made_for_an_unused_result(norm, arriving):
    call = added(norm)
    call = call.replaced(x=call.call.x.requires_grad_())
    result, dy = call.ours()[arriving], directions(call)[0]
    with Recorder() as recorder:
        operators = recorded(lambda: result.backward(dy))
    assert not operators & {"aten::zeros", "aten::zeros_like", "aten::zero_", "aten::fill_"}
    assert [args[13] for _, args in recorder.calls] == ([None] if arriving == 0 else [])


@row_norms
def test_a_sum_without_gradient(norm):
    """x and residual are fixed: the sum is too, and y is not."""
    call = added(norm)
    weight = call.call.weight.clone().requires_grad_()
    y, total = call.replaced(weight=weight).ours()
    assert y.requires_grad
    assert not total.requires_grad
    y.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not any(result.requires_grad for result in call.replaced(weight=weight).ours())


@row_norms
def test_one_tensor_is_both_gradients_of_one_dtype(norm):
    call = added(norm)
    with Recorder() as recorder:
        got = with_gradients(Added.ours, call, *directions(call))
    assert [args[12] for operator, args in recorder.calls if "backward" in operator.name()] == [
        [True, True, norm == "layer_norm", False]
    ]
    assert got["dx"].data_ptr() == got["dresidual"].data_ptr()


@row_norms
def test_gradients_are_accumulated_apart(norm):
    """They are one tensor at first: what is added to one must not be seen in the other."""
    call = added(norm)
    x, residual = call.call.x.requires_grad_(), call.residual.requires_grad_()
    for _ in range(2):
        y, total = call.ours()
        (y.sum() + total.pow(2).sum() + x.sum()).backward()
    torch.testing.assert_close(x.grad, residual.grad + 2)
    x.grad.zero_()
    assert residual.grad.abs().max() > 0


@row_norms
def test_backward_twice(norm):
    call = added(norm)
    x = call.call.x.requires_grad_()
    y, total = call.ours()
    loss = y.pow(2).sum() + total.sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("changed", ["sum", "weight"])
@row_norms
def test_change_in_place_is_noticed(norm, changed):
    call = added(norm)
    x, weight = call.call.x.requires_grad_(), call.call.weight.clone().requires_grad_() * 1
    y, total = call.replaced(x=x, weight=weight).ours()
    (total if changed == "sum" else weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@row_norms
def test_x_and_residual_may_change(norm):
    """They are not kept: the sum is."""
    call = added(norm)
    expected = with_gradients(Added.ours, call, *directions(call))
    x, residual = (t.clone().requires_grad_() for t in (call.call.x, call.residual))
    summands = x * 1, residual * 1
    results = call.replaced(x=summands[0], residual=summands[1]).ours()
    for summand in summands:
        summand.add_(1)
    torch.autograd.backward(results, directions(call))
    assert torch.equal(x.grad, expected["dx"])
    assert torch.equal(residual.grad, expected["dresidual"])


@row_norms
def test_saved_tensors(norm):
    call, packed = added(norm), []

    def pack(tensor):
        packed.append(tensor)
        return tensor.numpy(force=True).copy()

    def hooked(call):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            return call.ours()

    got = with_gradients(hooked, call, *directions(call))
    assert [torch.equal(t, got["sum"]) for t in packed if t.shape == call.call.x.shape] == [True]
    check_same(got, with_gradients(Added.ours, call, *directions(call)))


@row_norms
def test_the_kept_sum_does_not_keep_its_own_graph(norm):
    """It is a result: a node that held it with its history would never be freed."""
    call = added(norm)
    x = call.call.x.requires_grad_() * 1

    def hook(gradient):
        return gradient

    x.register_hook(hook)
    results = call.replaced(x=x).ours()
    held = weakref.ref(hook)
    del hook, x
    assert held() is not None
    del results
    assert held() is None


# ---- layouts in memory ----


@pytest.mark.parametrize("name", ROWS_IN_PLACE | ROWS_ELSEWHERE)
@pytest.mark.parametrize("which", ["x", "residual", "both"])
@row_norms
def test_views(norm, which, name):
    view = (ROWS_IN_PLACE | ROWS_ELSEWHERE)[name]
    call = added(norm, shape=view(F32).shape)
    for each in ("x", "residual") if which == "both" else (which,):
        call = call.replaced(**{each: view(F32)})
    dense = call.replaced(**{k: t.contiguous() for k, t in call.inputs().items()})
    got = with_gradients(Added.ours, call, *directions(call))
    check_same(got, with_gradients(Added.ours, dense, *directions(call)))
    assert got["y"].is_contiguous()
    assert got["sum"].is_contiguous()


@pytest.mark.parametrize("name", ROWS_IN_PLACE | ROWS_ELSEWHERE)
@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
@row_norms
def test_views_of_gradients(norm, which, name):
    view = (ROWS_IN_PLACE | ROWS_ELSEWHERE)[name](F32)
    call = added(norm, shape=view.shape)
    dy, dsum = directions(call)
    dy, dsum = (dy if which == "dsum" else view), (dsum if which == "dy" else view)
    got = with_gradients(Added.ours, call, dy, dsum)
    check_same(got, with_gradients(Added.ours, call, dy.contiguous(), dsum.contiguous()))


@pytest.mark.parametrize("name", ROWS_IN_PLACE)
@pytest.mark.parametrize("which", ["x", "residual", "both"])
@typical_mixes
@row_norms
def test_nothing_is_copied_or_cast(norm, mix, which, name):
    shape = ROWS_IN_PLACE[name](F32).shape
    call = added(norm, mix, shape)
    for each, dtype in zip(("x", "residual"), mix, strict=False):
        if which in (each, "both"):
            call = call.replaced(**{each: ROWS_IN_PLACE[name](dtype)})
    dy, dsum = random(shape, mix[0]), random(shape, mix[1])
    operators = recorded(lambda: with_gradients(Added.ours, call, dy, dsum))
    assert {"evenkeel::add_forward", "evenkeel::add_backward"} <= operators
    assert not operators & COPIES


@row_norms
def test_layouts_are_those_of_the_norm(norm):
    x = random((2, 4, 5, 8)).to(memory_format=torch.channels_last)
    call = Added(make(norm, x.shape, (8,)).replaced(x=x), random(x.shape, seed=3))
    y, total = call.ours()
    plain = getattr(ek, norm)(*call.call.arguments())
    assert y.stride() == total.stride() == plain.stride()
    check_call(call, *directions(call))


@row_norms
def test_lazy_clones_are_read_as_they_are(norm):
    call = added(norm)
    clones = {name: torch._lazy_clone(t).requires_grad_() for name, t in call.inputs().items()}
    gradients = [torch._lazy_clone(g) for g in directions(call)]
    results = call.replaced(**clones).ours()
    torch.autograd.grad(results, list(clones.values()), gradients)
    assert all(torch._C._is_cow_tensor(t) for t in [*clones.values(), *gradients])


# ---- modules ----


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_modules(kind):
    norm = getattr(ek, kind)(16, eps=1e-5)
    x, residual = random((3, 16), BF16), random((3, 16), seed=1)
    function = getattr(ek, {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[kind])
    expected = function(x, (16,), norm.weight, eps=1e-5, residual=residual, sum_dtype=BF16)
    for got in (
        norm(x, residual, sum_dtype=BF16),
        norm(x, residual=residual, sum_dtype=BF16),
        pickle.loads(pickle.dumps(norm))(x, residual, sum_dtype=BF16),
        copy.deepcopy(norm)(x, residual, sum_dtype=BF16),
    ):
        assert isinstance(got, tuple)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert norm(x, residual)[1].dtype == F32
    assert isinstance(norm(x), torch.Tensor)
    assert isinstance(norm(x, None), torch.Tensor)
    assert norm.state_dict().keys() == getattr(nn, kind)(16).state_dict().keys()
    with pytest.raises(ValueError, match=r"sum_dtype is torch\.float32, but there is no residual"):
        norm(x, sum_dtype=F32)


def test_group_norm_takes_none():
    x = random((2, 4, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'residual'"):
        ek.group_norm(x, 2, residual=x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'residual'"):
        ek.GroupNorm(2, 4)(x, residual=x)
    with pytest.raises(TypeError, match="positional argument"):
        ek.GroupNorm(2, 4)(x, x)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_fused_modules_are_called_as_before(kind):
    class Named(getattr(nn, kind)):
        pass

    model = nn.Sequential(getattr(nn, kind)(16), Named(16))
    x = random((3, 16))
    expected = model(x)
    ek.fuse(model)
    torch.testing.assert_close(model(x), expected)
    argument = "x" if kind == "RMSNorm" else "input"
    for norm in model:
        assert torch.equal(norm(**{argument: x}), norm(x))


def test_a_block_is_what_it_is_in_two_steps():
    block = Block()
    x, residual = random((5, 16)), random((5, 16), seed=1)
    torch.testing.assert_close(
        block(x, residual), block_in_two_steps(block, x, residual), rtol=1e-5, atol=1e-5
    )


# ---- calls that are wrong ----


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"residual": (8,)},
            RuntimeError,
            r"residual must have the shape \[4, 8\] of x, but has \[8\]",
        ),
        (
            {"residual": (1, 8)},
            RuntimeError,
            r"residual must have the shape \[4, 8\] of x, but has",
        ),
        (
            {"residual": (4, 1)},
            RuntimeError,
            r"residual must have the shape \[4, 8\] of x, but has",
        ),
        ({"residual": (1, 4, 8)}, RuntimeError, r"residual must have the shape \[4, 8\] of x"),
        (
            {"residual": ()},
            RuntimeError,
            r"residual must have the shape \[4, 8\] of x, but has \[\]",
        ),
        (
            {"residual": 1.0},
            TypeError,
            "residual must be a tensor or None, but is 1.0 of type float",
        ),
        ({"residual": [1.0]}, TypeError, "residual must be a tensor or None"),
        ({"residual": numpy.ones((4, 8))}, TypeError, "residual must be a tensor or None"),
        (
            {"residual": torch.int64},
            NotImplementedError,
            "residual must be float64, .* but is Long",
        ),
        ({"residual": torch.complex64}, NotImplementedError, "residual must be float64"),
        ({"residual": torch.float8_e4m3fn}, NotImplementedError, "residual must be float64"),
        (
            {"residual": torch.ones(4, 8).to_sparse()},
            NotImplementedError,
            "residual must be a dense",
        ),
        (
            {"residual": torch.ones(4, 8, device="meta")},
            RuntimeError,
            "residual is on meta, but x is on",
        ),
        (
            {"sum_dtype": F32, "residual": None},
            ValueError,
            "sum_dtype is torch.float32, but there is no",
        ),
        ({"sum_dtype": torch.int32}, ValueError, "sum_dtype must be float64, .* but is Int"),
        ({"sum_dtype": "float32"}, TypeError, "sum_dtype must be a torch.dtype or None"),
        ({"sum_dtype": numpy.float32}, TypeError, "sum_dtype must be a torch.dtype or None"),
        (
            {"sum_dtype": F32, "residual": F64},
            ValueError,
            "sum_dtype must be float64 where x or residual is, but is Float, and x is Float, residual Double",
        ),
        (
            {"x": F64},
            ValueError,
            "sum_dtype must be float64 where x or residual is, but is Float, residual's, and x is Double",
        ),
        ({"normalized_shape": (7,)}, RuntimeError, "x must end with the dimensions"),
    ],
    ids=str,
)
@devices
@row_norms
def test_wrong_calls(norm, device, changes, error, message):
    values = {
        "x": (4, 8),
        "residual": (4, 8),
        "normalized_shape": (8,),
        "sum_dtype": None,
    } | changes
    for name in ("x", "residual"):
        value = values[name]
        if isinstance(value, tuple):
            value = torch.ones(value)
        elif isinstance(value, torch.dtype):
            value = torch.ones(4, 8).to(value)
        values[name] = (
            value.to(device)
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            else value
        )
    with pytest.raises(error, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(ek, norm)(
            values["x"],
            values["normalized_shape"],
            residual=values["residual"],
            sum_dtype=values["sum_dtype"],
        )


def test_gradient_of_another_shape():
    call = added("layer_norm")
    call.call.x.requires_grad_()
    with pytest.raises(RuntimeError, match="shape"):
        call.ours()[1].backward(torch.ones(3))
