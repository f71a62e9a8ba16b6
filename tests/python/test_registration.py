"""First calls from many threads at once: each must find what torch is told about the operators."""

import subprocess
import sys
import textwrap

import pytest

THREADS = 16

# Registering takes a while, as it does on a busy machine: a thread that does not wait for it is seen.
PROGRAM = textwrap.dedent(
    """
    import sys, threading, time
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import evenkeel.torch as ek
    from evenkeel.torch import sharding

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    register, registered = sharding.register, []

    def slowly():
        time.sleep(0.2)
        register()
        registered.append(True)

    sharding.register = slowly
    x = distribute_tensor(torch.randn(4, 8, 6), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    wide = distribute_tensor(torch.randn(6), mesh, [Replicate()])
    calls = [
        lambda: ek.layer_norm(x, (6,), wide, wide),
        lambda: ek.rms_norm(x, (6,), wide),
        lambda: ek.group_norm(x, 2, w, w),
    ]
    barrier, errors = threading.Barrier(int(sys.argv[1])), []

    def work(call):
        barrier.wait()
        try:
            assert call().placements == (Shard(0),)
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(calls[i % 3],)) for i in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registered == [True], registered
    print("\\n".join(errors) or "all found it")
    dist.destroy_process_group()
    """
)


def test_first_calls_from_many_threads():
    torch_distributed = pytest.importorskip("torch.distributed")
    if not torch_distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(THREADS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.stdout == "all found it\n", finished.stdout + finished.stderr
