"""Norms in two processes: DTensor, data parallel, fully sharded, tensor and sequence parallel.

Two processes run all checks one after the other, and each check is one test. Their results are
compared with one process's on all the data: float32, to 1e-5.
"""

import torch
import torch.distributed as dist
from processes import PROCESSES, in_two_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import evenkeel.torch as ek
from evenkeel.torch import sharding

WIDTH = 16

NORMS = {
    "layer_norm": (lambda x, w, b: ek.layer_norm(x, (WIDTH,), w, b), (4, 6, WIDTH)),
    "layer_norm-silu": (
        lambda x, w, b: ek.layer_norm(x, (WIDTH,), w, b, activation="silu"),
        (4, 6, WIDTH),
    ),
    "layer_norm-weight": (
        lambda x, w, b: ek.layer_norm(x, (WIDTH,), w, weight_offset=1.0),
        (4, 6, WIDTH),
    ),
    "layer_norm-plain": (lambda x, w, b: ek.layer_norm(x, (6, WIDTH)), (4, 6, 6, WIDTH)),
    "rms_norm": (lambda x, w, b: ek.rms_norm(x, (WIDTH,), w), (4, 6, WIDTH)),
    "group_norm": (lambda x, w, b: ek.group_norm(x, 2, w, b), (4, WIDTH, 6)),
}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def inputs(shape):
    """x, weight, bias and the gradient of the result, the same in all processes."""
    torch.manual_seed(0)
    return [torch.randn(size) for size in (shape, WIDTH, WIDTH, shape)]


# ---- checks: each is run by all processes ----


def check_dtensor(mesh, norm, place, parameters, communicates):
    function, shape = NORMS[norm]
    *values, dy = inputs(shape)
    alone = [value.clone().requires_grad_() for value in values]
    y = function(*alone)
    y.backward(dy)

    places = [place, parameters, parameters]
    ours = [
        distribute_tensor(value, mesh, [p]).requires_grad_()
        for value, p in zip(values, places, strict=True)
    ]
    gradient = distribute_tensor(dy, mesh, [place])
    with CommDebugMode() as communication:
        result = function(*ours)
    assert (communication.get_total_counts() > 0) == communicates
    with CommDebugMode() as communication:
        result.backward(gradient)
    if not communicates:
        assert communication.get_total_counts() == 0
        assert result.placements == ours[0].grad.placements == (place,)
        for parameter in ours[1:]:
            assert parameter.grad is None or parameter.grad.placements == (Partial(),)
    close(result.full_tensor(), y)
    for mine, reference in zip(ours, alone, strict=True):
        assert (mine.grad is None) == (reference.grad is None)
        if mine.grad is not None:
            close(mine.grad.full_tensor(), reference.grad)


def check_statistics(mesh):
    """Of the internal operator: split like x where they are, whole where they are empty."""
    x = distribute_tensor(inputs((4, 6, WIDTH))[0], mesh, [Shard(1)])
    for op, statistics, mean, rstd in (
        (0, True, Shard(1), Shard(1)),
        (sharding.RMS_NORM, True, Replicate(), Shard(1)),
        (0, False, Replicate(), Replicate()),
    ):
        results = torch.ops.evenkeel.forward(
            x, None, None, op, 1, 1e-5, 0, 0, 0.0, torch.float32, statistics
        )
        assert [r.placements for r in results] == [(Shard(1),), (mean,), (rstd,)]


def check_modulated(mesh, norm, dim, lead):
    """A scale and a shift are split with x's samples, or whole where their rows are split: nothing is communicated."""
    x, weight, _, dy = inputs((4, 6, WIDTH))
    wide = torch.cat([x, x.flip(0)], -1)[tuple(slice(size) for size in lead)]
    wide = wide if len(lead) == 2 else wide[:, 0]
    alone = [value.clone().requires_grad_() for value in (x, weight, *wide.chunk(2, -1))]

    def function(x, weight, scale, shift):
        return getattr(ek, norm)(x, (WIDTH,), weight, residual=x, scale=scale, shift=shift)

    torch.autograd.backward(function(*alone), [dy, dy.sin()])
    own = Shard(dim) if dim < len(lead) else Replicate()
    ours = [
        distribute_tensor(value.detach(), mesh, [place]).requires_grad_()
        for value, place in zip(alone, (Shard(dim), Replicate(), own, own), strict=True)
    ]
    with CommDebugMode() as forward:
        results = function(*ours)
    arriving = [distribute_tensor(value, mesh, [Shard(dim)]) for value in (dy, dy.sin())]
    with CommDebugMode() as backward:
        torch.autograd.backward(results, arriving)
    assert forward.get_total_counts() == backward.get_total_counts() == 0
    terms = own if own == Shard(dim) else Partial()
    assert [t.grad.placements for t in ours] == [(Shard(dim),), (Partial(),), (terms,), (terms,)]
    for result, expected in zip(results, function(*alone), strict=True):
        close(result.full_tensor(), expected)
    for mine, reference in zip(ours, alone, strict=True):
        close(mine.grad.full_tensor(), reference.grad)


RESIDUAL = {
    "layer_norm": lambda x, r, w, b: ek.layer_norm(x, (WIDTH,), w, b, residual=r),
    "rms_norm": lambda x, r, w, b: ek.rms_norm(x, (WIDTH,), w, residual=r),
}


def check_residual(mesh, norm, places, used, dtype=torch.float32):
    """Of x and residual: split alike, nothing is communicated; otherwise the results are right all the same."""
    function = RESIDUAL[norm]
    x, weight, bias, dy = inputs((4, 6, WIDTH))
    x = x.to(dtype)
    alone = [value.clone().requires_grad_() for value in (x, dy.sin(), weight, bias)]

    def chosen(results):
        return [r for name, r in zip(("y", "sum"), results, strict=True) if name in used]

    expected = function(*alone)
    arriving = [dy.to(result.dtype) for result in chosen(expected)]
    torch.autograd.backward(chosen(expected), arriving)
    ours = [
        distribute_tensor(value.detach(), mesh, [place]).requires_grad_()
        for value, place in zip(alone, (*places, Replicate(), Replicate()), strict=True)
    ]
    with CommDebugMode() as forward:
        results = function(*ours)
    arriving = [distribute_tensor(gradient, mesh, results[0].placements) for gradient in arriving]
    with CommDebugMode() as backward:
        torch.autograd.backward(chosen(results), arriving)
    if places[0] == places[1]:
        assert forward.get_total_counts() == backward.get_total_counts() == 0
        placements = [t.placements for t in (*results, ours[0].grad, ours[1].grad)]
        assert placements == [(places[0],)] * 4
    for mine, reference in zip(results, expected, strict=True):
        assert mine.dtype == reference.dtype
        close(mine.full_tensor(), reference)
    for mine, reference in zip(ours, alone, strict=True):
        assert (mine.grad is None) == (reference.grad is None)
        if mine.grad is not None:
            assert mine.grad.dtype == reference.grad.dtype
            torch.testing.assert_close(mine.grad.full_tensor(), reference.grad)


def check_residual_of_terms(mesh):
    """x as a row-parallel linear layer leaves it: in terms of a sum, which are added up before the norm."""
    x, weight, _, dy = inputs((4, 6, WIDTH))
    terms = DTensor.from_local(x / PROCESSES, mesh, [Partial()])
    residual = distribute_tensor(dy, mesh, [Shard(0)])
    results = ek.rms_norm(
        terms, (WIDTH,), distribute_tensor(weight, mesh, [Replicate()]), residual=residual
    )
    for mine, reference in zip(results, ek.rms_norm(x, (WIDTH,), weight, residual=dy), strict=True):
        close(mine.full_tensor(), reference)


def check_without_gradients(mesh, mode):
    function, shape = NORMS["layer_norm"]
    x, weight, bias, _ = inputs(shape)
    ours = [distribute_tensor(x, mesh, [Shard(1)])]
    ours += [distribute_tensor(parameter, mesh, [Replicate()]) for parameter in (weight, bias)]
    with mode(), CommDebugMode() as communication:
        result = function(*ours)
    assert communication.get_total_counts() == 0
    assert result.placements == (Shard(1),)
    with mode():
        close(result.full_tensor(), function(x, weight, bias))


def check_compile(mesh):
    function, shape = NORMS["layer_norm"]
    *values, dy = inputs(shape)

    def run(norm):
        leaves = [
            distribute_tensor(value, mesh, [place]).requires_grad_()
            for value, place in zip(values, [Shard(1), Replicate(), Replicate()], strict=True)
        ]
        y = norm(*leaves)
        y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
        return y, [leaf.grad for leaf in leaves]

    eager, compiled = run(function), run(torch.compile(function, backend="aot_eager"))
    close(compiled[0].full_tensor(), eager[0].full_tensor())
    for mine, reference in zip(compiled[1], eager[1], strict=True):
        assert mine.placements == reference.placements
        close(mine.full_tensor(), reference.full_tensor())


class Model(nn.Module):
    """All three norms around two linear layers, for x (tokens, WIDTH)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = ek.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.rms = ek.RMSNorm(WIDTH, eps=1e-5)
        self.group = ek.GroupNorm(2, WIDTH, activation="silu")
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x):
        x = x + self.down(torch.nn.functional.silu(self.up(self.layer(x))))
        return self.group(self.rms(x))


def check_training(mesh, distribute):
    """One backward of the model on all tokens, against its distributed form on this process's."""
    alone = Model()
    x = torch.randn(8, WIDTH)
    loss = alone(x).square().mean()
    loss.backward()

    model, part = distribute(Model(), x, mesh)
    mean = model(part).square().mean()
    mean.backward()
    if hasattr(mean, "full_tensor"):
        mean = mean.full_tensor()
    else:
        dist.all_reduce(mean := mean.detach().clone())
        mean /= PROCESSES
    close(mean, loss)
    parameters = dict(alone.named_parameters())
    assert len(parameters) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        close(gradient, parameters[name.removeprefix("module.")].grad)


def data_parallel(model, x, mesh):
    return nn.parallel.DistributedDataParallel(model), x.chunk(PROCESSES)[mesh.get_rank()]


def fully_sharded(model, x, mesh):
    fully_shard(model.rms, mesh=mesh)
    return fully_shard(model, mesh=mesh), x.chunk(PROCESSES)[mesh.get_rank()]


def tensor_and_sequence_parallel(model, x, mesh):
    sequence = SequenceParallel(sequence_dim=0)
    plan = {
        "layer": sequence,
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "rms": sequence,
        "group": sequence,
    }
    return parallelize_module(model, mesh, plan), distribute_tensor(x, mesh, [Shard(0)])


CHECKS = {
    **{
        f"dtensor-{norm}-dim{dim}": (check_dtensor, norm, Shard(dim), Replicate(), False)
        for norm in NORMS
        for dim in ([0] if norm == "group_norm" else [0, 1])
    },
    "dtensor-group_norm-pixels": (check_dtensor, "group_norm", Shard(2), Replicate(), True),
    "dtensor-layer_norm-columns": (check_dtensor, "layer_norm", Shard(2), Replicate(), True),
    "dtensor-layer_norm-parameters": (check_dtensor, "layer_norm", Shard(0), Shard(0), True),
    "dtensor-statistics": (check_statistics,),
    **{
        f"dtensor-{mode.__name__}": (check_without_gradients, mode)
        for mode in (torch.no_grad, torch.inference_mode)
    },
    "dtensor-compile": (check_compile,),
    **{
        f"dtensor-residual-{norm}-dim{dim}-{'+'.join(used)}": (
            check_residual,
            norm,
            (Shard(dim), Shard(dim)),
            used,
        )
        for norm in RESIDUAL
        for dim in (0, 1)
        for used in (("y",), ("sum",), ("y", "sum"))
    },
    **{
        f"dtensor-modulated-{norm}-dim{dim}-{lead}": (check_modulated, norm, dim, lead)
        for norm in RESIDUAL
        for dim in (0, 1)
        for lead in ((4,), (4, 6))
    },
    "dtensor-residual-two dtypes": (
        check_residual,
        "rms_norm",
        (Shard(0), Shard(0)),
        ("y", "sum"),
        torch.bfloat16,
    ),
    "dtensor-residual-whole": (check_residual, "rms_norm", (Shard(0), Replicate()), ("y", "sum")),
    "dtensor-residual-apart": (check_residual, "layer_norm", (Shard(0), Shard(1)), ("y", "sum")),
    "dtensor-residual-terms": (check_residual_of_terms,),
    **{
        distribute.__name__: (check_training, distribute)
        for distribute in (data_parallel, fully_sharded, tensor_and_sequence_parallel)
    },
}


test_two_processes = in_two_processes(CHECKS)
