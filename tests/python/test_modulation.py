"""layer_norm and rms_norm with a scale and a shift of each sample: values and gradients against float64, and how they get
on with torch's other parts.
"""

import contextlib
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from residual_support import sum_of
from test_onnx import needs_onnx, onnx_values, to_onnx
from test_transforms import Recorder
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import evenkeel.torch as ek
from support import DTYPES, ROW_NORMS, Call, check, make, oracle, random

F64, F32, F16, BF16 = DTYPES

row_norms = pytest.mark.parametrize("norm", ROW_NORMS)


def broadcast(tensor, x, normalized=1):
    """A scale or shift as torch's operations take it: with ones for the dimensions that share it."""
    lead = tensor.dim() - normalized
    ones = x.dim() - tensor.dim()
    return tensor.reshape(*tensor.shape[:lead], *[1] * ones, *tensor.shape[lead:])


@dataclass
class Modulated:
    """A call of a norm with a scale, a shift or both, and perhaps a residual."""

    call: Call
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    OWN = "scale", "shift", "residual"

    def inputs(self):
        own = {name: getattr(self, name) for name in self.OWN}
        given = {name: tensor for name, tensor in own.items() if tensor is not None}
        return self.call.inputs() | given

    def replaced(self, **changes):
        own = {name: changes.pop(name) for name in self.OWN if name in changes}
        return replace(self, call=self.call.replaced(**changes), **own)

    def ours(self):
        options = {name: getattr(self, name) for name in self.OWN} | self.call.options
        result = getattr(ek, self.call.norm)(*self.call.arguments(), **options)
        return result if self.residual is not None else (result,)

    def oracle(self):
        """In float64, but for the rounding of the sum, which gradients do not see."""
        call, activation = self.call, self.call.options.get("activation")
        total = call.x
        if self.residual is not None:
            exact = call.x.double() + self.residual.double()
            rounded = sum_of(call.x, self.residual, self.residual.dtype).double()
            total = exact + (rounded - exact).detach()
        plain = {name: v for name, v in call.options.items() if name != "activation"}
        y = oracle(replace(call.replaced(x=total), options=plain))
        if self.scale is not None:
            y = y * (1 + broadcast(self.scale.double(), call.x))
        if self.shift is not None:
            y = y + broadcast(self.shift.double(), call.x)
        if activation == "silu":
            y = torch.nn.functional.silu(y)
        return (y, total) if self.residual is not None else (y,)


def modulated(
    norm,
    dtype=F32,
    of_samples=F32,
    lead=(4,),
    shape=(4, 6, 24),
    weight=F32,
    residual=None,
    **options,
):
    bias = None if norm == "rms_norm" else weight
    call = make(norm, shape, shape[-1:], dtype, weight, bias, **options)
    wide = random((*lead, 3 * shape[-1]), of_samples, seed=5, scale=0.5)
    shift, scale, _ = wide.chunk(3, -1)
    more = residual and random(shape, residual, seed=6)
    return Modulated(call, scale, shift, more)


def with_gradients(run, call, wanted=None):
    leaves = {
        name: tensor.detach().requires_grad_(wanted is None or name in wanted)
        for name, tensor in call.inputs().items()
    }
    outputs = run(call.replaced(**leaves))
    dtypes = [tensor.dtype for tensor in (call.call.x, call.residual) if tensor is not None]
    arriving = [
        random(y.shape, dtype, seed=20 + i).to(y.dtype)
        for i, (y, dtype) in enumerate(zip(outputs, dtypes, strict=True))
    ]
    sought = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(outputs, list(sought.values()), arriving)
    named = {f"d{name}": g for name, g in zip(sought, gradients, strict=True)}
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | named


def check_both(call, wanted=None):
    ours = with_gradients(Modulated.ours, call, wanted)
    expected = with_gradients(Modulated.oracle, call, wanted)
    assert ours.keys() == expected.keys()
    # Means and inverse deviations are kept in float32 where x is not float64.
    compute = F64 if call.call.x.dtype == F64 else F32
    for name, value in ours.items():
        if name.startswith("d"):
            like = call.inputs()[name.removeprefix("d")]
            assert (value.dtype, value.shape) == (like.dtype, like.shape), name
        check(value, expected[name], name, compute, scale=20.0)


# ---- values and gradients ----


@pytest.mark.parametrize("of_samples", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@row_norms
def test_types(norm, dtype, of_samples):
    check_both(modulated(norm, dtype, of_samples))


@pytest.mark.parametrize(
    ("shape", "lead"),
    [
        ((4, 6, 24), (4,)),
        ((4, 6, 24), (4, 1)),
        ((4, 6, 24), (4, 6)),
        ((4, 6, 24), ()),
        ((4, 6, 24), (1,)),
        ((4, 6, 24), (1, 1)),
        ((2, 3, 5, 24), (2, 3)),
        ((2, 3, 5, 24), (2, 1, 1)),
        ((2, 3, 5, 24), (2, 3, 1)),
        ((1, 6, 24), (1, 6)),
        ((24,), ()),
    ],
    ids=str,
)
@row_norms
def test_samples(norm, shape, lead):
    check_both(modulated(norm, shape=shape, lead=lead))


def test_several_normalized_dimensions():
    x, scale, shift = (
        random((3, 4, 5, 6)),
        random((3, 1, 5, 6), seed=1),
        random((3, 1, 5, 6), seed=2),
    )
    y = ek.layer_norm(x, (5, 6), scale=scale, shift=shift)
    expected = torch.nn.functional.layer_norm(x, (5, 6)) * (1 + scale) + shift
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("weight", [None, F32, BF16], ids=str)
@row_norms
def test_weight_and_activation(norm, weight, activation):
    offset = {"weight_offset": 1.0} if weight == F32 else {}
    check_both(modulated(norm, weight=weight, activation=activation, **offset))


@pytest.mark.parametrize("part", ["scale", "shift"])
@row_norms
def test_one_alone(norm, part):
    call = modulated(norm)
    other = {"scale": "shift", "shift": "scale"}[part]
    check_both(replace(call, **{other: None}))


@pytest.mark.parametrize(
    ("dtype", "residual"), [*itertools.product([F32, BF16], repeat=2)], ids=str
)
@row_norms
def test_residual(norm, dtype, residual):
    check_both(modulated(norm, dtype, residual=residual))


@pytest.mark.parametrize(
    "wanted",
    [("x",), ("scale",), ("shift",), ("scale", "weight"), ("bias", "shift"), ("x", "scale")],
    ids="+".join,
)
def test_some_gradients(wanted):
    check_both(modulated("layer_norm"), wanted)


def test_llama_rounds_before_all_factors():
    call = modulated("rms_norm", BF16, BF16, weight=BF16, casting="llama")
    check_both(call, ("x", "scale", "shift"))


@row_norms
def test_bits_of_one_sample(norm):
    """Those of the norm whose weight is 1 + scale and whose bias is the shift."""
    call = modulated(norm, BF16, lead=(), weight=None)
    call.shift = None if norm == "rms_norm" else call.shift
    (y,) = call.ours()
    weight = call.scale.contiguous()
    parameters = [weight] if norm == "rms_norm" else [weight, call.shift.contiguous()]
    plain = getattr(ek, norm)(call.call.x, (24,), *parameters, call.call.eps, weight_offset=1.0)
    assert torch.equal(y, plain)


def test_other_strides():
    """Samples that do not lie at one distance are copied; so is what is expanded."""
    call = modulated("layer_norm", lead=(2, 3), shape=(2, 3, 5, 24))
    for change in (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t[:1, :1].expand(2, 3, 24),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
    ):
        check_both(replace(call, scale=change(call.scale), shift=change(call.shift)))


@row_norms
def test_nothing_to_do(norm):
    call = modulated(norm, shape=(3, 0, 24), lead=(3,))
    found = with_gradients(Modulated.ours, call)
    assert found["output 0"].shape == (3, 0, 24)
    assert torch.equal(found["dscale"], torch.zeros(3, 24))
    assert torch.equal(found["dshift"], torch.zeros(3, 24))


# ---- modules ----


def test_modules():
    call = modulated("layer_norm")
    layer, rms = ek.LayerNorm(24), ek.RMSNorm(24, eps=1e-5)
    x, options = call.call.x, {"scale": call.scale, "shift": call.shift}
    torch.testing.assert_close(
        layer(x, **options), ek.layer_norm(x, (24,), layer.weight, layer.bias, **options)
    )
    y, total = rms(x, x, **options)
    assert torch.equal(total, x + x)
    assert torch.equal(y, ek.rms_norm(total, (24,), rms.weight, 1e-5, **options))


# ---- torch's other parts ----


def doubles(norm, residual=False, **options):
    call = modulated(
        norm, F64, F64, (2,), (2, 3, 5), F64, residual=F64 if residual else None, **options
    )
    leaves = {name: t.detach().clone().requires_grad_() for name, t in call.inputs().items()}

    def function(*tensors):
        return call.replaced(**dict(zip(leaves, tensors, strict=True))).ours()

    return function, tuple(leaves.values())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@row_norms
def test_derivatives_of_every_order(norm, activation, residual):
    function, leaves = doubles(norm, residual, activation=activation)
    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=False)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("residual", [None, F32], ids=str)
@row_norms
def test_opcheck(norm, residual):
    call = modulated(norm, residual=residual, shape=(4, 3, 8))
    with Recorder() as recorder:
        with_gradients(Modulated.ours, call)
    operators = torch.ops.evenkeel
    assert [operator for operator, _ in recorder.calls] == [
        operators.modulated_forward.default,
        operators.modulated_backward.default,
    ]
    for (operator, args), wants in itertools.product(recorder.calls, (False, True)):
        args = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t, wants=wants: t.detach().requires_grad_(wants and t.numel() > 0),
            args,
        )
        torch.library.opcheck(operator, tuple(args))
    x, over, *others = call.call.arguments()
    public = getattr(operators, f"modulated_{norm}").default
    leaves = call.scale.detach().requires_grad_(), call.shift.detach().requires_grad_()
    torch.library.opcheck(
        public,
        (x.requires_grad_(), over, *others),
        {"scale": leaves[0], "shift": leaves[1], "residual": call.residual},
    )


@pytest.mark.parametrize("residual", [None, F32], ids=str)
@row_norms
def test_fake_tensors(norm, residual):
    call = modulated(norm, BF16, residual=residual)
    real = with_gradients(Modulated.ours, call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in call.inputs().items()}
        leaves = [fake.requires_grad_() for fake in fakes.values()]
        outputs = call.replaced(**fakes).ours()
        gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    for fake, value in zip((*outputs, *gradients), real.values(), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (value.shape, value.dtype, value.stride())


@row_norms
def test_autocast(norm):
    call = modulated(norm)
    with torch.autocast("cpu", dtype=BF16):
        (y,) = call.ours()
    assert y.dtype == BF16
    check(y, call.oracle()[0])
    call.call.options["out_dtype"] = F32
    with torch.autocast("cpu", dtype=BF16):
        assert call.ours()[0].dtype == F32


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("residual", [None, F32], ids=str)
@row_norms
def test_compile(norm, residual, dynamic):
    """Without a graph break, and with the eager results."""
    call = modulated(norm, residual=residual)
    compiled = torch.compile(Modulated.ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    actual, expected = (with_gradients(run, call) for run in (compiled, Modulated.ours))
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_compiled_autograd():
    call = modulated("layer_norm", residual=F32)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in call.inputs().items()}

    def gradients(enable):
        y, total = call.replaced(**leaves).ours()
        loss = y.square().sum() + total.sin().sum()
        for leaf in leaves.values():
            leaf.grad = None
        with enable:
            loss.backward()
        return [leaf.grad.clone() for leaf in leaves.values()]

    expected = gradients(contextlib.nullcontext())
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    for actual, value in zip(gradients(compiled), expected, strict=True):
        torch.testing.assert_close(actual, value)


def test_export():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ek.LayerNorm(24, elementwise_affine=False)

        def forward(self, x, wide):
            shift, scale = wide.chunk(2, -1)
            return self.norm(x, scale=scale, shift=shift)

    inputs = random((4, 6, 24)), random((4, 48), seed=1)
    exported = torch.export.export(Block(), inputs).module()
    assert torch.equal(exported(*inputs), Block()(*inputs))


@pytest.mark.parametrize("residual", [None, BF16], ids=str)
@row_norms
def test_decompositions(norm, residual):
    """An exported program in torch's own operators, as converters take it."""
    call = modulated(norm, residual=residual, activation="silu")
    names = list(call.inputs())

    class Block(torch.nn.Module):
        def forward(self, *tensors):
            return call.replaced(**dict(zip(names, tensors, strict=True))).ours()

    inputs = tuple(call.inputs().values())
    program = torch.export.export(Block(), inputs).run_decompositions(ek.decompositions())
    assert not any("evenkeel" in str(node.target) for node in program.graph.nodes)
    for actual, expected in zip(program.module()(*inputs), call.ours(), strict=True):
        torch.testing.assert_close(actual, expected)


@needs_onnx
def test_onnx():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ek.LayerNorm(24)

        def forward(self, x, scale, shift):
            return self.norm(x, scale=scale, shift=shift)

    inputs = random((4, 6, 24)), random((4, 24), seed=1), random((4, 24), seed=2)
    (y,) = onnx_values(to_onnx(Block(), inputs), *inputs)
    torch.testing.assert_close(y, Block()(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@row_norms
def test_vmap(norm):
    call = modulated(norm, shape=(3, 4, 6, 24), lead=(3, 4))

    def function(x, scale, shift):
        return getattr(ek, norm)(x, (24,), scale=scale, shift=shift)

    tensors = call.call.x, call.scale, call.shift
    expected = function(*tensors)
    torch.testing.assert_close(torch.func.vmap(function)(*tensors), expected)
    one = call.scale[0], call.shift[0]
    batched = torch.func.vmap(function, in_dims=(0, None, None))(call.call.x, *one)
    torch.testing.assert_close(batched[1], function(call.call.x[1], *one))

    def loss(scale, x, shift):
        return function(x, scale, shift).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss))(call.scale, call.call.x, call.shift)
    torch.testing.assert_close(
        per_sample, torch.func.grad(loss)(call.scale, call.call.x, call.shift)
    )


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"scale": random((6, 24))},
            RuntimeError,
            r"scale must have .*\[24\].*\[4, 6\].*\[6, 24\]",
        ),
        ({"shift": random((4, 2, 24))}, RuntimeError, r"shift must have .*\[4, 2, 24\]"),
        ({"scale": random((1, 6, 24))}, RuntimeError, r"scale must have .*\[1, 6, 24\]"),
        ({"scale": random((4, 12))}, RuntimeError, r"scale must have .*\[4, 12\]"),
        ({"scale": random(())}, RuntimeError, r"scale must have .*\[\]"),
        ({"scale": random((1, 4, 6, 24))}, RuntimeError, r"scale must have .*\[1, 4, 6, 24\]"),
        ({"shift": random((24,))}, RuntimeError, r"shift must have the samples of scale"),
        ({"scale": torch.ones(4, 24).long()}, NotImplementedError, r"scale must be float64"),
        ({"shift": torch.ones(4, 24).to_sparse()}, NotImplementedError, r"shift must be a dense"),
        ({"shift": torch.ones(4, 24, device="meta")}, RuntimeError, r"shift is on meta"),
        ({"scale": 2.0}, TypeError, r"scale must be a tensor or None, but is 2.0"),
        ({"sum_dtype": F32}, ValueError, r"sum_dtype is .* no residual"),
        ({"residual": random((4, 24))}, RuntimeError, r"residual must have the shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@row_norms
def test_errors(norm, changes, error, words):
    call = modulated(norm)
    options = {"scale": call.scale, "shift": call.shift} | changes
    with pytest.raises(error, match=words):
        getattr(ek, norm)(call.call.x, (24,), **options)


def test_errors_of_the_operator():
    with pytest.raises(ValueError, match="scale and shift are None"):
        torch.ops.evenkeel.modulated_layer_norm(random((4, 8)), [8])


def test_nested():
    nested = torch.nested.nested_tensor([random((3, 8)), random((5, 8))], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="no scale and no shift where x is nested"):
        ek.layer_norm(nested, (8,), scale=random((2, 8)))


def test_group_norm_takes_none():
    with pytest.raises(TypeError, match="scale"):
        ek.group_norm(random((2, 8, 4)), 2, scale=random((2, 8)))
