"""Runs cases through XLA: one call of a handler of evenkeel.jax, in a program of its own.

XLA's arrays are dense and apart from each other, so cases with strides are declined; what shares its memory in a
case gets its results afterwards.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
os.environ["JAX_ENABLE_X64"] = "1"

import jax
import jax.numpy as jnp
import numpy as np

from evenkeel import _abi
from evenkeel.check import cases
from evenkeel.jax import calls
from evenkeel.jax.norm import Norm, kind_of

DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}


def dtype_of(name):
    return None if name is None else jnp.dtype(DTYPES[name])


class JaxRunner:
    """As judge.Runner."""

    def run(self, case, pass_, buffers, used):
        found = {name: buffers[held] for name, held in used.items() if held in buffers}
        if any(case[name] for name in cases.STRIDES):
            raise _abi.UnsupportedError("XLA's arrays have no strides")
        if case.modulates:
            raise _abi.UnsupportedError("evenkeel.jax has no scale and no shift of each sample")
        operands = tuple(name for name in calls.OPERANDS[pass_] if name in found)
        results = self.results(case, pass_, found)
        for name in results:
            if name in ("dweight", "dbias") and name[1:] not in found:
                raise _abi.UnsupportedError(f"JAX has no gradient of a {name[1:]} that is absent")
        norm = self.norm(case)
        shapes = {"tensor": self.shape(case), "statistic": norm.statistics_shape(self.shape(case))}
        arrays = [
            self.array(found[name]).reshape(shapes.get(kind_of(name), -1)) for name in operands
        ]
        dtypes = {name: dtype_of(found[name].dtype) for name in results if name in found}

        def program(*arrays):
            return calls.call("cpu", pass_, norm, operands, results, dtypes, *arrays)

        try:
            done = jax.jit(program)(*arrays)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(str(error)) from error
        for name, value in zip(results, done, strict=True):
            if name in found:
                buffer = found[name]
                buffer.bytes[buffer.inside] = np.frombuffer(np.asarray(value).tobytes(), np.uint8)

    def norm(self, case):
        return Norm(
            case.op,
            lead=1,
            eps=case["eps"],
            x_dtype=dtype_of(case["x"]),
            out_dtype=dtype_of(case["y"]),
            residual_dtype=dtype_of(case.dtype("residual")),
            sum_dtype=dtype_of(case.normalized_dtype) if case.adds else None,
            groups=case["groups"] or 1,
            channels_last=case["layout"] == "nhwc",
            activation=case["activation"],
            casting=case["casting"],
            weight_offset=case["offset"],
        )

    def shape(self, case):
        if not case.is_group:
            return case["rows"], case["cols"]
        inner = (case["channels"], case["spatial"])
        return (case["samples"], *(inner[::-1] if case["layout"] == "nhwc" else inner))

    def results(self, case, pass_, found):
        """What the handler computes; some of it may not be in the case."""
        if pass_ == "backward":
            return tuple(name for name in calls.RESULTS[pass_] if name in found)
        statistics = ("rstd",) if case.op == "rms_norm" else ("mean", "rstd")
        wanted = statistics if any(name in found for name in statistics) else ()
        return ("y", *(("sum",) if case.adds else ()), *wanted)

    def array(self, buffer):
        return buffer.elements().view(dtype_of(buffer.dtype))
