"""What stands beside a norm in a compiled model joins it, or the norm goes back to the compiler: operators are counted
in the graphs of small models, and their values and gradients compared with the eager model's and with float64.
"""

import copy
import functools
import os
import pathlib

import pytest
import torch
import torch.nn.functional as F
from commands import run
from compiled_support import Compiled, counts, error, kept_bytes, loss_of, with_gradients
from compiled_zoo import LAYERS, LENGTH, MODELS, WIDTH, PreNorm, Stack, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenkeel.torch as ek
from evenkeel._abi import ACTIVATIONS
from evenkeel.torch.compiling import graph, report

BF16 = torch.bfloat16
MODES = ["float32", "autocast", "bfloat16"]

# forward, add_forward, backward, add_backward. Behind the first norms' x, and the last norms' dx, there is nothing to
# add, but a cast under autocast. Norms of embeddings are mostly the compiler's, QK norms always.
NORMS = 2 * LAYERS
DECODER = {"float32": (0, 4, 1, 3), "autocast": (1, 4, 0, 5), "bfloat16": (0, 4, 1, 3)}
GPT_2 = {"float32": (1, 4, 1, 4), "autocast": (1, 4, 0, 5), "bfloat16": (1, 3, 1, 3)}
VIT = {"float32": (1, 3, 1, 3), "autocast": (1, 3, 0, 4), "bfloat16": (1, 3, 1, 3)}
PRE_NORM = (1, 3, 0, 4)
EXPECTED = {
    "pre-norm": dict.fromkeys(MODES, PRE_NORM),
    "post-norm": dict.fromkeys(MODES, (0, 4, 4, 0)),
    "conv net": dict.fromkeys(MODES, (4, 0, 4, 0)),
    "conv net, channels last": dict.fromkeys(MODES, (4, 0, 4, 0)),
    "ViT": VIT,
    "BERT": dict.fromkeys(MODES, (0, 4, 4, 0)),
    "GPT-2": GPT_2,
    "Llama": DECODER,
    "Qwen3": DECODER,
}
OPERATORS = "forward", "add_forward", "backward", "add_backward"
# Where the gradient of an embedding begins with a pointwise operation, as in torch 2.11, the norm behind the embedding is
# the compiler's.
POINTWISE_EMBEDDING = {
    ("GPT-2", "float32"): (1, 3, 1, 3),
    ("GPT-2", "autocast"): (1, 3, 0, 4),
    ("Llama", "autocast"): (0, 4, 0, 4),
    ("Qwen3", "autocast"): (0, 4, 0, 4),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    report.clear()


def prepared(name, mode):
    """A fused model, its inputs, and the context to run it in."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    ek.fuse(model)
    if mode == "bfloat16":
        model = model.to(BF16)
        inputs = [x.to(BF16) if x.is_floating_point() else x for x in inputs]
    return model, inputs, torch.autocast("cpu", BF16, enabled=mode == "autocast")


def in_float64(model, inputs):
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    return with_gradients(copy.deepcopy(model).double(), wide)


@functools.cache
def expected_counts(name, mode):
    backend = Compiled()
    embedding = nn.Embedding(4, 8)
    torch.compile(embedding, backend=backend)(torch.arange(4)).square().sum().backward()
    pointwise = torch.ops.aten.where.self in {
        node.target for graph in backend.graphs for node in graph.graph.nodes
    }
    counts_of = POINTWISE_EMBEDDING if pointwise else {}
    return counts_of.get((name, mode), EXPECTED[name][mode])


def ways():
    return {(line.norm, line.way) for line in ek.compile_report().lines}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPECTED)
def test_neighbours_join(name, mode):
    if name in ("ViT", "BERT", "GPT-2", "Llama", "Qwen3"):
        pytest.importorskip("transformers")
    expected = expected_counts(name, mode)
    model, inputs, context = prepared(name, mode)
    backend = Compiled()
    with context:
        eager = with_gradients(model, inputs)
        got = with_gradients(model, inputs, torch.compile(model, backend=backend))
    found = backend.counts()
    assert tuple(found.get(operator, 0) for operator in OPERATORS) == expected
    if "conv net" in name:
        ops = torch.ops.evenkeel
        calls = backend.calls(ops.forward.default) + backend.calls(ops.backward.default)
        assert all(call["activation"] == ACTIVATIONS["silu"] for call in calls)
    exact = in_float64(model, inputs)
    assert error(got, exact) <= 1.5 * error(eager, exact) + 1e-5
    assert error(got, eager) <= (1e-5 if mode == "float32" else 3e-2)


# ---- with Inductor's code ----


@pytest.mark.parametrize(
    ("name", "mode"),
    [("pre-norm", "autocast"), ("Llama", "bfloat16"), ("conv net, channels last", "autocast")],
)
def test_generated_code(name, mode):
    if name == "Llama":
        pytest.importorskip("transformers")
    model, inputs, context = prepared(name, mode)
    with context:
        eager = with_gradients(model, inputs)
        got = with_gradients(model, inputs, torch.compile(model))
    assert ways()  # not from a cache of torch's, which this test would not see
    exact = in_float64(model, inputs)
    assert error(got, exact) <= 1.5 * error(eager, exact) + 1e-5


@pytest.fixture(autouse=True)
def _no_caches(request):
    from torch._inductor.utils import fresh_cache

    if "generated_code" not in request.node.name:
        yield
        return
    with fresh_cache():
        yield


# ---- the rule ----


class One(nn.Module):
    """Linear, what stands before the norm, the norm, what stands behind it, linear."""

    def __init__(self, norm, before=None, behind=None, width=WIDTH):
        super().__init__()
        self.norm, self.before, self.behind = norm, before, behind
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.into(x)
        x = x if self.before is None else self.before(x)
        y = self.norm(x)
        return self.out(y if self.behind is None else self.behind(y))


def verdict(model, x, **options):
    """evenkeel or compiler, why, and what is left in the graphs."""
    backend = Compiled()
    with_gradients(model, [x], torch.compile(model, backend=backend, **options))
    lines = list(ek.compile_report().lines)
    assert len({line.way for line in lines}) == 1
    return lines[0].way, lines[0].why, backend.counts()


HANDED_BACK = {
    "pointwise before and behind": (
        lambda: One(ek.LayerNorm(WIDTH), torch.sin, torch.tanh),
        "x is computed by sin, y goes into tanh",
    ),
    "short rows": (lambda: One(ek.LayerNorm(16), width=16), "rows of 16 elements are too short"),
    "float64": (lambda: One(ek.LayerNorm(WIDTH)).double(), "no fast kernel for torch.float64"),
    "mixed dtypes and SiLU": (
        lambda: One(ek.RMSNorm(WIDTH, activation="silu"), behind=torch.Tensor.float).to(BF16),
        "dtypes are mixed beside an activation",
    ),
    "mixed dtypes and odd rows": (
        lambda: One(ek.RMSNorm(33), behind=torch.Tensor.float, width=33).to(BF16),
        "y is wider than x and rows are not aligned",
    ),
}


@pytest.mark.parametrize("case", HANDED_BACK)
def test_handed_back(case):
    make, words = HANDED_BACK[case]
    torch.manual_seed(0)
    model = make()
    weight = model.into.weight
    x = torch.randn(8, weight.shape[1], dtype=weight.dtype)
    if case.startswith("mixed dtypes"):
        norm = model.norm
        norm.forward = lambda x: ek.rms_norm(
            x, norm.weight.shape, norm.weight, activation=norm.activation, out_dtype=torch.float32
        )
        model.behind = lambda y: y.to(BF16)
    eager = with_gradients(model, [x])
    way, why, left = verdict(model, x)
    assert (way, left) == ("compiler", {})
    assert words in why
    torch.compiler.reset()
    got = with_gradients(model, [x], torch.compile(model, backend=Compiled()))
    assert error(got, eager) < (1e-5 if x.dtype != BF16 else 3e-2)


class AutocastNorm(nn.LayerNorm):
    """As autocast runs it on GPUs: in float32."""

    def forward(self, x):
        return super().forward(x.float())


def test_handed_back_keeps_what_torchs_norm_does():
    """The first norm of a GPT-2 under autocast: of a sum of embeddings, of which torch's norm keeps neither."""
    pytest.importorskip("transformers")
    kept = []
    for fused in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model, inputs = MODELS["GPT-2"]()
        for module in model.modules():
            if type(module) is nn.LayerNorm:
                module.__class__ = AutocastNorm
        if fused:
            model.h[0].ln_1.__class__ = nn.LayerNorm
            ek.fuse(model, include=["h.0.ln_1"])
        with torch.autocast("cpu", BF16):
            size, output = kept_bytes(torch.compile(model, backend=Compiled()), inputs)
            torch.testing.assert_close(
                output.last_hidden_state, model(*inputs).last_hidden_state, rtol=3e-2, atol=3e-2
            )
        kept.append(size)
    assert ways() == {("h.0.ln_1", "compiler")}
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["one block", "two blocks", "ViT", "GPT-2"])
def test_sums_that_are_computed_again_are_foreseen(name, mode, caplog, monkeypatch):
    """One, where a float32 stream comes into the graph and meets a bfloat16 branch."""
    counts_of = {"one block": 1, "two blocks": 2}
    if name in counts_of:
        blocks = nn.Sequential(*(PreNorm() for _ in range(counts_of[name])))
        stream = [torch.randn(2, LENGTH, WIDTH, requires_grad=True)]
        monkeypatch.setitem(MODELS, name, lambda: (blocks, stream))
    else:
        pytest.importorskip("transformers")
    model, inputs, context = prepared(name, mode)
    backend = Compiled()
    with caplog.at_level("DEBUG", "evenkeel.compile"), context:
        with_gradients(model, inputs, torch.compile(model, backend=backend))
    foreseen = sum("computed again" in record.getMessage() for record in caplog.records)
    ops = torch.ops.evenkeel
    calls = backend.calls(ops.backward.default) + backend.calls(ops.add_backward.default)
    assert foreseen == sum(graph.source(call["x"]).op != "placeholder" for call in calls)
    assert foreseen == (mode == "autocast" and name not in ("ViT", "GPT-2"))


def test_alone_stays():
    assert verdict(One(ek.LayerNorm(WIDTH)), torch.randn(8, WIDTH))[0] == "evenkeel"


def test_dropout_in_a_bfloat16_stream_is_the_compilers():
    """x would be read once more, and dx for the dropout's gradient: as much as the kernels save."""
    model = Stack(lambda: PreNorm(dropout=0.1)).to(BF16)
    ek.fuse(model)
    with_gradients(model, [rows()[0].to(BF16)], torch.compile(model, backend=Compiled()))
    why = {line.norm: (line.way, line.why) for line in ek.compile_report().lines}
    assert why["blocks.0.norm2"][0] == "compiler"
    assert "x is computed by add, dx goes into mul" in why["blocks.0.norm2"][1]
    model.eval()
    torch.compiler.reset()
    report.clear()
    with_gradients(model, [rows()[0].to(BF16)], torch.compile(model, backend=Compiled()))
    assert {way for _, way in ways()} == {"evenkeel"}


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "group_norm"])
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"weight_offset": 1.0}], ids=str)
def test_formulas(norm, options):
    """What is handed back computes what the kernels do; in float64 every norm is."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, 40, dtype=torch.float64, requires_grad=True)
    over = 2 if norm == "group_norm" else (40,)
    size = 6 if norm == "group_norm" else 40
    weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    parameters = [weight] if norm == "rms_norm" else [weight, bias]

    def gradients(function):
        y = function(x, over, *parameters, 1e-5, **options)
        return y, *torch.autograd.grad((y**3).sum(), [x, *parameters])

    backend = Compiled()
    got = gradients(torch.compile(getattr(ek, norm), backend=backend))
    assert backend.counts() == {}
    for ours, reference in zip(got, gradients(getattr(ek, norm)), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_llamas_rounding_is_that_of_a_compiled_llama():
    """Whether a compiler keeps a rounding is up to it: torch 2.11 drops this one, 2.13 does not."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 16).to(BF16), torch.rand(16) + 1

    def llama(x):
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return weight * normalized.to(BF16)

    def norm(x):
        return ek.rms_norm(x, (16,), weight, 1e-6, casting="llama", out_dtype=torch.float32)

    backend = Compiled()
    got = torch.compile(norm, backend=backend)(x)
    assert backend.counts() == {}
    expected = torch.compile(llama, backend=Compiled())(x)
    # Some values may be rounded to the other side.
    assert torch.isclose(got, expected, rtol=1e-5).float().mean() > 0.99


# ---- single patterns ----


def test_both_orders_of_the_addition():
    for order in (lambda a, b: a + b, lambda a, b: b + a):
        torch.compiler.reset()
        norm, linear = ek.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        backend = Compiled()

        @torch.compile(backend=backend)
        def function(x, order=order, norm=norm, linear=linear):
            total = order(x, linear(x))
            return linear(norm(total)) + total

        x = torch.randn(8, WIDTH, requires_grad=True)
        function(x).sum().backward()
        assert backend.counts() == {"add_forward": 1, "add_backward": 1}


def test_a_cast_behind_y_is_its_dtype():
    norm, linear = ek.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).to(BF16)
    backend = Compiled()
    with torch.no_grad():
        torch.compile(lambda x: linear(norm(x).to(BF16)), backend=backend)(torch.randn(8, WIDTH))
    (call,) = backend.calls(torch.ops.evenkeel.forward.default)
    assert call["out_dtype"] == BF16


def test_a_sum_that_the_weight_depends_on_is_left():
    """The kernel cannot add what must be there before."""
    linear = nn.Linear(WIDTH, WIDTH)
    backend = Compiled()

    def function(x):
        total = x + linear(x)
        return linear(ek.layer_norm(total, (WIDTH,), total.mean(0)))

    x = torch.randn(8, WIDTH)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert "add_forward" not in backend.counts()


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (torch.Tensor.relu, "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (F.gelu, "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
    ],
    ids=str,
)
def test_activations_behind_a_group_norm_join(function, activation):
    norm, conv = ek.GroupNorm(4, 8), nn.Conv2d(8, 8, 3)
    backend = Compiled()

    def step(x):
        return conv(function(norm(conv(x)))).sum()

    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    compiled = torch.compile(step, backend=backend)(x)
    torch.testing.assert_close(compiled, step(x))
    (actual,) = torch.autograd.grad(compiled, x)
    (expected,) = torch.autograd.grad(step(x), x)
    torch.testing.assert_close(actual, expected)
    ops = torch.ops.evenkeel
    calls = backend.calls(ops.forward.default) + backend.calls(ops.backward.default)
    assert [c["activation"] for c in calls] == [ACTIVATIONS[activation]] * 2


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_activation_of_a_norm_that_is_handed_back(activation):
    """A formula takes the operators' place, forward and backward."""
    backend = Compiled()
    x = torch.randn(64, 16, requires_grad=True)  # rows that are too short for a kernel

    def step(x):
        return ek.layer_norm(x, (16,), activation=activation).square().sum()

    compiled = torch.compile(step, backend=backend)(x)
    torch.testing.assert_close(compiled, step(x))
    (actual,) = torch.autograd.grad(compiled, x)
    (expected,) = torch.autograd.grad(step(x), x)
    torch.testing.assert_close(actual, expected)
    assert not backend.counts()


def test_silu_of_a_result_that_is_used_twice_is_left():
    norm, conv = ek.GroupNorm(4, 8), nn.Conv2d(8, 8, 3)
    backend = Compiled()

    def function(x):
        y = norm(conv(x))
        return conv(F.silu(y)).sum() + conv(y).sum()

    torch.compile(function, backend=backend)(torch.randn(2, 8, 16, 16)).backward()
    assert [c["activation"] for c in backend.calls(torch.ops.evenkeel.forward.default)] == [0]


# ---- torch's other features ----


def test_dynamic_shapes():
    """One graph for all batches, with everything joined."""
    model, _, _ = prepared("pre-norm", "float32")
    backend = Compiled()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for batch in (3, 5, 8):
        x = torch.randn(batch, LENGTH, WIDTH)
        with torch.compiler.set_stance("default" if batch == 3 else "fail_on_recompile"):
            got = with_gradients(model, [x], compiled)
        assert error(got, with_gradients(model, [x])) < 1e-5
    assert backend.counts() == {"forward": 1, "add_forward": 3, "add_backward": 4}


def test_checkpoint():
    """Blocks are run again in the backward pass; norms that are computed again join as well."""
    model, inputs, _ = prepared("pre-norm", "float32")
    backend = Compiled()

    def run(x):
        x = model.embedding(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    eager = with_gradients(model, inputs)
    assert error(with_gradients(model, inputs, torch.compile(run, backend=backend)), eager) < 1e-5
    forward, backward = (counts(graph) for graph in backend.graphs)
    assert forward["add_forward"] >= LAYERS
    assert backward["add_backward"] == NORMS
    assert backward["forward"] + backward["add_forward"] >= LAYERS


def test_blocks():
    """Compiled one by one, they share their code."""
    model, inputs, _ = prepared("pre-norm", "float32")
    backend = Compiled()
    for block in model.blocks:
        block.compile(backend=backend)
    eager = copy.deepcopy(model)
    for block in eager.blocks:
        block._compiled_call_impl = None
    assert error(with_gradients(model, inputs), with_gradients(eager, inputs)) < 1e-5
    assert backend.counts() == {"forward": 1, "add_forward": 1, "add_backward": 2}


def test_inference():
    model, inputs, _ = prepared("pre-norm", "float32")
    backend = Compiled()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(*inputs)
        torch.testing.assert_close(got, model(*inputs))
    assert backend.counts() == {"forward": 1, "add_forward": NORMS - 1}


def test_bits_are_those_of_the_eager_model():
    """A sum is rounded where it was before."""
    model, inputs, _ = prepared("pre-norm", "bfloat16")
    with torch.no_grad():
        got = torch.compile(model, backend=Compiled())(*inputs)
        assert torch.equal(loss_of(got), loss_of(model(*inputs)))


def test_export_is_unharmed():
    model, inputs, _ = prepared("pre-norm", "float32")
    with_gradients(model, inputs, torch.compile(model, backend=Compiled()))
    program = torch.export.export(model.eval(), tuple(inputs))
    found = [str(node.target) for node in program.graph.nodes]
    assert found.count("evenkeel.layer_norm.default") == NORMS
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


PACKAGE = """
import sys
import torch
from compiled_zoo import LENGTH, WIDTH, PreNorm
import evenkeel.torch as ek

kind, path = sys.argv[1:]
block = PreNorm().eval()
if kind == "fused":
    ek.fuse(block)
x = torch.randn(4, LENGTH, WIDTH)
program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
torch._inductor.aoti_compile_and_package(program, package_path=path)
compiled = torch._inductor.aoti_load_package(path)
joined = ["alone", "with the residual"] if kind == "fused" else []
assert [line.why for line in ek.compile_report().lines] == joined
for rows_of in (4, 7):
    x = torch.randn(rows_of, LENGTH, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))
"""


def package(kind, folder):
    """In a process of its own: where the compiler links libstdc++ statically, a package can end who loads it."""
    places = os.pathsep.join((os.environ["PYTHONPATH"], str(pathlib.Path(__file__).parent)))
    return run("-c", PACKAGE, kind, f"{folder}/{kind}.pt2", PYTHONPATH=places)


def test_generated_code_ahead_of_time(tmp_path):
    """AOTInductor: norms join in the package's code, too."""
    done = package("fused", tmp_path)
    if done.returncode < 0 and package("stock", tmp_path).returncode < 0:
        pytest.skip("a package of torch's own norms ends the process, too")
    assert done.returncode == 0, done.stderr
