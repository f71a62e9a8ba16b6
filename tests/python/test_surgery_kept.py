"""What lives on in a fused model: parameters, optimizers, ties, hooks, flags, dtypes, checkpoints.

A fused model is compared with a copy that was left alone: results, gradients, and everything that a
user may have hung on a module.
"""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from handwritten import T5, Llama, Renamed, Rms
from surgery_support import (
    NAMES,
    WIDTH,
    Net,
    add_hooks,
    close,
    every_device,
    fused,
    net,
    randomize,
    replaced_names,
    snapshot,
    values,
    with_twin,
)
from torch import nn
from torch.nn.utils import prune

import evenkeel.torch as ek
from support import check, name_of

device = every_device


def parameters_of(model):
    return [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]


def test_parameters_and_buffers_are_the_same_objects(device):
    model = net(device)
    before, keys = parameters_of(model), list(model.state_dict())
    fused(model)
    assert parameters_of(model) == before
    assert list(model.state_dict()) == keys


def test_only_classes_change(device):
    model = net(device)
    before = snapshot(model)
    fused(model)
    for name, (identity, _, attributes) in snapshot(model).items():
        assert (identity, attributes) == (before[name][0], before[name][2]), name


def train(model, optimizer, steps, device):
    for seed in steps:
        optimizer.zero_grad()
        loss = (model(values(device, seed=seed)) - values(device, seed=50)).square().mean()
        loss.backward()
        optimizer.step()


def test_optimizer_goes_on(device):
    def grouped(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
        return torch.optim.AdamW(groups, lr=1e-2)

    model, twin = with_twin(net(device))
    optimizer, reference = grouped(model), grouped(twin)
    train(model, optimizer, range(3), device)
    train(twin, reference, range(3), device)
    parameters = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    states = {id(p): id(state) for p, state in optimizer.state.items()}
    ek.apply_fused_layernorm(model, optimizer)
    ek.fuse(model)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == parameters
    assert {id(p): id(state) for p, state in optimizer.state.items()} == states
    train(model, optimizer, range(3, 6), device)
    train(twin, reference, range(3, 6), device)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours, theirs, 2e-4)
    train(twin, grouped(twin), range(6, 7), device)
    train(model, optimizer, range(6, 7), device)
    with pytest.raises(AssertionError):  # a fresh optimizer would be seen
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            close(ours, theirs, 2e-4)


def test_tied_and_frozen_parameters(device):
    model = net(device)
    model.blocks[1].norm.weight = model.blocks[0].norm.weight
    model.final.weight = model.blocks[1].written.weight
    model.blocks[0].norm.bias.requires_grad_(False)
    model.blocks[0].written.requires_grad_(False)
    model, twin = with_twin(model)
    fused(model)
    assert model.blocks[1].norm.weight is model.blocks[0].norm.weight
    assert model.final.weight is model.blocks[1].written.weight
    for each in (model, twin):
        each(values(device)).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            close(ours.grad, theirs.grad, 1e-4)
    assert model.blocks[0].written.weight.grad is None


def use(model, x):
    model(x.requires_grad_()).square().mean().backward()
    model.load_state_dict(model.state_dict())


def test_hooks_run_as_before(device):
    log, model = [], net(device)
    for module in (model.blocks[0].norm, model.blocks[0].written, model.final):
        add_hooks(module, log)
    use(model, values(device))
    before = list(log)
    log.clear()
    report = ek.fuse(model)
    assert log == []
    use(model, values(device))
    assert log == before and len(set(log)) == 12
    log.clear()
    report.undo()
    use(model, values(device))
    assert log == before


def test_hook_that_changes_the_result(device):
    model = net(device)
    model.blocks[0].norm.register_forward_hook(lambda module, args, y: y + 1)
    model.final.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model, twin = with_twin(model)
    close(fused(model)(values(device)), twin(values(device)))


def test_pruned_weight_keeps_its_mask(device):
    model, twin = net(device), net(device)
    for each in (model, twin):
        prune.l1_unstructured(each.blocks[0].norm, "weight", 0.5)
    assert "blocks.0.norm" in replaced_names(ek.fuse(model))
    assert (model.blocks[0].norm.weight == 0).sum() == WIDTH // 2
    close(model(values(device)), twin(values(device)))


def test_training_flags(device):
    model = net(device).train()
    model.blocks[0].norm.eval()
    model.blocks[1].written.eval()
    flags = {name: module.training for name, module in model.named_modules()}
    fused(model)
    assert {name: module.training for name, module in model.named_modules()} == flags
    model.eval()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32], ids=name_of
)
def test_dtype(dtype, when, device):
    model, twin = with_twin(net(device))
    model = fused(model.to(dtype)) if when == "before" else fused(model).to(dtype)
    twin.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    x = values(device, dtype)
    actual, expected = model(x), twin(x)
    assert actual.dtype == expected.dtype == dtype
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-5)
    close(actual, expected, tolerance)
    assert type(model.final) is ek.RMSNorm


def test_device_stays(device):
    model = fused(net(device))
    assert {p.device.type for p in model.parameters()} == {device}
    assert model(values(device)).device.type == device


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_meta_device(how, device):
    source = net(device)
    with torch.device("meta"):
        model = Net()
        report = ek.fuse(model)
    assert replaced_names(report) == NAMES
    assert {p.device.type for p in model.parameters()} == {"meta"}
    if how == "to_empty":
        model.to_empty(device=device).load_state_dict(source.state_dict())
    else:
        model.load_state_dict(source.state_dict(), assign=True)
    close(model(values(device)), source(values(device)))


def test_checkpoints_move_both_ways(device, tmp_path):
    model, plain = fused(net(device)), randomize(Net(), seed=1).to(device)
    x = values(device)
    torch.save(model.state_dict(), tmp_path / "fused.pt")
    plain.load_state_dict(torch.load(tmp_path / "fused.pt", weights_only=True))
    close(plain(x), model(x))
    other = randomize(Net(), seed=2).to(device)
    model.load_state_dict(other.state_dict())
    close(model(x), other(x))


def saved_and_loaded(model, tmp_path):
    torch.save(model, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=False)


DUPLICATES = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", DUPLICATES)
def test_copies_of_a_fused_model(how, device, tmp_path):
    model = net(device)
    model.renamed = Renamed(WIDTH).to(device)
    model.blocks[0].written.variance_epsilon = 1e-3
    fused(model)
    twin = DUPLICATES[how](model, tmp_path)
    assert repr(twin) == repr(model)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        assert type(ours) is type(theirs) and ours is not theirs
        assert vars(ours).keys() == vars(theirs).keys()
    assert all(p is not q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(twin(values(device)), model(values(device)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ek.fuse(twin).replaced == ()


def test_shallow_copy_of_a_norm(device):
    for make in (nn.LayerNorm, Llama, Renamed):
        module = fused(randomize(make(WIDTH)).to(device))
        twin = copy.copy(module)
        assert type(twin) is type(module) and twin is not module
        assert twin.weight is module.weight
        assert torch.equal(twin(values(device)), module(values(device)))


def test_saved_model_in_a_new_process(device, tmp_path):
    """The classes of written norms are made anew there."""
    model = fused(net(device))
    x = values(device)
    torch.save({"model": model, "x": x, "y": model(x)}, tmp_path / "all.pt")
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\nimport torch\n"
        f"all = torch.load({str(tmp_path / 'all.pt')!r}, weights_only=False)\n"
        "assert torch.equal(all['model'](all['x']), all['y'])\n"
        "print(type(all['model'].blocks[0].written).__mro__)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "evenkeel" in run.stdout and "Llama" in run.stdout


def test_copy_of_a_half_fused_tree_shares_what_it_shared(device):
    model = nn.ModuleDict({"a": Llama(WIDTH), "b": nn.LayerNorm(WIDTH)}).to(device)
    model["again"] = model["a"]
    model["b"].weight = model["a"].weight
    twin = copy.deepcopy(fused(model))
    assert twin["again"] is twin["a"]
    assert twin["b"].weight is twin["a"].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, Llama, Rms, T5, Renamed])
def test_autocast_gives_its_dtype(make, dtype, device):
    """Within one rounding of the result in float64, though the weights are float32."""
    model, twin = with_twin(randomize(make(WIDTH)).to(device))
    x = values(device, dtype)
    with torch.autocast(device, torch.bfloat16):
        y = fused(model)(x)
    assert y.dtype == torch.bfloat16
    # Those that round before the weight too may be one further away.
    check(y.cpu(), oracle_of(twin.cpu(), x.cpu()), outliers=0.3 * (make in (Llama, T5)))


def oracle_of(module, x):
    x, parameters = x.double(), {n: p.double() for n, p in module.named_parameters()}
    if isinstance(module, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    eps = next(getattr(module, n) for n in ("eps", "variance_epsilon") if hasattr(module, n))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * parameters["weight"]
    return y + parameters.get("bias", 0.0)


def test_autocast_of_a_model(device):
    model, twin = with_twin(net(device))
    seen = []
    fused(model).final.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    with torch.autocast(device, torch.bfloat16):
        y = model(values(device))
    assert seen == [torch.bfloat16]
    torch.testing.assert_close(y.float(), twin(values(device)), rtol=0.1, atol=0.1)


def test_repr_says_who_computes(device):
    model, twin = with_twin(net(device))
    for entry in ek.fuse(model).replaced:
        assert "evenkeel" in repr(entry.module)
        assert twin.get_submodule(entry.name).extra_repr() in repr(entry.module)
