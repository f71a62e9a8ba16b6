"""Composer's algorithms FusedLayerNorm, LowPrecisionLayerNorm, LowPrecisionGroupNorm, by evenkeel.

Names of parameters stay as they were, so checkpoints load with these algorithms and without. For
that they have to keep out of Composer's way: it writes the names of a run's algorithms into its
checkpoints, and adds those that are its own, and required, to a run that loads one. So there the
classes have longer names; and where Composer has added its own algorithm all the same, because a
checkpoint was saved with that, its modules are replaced once everything is loaded.
"""

from typing import Any

import evenkeel.torch
from evenkeel._trainers import Surgery

try:
    from composer import algorithms
    from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import LPGroupNorm
    from composer.algorithms.low_precision_layernorm.low_precision_layernorm import LPLayerNorm
    from composer.core import Event, Precision, State
    from composer.loggers import Logger
except ImportError as error:
    raise ImportError(
        f"evenkeel.composer needs Composer (pip install mosaicml): {error}"
    ) from error

__all__ = ["FusedLayerNorm", "LowPrecisionGroupNorm", "LowPrecisionLayerNorm"]

EVENTS = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


def precision_of(state):
    """Of the trainer; fp8 is without torch's autocast, whose word counts at run time."""
    return None if state.precision == Precision.AMP_FP8 else state.precision


class _Algorithm(Surgery):
    """What the three share; in front of the algorithm of Composer whose place it takes.

    apply_at: the event at which the norms are replaced. report: what was replaced then.
    """

    _composers: type  # whose place it takes
    _lowered: Any  # a class of Composer's for modules
    _surgery: Any  # what it does to (model, state)

    def __init__(self, apply_at: Event | str = Event.INIT) -> None:
        self.apply_at = Event(apply_at)
        if self.apply_at not in EVENTS:
            allowed = ", ".join(map(str, EVENTS))
            name = type(self).__name__
            raise ValueError(
                f"evenkeel: apply_at of {name} must be one of {allowed}, but is {apply_at}"
            )

    @staticmethod
    def required_on_load() -> bool:
        return False

    def match(self, event: Event, state: State) -> bool:
        return event == self.apply_at or (
            event == Event.AFTER_LOAD and any(type(a) is self._composers for a in state.algorithms)
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        for module in state.model.modules():
            if type(module) is self._lowered:
                module.__class__ = self._lowered.__base__
        self.operate(state.model, lambda model: self._surgery(model, state))


class _LayerNorms(_Algorithm, algorithms.LowPrecisionLayerNorm):
    """Composer runs this algorithm and what is derived from it after all that may add norms."""

    _composers, _lowered = algorithms.LowPrecisionLayerNorm, LPLayerNorm


class FusedLayerNorm(_LayerNorms):
    """Replaces the layer norms of the model."""

    def _surgery(self, model, state):
        return evenkeel.torch.apply_fused_layernorm(model, state.optimizers)


class LowPrecisionLayerNorm(_LayerNorms):
    """Replaces the layer norms of the model if the trainer's precision is mixed."""

    def _surgery(self, model, state):
        return evenkeel.torch.apply_low_precision_layernorm(
            model, precision_of(state), state.optimizers
        )


class LowPrecisionGroupNorm(_Algorithm, algorithms.LowPrecisionGroupNorm):
    """Replaces the group norms of the model if the trainer's precision is mixed."""

    _composers, _lowered = algorithms.LowPrecisionGroupNorm, LPGroupNorm

    def _surgery(self, model, state):
        return evenkeel.torch.apply_low_precision_groupnorm(
            model, precision_of(state), state.optimizers
        )


for _algorithm in (FusedLayerNorm, LowPrecisionLayerNorm, LowPrecisionGroupNorm):
    _algorithm.__qualname__ = f"{__name__}.{_algorithm.__name__}"
