"""layer_norm and rms_norm with a residual: y and sum, their gradients, and what torch does with both.

y and sum are what an addition and evenkeel's norm of its result give, bit by bit; gradients are compared with
float64.
"""

import contextlib
import copy
import functools
import io
import itertools
import pickle
import warnings
import weakref
from dataclasses import dataclass

import numpy
import pytest
import torch
from cuda_support import needs_kernels
from test_functional import ROWS_ELSEWHERE, ROWS_IN_PLACE
from test_onnx import needs_onnx, norms_in, onnx_values, to_onnx
from test_transforms import Dispatch, Function, Recorder
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import evenkeel.torch as ek
from support import COPIES, DTYPES, HALVES, ROW_NORMS, Call, check, make, name_of, random, recorded
from support import oracle as oracle_of_norm

F64, F32, F16, BF16 = DTYPES

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_kernels)])

# x, residual and sum. A sum of float64 is added in it, every other one in float32.
MIXES = [
    (x, residual, total)
    for x, residual, total in itertools.product(DTYPES, repeat=3)
    if total == F64 or F64 not in (x, residual)
]
mixes = pytest.mark.parametrize(
    "mix", MIXES, ids=lambda mix: "-".join(name_of(dtype) for dtype in mix)
)


def sum_of(x, residual, dtype):
    compute = F64 if dtype == F64 else F32
    return (x.to(compute) + residual.to(compute)).to(dtype)


@dataclass
class Added:
    """A call of a norm with a residual."""

    call: Call
    residual: torch.Tensor
    sum_dtype: torch.dtype | None = None

    def inputs(self):
        return self.call.inputs() | {"residual": self.residual}

    def replaced(self, **changes):
        residual = changes.pop("residual", self.residual)
        return Added(self.call.replaced(**changes), residual, self.sum_dtype)

    def to(self, device):
        return self.replaced(**{name: tensor.to(device) for name, tensor in self.inputs().items()})

    def type_of_sum(self):
        return self.sum_dtype or self.residual.dtype

    def ours(self):
        options = {"residual": self.residual, "sum_dtype": self.sum_dtype} | self.call.options
        return getattr(ek, self.call.norm)(*self.call.arguments(), **options)

    def in_two_steps(self):
        total = sum_of(self.call.x, self.residual, self.type_of_sum())
        options = {"out_dtype": self.call.x.dtype} | self.call.options
        return getattr(ek, self.call.norm)(
            *self.call.replaced(x=total).arguments(), **options
        ), total

    def oracle(self):
        """In float64, but for the rounding of the sum, which gradients do not see."""
        x, residual = self.call.x, self.residual
        exact = x.double() + residual.double()
        rounded = sum_of(x, residual, self.type_of_sum()).double()
        total = exact + (rounded - exact).detach()
        return oracle_of_norm(self.call.replaced(x=total)), total


def added(norm, mix=(F32, F32, None), shape=(6, 5, 40), weight=F32, **options):
    x, residual, total = mix
    bias = None if norm == "rms_norm" else weight
    call = make(norm, shape, shape[-1:], x, weight, bias, **options)
    return Added(call, random(shape, residual, seed=3, scale=2.0), total)


def with_gradients(run, call, dy=None, dsum=None, wanted=None):
    """y, sum and gradients by name of `run` (a method of Added)."""
    leaves = {
        name: tensor.detach().requires_grad_(wanted is None or name in wanted)
        for name, tensor in call.inputs().items()
    }
    outputs = run(call.replaced(**leaves))
    sought = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [
        (result, gradient if gradient.dtype == result.dtype else gradient.to(result.dtype))
        for result, gradient in zip(outputs, (dy, dsum), strict=True)
        if gradient is not None
    ]
    results, arriving = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(results, list(sought.values()), arriving, allow_unused=True)
    named = {f"d{name}": g for name, g in zip(sought, gradients, strict=True)}
    return {"y": outputs[0].detach(), "sum": outputs[1].detach()} | named


def directions(call, device="cpu"):
    shape = call.call.x.shape
    return random(shape, seed=8).to(device), random(shape, seed=9).to(device)


def check_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name]
        assert (value is None) == (other is None), name
        if value is not None:
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name


def check_call(call, dy, dsum):
    """Against float64; dtypes, too. dy and dsum: float32 that the dtypes of y and sum can hold, or None."""
    actual = with_gradients(Added.ours, call, dy, dsum)
    expected = with_gradients(Added.oracle, call, dy, dsum)
    assert actual["y"].dtype == (call.call.options.get("out_dtype") or call.call.x.dtype)
    assert actual["sum"].dtype == call.type_of_sum()
    rstd_is_wide = call.type_of_sum() == F64
    for name, value in actual.items():
        if expected[name] is None:
            assert value is None, name
            continue
        if name.startswith("d"):
            assert value.dtype == call.inputs()[name[1:]].dtype, name
        compute = None if rstd_is_wide or name == "sum" else F32
        check(
            value, expected[name].double(), name, compute, scale=8.0 if name.startswith("d") else 0
        )


def rounded(tensor, dtype):
    return tensor.to(dtype).float() if dtype in HALVES else tensor


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
typical_mixes = pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None)], ids=str)


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


# ---- derivatives ----


def small(norm, **options):
    shape = (2, 3, 5)
    return added(norm, (F64, F64, None), shape, weight=F64, **options)


def function_of(call, run=Added.ours):
    names = list(call.inputs())
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call.inputs().values()]
    return lambda *tensors: run(call.replaced(**dict(zip(names, tensors, strict=True)))), leaves


def some_of(which):
    """Results that are derived: y, sum or both."""
    return {"y": lambda pair: pair[0], "sum": lambda pair: pair[1], "both": tuple}[which]


SMALL = {
    **{norm: small(norm) for norm in ROW_NORMS},
    **{f"{norm}-silu": small(norm, activation="silu", weight_offset=1.0) for norm in ROW_NORMS},
}


@pytest.mark.parametrize("which", ["y", "sum", "both"])
@pytest.mark.parametrize("name", SMALL)
def test_first_derivatives(name, which):
    function, leaves = function_of(SMALL[name])
    leaves = (
        leaves
        if which != "sum"
        else [
            leaf if place in (0, len(leaves) - 1) else leaf.detach()
            for place, leaf in enumerate(leaves)
        ]
    )
    assert torch.autograd.gradcheck(
        lambda *tensors: some_of(which)(function(*tensors)),
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@pytest.mark.parametrize("which", ["y", "both"])
@pytest.mark.parametrize("name", SMALL)
def test_second_derivatives(name, which):
    function, leaves = function_of(SMALL[name])
    assert torch.autograd.gradgradcheck(
        lambda *tensors: some_of(which)(function(*tensors)), leaves, check_fwd_over_rev=True
    )


@row_norms
def test_third_derivative(norm):
    def third(run):
        function, leaves = function_of(small(norm, activation="silu"), run)
        y, total = function(*leaves)
        value = y.pow(3).sum() + (y * total.pow(2)).sum()
        for _ in range(3):
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(gradient.pow(2).sum() for gradient in gradients)
        return gradients

    torch.testing.assert_close(third(Added.ours), third(Added.oracle), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None), (F32, BF16, F32)], ids=str)
@row_norms
def test_tangents(norm, mix):
    call = added(norm, mix)
    tangents = {name: random(t.shape, t.dtype, seed=5) for name, t in call.inputs().items()}
    with forward_ad.dual_level():
        duals = {k: forward_ad.make_dual(t, tangents[k]) for k, t in call.inputs().items()}
        (y, dy), (total, dsum) = map(forward_ad.unpack_dual, call.replaced(**duals).ours())
    assert torch.equal(total, call.ours()[1])
    assert (y.dtype, dsum.dtype) == (mix[0], call.type_of_sum())
    _, expected = torch.func.jvp(
        lambda *tensors: call.replaced(**dict(zip(tangents, tensors, strict=True))).oracle(),
        tuple(t.double() for t in call.inputs().values()),
        tuple(t.double() for t in tangents.values()),
    )
    rounding = 2e-2 if BF16 in (mix[0], call.type_of_sum()) else 1e-4
    for got, reference in zip((dy, dsum), expected, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=rounding, atol=4 * rounding)


def cubes(function):
    def run(*tensors):
        y, total = function(*tensors)
        return (y.pow(3) + y * total).sum()

    return run


def all_of(tensors):
    return tuple(range(len(tensors)))


def batch_of(tensor):
    return torch.stack([tensor, tensor * 2 + 1, tensor.flip(-1)])


FUNC = {
    "grad": lambda f, t: torch.func.grad(cubes(f), all_of(t))(*t),
    "vjp": lambda f, t: torch.func.vjp(f, *t)[1]((torch.sin(t[0]), torch.cos(t[0]))),
    "jvp": lambda f, t: torch.func.jvp(f, tuple(t), tuple(map(torch.sin, t))),
    "jacrev": lambda f, t: torch.func.jacrev(f, all_of(t))(*t),
    "jacfwd": lambda f, t: torch.func.jacfwd(f, all_of(t))(*t),
    "hessian": lambda f, t: torch.func.hessian(cubes(f))(*t),
    "vmap": lambda f, t: vmap(f)(*map(batch_of, t)),
    "vmap of grad": lambda f, t: vmap(torch.func.grad(cubes(f), all_of(t)))(*map(batch_of, t)),
    "functionalize": lambda f, t: torch.func.functionalize(f)(*t),
}


@pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")
@pytest.mark.parametrize("transform", FUNC)
@row_norms
def test_func(norm, transform):
    call = small(norm, activation="silu")
    (function, leaves), (expected, _) = function_of(call), function_of(call, Added.oracle)
    tensors = [leaf.detach() for leaf in leaves]
    torch.testing.assert_close(
        FUNC[transform](function, tensors), FUNC[transform](expected, tensors), rtol=1e-9, atol=1e-9
    )


# ---- vmap ----


def one_by_one(function, dims, tensors):
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)))
        for i in range(3)
    ]
    return torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def subsets():
    for norm in ROW_NORMS:
        names = list(added(norm).inputs())
        for size in range(1, 1 + len(names)):
            for subset in itertools.combinations(names, size):
                yield pytest.param(norm, subset, id=f"{norm}-{'+'.join(subset)}")


def batched(call, subset):
    items = call.inputs().items()
    dims = tuple(0 if name in subset else None for name, _ in items)
    return [batch_of(t) if name in subset else t for name, t in items], dims


@pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")
@pytest.mark.parametrize(("norm", "subset"), list(subsets()))
@typical_mixes
def test_vmap(norm, subset, mix):
    call = added(norm, mix, activation="silu")
    function, _ = function_of(call)
    tensors, dims = batched(call, subset)
    with Recorder() as recorder:
        got = vmap(function, dims)(*tensors)
    assert [operator.name() for operator, _ in recorder.calls] == ["evenkeel::add_forward"]
    expected = one_by_one(function, dims, tensors)
    assert torch.equal(got[1], expected[1])
    if set(subset) <= {"x", "residual"}:
        assert torch.equal(got[0], expected[0])
    rounding = 2e-2 if mix[0] == BF16 else 1e-4
    torch.testing.assert_close(got[0], expected[0], rtol=rounding, atol=rounding)


@pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")
@pytest.mark.parametrize(("norm", "subset"), list(subsets()))
def test_gradients_under_vmap(norm, subset):
    call = added(norm, (BF16, F32, None), out_dtype=F32)
    tensors, dims = batched(call, subset)
    gradients = torch.func.grad(cubes(function_of(call)[0]), all_of(tensors))
    got, expected = vmap(gradients, dims)(*tensors), one_by_one(gradients, dims, tensors)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        rounding = 2e-2 if ours.dtype == BF16 else 1e-4
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * scale)


@pytest.mark.parametrize("arriving", ["y", "both"])
@pytest.mark.parametrize(
    "wanted", [["x"], ["residual"], ["x", "residual"], ["x", "weight", "residual"]]
)
@typical_mixes
@row_norms
def test_batch_of_gradients(norm, mix, wanted, arriving):
    call = added(norm, mix)
    leaves = {k: t.detach().requires_grad_(k in wanted) for k, t in call.inputs().items()}
    results = call.replaced(**leaves).ours()
    results = results[:1] if arriving == "y" else results
    batches = [batch_of(random(r.shape, r.dtype, seed=7)) for r in results]

    def gradients(*arrived):
        return torch.autograd.grad(
            results, [leaves[name] for name in wanted], arrived, retain_graph=True
        )

    got = vmap(gradients)(*batches)
    for ours, theirs in zip(got, one_by_one(gradients, (0,) * len(batches), batches), strict=True):
        rounding = 2e-2 if ours.dtype == BF16 else 1e-4
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * 10)


# ---- operators as torch's other parts meet them ----


@pytest.mark.parametrize("requires_grad", [False, True])
@typical_mixes
@row_norms
def test_opcheck(norm, mix, requires_grad):
    call = added(norm, mix, (4, 3, 8))
    with Recorder() as recorder:
        with_gradients(Added.ours, call, *directions(call))
        with_gradients(Added.ours, call, directions(call)[0], None)
    operators = torch.ops.evenkeel
    assert [operator for operator, _ in recorder.calls] == 2 * [
        operators.add_forward.default,
        operators.add_backward.default,
    ]
    x, over, *others = call.call.arguments()
    public = getattr(operators, f"add_{norm}").default
    for operator, args in [*recorder.calls, (public, (x, call.residual, over, *others))]:
        args = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().requires_grad_(requires_grad and t.numel() > 0), args
        )
        torch.library.opcheck(operator, tuple(args))


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None), (F32, F32, F64)], ids=str)
@row_norms
def test_tensors_without_values(norm, mix, kind):
    mode = FakeTensorMode()

    def without_values(tensor):
        return mode.from_tensor(tensor) if kind == "fake" else tensor.to("meta")

    def description(results):
        return {k: (t.shape, t.stride(), t.dtype) for k, t in results.items()}

    call = added(norm, mix)
    directed = directions(call)
    real = with_gradients(Added.ours, call, *directed)
    shadows = {k: without_values(t) for k, t in call.inputs().items()}
    got = with_gradients(Added.ours, call.replaced(**shadows), *map(without_values, directed))
    assert description(got) == description(real)


@pytest.mark.parametrize("dynamic", ["dynamic=True", "mark_dynamic", "autocast"])
@pytest.mark.parametrize("mix", [(F32, F32, None), (BF16, F32, None)], ids=str)
@row_norms
def test_compile(norm, mix, dynamic):
    """One graph, for batches of all sizes, with eager's values bit by bit."""
    torch.compiler.reset()
    autocast = torch.autocast("cpu", BF16, enabled=dynamic == "autocast")
    compiled = torch.compile(
        getattr(ek, norm),
        backend="aot_eager",
        fullgraph=True,
        dynamic=None if dynamic == "mark_dynamic" else True,
    )

    def run_compiled(call):
        if dynamic == "mark_dynamic":
            for tensor in (call.call.x, call.residual):
                torch._dynamo.mark_dynamic(tensor, 0)
        with autocast:
            return compiled(*call.call.arguments(), residual=call.residual)

    def run_eager(call):
        with autocast:
            return call.ours()

    for size in (7, 9, 13):
        call = added(norm, mix, (size, 3, 8))
        with torch.compiler.set_stance("default" if size == 7 else "fail_on_recompile"):
            got = with_gradients(run_compiled, call, *directions(call))
        check_same(got, with_gradients(run_eager, call, *directions(call)))


class Block(nn.Module):
    """A pre-norm block and a post-norm one."""

    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = ek.RMSNorm(width, eps=1e-5), ek.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x, residual):
        y, residual = self.first(x, residual)
        y, residual = self.second(self.down(self.up(y).relu()), residual)
        return y * 2, residual


def block_in_two_steps(block, x, residual):
    residual = x + residual
    residual = residual + block.down(block.up(block.first(residual)).relu())
    return block.second(residual) * 2, residual


def loss_of(pair):
    y, residual = pair
    return y.pow(2).sum() + residual.pow(3).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model(backend):
    torch.compiler.reset()
    block = Block()
    compiled = torch.compile(copy.deepcopy(block), backend=backend, fullgraph=True, dynamic=True)
    for size in (3, 5):
        x, residual = random((size, 16), seed=size), random((size, 16), seed=size + 1)
        with torch.compiler.set_stance("default" if size == 3 else "fail_on_recompile"):
            got = compiled(x, residual)
            loss_of(got).backward()
        expected = block(x, residual)
        loss_of(expected).backward()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        for ours, reference in zip(compiled.parameters(), block.parameters(), strict=True):
            scale = reference.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("used", ["y", "sum", "both"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_autograd(backend, used):
    torch.compiler.reset()
    call = added("layer_norm", (BF16, F32, None))
    leaves = {name: t.clone().requires_grad_() for name, t in call.inputs().items()}

    def gradients(context):
        y, total = call.replaced(**leaves).ours()
        loss = {"y": y.pow(2).sum(), "sum": total.pow(2).sum()}
        loss["both"] = loss["y"] + loss["sum"]
        with context:
            loss[used].backward()
        found = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        return found

    expected = gradients(contextlib.nullcontext())
    for _ in range(2):
        got = gradients(torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)))
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


def test_compiled_autograd_tells_calls_apart():
    """Dtypes of x and residual, and whether there is one, are part of what is compiled."""
    torch.compiler.reset()
    for mix in (None, (F32, F32, None), (BF16, F32, None), (F32, BF16, F32)):
        call = added("rms_norm", mix or (F32, F32, None))
        x = call.call.x.requires_grad_()

        def loss(call=call, mix=mix):
            results = call.ours() if mix else [call.call.ours()]
            return sum(result.float().pow(2).sum() for result in results)

        (expected,) = torch.autograd.grad(loss(), x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss().backward()
        assert torch.equal(x.grad, expected)


def test_export():
    block, batch = Block(), torch.export.Dim("batch")
    example = random((4, 16)), random((4, 16), seed=1)
    program = torch.export.export(block, example, dynamic_shapes=({0: batch}, {0: batch}))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    inputs = random((9, 16)), random((9, 16), seed=1)
    for variant in (program, torch.export.load(stored), program.run_decompositions()):
        for ours, theirs in zip(variant.module()(*inputs), block(*inputs), strict=True):
            assert torch.equal(ours, theirs)
    targets = [str(node.target) for node in program.graph.nodes]
    assert {f"evenkeel.add_{norm}.default" for norm in ROW_NORMS} <= set(targets)
    plain = program.run_decompositions(ek.decompositions())
    assert not any("evenkeel" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(*inputs), block(*inputs), rtol=1e-4, atol=1e-4)


@needs_onnx
@pytest.mark.parametrize("opset", [20, 23])
def test_onnx(opset):
    block = Block().eval()
    program = to_onnx(
        block,
        (random((4, 16)), random((4, 16), seed=1)),
        dynamic_shapes=({0: "batch"}, {0: "batch"}),
        opset_version=opset,
    )
    assert norms_in(program)["LayerNormalization"] == 1
    inputs = random((9, 16)), random((9, 16), seed=1)
    for ours, theirs in zip(onnx_values(program, *inputs), block(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


KEEP_FORWARD = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.evenkeel.add_forward.default]
)


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": KEEP_FORWARD},
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
@row_norms
def test_checkpoint(norm, options):
    call = added(norm)

    def gradients(run):
        leaves = {k: t.detach().requires_grad_() for k, t in call.inputs().items()}
        results = run(call.replaced(**leaves))
        torch.autograd.backward(results, directions(call))
        return {k: leaf.grad for k, leaf in leaves.items()}

    def checkpointed(call):
        function, _ = function_of(call)
        return checkpoint(function, *call.inputs().values(), **options)

    check_same(gradients(checkpointed), gradients(Added.ours))


# ---- subclasses, nested tensors ----


@pytest.mark.parametrize("position", ["x", "residual", "weight"])
@row_norms
def test_function_subclass(norm, position):
    call = added(norm)
    Function.seen.clear()
    results = call.replaced(**{position: call.inputs()[position].as_subclass(Function)}).ours()
    assert [type(result) for result in results] == [Function] * 2
    assert getattr(ek, norm) in Function.seen
    for ours, theirs in zip(results, call.ours(), strict=True):
        assert torch.equal(ours.as_subclass(torch.Tensor), theirs)


@pytest.mark.parametrize("position", ["x", "residual"])
@row_norms
def test_dispatch_subclass(norm, position):
    call = added(norm)
    Dispatch.seen.clear()
    tensor = Dispatch(call.inputs()[position].clone()).requires_grad_()
    y, total = call.replaced(**{position: tensor}).ours()
    (y.sum() + total.sum()).backward()
    assert type(y) is type(total) is type(tensor.grad) is Dispatch
    operators = torch.ops.evenkeel
    for operator in (operators.add_forward.default, operators.add_backward.default):
        assert Dispatch.seen.count(operator) == 1


def test_unused_options_are_not_seen_by_overrides():
    """A plain call is handed over as it was before there were residuals."""
    seen = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(set(kwargs or {}))
            return super().__torch_function__(function, types, args, kwargs)

    ek.rms_norm(random((3, 8)).as_subclass(Noting), (8,))
    assert not any(names & {"residual", "sum_dtype"} for names in seen)


def jagged(seed, sizes=(3, 1, 5)):
    parts = [random((size, 16), seed=seed + size) for size in sizes]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@row_norms
def test_nested(norm):
    x = jagged(0).requires_grad_()
    residual = torch.nested.nested_tensor_from_jagged(random((9, 16), seed=7), x.offsets())
    weight = random(16, seed=9)
    y, total = getattr(ek, norm)(x, (16,), weight, residual=residual)
    assert y.shape == total.shape == x.shape
    expected = getattr(ek, norm)(x.values(), (16,), weight, residual=residual.values())
    assert torch.equal(y.values(), expected[0])
    assert torch.equal(total.values(), expected[1])
    (y.values().sum() + total.values().pow(2).sum()).backward()
    assert x.grad.shape == x.shape
    torch.compiler.reset()
    compiled = torch.compile(getattr(ek, norm), backend="aot_eager", fullgraph=True)
    got = compiled(x, (16,), weight, residual=residual)
    assert torch.equal(got[0].values(), y.values())


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (lambda x: random((3, 5, 16)), NotImplementedError, "residual is not nested"),
        (lambda x: jagged(1, (2, 2, 5)), ValueError, "residual must have the shape .* of x"),
        (
            lambda x: torch.nested.narrow(
                random((3, 6, 16)),
                1,
                torch.tensor([0, 1, 0]),
                torch.tensor([2, 3, 4]),
                layout=torch.jagged,
            ),
            (ValueError, NotImplementedError),
            "residual",
        ),
    ],
    ids=["dense", "other parts", "gaps"],
)
def test_nested_that_do_not_fit(residual, error, message):
    x = jagged(0)
    with pytest.raises(error, match=message):
        ek.layer_norm(x, (16,), residual=residual(x))


def test_dense_x_and_nested_residual():
    with pytest.raises(NotImplementedError, match="x is not nested"):
        ek.layer_norm(random((3, 5, 16)), (16,), residual=jagged(0))


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
