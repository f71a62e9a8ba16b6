"""What goes wrong around a call: forks, exits, no memory, no threads, too many callers, interrupts.

Every scenario happens in a fresh process that has imported evenkeel.torch but called nothing yet; one
that hangs is killed and named so. The pool of the C interface by itself: tests/cpp/test_faults.cc.
"""

import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.data

import evenkeel.torch as ek
from evenkeel import _abi, _native
from support import Call, check_same, make, random, with_gradients

SECONDS = 120  # for one process
TESTS = pathlib.Path(__file__).parent

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["evenkeel.torch"])
fork = multiprocessing.get_context("fork")


def finish(process):
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"hangs: killed after {SECONDS} seconds")
    assert process.exitcode == 0, f"exit code {process.exitcode}"


def in_a_child(function, *arguments):
    """Runs it in a process that is forked from this one."""
    process = fork.Process(target=function, args=arguments)
    process.start()
    finish(process)


# --- What is called

CALLS = [
    ("layer_norm", (300, 257), (257,), torch.float32, torch.float32, torch.float32),
    ("rms_norm", (700, 64), (64,), torch.bfloat16, torch.float32),
    ("group_norm", (2, 32, 20, 20), 8, torch.float32, torch.float32, torch.float32),
]


def results():
    """Values and gradients of some calls that are large enough for several threads."""
    calls = [make(*call) for call in CALLS]
    return [with_gradients(Call.ours, call, torch.ones_like(call.x)) for call in calls]


def expect(expected):
    for actual, wanted in zip(results(), expected, strict=True):
        check_same(actual, wanted)


def expect_with_threads(threads, expected):
    torch.set_num_threads(threads)
    expect(expected)


class CCall:
    """A call through the C interface with threads of its own pool, whose result is known."""

    def __init__(self, threads):
        rows, cols = 1500, 257
        self.x, self.y = random((rows, cols)), torch.empty(rows, cols)
        problem = _abi.sized(_abi.Problem, rows=rows, cols=cols, eps=1e-5)
        tensors = {name: _abi.tensor(getattr(self, name).data_ptr(), "f32") for name in "xy"}
        args = _abi.sized(_abi.ForwardArgs, **tensors)
        library = _abi.Evenkeel(_native.find("libevenkeel.so"))
        library.forward(problem, args, 1)()
        self.expected = self.y.clone()
        self.run = library.forward(problem, args, threads)

    def expect_same_bits(self):
        self.y.fill_(float("nan"))
        self.run()
        assert torch.equal(self.y, self.expected)


def threads_now():
    return sum(1 for _ in pathlib.Path("/proc/self/task").iterdir())


# --- Forks


def fork_after_import():
    torch.set_num_threads(1)
    expected = results()
    in_a_child(expect_with_threads, 2, expected)
    expect_with_threads(2, expected)


def fork_after_calls():
    """The threads of torch's OpenMP are gone in a child: it asks for one, as DataLoader's workers do."""
    torch.set_num_threads(2)
    expected = results()
    for _ in range(3):
        in_a_child(expect_with_threads, 1, expected)
    expect(expected)


def fork_after_calls_with_threads():
    """Other operators of torch would wait for OpenMP's threads forever."""
    torch.set_num_threads(2)
    call = make(*CALLS[0])
    expected = call.ours().numpy()

    def child():
        assert (call.ours().numpy() == expected).all()

    for _ in range(3):
        in_a_child(child)
    child()


def fork_while_a_thread_calls():
    torch.set_num_threads(1)
    expected = results()
    call, stop = make(*CALLS[0]), threading.Event()

    def keep_calling():
        while not stop.is_set():
            call.ours()

    thread = threading.Thread(target=keep_calling)
    thread.start()
    try:
        for _ in range(5):
            in_a_child(expect, expected)
    finally:
        stop.set()
        thread.join()
    expect(expected)


def fork_with_the_pool():
    """The C interface's own threads: a child has as many as its parent."""
    torch.set_num_threads(1)
    call = CCall(4)
    call.expect_same_bits()
    before = threads_now()

    def child():
        call.expect_same_bits()
        assert threads_now() == 1 + 3

    for _ in range(3):
        in_a_child(child)
    call.expect_same_bits()
    assert threads_now() == before


class Normalized(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ek.layer_norm(random((300, 257), seed=index), (257,))


def data_loader():
    torch.set_num_threads(2)
    expected = [Normalized()[i] for i in range(8)]
    loader = torch.utils.data.DataLoader(Normalized(), num_workers=2, timeout=SECONDS)
    for (actual,), wanted in zip(loader, expected, strict=True):
        assert torch.equal(actual, wanted)


# --- The end of a process


def exit_in_the_middle(leave):
    started = threading.Barrier(4)

    def keep_calling():
        call = CCall(3)
        call.expect_same_bits()
        started.wait()
        while True:
            call.run()

    for _ in range(3):
        threading.Thread(target=keep_calling, daemon=True).start()
    started.wait()
    leave(0)


def exit_while_threads_call():
    """Daemon threads inside calls of the C interface, when the interpreter is torn down."""
    for leave in (ctypes.pythonapi.Py_Exit, sys.exit, os._exit):
        for _ in range(2):
            in_a_child(exit_in_the_middle, leave)


def exit_with_work_left(expected):
    # A forked child makes autograd's engine and OpenMP's settings anew when they are first used, which torch does not
    # guard: not by three threads at once.
    expect(expected)
    pool = concurrent.futures.ThreadPoolExecutor(3)
    for _ in range(3):
        pool.submit(expect, expected).add_done_callback(
            lambda done: done.exception() and os._exit(1)
        )
    ctypes.pythonapi.Py_Exit(0)


def exit_before_threads_are_done():
    """The interpreter waits for threads that are not daemons."""
    torch.set_num_threads(1)
    expected = results()
    for _ in range(2):
        in_a_child(exit_with_work_left, expected)


# --- Nothing to be had


@contextlib.contextmanager
def address_space(spare):
    """Of what this process has, and so many bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def no_memory_for_the_result():
    torch.set_num_threads(1)
    expected = results()
    x = torch.zeros(64, 1 << 20)
    with (
        address_space(spare=64 << 20),
        pytest.raises(RuntimeError, match="allocate 268435456 bytes"),
    ):
        ek.layer_norm(x, (1 << 20,))
    expect(expected)


def no_memory_for_the_workspace():
    """Which holds partial sums for dweight, several times its size."""
    torch.set_num_threads(1)
    cols = 1 << 20
    x, weight = random((16, cols)), torch.ones(cols, requires_grad=True)
    y, dy = ek.rms_norm(x, (cols,), weight, 1e-5), torch.ones(16, cols)
    (expected,) = torch.autograd.grad(y, weight, dy, retain_graph=True)
    with address_space(spare=10 << 20), pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.autograd.grad(y, weight, dy, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, weight, dy)[0], expected)


def no_memory_for_threads():
    torch.set_num_threads(1)
    call = CCall(8)
    before = threads_now()
    with address_space(spare=4 << 20):
        call.expect_same_bits()
        assert threads_now() < before + 7
    call.expect_same_bits()
    assert threads_now() == before + 7


# --- Too many callers


def many_callers():
    torch.set_num_threads(2)
    expected = results()

    def work(_):
        expect(expected)
        call = CCall(64)
        for _ in range(3):
            call.expect_same_bits()

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))


def many_processes():
    torch.set_num_threads(1)
    expected = results()
    processes = [fork.Process(target=expect_with_threads, args=(8, expected)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        finish(process)


# --- Interrupts


def interrupts():
    """Ctrl-C arrives inside a call and is raised after it."""
    torch.set_num_threads(2)
    expected = results()
    c_call = CCall(2)
    arrived = []

    def handler(number, frame):
        arrived.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    for i in range(5):
        # Python drops what is raised inside a finalizer.
        with contextlib.suppress(KeyboardInterrupt):
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            while len(arrived) == i:
                c_call.run()
                expect(expected)
    expect(expected)
    c_call.expect_same_bits()


SCENARIOS = [
    fork_after_import,
    fork_after_calls,
    fork_after_calls_with_threads,
    fork_while_a_thread_calls,
    fork_with_the_pool,
    data_loader,
    exit_while_threads_call,
    exit_before_threads_are_done,
    no_memory_for_the_result,
    no_memory_for_the_workspace,
    no_memory_for_threads,
    many_callers,
    many_processes,
    interrupts,
]


def without_gpus(scenario):
    """Where torch sees a GPU it refuses to compute gradients in a forked child, whoever's they are."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    scenario()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_crashes_or_hangs(scenario):
    process = server.Process(target=without_gpus, args=(scenario,))
    process.start()
    finish(process)


# --- In programs of their own


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


UNLOAD = """
import _ctypes, ctypes, pathlib
from evenkeel import _abi, _native
library = _abi.Evenkeel(_native.find("libevenkeel.so"))
x = (ctypes.c_float * 262144)()
tensor = _abi.tensor(ctypes.addressof(x), "f32")
args = _abi.sized(_abi.ForwardArgs, x=tensor, y=tensor)
library.forward(_abi.sized(_abi.Problem, rows=512, cols=512, eps=1e-5), args, 4)()
for opened in library.library, _native.core():
    _ctypes.dlclose(opened._handle)
assert len(list(pathlib.Path("/proc/self/task").iterdir())) == 4
print("libevenkeel" in pathlib.Path("/proc/self/maps").read_text())
"""


def test_the_library_may_be_closed():
    """Its threads still run: their code must stay where it is."""
    assert run("-c", UNLOAD) == "True\n"


def test_soak():
    """Some seconds of it; with --minutes a person can make it a day's worth of calls."""
    assert "days' worth" in run(str(TESTS / "soak.py"), "--minutes", "0.05")
