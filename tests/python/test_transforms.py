"""What torch does to a norm besides calling it.

Derivatives of any order and mode, torch.func, torch.compile, export, checkpointing, meta and fake
tensors, tensor subclasses and modes, saved tensors, copies of models.
"""

import contextlib
import copy
import functools
import io
import pickle
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import evenkeel.torch as ek
from support import NORMS, Call, check_same, make, oracle, ordinary, random, with_gradients

# What torch says where it takes the samples of a vmap one by one.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")

ROWS, IMAGES = (2, 3, 5), (2, 4, 3, 2)
DOUBLE = torch.float64

norms = pytest.mark.parametrize("norm", NORMS)


def channels_last(call):
    return call.replaced(x=call.x.to(memory_format=torch.channels_last))


def small(norm, **options):
    """A float64 call that is small enough for finite differences; RMS norm has no bias."""
    shape, over = (IMAGES, 2) if norm == "group_norm" else (ROWS, ROWS[-1:])
    options = {"weight": DOUBLE, "bias": None if norm == "rms_norm" else DOUBLE} | options
    return make(norm, shape, over, DOUBLE, **options)


SMALL = {
    **{norm: small(norm) for norm in NORMS},
    **{f"{norm}-plain": small(norm, weight=None, bias=None) for norm in NORMS},
    **{f"{norm}-silu": small(norm, activation="silu", weight_offset=1.0) for norm in NORMS},
    **{
        f"layer_norm-{activation}": small("layer_norm", activation=activation)
        for activation in ("relu", "gelu", "gelu_tanh")
    },
    "layer_norm-planes": make("layer_norm", (2, 3, 4), (3, 4), DOUBLE, DOUBLE, None),
    "group_norm-channels_last": channels_last(small("group_norm", activation="silu")),
}
small_calls = pytest.mark.parametrize("name", SMALL)


def function_of(call, run=Call.ours):
    """The call as a function of its tensors, and these as leaves."""
    names = list(call.inputs())
    leaves = [tensor.detach().clone().requires_grad_() for tensor in call.inputs().values()]

    def function(*tensors):
        return run(call.replaced(**dict(zip(names, tensors, strict=True))))

    return function, leaves


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def description(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


class Recorder(TorchDispatchMode):
    """Keeps the calls of evenkeel's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "evenkeel":
            self.calls.append((operator, args))
        return operator(*args, **(kwargs or {}))


# ---- derivatives ----


@small_calls
def test_first_derivatives(name):
    function, leaves = function_of(SMALL[name])
    assert torch.autograd.gradcheck(
        function,
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@small_calls
def test_second_derivatives(name):
    function, leaves = function_of(SMALL[name])
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


FAR = torch.tensor([-3e38, -1e20, -30.0, 30.0, 1e20, 3e38])
IS_SLOPE = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])


def far(bias):
    """GELU's tanh form, at values whose cubes overflow."""
    return ek.layer_norm(torch.zeros(2, 6), (6,), torch.zeros(6), bias, activation="gelu_tanh")


def test_far_slopes_of_gelu_tanh():
    """Each in torch's operations: the gradient of a gradient, a tangent, a batched bias."""
    bias = FAR.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(far(bias).sum(), bias, create_graph=True)
    assert torch.equal(gradient, 2 * IS_SLOPE)
    (second,) = torch.autograd.grad(gradient.sum(), bias)
    assert torch.equal(second, torch.zeros(6))
    y, tangent = torch.func.jvp(far, (FAR,), (torch.ones(6),))
    assert torch.equal(y, far(FAR)) and torch.equal(tangent, IS_SLOPE.expand(2, 6))
    per_sample = torch.vmap(torch.func.grad(lambda bias: far(bias).sum()))(FAR.repeat(3, 1))
    assert torch.equal(per_sample, 2 * IS_SLOPE.expand(3, 6))
    y, tangent = torch.func.jvp(torch.vmap(far), (FAR.repeat(3, 1),), (torch.ones(3, 6),))
    assert torch.equal(y[0], far(FAR)) and torch.equal(tangent, IS_SLOPE.expand(3, 2, 6))


@norms
def test_third_derivative(norm):
    call = small(norm, activation="silu")

    def third(run):
        function, leaves = function_of(call, run)
        value = function(*leaves).pow(3).sum()
        for _ in range(3):
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(gradient.pow(2).sum() for gradient in gradients)
        return gradients

    torch.testing.assert_close(third(Call.ours), third(oracle), rtol=1e-7, atol=1e-7)


@norms
def test_tangents(norm):
    """In float32, where gradcheck would see rounding only; all inputs at once."""
    call = ordinary(norm)
    step = 1e-3
    tangents = {name: random(t.shape, seed=5) for name, t in call.inputs().items()}
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(tensor, tangents[name])
            for name, tensor in call.inputs().items()
        }
        y, dy = forward_ad.unpack_dual(call.replaced(**duals).ours())
    torch.testing.assert_close(y, call.ours())

    def moved(by):
        tensors = call.inputs().items()
        return oracle(call.replaced(**{n: t.double() + by * tangents[n] for n, t in tensors}))

    differences = (moved(step) - moved(-step)) / (2 * step)
    torch.testing.assert_close(dy, differences.float(), rtol=1e-4, atol=1e-4)


def test_second_derivative_of_no_samples():
    x = torch.zeros(0, 4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(ek.group_norm(x, 2).sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("derivative", ["tangent", "gradient to be differentiated"])
def test_derivatives_keep_channels_last(derivative):
    call = SMALL["group_norm-channels_last"]
    function, leaves = function_of(call)
    if derivative == "tangent":
        results = torch.func.jvp(function, tuple(leaves), tuple(leaves))
    else:
        results = torch.autograd.grad(function(*leaves).sum(), leaves[:1], create_graph=True)
    assert {result.stride() for result in results} == {call.x.stride()}


# ---- torch.func ----


def cubes(function):
    return lambda *tensors: function(*tensors).pow(3).sum()


def all_of(tensors):
    return tuple(range(len(tensors)))


def batch(tensor):
    return torch.stack([tensor, tensor + 1, tensor * 2])


FUNC = {
    "grad": lambda f, t: torch.func.grad(cubes(f), all_of(t))(*t),
    "vjp": lambda f, t: torch.func.vjp(f, *t)[1](torch.sin(t[0])),
    "jvp": lambda f, t: torch.func.jvp(f, tuple(t), tuple(map(torch.sin, t))),
    "jacrev": lambda f, t: torch.func.jacrev(f, all_of(t))(*t),
    "jacfwd": lambda f, t: torch.func.jacfwd(f, all_of(t))(*t),
    "hessian": lambda f, t: torch.func.hessian(cubes(f))(*t),
    "vmap": lambda f, t: torch.func.vmap(f)(*map(batch, t)),
    "vmap over x": lambda f, t: torch.func.vmap(lambda x: f(x, *t[1:]), 2, 1)(
        batch(t[0]).movedim(0, 2)
    ),
    "vmap of grad": lambda f, t: torch.func.vmap(torch.func.grad(cubes(f), all_of(t)))(
        *map(batch, t)
    ),
    "functionalize": lambda f, t: torch.func.functionalize(f)(*t),
}


@pytest.mark.parametrize("transform", FUNC)
@norms
def test_func(norm, transform):
    function, leaves = function_of(small(norm, activation="silu"))
    expected, _ = function_of(small(norm, activation="silu"), oracle)
    tensors = [leaf.detach() for leaf in leaves]
    close(FUNC[transform](function, tensors), FUNC[transform](expected, tensors))


def small_model():
    """Three norms and something to learn; x (batch, 6, 8)."""
    torch.manual_seed(0)
    return nn.Sequential(
        ek.LayerNorm(8), nn.Linear(8, 8), ek.GroupNorm(3, 6, activation="silu"), ek.RMSNorm(8)
    )


def test_functional_call():
    model, x = small_model(), random((4, 6, 8))
    others = {name: random(p.shape, seed=3) for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, x).pow(2).sum()

    gradients = torch.func.grad(loss)(others)
    reference = copy.deepcopy(model)
    reference.load_state_dict(others)
    reference(x).pow(2).sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


# ---- operators as torch's other parts meet them ----

CALLS = {
    "layer_norm": make("layer_norm", (4, 3, 8), (8,), bias=torch.float32),
    "layer_norm-rows apart": make("layer_norm", (4, 3, 8), (8,), bias=torch.float32).replaced(
        x=random((4, 3, 16))[..., :8]
    ),
    "layer_norm-columns apart": make("layer_norm", (4, 3, 8), (3, 8)).replaced(
        x=random((4, 3, 16))[..., ::2]
    ),
    "rms_norm-bfloat16": make(
        "rms_norm", (4, 3, 8), (8,), torch.bfloat16, casting="llama", out_dtype=torch.float32
    ),
    "rms_norm-plain": make("rms_norm", (6, 8), (8,), weight=None, activation="silu"),
    "group_norm": make("group_norm", (3, 4, 5), 2, weight=None, bias=torch.float32),
    "group_norm-channels_last": channels_last(
        make("group_norm", (3, 4, 5, 2), 2, bias=torch.float32, activation="silu")
    ),
}
calls = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize("requires_grad", [False, True])
@calls
def test_opcheck(name, requires_grad):
    call = CALLS[name]
    with Recorder() as recorder:
        with_gradients(Call.ours, call, torch.ones_like(call.x, dtype=call.ours().dtype))
    operators = [operator for operator, _ in recorder.calls]
    internal = torch.ops.evenkeel
    # The first one is for the dtype.
    assert operators == [internal.forward.default] * 2 + [internal.backward.default]
    public = getattr(internal, call.norm).default
    for operator, args in [*recorder.calls[1:], (public, call.arguments())]:
        args = tree_map_only(
            torch.Tensor, lambda t: t.detach().requires_grad_(requires_grad and t.numel() > 0), args
        )
        torch.library.opcheck(operator, tuple(args), call.options if operator is public else {})


@pytest.mark.parametrize("kind", ["meta", "fake"])
@calls
def test_tensors_without_values(name, kind):
    """Results have the shapes, strides and dtypes of those of real tensors."""
    mode = FakeTensorMode()

    def without_values(tensor):
        if kind == "fake":
            return mode.from_tensor(tensor)
        size, stride, dtype = description(tensor)
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    call = CALLS[name]
    dy = random(call.x.shape, call.options.get("out_dtype") or call.x.dtype)
    real = with_gradients(Call.ours, call, dy)
    shadows = {key: without_values(tensor) for key, tensor in call.inputs().items()}
    got = with_gradients(Call.ours, call.replaced(**shadows), without_values(dy))
    assert {k: description(t) for k, t in got.items()} == {
        k: description(t) for k, t in real.items()
    }
    assert {t.device.type for t in got.values()} == {"meta" if kind == "meta" else "cpu"}


# ---- torch.compile and torch.export ----


def with_batch(call, size):
    x = random((size, *call.x.shape[1:]), call.x.dtype, seed=size)
    last = not call.x.is_contiguous() and call.x.stride(1) == 1
    call = call.replaced(x=x)
    return channels_last(call) if last else call


@pytest.mark.parametrize("dynamic", ["dynamic=True", "mark_dynamic", "autocast"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm-bfloat16", "group_norm-channels_last"])
def test_compile(name, dynamic):
    """One graph, for batches of all sizes, with eager's values bit by bit."""
    torch.compiler.reset()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dynamic == "autocast")
    compiled = torch.compile(
        getattr(ek, CALLS[name].norm),
        backend="aot_eager",
        fullgraph=True,
        dynamic=None if dynamic == "mark_dynamic" else True,
    )

    def run_compiled(call):
        if dynamic == "mark_dynamic":
            torch._dynamo.mark_dynamic(call.x, 0)
        with autocast:
            return compiled(*call.arguments(), **call.options)

    def run_eager(call):
        with autocast:
            return call.ours()

    for size in (7, 9, 13):
        call = with_batch(CALLS[name], size)
        dy = random(call.x.shape)
        with torch.compiler.set_stance("default" if size == 7 else "fail_on_recompile"):
            got = with_gradients(run_compiled, call, dy)
        expected = with_gradients(run_eager, call, dy)
        check_same(got, expected)
        assert [t.stride() for t in got.values()] == [t.stride() for t in expected.values()]
        if dynamic == "autocast" and "out_dtype" not in call.options:
            assert got["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model(backend):
    torch.compiler.reset()
    model = small_model()
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True, dynamic=True)
    for size in (3, 5):
        x = random((size, 6, 8), seed=size)
        # Of squares there would be no gradient before the last norm.
        with torch.compiler.set_stance("default" if size == 3 else "fail_on_recompile"):
            y = compiled(x)
            y.pow(3).sum().backward()
        model(x).pow(3).sum().backward()
        torch.testing.assert_close(y, model(x))
        for ours, reference in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_autograd(backend):
    """The whole backward pass is one graph, with the backward operator in it, for all kinds of norms."""
    torch.compiler.reset()
    graphs, model, x = [], small_model(), random((4, 6, 8))
    x.requires_grad_()

    def compiler(graph):
        graphs.append(graph)
        return torch.compile(graph, backend=backend)

    def gradients(context):
        y = model(x)
        with context:
            y.pow(2).sum().backward()
        leaves = [x, *model.parameters()]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    expected = gradients(contextlib.nullcontext())
    for _ in range(2):
        got = gradients(torch._dynamo.compiled_autograd._enable(compiler))
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("EvenkeelNormBackward" in name for name in called) == 3


def test_compiled_autograd_tells_norms_apart():
    """A graph is compiled again where an option of the norm or the wanted gradients are others."""
    torch.compiler.reset()
    for eps, needs_weight in ((1e-5, True), (1.0, True), (1.0, False)):
        call = make("layer_norm", (3, 8), (8,), bias=torch.float32)
        x = call.x.requires_grad_()
        weight = call.weight.requires_grad_(needs_weight)
        leaves = [x, weight] if needs_weight else [x]
        expected = torch.autograd.grad(
            ek.layer_norm(x, (8,), weight, call.bias, eps).pow(3).sum(), leaves
        )
        y = ek.layer_norm(x, (8,), weight, call.bias, eps)
        x.grad = weight.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.pow(3).sum().backward()
        for leaf, reference in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.grad, reference)


def test_export():
    model = small_model()
    batch_size = torch.export.Dim("batch")
    program = torch.export.export(model, (random((4, 6, 8)),), dynamic_shapes=({0: batch_size},))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored)
    x = random((9, 6, 8))
    for variant in (program, loaded, program.run_decompositions()):
        assert torch.equal(variant.module()(x), model(x))
    targets = [str(node.target) for node in program.graph.nodes]
    assert [f"evenkeel.{norm}.default" in targets for norm in NORMS] == [True] * 3


# ---- what autograd keeps ----

KEEP_FORWARD = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.evenkeel.forward.default]
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
@norms
def test_checkpoint(norm, options):
    call = ordinary(norm)
    dy = random(call.x.shape, seed=4)

    def checkpointed(call):
        function, _ = function_of(call)
        return checkpoint(function, *call.inputs().values(), **options)

    def gradients(run):
        leaves = {k: t.detach().requires_grad_() for k, t in call.inputs().items()}
        y = run(call.replaced(**leaves))
        y.backward(dy)  # a reentrant checkpoint refuses autograd.grad
        return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    check_same(gradients(checkpointed), gradients(Call.ours))


@norms
def test_saved_tensor_hooks(norm):
    call = ordinary(norm)
    packed, dy = [], random(call.x.shape, seed=4)

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.numpy(force=True).copy()

    def hooked(call):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            return call.ours()

    got = with_gradients(hooked, call, dy)
    assert call.x.shape in packed
    check_same(got, with_gradients(Call.ours, call, dy))


@pytest.mark.parametrize("changed", ["x", "weight"])
@norms
def test_change_in_place_is_noticed(norm, changed):
    call = ordinary(norm)
    inputs = {name: t.clone().requires_grad_() * 1 for name, t in call.inputs().items()}
    y = call.replaced(**inputs).ours()
    inputs[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@norms
def test_backward_twice(norm):
    call = ordinary(norm)
    x = call.x.clone().requires_grad_()
    y = call.replaced(x=x).ours()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@norms
def test_without_gradients(norm, mode):
    call = ordinary(norm)
    leaves = {name: t.clone().requires_grad_() for name, t in call.inputs().items()}
    with mode():
        y = call.replaced(**leaves).ours()
    assert not y.requires_grad
    assert y.grad_fn is None
    assert y.is_inference() == (mode is torch.inference_mode)
    assert torch.equal(y, call.ours())


@pytest.mark.parametrize("gradients", [False, True])
@norms
def test_statistics_only_for_gradients(norm, gradients):
    call = ordinary(norm)
    call.x.requires_grad_()
    with torch.set_grad_enabled(gradients), Recorder() as recorder:
        call.ours()
    ((_, args),) = recorder.calls
    assert args[-1] is gradients


# ---- subclasses and modes ----


class Function(torch.Tensor):
    """Notes the functions that it goes through."""

    seen: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs)


class Dispatch(torch.Tensor):
    """Holds a tensor and notes the operators that reach it."""

    seen: ClassVar = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        cls.seen.append(operator)
        args, kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, operator(*args, **kwargs))


@pytest.mark.parametrize("position", ["x", "weight"])
@norms
def test_function_subclass(norm, position):
    call = ordinary(norm)
    Function.seen.clear()
    subclassed = call.replaced(**{position: call.inputs()[position].as_subclass(Function)})
    y = subclassed.ours()
    assert type(y) is Function
    assert getattr(ek, norm) in Function.seen
    assert torch.equal(y.as_subclass(torch.Tensor), call.ours())


@pytest.mark.parametrize("position", ["x", "weight"])
@norms
def test_dispatch_subclass(norm, position):
    call = ordinary(norm)
    Dispatch.seen.clear()
    tensor = Dispatch(call.inputs()[position].clone()).requires_grad_()
    y = call.replaced(**{position: tensor}).ours()
    y.sum().backward()
    assert type(y) is type(tensor.grad) is Dispatch
    for operator in (torch.ops.evenkeel.forward.default, torch.ops.evenkeel.backward.default):
        assert Dispatch.seen.count(operator) == 1
    expected = with_gradients(Call.ours, call, torch.ones_like(call.x))
    assert torch.equal(y.held, expected["y"])
    assert torch.equal(tensor.grad.held, expected[f"d{position}"])


@norms
def test_modes(norm):
    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    call, seen = ordinary(norm), []
    call.x.requires_grad_()
    with Functions(), Recorder() as recorder:
        y = call.ours()
    assert seen == [getattr(ek, norm)]
    with recorder:
        y.sum().backward()
    assert [operator for operator, _ in recorder.calls] == [
        torch.ops.evenkeel.forward.default,
        torch.ops.evenkeel.backward.default,
    ]


# ---- copies of a model ----


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_model_and_optimizer(duplicate):
    def train(model, optimizer):
        for seed in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(random((4, 6, 8), seed=seed)), random((4, 6, 8), seed=9)).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = train(model, optimizer)
    twin, optimizer_of_twin = duplicate((model, optimizer))
    assert repr(twin) == repr(model)
    after = train(model, optimizer)
    assert not torch.equal(before[0], after[0])
    for ours, other in zip(after, train(twin, optimizer_of_twin), strict=True):
        assert torch.equal(ours, other)
