"""What a norm is, without its arrays: the static part of every operation here.

Operations take and return arrays by name. The names say what shape an array has: x and all that is
like it (y, dx, ...), statistics (mean, rstd), and parameters (weight, bias, dweight, ...).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenkeel import _abi

STATISTICS = ("mean", "rstd")
PARAMETERS = ("weight", "bias", "dweight", "dbias", "weight_dot", "bias_dot")


def kind_of(name):
    """ "statistic", "parameter" or "tensor"."""
    if name in STATISTICS:
        return "statistic"
    return "parameter" if name in PARAMETERS else "tensor"


@dataclass(frozen=True)
class Norm:
    """lead: how many of x's leading dimensions are rows, or of group norm samples."""

    op: str
    lead: int
    eps: float
    x_dtype: Any
    out_dtype: Any
    residual_dtype: Any = None
    sum_dtype: Any = None
    groups: int = 1
    channels_last: bool = True
    activation: str = "none"
    casting: str = "none"
    weight_offset: float = 0.0
    donate_residual: bool = False

    def codes(self):
        """The fields of ek_problem that are one of a few."""
        return {
            "op": _abi.OPS[self.op],
            "layout": _abi.LAYOUTS["nhwc" if self.channels_last else "nchw"],
            "activation": _abi.ACTIVATIONS[self.activation],
            "casting": _abi.CASTINGS[self.casting],
        }

    @property
    def centers(self):
        return self.op != "rms_norm"

    @property
    def normalized_dtype(self):
        """Of what is normalized: x, or its sum with the residual."""
        return self.sum_dtype or self.x_dtype

    @property
    def statistics(self):
        """Names of those that the backward pass needs."""
        return STATISTICS if self.centers else STATISTICS[1:]

    def statistics_shape(self, shape):
        return shape[: self.lead] + ((self.groups,) if self.op == "group_norm" else ())

    def batched(self):
        """The norm of arrays with one more leading dimension."""
        return replace(self, lead=self.lead + 1)

    def compute_dtype(self, *others):
        """float64 if x, the residual or one of the other dtypes is, otherwise float32."""
        dtypes = {self.x_dtype, self.out_dtype, self.residual_dtype, self.sum_dtype, *others}
        return np.dtype("float64") if np.dtype("float64") in dtypes else np.dtype("float32")

    @property
    def statistics_dtype(self):
        wide = self.normalized_dtype == np.dtype("float64")
        return np.dtype("float64" if wide else "float32")

    def dtype_of(self, result, arrays):
        """The dtype of a result; arrays: the operands (or what has their dtypes) by name."""
        kind = kind_of(result)
        if kind == "statistic":
            return self.statistics_dtype
        if kind == "parameter":
            return arrays[result.removeprefix("d")].dtype
        return {
            "y": self.out_dtype,
            "y_dot": self.out_dtype,
            "sum": self.sum_dtype,
            "sum_dot": self.sum_dtype,
            "dx": self.x_dtype,
            "dresidual": self.residual_dtype,
        }[result]

    def shape_of(self, result, arrays):
        kind = kind_of(result)
        if kind == "parameter":
            return arrays[result.removeprefix("d")].shape
        shape = arrays["x"].shape
        return self.statistics_shape(shape) if kind == "statistic" else shape
