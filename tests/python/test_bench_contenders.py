"""What `python -m evenkeel bench` gives its contenders, how it calls them, and what it compares their results with."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from bench_lines import CPU, EVERY_KIND, MODULATED, WITH_RESIDUAL, label

from evenkeel.bench import contenders, lines, tensors, timing


@pytest.mark.parametrize("line", [EVERY_KIND[0], *WITH_RESIDUAL], ids=label)
def test_limit_moves_the_bytes_of_the_pass(line):
    s = tensors.make_set(line, CPU)
    for pass_ in lines.RESIDUAL_PASSES if line.adds else lines.PASSES:
        (call,) = timing.ceiling_calls(line, [s], pass_)
        moved = sum(operand.nbytes for operand in call.args) + call().nbytes
        assert moved == line.moved_bytes(pass_)


def test_bytes_of_a_line_with_a_residual():
    """Of an element: x and y, residual and sum; dy, sum, dsum and dx; the same without dsum."""
    passes = ("forward", "backward", "backward no dsum")
    for dtype, sizes in (("bf16+bf16", (8, 8, 6)), ("bf16+f32", (12, 14, 10))):
        line = lines.Line("layer_norm", dtype, (1000, 1000))
        assert [line.moved_bytes(pass_) / 1e6 for pass_ in passes] == list(sizes)
        assert line.gb_per_s("backward", 20) == pytest.approx(sizes[1] * 50)


def test_dtypes_of_a_line_with_a_residual():
    s = tensors.make_set(WITH_RESIDUAL[0], CPU)
    assert [v.dtype for v in s.inputs] == [torch.bfloat16] + 3 * [torch.float32]
    assert [v.dtype for v in s.gradients] == [torch.bfloat16, torch.float32]
    for name in ("evenkeel", "torch"):
        y, total = contenders.MAKERS[name](WITH_RESIDUAL[0]).forward(s)
        assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)


def torch_results(line, s):
    norm = contenders.torch_norm(line)
    inputs = [v.detach().double().requires_grad_() for v in s.inputs]
    if not line.adds:
        y = norm(*inputs)
        return {"forward": (y,), "backward": torch.autograd.grad(y, inputs, s.dy.double())}
    outputs, gradients = norm(*inputs), [v.double() for v in s.gradients]
    return {
        "forward": outputs,
        "backward": torch.autograd.grad(outputs, inputs, gradients, retain_graph=True),
        lines.NO_DSUM: torch.autograd.grad(outputs[0], inputs, gradients[0]),
    }


# Without the sum in bfloat16, which is rounded here and not in torch_results.
@pytest.mark.parametrize("line", [*EVERY_KIND, *WITH_RESIDUAL[:3], *MODULATED], ids=label)
def test_reference_is_the_norm(line, monkeypatch):
    monkeypatch.setattr(tensors, "REFERENCE_ELEMENTS", 3 * line.parameters)  # in several parts
    s = tensors.make_set(line, CPU)
    expected = torch_results(line, s)
    found = tensors.reference(line, s)
    assert found.keys() == expected.keys()
    for pass_, wanted in expected.items():
        for result, each in zip(found[pass_].values(), wanted, strict=True):
            torch.testing.assert_close(result.double(), each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("line", [*EVERY_KIND, *WITH_RESIDUAL, *MODULATED], ids=label)
def test_every_contender_of_a_cpu_is_right(line):
    s = tensors.make_set(line, CPU)
    for name in ("evenkeel", "torch"):
        contender = contenders.MAKERS[name](line)
        for pass_, expected in tensors.reference(line, s).items():
            timing.contender_calls(name, contender, line, [s], pass_, expected)


@pytest.mark.parametrize("line", [EVERY_KIND[0], EVERY_KIND[4]], ids=label)
def test_torchs_operators_are_right(line, monkeypatch):
    monkeypatch.setattr(contenders.Torch, "has_operators", lambda self, s: self.operators)
    s = tensors.make_set(line, CPU)
    contender = contenders.Torch(line)
    gradients = contender.backward(s, contender.keep(s))
    assert gradients[0].grad_fn is None
    tensors.check(True, line, gradients, tensors.reference(line, s)["backward"])


def test_sets_exceed_the_caches_and_keep_the_layout():
    line = EVERY_KIND[5]
    sets = tensors.make_sets(line, CPU, total_bytes=10 * line.x_bytes)
    assert len(sets) == 10
    assert len(tensors.make_sets(line, CPU, total_bytes=1)) == tensors.MIN_SETS
    for tensor in (sets[0].x, sets[0].dy):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(sets[0].x, sets[1].x)


def fake(monkeypatch, name, **content):
    """An importable module; its parents are packages."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = sys.modules.get(path) or types.ModuleType(path)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
        if i > 1:
            monkeypatch.setattr(
                sys.modules[".".join(parts[: i - 1])], parts[i - 1], module, raising=False
            )
    for key, value in content.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


class FakeGroupNorm(torch.nn.GroupNorm):
    SUPPORTED_CHANNELS = frozenset([64])

    def __init__(self, groups, channels, eps=1e-5, affine=True, act=""):
        super().__init__(groups, channels, eps)
        self.act = act

    def forward(self, x):
        y = super().forward(x)
        return F.silu(y) if self.act else y


@pytest.fixture
def rivals(monkeypatch):
    """The rivals' public functions and classes, in torch."""

    def added(norm):
        """With a residual it normalizes the sum before that is rounded, as most of them do."""

        def function(x, weight, bias=None, residual=None, eps=1e-6, prenorm=False):
            if residual is None:
                return norm(x, weight, bias, eps)
            total = x.float() + residual.float()
            parameters = [None if v is None else v.float() for v in (weight, bias)]
            y = norm(total, *parameters, eps).to(x.dtype)
            return (y, total.to(residual.dtype)) if prenorm else y

        return function

    @added
    def layer_norm(x, weight, bias, eps):
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    @added
    def rms_norm(x, weight, bias, eps):
        return F.rms_norm(x, weight.shape, weight, eps)

    def fused_add_rms_norm(x, residual, weight, eps, in_place=True):
        assert not in_place
        return rms_norm(x, weight, residual=residual, eps=eps, prenorm=True)

    def modulated_rms_norm(x, weight, scale, shift, eps, in_place=True):
        assert weight is None and not in_place
        return F.rms_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]

    norms = {"FusedLayerNorm": torch.nn.LayerNorm, "FusedRMSNorm": torch.nn.RMSNorm}
    fake(monkeypatch, "apex.normalization", **norms)
    fake(monkeypatch, "apex.contrib.layer_norm", FastLayerNorm=torch.nn.LayerNorm)
    fake(monkeypatch, "apex.contrib.group_norm", GroupNorm=FakeGroupNorm)
    functions = {
        "liger_layer_norm": lambda x, weight, bias, eps: layer_norm(x, weight, bias, eps=eps),
        "liger_fused_add_rms_norm": fused_add_rms_norm,
        "liger_rms_norm": lambda x, weight, eps, in_place: rms_norm(x, weight, eps=eps),
        "liger_modulated_rms_norm": modulated_rms_norm,
    }
    fake(monkeypatch, "liger_kernel.transformers.functional", **functions)
    fake(monkeypatch, "quack", rmsnorm=rms_norm)
    functions = {"layer_norm_fn": layer_norm, "rms_norm_fn": rms_norm}
    fake(monkeypatch, "flash_attn.ops.triton.layer_norm", **functions)


OFFERED = {
    "apex": {"layer_norm", "rms_norm", "group_norm"},
    "apex-fast": {"layer_norm"},
    "liger": {
        *("layer_norm", "rms_norm", "modulated rms_norm"),
        *("rms_norm f32+f32", "rms_norm bf16+bf16"),
    },
    "quack": {"rms_norm", "rms_norm f32+f32", "rms_norm bf16+bf16"},
    "flash-attn": {
        *("layer_norm", "layer_norm bf16+f32"),
        *("rms_norm", "rms_norm f32+f32", "rms_norm bf16+bf16"),
    },
}


@pytest.mark.usefixtures("rivals")
@pytest.mark.parametrize("name", OFFERED)
def test_rivals_are_called_as_they_are_documented(name, monkeypatch):
    monkeypatch.setattr(contenders, "APEX_FAST_COLS", {48})
    found = set()
    for line in (*EVERY_KIND, *WITH_RESIDUAL, *MODULATED):
        try:
            contender = contenders.MAKERS[name](line)
        except contenders.NotOfferedError:
            continue
        if line.mixed:  # torch, which stands in here, does not mix
            continue
        s = tensors.make_set(line, CPU)
        for pass_, expected in tensors.reference(line, s).items():
            timing.contender_calls(name, contender, line, [s], pass_, expected)
        op = f"modulated {line.op}" if line.modulates else line.op
        found.add(f"{op} {line.dtype}" if line.adds else op)
    assert found == OFFERED[name]


@pytest.mark.usefixtures("rivals")
def test_apex_is_not_asked_for_what_would_end_the_process():
    for name, line in (("apex-fast", EVERY_KIND[0]), ("apex", EVERY_KIND[4])):
        with pytest.raises(contenders.NotOfferedError):
            contenders.MAKERS[name](line)
