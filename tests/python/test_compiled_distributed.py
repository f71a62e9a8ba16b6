"""Compiled models in two processes: data parallel and fully sharded, whole and by blocks. Norms join their neighbours
as they do in one process, and gradients are those of one process that has all the data.
"""

from unittest import mock

import torch
import torch.distributed as dist
from compiled_support import Compiled, error, with_gradients
from compiled_zoo import LENGTH, WIDTH, PreNorm, Stack
from processes import PROCESSES, in_two_processes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import evenkeel.torch as ek

WHOLE = {"forward": 1, "add_forward": 3, "add_backward": 4}
BLOCK = {"forward": 1, "add_forward": 1, "add_backward": 2}


def model_and_parts():
    """A fused model, all of the data, and what each process has of it."""
    torch.manual_seed(0)
    model = Stack(PreNorm)
    ek.fuse(model)
    x = torch.randn(2 * PROCESSES, LENGTH, WIDTH)
    return model, x, x.chunk(PROCESSES)


def alone():
    """Loss and gradients in one process; the mean over processes is what data parallel models have."""
    model, x, _ = model_and_parts()
    return {name: value / PROCESSES for name, value in with_gradients(model, [x]).items()}


def gathered(found):
    """The same names and whole tensors, whatever they are wrapped in."""
    values = {}
    for name, value in found.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        values[name.removeprefix("module.").replace("_orig_mod.", "")] = value
    dist.all_reduce(values["loss"])
    values["loss"] /= PROCESSES
    return values


def check(mesh, wrap, expected, graphs, bucket=2**20):
    """bucket: bytes of gradients behind which torch divides the graph of a data parallel model."""
    torch.compiler.reset()
    model, _, parts = model_and_parts()
    backend = Compiled()
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", bucket):
        model = wrap(model, mesh, backend)
        found = with_gradients(model, [parts[mesh.get_rank()]])
    assert error(gathered(found), alone()) < 1e-5
    assert (backend.counts(), len(backend.graphs)) == (expected, graphs)


def data_parallel(model, mesh, backend):
    model = DistributedDataParallel(model, bucket_cap_mb=dist._DEFAULT_FIRST_BUCKET_BYTES / 2**20)
    model.compile(backend=backend)
    return model


def data_parallel_blocks(model, mesh, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return DistributedDataParallel(model)


def fully_sharded(model, mesh, backend):
    model = fully_shard(model, mesh=mesh)
    model.compile(backend=backend)
    return model


def fully_sharded_blocks(model, mesh, backend):
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


HALF_A_BLOCK = 50_000  # bytes of its gradients

CHECKS = {
    "data parallel": (check, data_parallel, WHOLE, 2),
    "data parallel, divided": (check, data_parallel, WHOLE, 10, HALF_A_BLOCK),
    "data parallel, blocks": (check, data_parallel_blocks, BLOCK, 2),
    "fully sharded": (check, fully_sharded, WHOLE, 2),
    "fully sharded, blocks": (check, fully_sharded_blocks, BLOCK, 2),
}


test_two_processes = in_two_processes(CHECKS)
