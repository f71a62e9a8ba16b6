"""Runs a case on a backend, and compares with the oracle.

A result passes if it lies between the roundings of (oracle - bound) and (oracle + bound) to its type. Where the
oracle is NaN or infinite the result must be too. Backward runs on the statistics of the backend's own forward call,
and, where there is a residual, on the sum as the oracle has it.
"""

import numpy as np

from evenkeel import _abi
from evenkeel.check import cases, oracle
from evenkeel.check.memory import LARGEST, Buffer, offsets, round_to, sample_offsets

INPUTS = ("x", "residual", "dy", "dsum")


def draw_x(case, generator):
    shape = case.unit_count, case.unit_size
    normal = generator.standard_normal(shape)
    match case["values"]:
        case "mean1e4":
            return 1e4 + normal
        case "outlier_first":
            normal[:, :1] = 1e4
            return normal
        case "constant":
            return np.broadcast_to(3 * generator.standard_normal((shape[0], 1)), shape)
        case "zero":
            return np.zeros(shape)
        case "denormal":
            return subnormal(case["x"], normal)
        case "huge":
            return normal * (1e4 if case["x"] == "f16" else 1e15)
    return 0.25 + normal


def draw_residual(case, generator):
    """Beside an x that is small or the same in all of a unit, so is the sum; otherwise spread 1."""
    shape = case.unit_count, case.unit_size
    match case["values"]:
        case "constant":
            return np.broadcast_to(generator.standard_normal((shape[0], 1)), shape)
        case "zero":
            return np.zeros(shape)
        case "denormal":
            return subnormal(case["residual"], generator.standard_normal(shape))
    return generator.standard_normal(shape)


def subnormal(dtype, normal):
    return 0.25 * normal * {"f16": 2.0**-14, "f64": 2.0**-1022}.get(dtype, 2.0**-126)


def spoil(values, value, generator):
    """Puts a value somewhere into every third unit."""
    if values.size:
        rows = np.arange(1, len(values), 3)
        values[rows, generator.integers(values.shape[1], size=len(rows))] = value
    return values


def draw(case):
    """All inputs."""
    generator = np.random.default_rng(case["seed"])
    x = draw_x(case, generator)
    dy = generator.standard_normal(x.shape)
    kind = case["values"]
    if kind in ("nan", "inf"):
        x = spoil(x, np.nan if kind == "nan" else np.inf, generator)
    if kind == "nan_dy":
        dy = spoil(dy, np.nan, generator)
    spread = 0 if kind == "zero_weight" else 1
    center = spread * (1 - case["offset"])
    weight = center + 0.25 * spread * generator.standard_normal(case.parameters)
    bias = 0.5 * spread * generator.standard_normal(case.parameters)
    residual, dsum = draw_residual(case, generator), generator.standard_normal(x.shape)
    found = {"x": x, "dy": dy, "weight": weight, "bias": bias, "residual": residual, "dsum": dsum}
    shape = case["samples"], case["cols"]
    return found | {name: 0.5 * generator.standard_normal(shape) for name in ("scale", "shift")}


def make_buffers(case):
    """All tensors and vectors of a case, the inputs filled. A sum is there even if it is not stored: for backward."""
    buffers = {}

    def make(name, places, dtype):
        if dtype:
            buffers[name] = Buffer(places, dtype, case["misalign"])

    dtypes = {name: case.dtype(name) for name in cases.TENSORS}
    if case.adds:
        dtypes["sum"] = case.normalized_dtype
    for name, dtype in dtypes.items():
        make(name, offsets(case, name), dtype)
    for name in ("weight", "bias", "dweight", "dbias"):
        make(name, np.arange(case.parameters), case.dtype(name))
    for name in cases.OF_SAMPLES:
        make(name, sample_offsets(case, name), case.dtype(name))
    for name in ("mean", "rstd"):
        if name == "rstd" or case.op != "rms_norm":
            make(name, np.arange(case.unit_count), case.statistics_dtype)
    if case.quantizes and case["y_scale"] == "rows":
        make("y_row_scale", np.arange(case.unit_count), "f32")
    elif case.quantizes:
        make("y_scale", np.arange(1), "f32")
        buffers["y_scale"].write(np.full(1, 3 / LARGEST[case["y"]]))
    for name, values in draw(case).items():
        if name in buffers:
            buffers[name].write(values)
    return buffers


class Runner:
    """The library with one of its backends; `place` is memory.Host() or memory.Device(...)."""

    def __init__(self, library, backend, place):
        self.library, self.backend, self.place = library, backend, place

    def run(self, case, pass_, buffers, used):
        """`used`: {argument: the name of its buffer}."""

        def tensor(name):
            buffer = buffers.get(used.get(name))
            if buffer is None:  # the dtype of a sum counts all the same
                return _abi.tensor(None, case.normalized_dtype if name == "sum" else "f32")
            if name in cases.OF_SAMPLES:
                return _abi.tensor(self.place.address(buffer), buffer.dtype, case[f"{name}_stride"])
            strides = (case[f"{used[name]}_{kind}_stride"] for kind in ("row", "outer"))
            return _abi.tensor(self.place.address(buffer), buffer.dtype, *strides)

        def vector(name):
            buffer = buffers.get(used.get(name))
            if buffer is None:
                return _abi.vector(None, "f32")
            return _abi.vector(self.place.address(buffer), buffer.dtype)

        def pointer(name):
            buffer = buffers.get(used.get(name))
            return None if buffer is None else self.place.address(buffer)

        problem = _abi.sized(
            _abi.Problem,
            op=_abi.OPS[case.op],
            layout=_abi.LAYOUTS[case["layout"]],
            activation=_abi.ACTIVATIONS[case["activation"]],
            casting=_abi.CASTINGS[case["casting"]],
            eps=case["eps"],
            weight_offset=case["offset"],
            **{name: case[name] for name in ("rows", "cols", "inner_rows")},
            **{name: case[name] for name in ("samples", "channels", "spatial", "groups")},
        )
        kind = _abi.ForwardArgs if pass_ == "forward" else _abi.BackwardArgs
        makers = {_abi.Tensor: tensor, _abi.Vector: vector}
        fields = {
            name: makers.get(field, pointer)(name)
            for name, field in kind._fields_
            if name not in ("struct_size", "reserved", "y_amax_bound")
        }
        if pass_ == "forward":
            fields["y_amax_bound"] = case["amax_bound"]
        prepare = getattr(self.library, pass_)
        prepare(
            problem,
            _abi.sized(kind, **fields),
            threads=0,
            backend=self.backend,
            memory=self.place.scratch,
            **self.place.where,
        )()
        self.place.finish()


def check_case(case, runner):
    """None, or what is wrong. Raises what the library refuses (_abi.UnsupportedError, RuntimeError)."""
    with np.errstate(all="ignore"):
        return _check(case, runner)


def _check(case, runner):
    buffers = make_buffers(case)
    inputs = {name: buffers[name].read() for name in INPUTS if name in buffers}
    normalized = inputs["x"]
    if case.adds:
        normalized = oracle.added(case, inputs["x"], inputs["residual"])
    weight, bias = np.ones(case.parameters), np.zeros(case.parameters)
    if "weight" in buffers:
        weight = buffers["weight"].read() + case["offset"]
    if "bias" in buffers:
        bias = buffers["bias"].read()
    modulation = None
    if case.modulates:
        absent = np.zeros((case["samples"], case["cols"]))
        modulation = [buffers[n].read() if n in buffers else absent for n in ("scale", "shift")]
    same = {name: name for name in buffers}

    # Forward runs for a backward case too: for the statistics.
    used = dict(same)
    if "forward" in case.passes:  # otherwise they are wanted whatever the case says
        used |= {name: None for name in ("mean", "rstd") if case[name] == "no"}
        used |= {"sum": None} if case["sum"] == "none" else {}
    used |= put_in_place(case, "forward", buffers, used, inputs)
    runner.run(case, "forward", buffers, used)
    expected = oracle.forward(case, normalized, weight, bias, modulation)
    if case.quantizes:
        expected |= oracle.quantized(case, *expected["y"], buffers)
    if "forward" in case.passes:
        found = judge(case, buffers, {name: expected[name] for name in expected if used.get(name)})
        if found:
            return f"forward: {found}"
    if "backward" not in case.passes:
        return None

    if None in used.values():
        runner.run(case, "forward", buffers, same)
    used = dict(same)
    if case.adds:
        buffers["sum"].write(normalized)
        used["x"] = "sum"
    used |= put_in_place(case, "backward", buffers, used, inputs | {"x": normalized})
    runner.run(case, "backward", buffers, used)
    mean = buffers["mean"].read() if "mean" in buffers else np.zeros(case.unit_count)
    rstd = buffers["rstd"].read()
    expected = oracle.backward(
        case, normalized, inputs["dy"], inputs.get("dsum"), weight, bias, modulation, mean, rstd
    )
    found = judge(case, buffers, {name: expected[name] for name in expected if name in buffers})
    return f"backward: {found}" if found else None


def put_in_place(case, pass_, buffers, used, inputs):
    """Writes inputs where the case has their outputs; gives the buffers that these inputs have then."""
    moved = {}
    for output, name in cases.IN_PLACE[case["in_place"]][pass_].items():
        if used.get(output):
            buffers[output].write(inputs[name])
            moved[name] = output
    return moved


def judge(case, buffers, expected):
    """The first output that is damaged or out of bounds, in words."""
    for name, (wanted, bound) in expected.items():
        damage = buffers[name].damage()
        if damage:
            return f"{name}: {damage}"
        found = compare(name, buffers[name].read(), wanted, bound, buffers[name].dtype)
        if found:
            return found
    return None


def compare(name, result, wanted, bound, dtype):
    # A unit with an infinity can have finite outputs, but its sums give no bound.
    bound = np.where(np.isfinite(bound), bound, 2.0**-20 * (1 + np.abs(wanted)))
    rounded = round_to(wanted, dtype)
    special = ~np.isfinite(wanted)
    same = np.where(np.isnan(rounded), np.isnan(result), result == rounded)
    if name == "mean":  # of an infinity: an infinity or NaN, as the order of the sum has it
        same |= ~np.isfinite(result)
    close = (result >= round_to(wanted - bound, dtype)) & (
        result <= round_to(wanted + bound, dtype)
    )
    right = np.where(special, same, close | (np.abs(result - wanted) <= bound))
    if right.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~right)[0])
    where = ", ".join(map(str, place))
    return (
        f"{name}[{where}] is {result[place]:.9g}, but must be {wanted[place]:.9g}, give or take {bound[place]:.2g} "
        f"and the final rounding; {int((~right).sum())} of {right.size} elements are off"
    )
