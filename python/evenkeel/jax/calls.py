"""One call of a handler (bindings/jax/handlers.cc): its attributes, its buffers and its workspace.

Buffers go in the order of these lists, the optional ones only where they are there.
"""

import jax
import jax.numpy as jnp
import numpy as np

from evenkeel.jax import _load as _load  # first: it registers the handlers
from evenkeel.jax import workspace

OPERANDS = {
    "forward": ("x", "residual", "weight", "bias"),
    "backward": ("dy", "x", "weight", "bias", "mean", "rstd", "dsum"),
}
RESULTS = {
    "forward": ("y", "sum", "mean", "rstd"),
    "backward": ("dx", "dresidual", "dweight", "dbias"),
}


def call(platform, direction, norm, operands, results, dtypes, *arrays):
    """The results of a pass; platform: "cpu" or "cuda".

    dtypes: of results, by name, where they are not those that the norm has for them.
    """
    named = dict(zip(operands, arrays, strict=True))
    if not all(isinstance(size, int) for size in named["x"].shape):
        raise ValueError(
            f"evenkeel: x has shape {named['x'].shape}, but its sizes must be known when a program is "
            "lowered: trace it again for each of them"
        )
    outputs = [
        jax.ShapeDtypeStruct(
            norm.shape_of(name, named), dtypes.get(name) or norm.dtype_of(name, named)
        )
        for name in results
    ]
    if named["x"].size == 0:
        return [jnp.zeros(each.shape, each.dtype) for each in outputs]
    target = f"evenkeel_{direction}"
    if platform == "cuda":
        size = workspace.on_gpus(direction, norm, named, dict(zip(results, outputs, strict=True)))
        if size is None:
            target += "_scratch"
        else:
            outputs.append(jax.ShapeDtypeStruct((size,), np.uint8))
    aliases = {}
    if norm.donate_residual and direction == "forward":
        aliases = {operands.index("residual"): results.index("sum")}
    done = jax.ffi.ffi_call(target, outputs, input_output_aliases=aliases)(
        *arrays, **attributes(direction, norm, operands, results)
    )
    return done[: len(results)]


def attributes(direction, norm, operands, results):
    numbers = norm.codes() | {"groups": norm.groups, "lead": norm.lead}
    has = ["weight", "bias", "residual" if direction == "forward" else "dsum"]
    flags = {f"has_{name}": name in operands for name in has}
    if direction == "forward":
        flags["has_statistics"] = "rstd" in results
    else:
        flags |= {f"wants_{name}": name in results for name in RESULTS["backward"]}
    return {
        **{name: np.int64(value) for name, value in numbers.items()},
        "eps": np.float64(norm.eps),
        "weight_offset": np.float64(norm.weight_offset),
        **{name: np.bool_(value) for name, value in flags.items()},
    }
