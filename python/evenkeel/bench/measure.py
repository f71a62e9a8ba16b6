"""Timing in alternating rounds: every contender once per round, so that drift of the machine hits all
alike.

Each turn begins with a pause, long enough for the other libraries' waiting threads to go to sleep.
Then come untimed calls until the contender's own threads are awake and spread over the processors,
then the timed batch. It needs nothing but Python, for the programs in benchmarks/.
"""

import ctypes
import statistics
import time

PAUSE = 0.008  # libgomp's threads wait about 5 ms before they sleep
WAKING_SECONDS = 0.004
BATCH_SECONDS = 0.002
ESTIMATE_SECONDS = 1.0
HOPELESS = 20  # a contender this many times slower than the fastest is timed once
MIN_ROUNDS = 5
MAX_ROUNDS = 101


def keep_pages():
    """Freed memory stays with the process: fresh pages would cost more than a norm does."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)


def _time(call, count, wait):
    begin = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - begin) / max(count, 1)


def _estimate(call, wait):
    """The fastest of a few calls: the first ones still meet sleeping threads and unmapped pages."""
    values = []
    while len(values) < 20 and sum(values) < ESTIMATE_SECONDS:
        values.append(_time(call, 1, wait))
    return min(values)


def rounds(calls, seconds, wait=lambda: None):
    """Seconds per call for each contender, one entry per round; hopeless ones have a single entry.

    wait: returns once a device has done what calls have left to it.
    """
    first = {name: _estimate(call, wait) for name, call in calls.items()}
    limit = HOPELESS * min(first.values())
    times = {name: [] if value <= limit else [value] for name, value in first.items()}
    racing = {name: call for name, call in calls.items() if not times[name]}
    end = time.perf_counter() + seconds
    done = 0
    while done < MIN_ROUNDS or (done < MAX_ROUNDS and time.perf_counter() < end):
        for name, call in racing.items():
            time.sleep(PAUSE)
            _time(call, round(WAKING_SECONDS / first[name]), wait)
            times[name].append(_time(call, max(1, round(BATCH_SECONDS / first[name])), wait))
        done += 1
    return times


def ratio(times, above, below):
    """The median over the rounds of one contender's time / another's."""
    pair = times[above], times[below]
    if len(pair[0]) != len(pair[1]):
        return statistics.median(pair[0]) / statistics.median(pair[1])
    return statistics.median(a / b for a, b in zip(*pair, strict=True))
