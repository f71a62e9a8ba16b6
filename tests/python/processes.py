"""Runs checks in several processes that talk to each other through gloo, on the CPU.

The processes start once for a list of checks and run them one after the other. What went wrong in any
of them comes back by the name of the check, so that each check can be a test.
"""

import datetime
import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

PROCESSES = 2
SECONDS = 120  # for all checks together
SECONDS_APART = 20  # that one process waits for the other


def in_two_processes(checks):
    """A test for each check; a check is a function of the mesh, and its arguments."""
    failures = {}

    @pytest.mark.parametrize("name", checks)
    def test_two_processes(name, tmp_path_factory):
        if not failures:
            failures.update(dict.fromkeys(checks, "the processes did not come to an end"))
            failures.update(_failures_of(checks, tmp_path_factory.mktemp("processes")))
        assert not failures[name], failures[name]

    return test_two_processes


def _failures_of(checks, directory):
    """The texts of what went wrong by check."""
    processes = torch.multiprocessing.spawn(
        _run, args=(checks, directory), nprocs=PROCESSES, join=False
    )
    deadline = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=1):
            assert time.monotonic() < deadline, f"not finished after {SECONDS} seconds"
    finally:
        for process in processes.processes:
            process.kill()
    texts = dict.fromkeys(checks, "")
    for rank in range(PROCESSES):
        for name, text in torch.load(directory / f"outcomes{rank}").items():
            texts[name] += text
    return texts


def _run(rank, checks, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=SECONDS_APART),
    )
    mesh = init_device_mesh("cpu", (PROCESSES,))
    outcomes = {}
    for name, (function, *arguments) in checks.items():
        try:
            function(mesh, *arguments)
        except Exception:
            outcomes[name] = f"process {rank}:\n{traceback.format_exc()}"
    torch.save(outcomes, directory / f"outcomes{rank}")
    dist.destroy_process_group()
    # Without the interpreter's own end: on a busy machine, one process in thirty that had used torch's profiler
    # was aborted there ("terminate called without an active exception").
    os._exit(0)
