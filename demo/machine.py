"""What this machine can do, what else it is doing, and how the demo keeps out of its way.

Threads of one computation wait for each other. Where another program holds a processor, each such wait takes until
the system gives it back, which is longer than a norm; fewer threads are faster then.
"""

import os
import pathlib
import time

import torch

SECONDS = 1.0  # to watch it for
IDLE, WAITING = 3, 4  # places in the first line of /proc/stat
BF16 = {"avx512_bf16", "amx_bf16"}  # among the flags of /proc/cpuinfo
PLACES = 8  # up to the time that a virtual machine was not given; guests' follow, counted already


def counts(text):
    """Ticks so far, and those of them in which processors had nothing to do."""
    numbers = [int(word) for word in text.splitlines()[0].split()[1 : PLACES + 1]]
    return sum(numbers), numbers[IDLE] + numbers[WAITING]


def busy_processors(before, after, processors):
    """How many were busy on average, between two readings of /proc/stat."""
    (total_before, idle_before), (total_after, idle_after) = counts(before), counts(after)
    return processors * (1 - (idle_after - idle_before) / (total_after - total_before))


def make_room():
    """Leaves busy processors to others; how many there are."""
    stat = pathlib.Path("/proc/stat")
    before = stat.read_text()
    time.sleep(SECONDS)
    busy = busy_processors(before, stat.read_text(), os.cpu_count())
    torch.set_num_threads(max(1, min(torch.get_num_threads(), os.cpu_count() - round(busy))))
    return busy


def has_bf16(text=None):
    """Whether the processor multiplies matrices in bfloat16; torch emulates that elsewhere, slower than float32.

    text: of /proc/cpuinfo.
    """
    path = pathlib.Path("/proc/cpuinfo")
    if text is None:
        text = path.read_text() if path.exists() else ""
    return not BF16.isdisjoint(text.split())
