"""How the passes for compiled models get into Inductor, and how they leave other people's alone: hooks of newer and of
older versions of torch, caches, the switch, threads, and a torch that has no such hooks.
"""

import logging
import sys
import textwrap
import threading

import pytest
import torch
from commands import run
from compiled_support import Compiled
from torch import nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import evenkeel.torch as ek
from evenkeel.torch import compiling
from evenkeel.torch.compiling import hooks

HOOKS = "pre_grad_custom_pass", "joint_custom_pre_pass", "post_grad_custom_pre_pass"
FUSED, UNFUSED = {"add_forward": 1}, {"forward": 1}


class Mine(CustomGraphPass):
    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "mine"


@pytest.fixture(autouse=True)
def _clean():
    torch.compiler.reset()
    with config.patch(dict.fromkeys(HOOKS)):
        yield


LISTED = hooks._listed is not None
needs_lists = pytest.mark.skipif(not LISTED, reason="the hooks of this torch take no lists")


@pytest.fixture
def one_pass(monkeypatch):
    """As in versions of torch whose hooks take no list."""
    monkeypatch.setattr(hooks, "_listed", None)


def passes_of(hook):
    """All that a hook of Inductor's calls, in order."""
    value = getattr(config, hook)
    if isinstance(value, hooks.Chain):
        return [value.theirs, value.ours]
    return value if isinstance(value, list) else [value]


def in_graphs():
    """Of a residual and a norm, compiled now."""
    torch.compiler.reset()
    backend = Compiled()
    norm, linear = ek.LayerNorm(64), nn.Linear(64, 64)
    with torch.no_grad():
        torch.compile(lambda x: linear(norm(x + linear(x))), backend=backend)(torch.randn(4, 64))
    return backend.counts()


def test_installed_when_first_traced():
    assert in_graphs() == FUSED
    for hook in HOOKS:
        assert any(isinstance(one, hooks.Pass) for one in passes_of(hook))


def test_import_does_not_import_inductor():
    result = run("-c", "import sys, evenkeel.torch; print('torch._inductor' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=needs_lists)])
def test_own_pass_stays(listed):
    mine = Mine()
    config.post_grad_custom_pre_pass = [mine] if listed else mine
    assert in_graphs() == FUSED
    assert mine.calls == 1
    assert passes_of("post_grad_custom_pre_pass")[0] is mine


def test_own_pass_that_comes_later_stays_too():
    assert in_graphs() == FUSED
    mine = config.post_grad_custom_pre_pass = Mine()
    assert in_graphs() == FUSED
    assert mine.calls == 1


def test_chain(one_pass):
    mine = Mine()
    ours = compiling._passes()["post_grad_custom_pre_pass"]
    config.post_grad_custom_pre_pass = mine
    assert in_graphs() == FUSED
    chain = config.post_grad_custom_pre_pass
    assert (chain.theirs, chain.ours, mine.calls) == (mine, ours, 1)
    assert chain.uuid() == ("mine", ours.uuid())
    in_graphs()
    assert config.post_grad_custom_pre_pass is chain
    assert hooks.Chain(print, ours).uuid() is None  # torch's caches must not be used then


@pytest.mark.parametrize("older", [False, True])
def test_switch(older, monkeypatch):
    if older:
        monkeypatch.setattr(hooks, "_listed", None)
    mine = config.joint_custom_pre_pass = Mine()
    assert in_graphs() == FUSED
    monkeypatch.setenv(compiling.SWITCH, "0")
    assert in_graphs() == UNFUSED
    assert "EVENKEEL_FUSE_COMPILED is 0" in compiling.status()
    assert config.joint_custom_pre_pass in (mine, [mine])
    assert config.post_grad_custom_pre_pass is None
    monkeypatch.setenv(compiling.SWITCH, "1")
    assert in_graphs() == FUSED


def test_other_threads():
    """torch keeps its configuration by thread, and a backward pass may be compiled in another one."""
    found = []

    def work():
        torch._dynamo.callback.callback_handler.run_start_callbacks(None)
        found.extend(passes_of("post_grad_custom_pre_pass"))

    in_graphs()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert any(isinstance(one, hooks.Pass) for one in found)


def test_unknown_hooks(monkeypatch, caplog):
    """Models compile and are right."""

    def no_passes():
        raise AttributeError("no post_grad_custom_pre_pass")

    monkeypatch.setattr(hooks, "passes", no_passes)
    compiling._passes.cache_clear()
    compiling._say_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "evenkeel.compile"):
            assert in_graphs() == UNFUSED
        assert "no post_grad_custom_pre_pass" in caplog.text
        assert "no post_grad_custom_pre_pass" in compiling.status()
    finally:
        compiling._passes.cache_clear()


def test_module_of_hooks_is_gone(monkeypatch):
    monkeypatch.setitem(sys.modules, "evenkeel.torch.compiling.hooks", None)
    monkeypatch.delattr(compiling, "hooks")
    compiling._passes.cache_clear()
    try:
        assert in_graphs() == UNFUSED
        assert compiling.status().startswith("not fused: this torch has other hooks")
    finally:
        compiling._passes.cache_clear()


def test_a_pass_that_fails_leaves_the_graph(caplog):
    def fails(graph):
        raise ValueError("lost")

    with caplog.at_level(logging.WARNING, "evenkeel.compile"):
        hooks.Pass(fails)(torch.fx.symbolic_trace(nn.Linear(2, 2)).graph)
    assert "left as they are" in caplog.text


def test_a_pass_that_fails_midway_ends_the_compilation():
    def fails(graph):
        node = next(node for node in graph.nodes if node.op == "call_function")
        node.args = node.args[::-1]
        raise ValueError("lost")

    graph = torch.fx.symbolic_trace(lambda a, b: a - b).graph
    with pytest.raises(RuntimeError, match=r"EVENKEEL_FUSE_COMPILED=0.*ValueError: lost"):
        hooks.Pass(fails)(graph)


PROGRAM = textwrap.dedent(
    """
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    import evenkeel.torch as ek

    torch.manual_seed(0)
    norm, linear = ek.LayerNorm(64), nn.Linear(64, 64)
    compiled = torch.compile(lambda x: linear(norm(x + linear(x))))
    compiled(torch.randn(4, 64)).sum().backward()
    hits = [counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]
    print(max(hits), len(ek.compile_report().lines))
    """
)


def test_caches_are_used(tmp_path):
    """A second process takes the code of the first, and one with the switch off does not."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = []
    for switch in ("1", "1", "0"):
        result = run(
            str(program),
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
            EVENKEEL_FUSE_COMPILED=switch,
        )
        assert result.returncode == 0, result.stderr
        found.append([int(word) for word in result.stdout.split()])
    first, second, off = found
    assert first[0] == 0
    assert first[1] > 0
    assert second[0] > 0
    assert off == [0, 0]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    norm, linear = ek.LayerNorm(64), nn.Linear(64, 64)

    def function(x):
        return linear(norm(x + linear(x)))

    x = torch.randn(4, 64)
    with fresh_cache(), torch.no_grad():
        torch.testing.assert_close(torch.compile(function, mode=mode)(x), function(x))
    assert any(line.why == "with the residual" for line in ek.compile_report().lines)
