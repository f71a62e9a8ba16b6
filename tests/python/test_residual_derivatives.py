"""Derivatives of layer_norm and rms_norm with a residual: of every order, forward mode, torch.func and vmap."""

import itertools

import pytest
import torch
from residual_support import BF16, F32, F64, Added, added, function_of, row_norms, typical_mixes
from test_transforms import Recorder
from torch.autograd import forward_ad
from torch.func import vmap

from support import ROW_NORMS, random


def small(norm, **options):
    shape = (2, 3, 5)
    return added(norm, (F64, F64, None), shape, weight=F64, **options)


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
