"""What the trainers' hooks share: surgery that may be asked for more than once.

A trainer tells its hooks when a model is there, and again before every run: in between it may have
been built anew, or not. So the surgery is simply done again, which changes nothing in a model that
has had it; it is reported and warned about once.
"""

import inspect
import warnings
from typing import Any

from evenkeel.torch import Report, fuse


class Surgery:
    """report: what was done to the model that came last, or None as long as there was none."""

    report: Report | None = None

    def operate(self, model, surgery):
        """Does `surgery(model)`, which gives a report."""
        last = self.report
        with warnings.catch_warnings():
            if last is not None and type(last.model) is type(model):
                warnings.simplefilter("ignore")
            report = surgery(model)
        if last is None or last.model is not model or report.replaced:
            self.report = report


class Fusing(Surgery):
    """With the options of `evenkeel.torch.fuse`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        inspect.signature(fuse).bind(
            None, **options
        )  # a wrong name is an error here, not hours later
        self.options = options

    def fuse(self, model):
        self.operate(model, lambda model: fuse(model, **self.options))
