"""Programs that leave torch: evenkeel's operators become torch's, and ONNX's, with the same values.

What needs ONNX is skipped where onnxscript or onnxruntime is missing.
"""

import importlib.util
import io
import warnings
from collections import Counter

import pytest
import torch
from documents import ROOT, run_document
from torch import nn
from zoo import ZOO, MissingError

import evenkeel.torch as ek
from evenkeel.torch import exporting
from support import DTYPES, HALVES, NORMS, check, make, oracle, ordinary, random

MISSING = [name for name in ("onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {' and '.join(MISSING)}: scripts/setup puts them into .venv"
)

F64, F32, F16, BF16 = DTYPES
LAYER, RMS, GROUP = "LayerNormalization", "RMSNormalization", "GroupNormalization"
ONNX_NORMS = dict(zip(NORMS, (LAYER, RMS, GROUP), strict=True))
SINCE = {LAYER: 17, GROUP: 21, RMS: 23}  # opset


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def to_onnx(model, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        return torch.onnx.export(model, *args, dynamo=True, verbose=False, **options)


def onnx_values(program, *inputs):
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), settings)
    names = [value.name for value in session.get_inputs()]
    fed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, fed)]


def norms_in(program):
    """How many of ONNX's norms a program has; every operator is a standard one."""
    nodes = list(program.model.graph)
    assert {node.domain for node in nodes} == {""}
    return Counter(node.op_type for node in nodes if node.op_type in SINCE)


def available(norms, opset):
    return Counter({name: count for name, count in norms.items() if SINCE[name] <= opset})


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# ---- models ----


# Opset (None: torch's default, 20) and norms.
MODELS = {
    "BertForMaskedLM": (None, {LAYER: 6}),
    "GPT2LMHeadModel": (23, {LAYER: 5}),
    "LlamaForCausalLM": (None, {}),  # RMSNormalization came later
    "GemmaForCausalLM": (23, {RMS: 5}),  # 1 + weight
    "ViTForImageClassification": (18, {LAYER: 5}),
    "UNet": (21, {GROUP: 8, LAYER: 2}),
}


def larger(name, value):
    """Another batch, and for texts another length, than those of the export."""
    value = torch.cat([value, value.flip(0)])
    return torch.cat([value, value], 1) if name.endswith("ids") else value


def model_to_onnx(model, inputs, opset):
    axes = {name: {0: "batch"} | ({1: "length"} if name.endswith("ids") else {}) for name in inputs}
    # Its optimizer makes RotaryEmbeddings at opset 23 that onnxruntime runs for a batch of 1 only.
    settings = {"opset_version": opset, "optimize": opset != 23}
    return to_onnx(model, (), kwargs=inputs, dynamic_shapes=axes, **settings)


@needs_onnx
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    opset, norms = MODELS[name]
    (entry,) = [entry for entry in ZOO if entry.name == name]
    try:
        model, inputs = entry.build().eval(), entry.inputs()
    except MissingError as error:
        pytest.skip(str(error))
    stock = model_to_onnx(model, inputs, opset)
    ek.fuse(model)
    program = model_to_onnx(model, inputs, opset)
    assert norms_in(program) == norms

    inputs = {name: larger(name, value) for name, value in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    actual, of_stock = (onnx_values(each, *inputs.values())[0] for each in (program, stock))
    assert relative(actual, expected) <= 1e-5
    assert relative(actual, of_stock) <= 1e-5


# ---- every option ----

ROWS = (6, 5, 40)
CALLS = {
    **{f"{norm} of {dtype}": ordinary(norm, dtype) for norm in NORMS for dtype in DTYPES},
    **{
        f"{norm} of {dtype}, all in it": ordinary(norm, dtype, dtype, dtype)
        for norm in NORMS
        for dtype in HALVES
    },
    **{f"{norm} without parameters": ordinary(norm, weight=None, bias=None) for norm in NORMS},
    **{f"{norm} without bias": ordinary(norm, bias=None) for norm in ("layer_norm", "group_norm")},
    **{
        f"{norm} without weight": ordinary(norm, weight=None)
        for norm in ("layer_norm", "group_norm")
    },
    **{f"{norm} with f64 weight": ordinary(norm, F32, F64) for norm in NORMS},
    **{f"{norm}, silu": ordinary(norm, activation="silu") for norm in NORMS},
    **{
        f"layer_norm, {activation}": ordinary("layer_norm", activation=activation)
        for activation in ("relu", "gelu", "gelu_tanh")
    },
    **{f"{norm}, 1 + weight": ordinary(norm, weight_offset=1.0) for norm in NORMS},
    **{f"{norm} of bf16 to f32": ordinary(norm, BF16, out_dtype=F32) for norm in NORMS},
    **{f"{norm} of f32 to f16": ordinary(norm, out_dtype=F16) for norm in NORMS},
    **{
        f"{casting} of {dtype}": ordinary("rms_norm", dtype, weight, casting=casting)
        for casting in ("llama", "gemma")
        for dtype, weight in ((BF16, BF16), (F16, F32), (F32, F32))
    },
    "llama without weight": ordinary("rms_norm", BF16, weight=None, casting="llama"),
    "all of it": ordinary(
        "rms_norm", BF16, casting="llama", weight_offset=1.0, activation="silu", out_dtype=F32
    ),
    "large eps": ordinary("layer_norm", eps=2.0),
    "several dimensions": make("layer_norm", ROWS, ROWS[1:], bias=F32),
    "several dimensions, RMS": make("rms_norm", ROWS, ROWS[1:]),
    "all dimensions": make("layer_norm", ROWS, ROWS),
    **{
        f"images of rank {len(shape)}": make("group_norm", shape, 4, bias=F32)
        for shape in ((3, 12), (3, 12, 7), (2, 12, 3, 2, 4))
    },
    "f64 image of rank 3": make("group_norm", (3, 12, 7), 4, F64, F64, F64),
    "instance norm": make("group_norm", (3, 12, 5, 3), 12, bias=F32),
}


def channels_last(norm, shape, over):
    call = make(norm, shape, over)
    return call.replaced(x=call.x.movedim(1, -1).contiguous().movedim(-1, 1))


def transposed(norm, shape, over):
    call = make(norm, shape, over)
    return call.replaced(x=call.x.transpose(0, 2).contiguous().transpose(0, 2))


LAYOUTS = {
    **{
        f"group_norm, channels last, rank {len(shape)}": channels_last("group_norm", shape, 4)
        for shape in ((3, 12, 7), (3, 12, 5, 3), (2, 12, 3, 2, 4))
    },
    **{
        f"{norm}, channels last": channels_last(norm, (3, 12, 5, 4), (4,))
        for norm in ("layer_norm", "rms_norm")
    },
    **{
        f"{norm}, transposed": transposed(norm, (3, 12, 5, 4), 4 if norm == "group_norm" else (4,))
        for norm in NORMS
    },
}


def arithmetic(call):
    return F64 if F64 in {tensor.dtype for tensor in call.inputs().values()} else F32


class Calls(nn.Module):
    """All calls in one program. onnxruntime takes and gives no bfloat16: it is f32 outside."""

    def forward(self, *inputs):
        results = []
        for call, x in zip(CALLS.values(), inputs, strict=True):
            y = call.replaced(x=x.to(call.x.dtype)).ours()
            results.append(y.float() if y.dtype in HALVES else y)
        return tuple(results)


@needs_onnx
@pytest.mark.parametrize("opset", [18, 21, 23])
def test_options(opset):
    inputs = [call.x.float() if call.x.dtype in HALVES else call.x for call in CALLS.values()]
    program = to_onnx(Calls(), tuple(inputs), opset_version=opset)
    standard = Counter(ONNX_NORMS[call.norm] for call in CALLS.values() if arithmetic(call) is F32)
    assert norms_in(program) == available(standard, opset)
    for node in program.model.graph:
        if node.op_type == RMS:  # its scale has the shape that is normalized, and not x's
            assert node.inputs[1].shape.rank() == -node.attributes["axis"].value
    for (what, call), actual in zip(CALLS.items(), onnx_values(program, *inputs), strict=True):
        expected = call.ours()
        if expected.dtype in HALVES:
            # Rounded where the kernels round: but for ties, to the same bits.
            assert (actual.to(expected.dtype) == expected).double().mean() >= 0.995, what
        check(actual.to(expected.dtype), oracle(call), what, arithmetic(call))


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("call", [*CALLS.values(), *LAYOUTS.values()], ids=[*CALLS, *LAYOUTS])
def test_decomposed_operator(call, statistics):
    """In all results: values, dtypes, shapes and strides."""
    recorded = []

    class Recorded(exporting.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.evenkeel.forward.default:
                recorded.append(args)
            return operator(*args, **(kwargs or {}))

    with Recorded():
        getattr(torch.ops.evenkeel, call.norm)(*spelled_out(call), **call.options)
    (arguments,) = recorded
    arguments = [*arguments[:-1], statistics]
    expected = torch.ops.evenkeel.forward(*arguments)
    for part, wanted in zip(exporting.forward(*arguments), expected, strict=True):
        assert (part.dtype, part.shape, part.stride()) == (
            wanted.dtype,
            wanted.shape,
            wanted.stride(),
        )
        check(part, wanted.double(), compute=arithmetic(call))


def spelled_out(call):
    """The arguments of the operator, which takes shapes as lists."""
    x, over, *others = call.arguments()
    return [x, list(over) if isinstance(over, tuple) else over, *others]


# ---- the ways of a program ----


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Sequential(
                ek.GroupNorm(3, 6, activation="silu"),
                nn.Linear(8, 8),
                ek.LayerNorm(8),
                ek.RMSNorm(8),
            )

    def forward(self, x):
        return self.inner(x)


X, OTHER_X = random((4, 6, 8)), random((7, 6, 8), seed=1)
EACH = Counter([LAYER, RMS, GROUP])


def exported(model, **options):
    batch_size = torch.export.Dim("batch")
    return torch.export.export(model, (X,), dynamic_shapes=({0: batch_size},), **options)


def loaded(program):
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    return torch.export.load(stored)


@needs_onnx
@pytest.mark.parametrize("opset", [17, 18, 20, 21, 23])
def test_opsets(opset):
    model = Small().eval()
    program = to_onnx(model, (X,), opset_version=opset, dynamic_shapes=({0: "batch"},))
    if opset >= 18:  # torch exports for 18 at least, and converts what can be converted
        assert program.model.opset_imports[""] == opset
    assert norms_in(program) == available(EACH, opset)
    (actual,) = onnx_values(program, OTHER_X)
    assert relative(actual, model(OTHER_X).detach()) <= 1e-5


PROGRAMS = {
    "exported": lambda model: exported(model),
    "strict": lambda model: exported(model, strict=True),
    "loaded": lambda model: loaded(exported(model)),
    "decomposed": lambda model: exported(model).run_decompositions(ek.decompositions()),
    "decomposed twice": lambda model: (
        exported(model).run_decompositions().run_decompositions(ek.decompositions())
    ),
}


@needs_onnx
@pytest.mark.parametrize("way", PROGRAMS)
def test_programs(way):
    model = Small().eval()
    program = to_onnx(PROGRAMS[way](model), opset_version=23)
    if way != "decomposed twice":  # torch's RMS norm has been decomposed by then
        assert norms_in(program) == EACH
    (actual,) = onnx_values(program, OTHER_X)
    assert relative(actual, model(OTHER_X).detach()) <= 1e-5


@needs_onnx
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    model = Small().eval()
    with mode():
        program = to_onnx(model, (X,), opset_version=23)
    assert norms_in(program) == EACH


@needs_onnx
def test_autocast():
    """The norms write bfloat16, as without ONNX; products of bfloat16 are none of onnxruntime's."""

    class Autocast(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = ek.layer_norm(x, (8,))
            assert y.dtype == torch.bfloat16
            return y.float()

    model = Autocast()
    (actual,) = onnx_values(to_onnx(model, (X,)), X)
    assert torch.equal(actual, model(X))


class Tokens(nn.Module):
    """A view that only a channels-last result has."""

    def forward(self, x):
        y = ek.group_norm(x.contiguous(memory_format=torch.channels_last), 3)
        return y.permute(0, 2, 3, 1).view(x.shape[0], -1, x.shape[1])


@needs_onnx
def test_channels_last():
    x = random((2, 6, 5, 4))
    program = to_onnx(Tokens(), (x,), opset_version=21)
    assert norms_in(program) == {GROUP: 1}
    assert "Transpose" in (kinds := [node.op_type for node in program.model.graph])
    assert kinds.count("Transpose") == 1  # permute's: the layout itself is nothing to ONNX
    (actual,) = onnx_values(program, x)
    assert relative(actual, Tokens()(x)) <= 1e-6


@needs_onnx
def test_errors_are_evenkeels():
    class Bad(nn.Module):
        def forward(self, x):
            return ek.layer_norm(x, (8,), activation="elu")

    with pytest.raises(torch.onnx.OnnxExporterError, match="activation must be None, 'silu'"):
        to_onnx(Bad(), (X,))


@needs_onnx
def test_translations_of_ones_own():
    """Who passes a translation of one of the operators gets it."""
    import onnxscript

    def negated(x, normalized_shape, weight=None, bias=None, eps=1e-5, **options):
        return onnxscript.opset20.Neg(x)

    table = {torch.ops.evenkeel.layer_norm.default: negated}
    program = to_onnx(ek.LayerNorm(8).eval(), (X,), custom_translation_table=table)
    assert [node.op_type for node in program.model.graph] == ["Neg"]


@needs_onnx
def test_only_onnx_is_told():
    """An export to ONNX leaves torch.export and torch.compile as they were."""
    model = Small().eval()
    to_onnx(model, (X,))
    program = exported(model)
    assert evenkeels(program) == Counter(f"evenkeel.{norm}.default" for norm in NORMS)
    assert evenkeels(program.run_decompositions()) == {"evenkeel.forward.default": 3}


def evenkeels(program):
    targets = [str(node.target) for node in program.graph.nodes]
    return Counter(target for target in targets if target.startswith("evenkeel."))


@pytest.mark.parametrize("decomposed_before", [False, True])
def test_decompositions(decomposed_before):
    """For converters that know torch's operators only."""
    model = Small().eval()
    program = exported(model)
    if decomposed_before:
        program = program.run_decompositions()
    assert evenkeels(program)
    program = program.run_decompositions(ek.decompositions())
    assert not evenkeels(program)
    check(program.module()(OTHER_X), model(OTHER_X).detach().double())


def test_decompositions_beside_torchs():
    table = torch.export.default_decompositions()
    table.update(ek.decompositions())
    program = exported(Small().eval()).run_decompositions(table)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.native_layer_norm.default" in targets
    assert not evenkeels(program)


@needs_onnx
def test_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_document(ROOT / "docs" / "pytorch.md", "onnx", {})
