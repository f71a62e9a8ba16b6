"""Surgery on models that something else wraps: data parallel, sharded, compiled, traced, adapted.

It happens before or after the wrapping, and the model trains on as one that nobody touched. What
needs several processes runs in two, through gloo on the CPU.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from handwritten import HONEST, Llama
from processes import PROCESSES, in_two_processes
from surgery_support import (
    NAMES,
    WIDTH,
    Block,
    Net,
    close,
    every_device,
    fused,
    net,
    randomize,
    reasons,
    replaced_names,
    snapshot,
    values,
    with_twin,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import evenkeel.torch as ek
from support import recorded

device = every_device


def step(model, x, target):
    """One step of gradient descent; the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ---- several processes ----


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def sharded_flat(model, mesh, norms=(nn.LayerNorm,), **options):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, *norms}),
        device_id=torch.device("cpu"),
        **options,
    )


def sharded_flat_by_parameter(model, mesh):
    return sharded_flat(model, mesh, use_orig_params=True)


def sharded(model, mesh):
    """The norms themselves are sharded, and get classes of torch's for that, and so is the rest."""
    for block in model.blocks:
        fully_shard(block.norm, mesh=mesh)
        fully_shard(block.written, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = [data_parallel, sharded_flat, sharded_flat_by_parameter, sharded]


def whole(model):
    """The parameters by their names in the model that was wrapped."""
    flat = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if flat else contextlib.nullcontext():
        return {
            name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): getattr(
                parameter, "full_tensor", parameter.detach
            )().clone()
            for name, parameter in model.named_parameters()
        }


def check_training(mesh, wrap, when):
    alone, x, target = net("cpu"), values("cpu"), values("cpu", seed=50)
    part, target_part = (t.chunk(PROCESSES)[mesh.get_rank()] for t in (x, target))
    model = net("cpu")
    if when == "before":
        report = ek.fuse(model)
    model = wrap(model, mesh)
    if when == "after":
        keys = list(model.state_dict())
        report = ek.fuse(model)
        assert list(model.state_dict()) == keys
    assert len(report.replaced) == len(NAMES), report
    losses = []
    operators = recorded(lambda: losses.append(step(model, part, target_part)))
    assert {"evenkeel::forward", "evenkeel::backward"} <= operators
    losses.append(step(model, part, target_part))
    for loss in losses:
        dist.all_reduce(loss)
        close(loss / PROCESSES, step(alone, x, target))
    for name, expected in alone.named_parameters():
        close(whole(model)[name], expected.detach())
    if when == "after":
        report.undo()
        close(model(part), alone(part))


def check_sharded_classes(mesh):
    """torch makes a class for each sharded module; the surgery keeps what it adds."""
    model = sharded(net("cpu"), mesh)
    before = snapshot(model)
    report = ek.fuse(model)
    for name in ("blocks.0.norm", "blocks.0.written"):
        norm = model.get_submodule(name)
        assert isinstance(norm, FSDPModule)
        assert name in [entry.name for entry in report.replaced], reasons(report)
        norm.unshard()
        norm.reshard()
    report.undo()
    assert {n: s[:2] for n, s in snapshot(model).items()} == {n: s[:2] for n, s in before.items()}


def check_undo_after_sharding(mesh):
    """torch has changed the class since."""
    model = net("cpu")
    report = ek.fuse(model)
    sharded(model, mesh)
    with pytest.raises(RuntimeError, match="norm"):
        report.undo()
    assert isinstance(model.blocks[0].norm, ek.LayerNorm)


def check_checkpoints(mesh):
    """A sharded checkpoint of a fused model fits an unfused one."""
    source, target = sharded(net("cpu"), mesh), sharded(randomize(Net(), seed=1), mesh)
    ek.fuse(source)
    target.load_state_dict(source.state_dict())
    close(target(values("cpu")), source(values("cpu")))


CHECKS = {
    **{
        f"{wrap.__name__}-{when}": (check_training, wrap, when)
        for wrap in WRAPPERS
        for when in ("before", "after")
    },
    "sharded-classes": (check_sharded_classes,),
    "sharded-undo": (check_undo_after_sharding,),
    "sharded-checkpoints": (check_checkpoints,),
}


test_two_processes = in_two_processes(CHECKS)


# ---- compiled and traced ----


class Graphs:
    """A backend that runs graphs as they are, and notes which: whether evenkeel is in them."""

    def __init__(self):
        torch.compiler.reset()
        self.compiled = 0
        self.ran = []

    def __call__(self, graph, inputs):
        self.compiled += 1
        fused = any("evenkeel" in str(node.target) for node in graph.graph.nodes)

        def run(*args):
            self.ran.append(fused)
            return graph(*args)

        return run


def compiled_as(how, model, backend):
    if how == "in place":
        model.compile(backend=backend, fullgraph=True)
        return model
    return torch.compile(model, backend=backend, fullgraph=True)


compilations = pytest.mark.parametrize("how", ["torch.compile", "in place"])


@compilations
def test_compiled_and_run_before(how, device):
    """Surgery makes it compile again, and undo once more."""
    graphs, x = Graphs(), values(device)
    model, twin = with_twin(net(device))
    compiled = compiled_as(how, model, graphs)
    compiled(x)
    assert not graphs.ran[-1]
    report = ek.fuse(compiled)
    assert len(report.replaced) == len(NAMES)
    assert all(
        name.startswith("_orig_mod.") == (how != "in place") for name in replaced_names(report)
    )
    close(compiled(x), twin(x))
    assert graphs.ran[-1]
    report.undo()
    assert torch.equal(compiled(x), twin(x))
    assert not graphs.ran[-1]


@compilations
def test_compiled_after(how, device):
    graphs, x, target = Graphs(), values(device), values(device, seed=50)
    model, twin = with_twin(fused(net(device)))
    compiled = compiled_as(how, model, graphs)
    for _ in range(2):
        close(step(compiled, x, target), step(twin, x, target))
    assert graphs.compiled == 1
    assert graphs.ran[-1]
    for ours, theirs in zip(compiled.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("make", [nn.LayerNorm, Llama])
def test_norm_that_is_compiled_itself(make, device):
    graphs, x = Graphs(), values(device)
    model, twin = with_twin(nn.Sequential(randomize(make(WIDTH)).to(device)))
    model[0].compile(backend=graphs)
    model(x)
    ek.fuse(model)
    close(model(x), twin(x))
    assert graphs.ran[-1]


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5", "FloatLayerNorm", "PlainLayerNorm"])
def test_written_norms_are_one_graph(name, device):
    graphs, x = Graphs(), values(device, torch.bfloat16)
    model, twin = with_twin(fused(randomize(HONEST[name].make(WIDTH)).to(device)))
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    assert torch.equal(compiled(x), twin(x))
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(compiled(x.float()), twin(x.float()))


@pytest.mark.parametrize(
    "trace", [torch.jit.trace, lambda model, x: torch.fx.symbolic_trace(model)]
)
@pytest.mark.parametrize("make", [nn.LayerNorm, Llama, HONEST["FloatLayerNorm"].make])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_traced(make, trace, device):
    x = values(device)
    model = nn.Sequential(fused(randomize(make(WIDTH)).to(device)))
    assert torch.equal(trace(model, x)(x), model(x))


def test_exported(device):
    model, x = fused(net(device)), values(device)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    assert any("evenkeel" in str(node.target) for node in program.graph.nodes)


def test_inductor(device):
    torch.compiler.reset()
    model, twin = with_twin(net(device, blocks=1))
    compiled = torch.compile(model, fullgraph=True)
    ek.fuse(compiled)
    x, target = values(device), values(device, seed=50)
    close(step(compiled, x, target), step(twin, x, target))
    for ours, theirs in zip(compiled.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


class Residual(nn.Module):
    """A float32 stream with a bfloat16 summand, which a compiler may keep instead of the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.first(x.sin())
        return x + self.down(self.up(self.norm(x)).relu())


def compiled_result(model, device):
    torch.compiler.reset()
    x = torch.randn(1024, WIDTH, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        return torch.compile(model, fullgraph=True)(x)


def test_compiled_keeps_no_more_than_native(device):
    def kept(model):
        result = compiled_result(model, device)
        return sum(tensor.nbytes for tensor in result.grad_fn.saved_tensors)

    model, native = with_twin(Residual().to(device))
    assert kept(fused(model)) <= kept(native) + native.norm.bias.nbytes


def test_compiled_has_no_higher_peak_than_native(device, monkeypatch):
    """As the compiler itself estimates it: what it computes again must not be there too soon."""
    from torch._inductor import memory, utils

    estimates, estimate = [], memory.estimate_peak_memory
    order = memory.reorder_for_peak_memory

    def kept_estimate(*args):
        estimates.append(estimate(*args))
        return estimates[-1]

    def of_a_graph(*args):
        estimates.clear()
        return order(*args)

    monkeypatch.setattr(memory, "estimate_peak_memory", kept_estimate)
    monkeypatch.setattr(memory, "reorder_for_peak_memory", of_a_graph)

    def peak(model):
        with utils.fresh_cache():  # or the order is not looked for again
            compiled_result(model, device).sum().backward()
        return min(peak for peak, *_ in estimates)

    model, native = with_twin(Residual().to(device))
    assert peak(fused(model)) <= peak(native) + native.norm.bias.nbytes


def test_compiled_gradient_in_one_graph(device):
    """There x comes before dy: nothing may make it wait."""
    torch.compiler.reset()
    norm = fused(nn.Sequential(randomize(nn.LayerNorm(WIDTH)).to(device)))[0]
    gradient = torch.func.grad(lambda x: norm(x.sin()).sin().sum())
    x = values(device)
    close(torch.compile(gradient, fullgraph=True)(x), gradient(x))


# ---- adapted ----


class LowRank(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class KeptCopy(nn.Module):
    """A module that is trained as a copy, beside the original."""

    def __init__(self, original):
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.modules_to_save.requires_grad_()
        self.active = True

    def forward(self, *args, **kwargs):
        chosen = self.modules_to_save["default"] if self.active else self.original_module
        return chosen(*args, **kwargs)


class Adapted(nn.Module):
    """A model whose attributes are those of the one that it wraps, as PEFT does it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model
        model.requires_grad_(False)
        for block in model.blocks:
            block.linear = LowRank(block.linear)
            block.norm = KeptCopy(block.norm)
        model.final = KeptCopy(model.final)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_adapted_model(device):
    model, twin = with_twin(randomize(Adapted(net(device))).to(device))
    report = ek.fuse(model)
    for name in ("original_module", "modules_to_save.default"):
        for parent in ("base_model.blocks.0.norm", "base_model.final"):
            assert f"{parent}.{name}" in replaced_names(report)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    x, target = values(device), values(device, seed=50)
    for active in (True, False):
        for each in (model, twin):
            for module in each.modules():
                if isinstance(module, KeptCopy):
                    module.active = active
        for _ in range(2):
            close(step(model, x, target), step(twin, x, target))
    assert trained == [name for name, p in twin.named_parameters() if p.requires_grad]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


def test_adapted_after(device):
    """Copies that an adapter makes of fused norms are fused."""
    model = Adapted(fused(net(device))).to(device)
    copies = [m.modules_to_save["default"] for m in model.modules() if isinstance(m, KeptCopy)]
    assert {type(norm) for norm in copies} == {ek.LayerNorm, ek.RMSNorm}
    assert all(norm.weight.requires_grad for norm in copies)
    assert model.final is model.base_model.final
