"""What turns tell: how long a step takes, how much of it is norms, and how far noise moves these figures.

The runs of the demo take turns, and one of them has norms that only pass x on (training.BARE). What else the machine
does can only make a turn longer, so a run's step takes as long as the QUANTILE of its turns says, which a tenth of
them undercut. What a run takes beyond the bare one is the time of its norms. So times of steps and of norms are
from one measurement, and agree.

An interval says where a figure lies in LEVEL of all series of turns that are drawn from those measured, with
replacement and in pieces of some turns on end, since what disturbs one turn often disturbs the next (the block
bootstrap). A ratio of steps whose interval includes 1 is no claim.
"""

import torch

from demo.training import BARE, FUSED, STOCK

QUANTILE = 0.1
LEVEL = 0.99
SERIES, PIECE = 2000, 5
WARM_UP = 0.1  # of the turns, when memory is found and code is compiled


def includes(estimate, value):
    """Whether noise could make a figure of this value what was measured; of what is no number, it could."""
    return not (estimate["low"] > value or estimate["high"] < value)


def measured(seconds):
    """{name: seconds of a step, of each turn} without the first turns."""
    length = len(next(iter(seconds.values())))
    return {name: turns[max(1, int(WARM_UP * length)) :] for name, turns in seconds.items()}


def series(turns):
    """Numbers of turns, (SERIES, turns): the same for all runs, which so stay beside each other."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.randint(turns, (SERIES, -(-turns // PIECE), 1), generator=generator)
    return ((begins + torch.arange(PIECE)).flatten(1) % turns)[:, :turns]


def estimate(value, values):
    low, high = values.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2]).double()).tolist()
    return {"value": value.item(), "low": low, "high": high}


def compare(seconds):
    """Estimates by name: "step" and "norms" in milliseconds, of STOCK and FUSED; "rest"; "ratio" of steps, stock / fused."""
    turns = {name: torch.tensor(each).double() * 1e3 for name, each in measured(seconds).items()}
    chosen = series(len(turns[BARE]))
    # Last of each: of the turns as they were.
    steps = {
        name: torch.cat([each[chosen].quantile(QUANTILE, dim=1), each.quantile(QUANTILE)[None]])
        for name, each in turns.items()
    }

    def found(values):
        return estimate(values[-1], values[:-1])

    return {
        "step": {name: found(steps[name]) for name in (STOCK, FUSED)},
        "norms": {name: found(steps[name] - steps[BARE]) for name in (STOCK, FUSED)},
        "rest": found(steps[BARE]),
        "saved": found(steps[STOCK] - steps[FUSED]),
        "share": found(1 - steps[BARE] / steps[STOCK]),
        "ratio": found(steps[STOCK] / steps[FUSED]),
    }
