"""layer_norm and rms_norm with a residual in torch's other parts: operators, torch.compile, export, checkpoints, subclasses
and nested tensors.
"""

import contextlib
import copy
import functools
import io

import pytest
import torch
from residual_support import (
    BF16,
    F32,
    F64,
    Added,
    Block,
    added,
    check_same,
    directions,
    function_of,
    row_norms,
    typical_mixes,
    with_gradients,
)
from test_onnx import needs_onnx, norms_in, onnx_values, to_onnx
from test_transforms import Dispatch, Function, Recorder
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import evenkeel.torch as ek
from support import ROW_NORMS, random

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
