"""Cases: one problem each, read from the text lists that the library's own tests use.

    layer_norm rows=3 cols=77 x=f32,bf16 weight=none,f32     # lists: their product, 4 cases

tests/support/cases.h describes the keys. A case is what its line says, with every default filled in.
"""

import dataclasses
import itertools
import pathlib

from evenkeel import _abi

LISTS = ("basic.txt", "hostile.txt")
TENSORS = ("x", "y", "dy", "dx", "residual", "sum", "dsum", "dresidual")
OF_SAMPLES = ("scale", "shift", "dscale", "dshift")  # a row for each sample
ROW_SIZES, IMAGE_SIZES = ("rows", "cols"), ("samples", "channels", "spatial", "groups")
SIZES = (*ROW_SIZES, "inner_rows", *IMAGE_SIZES)
STRIDES = tuple(f"{name}_{kind}_stride" for name in TENSORS for kind in ("row", "outer"))
STRIDES += tuple(f"{name}_stride" for name in OF_SAMPLES)
INTEGERS = {*SIZES, *STRIDES, "misalign", "seed"}
DEFAULTS = (
    dict.fromkeys((*SIZES, *STRIDES, "misalign"), 0)
    | {"layout": "nchw", "x": "f32", "weight": "f32", "rstd": "yes", "eps": 1e-5, "offset": 0.0}
    | {"casting": "none", "activation": "none", "in_place": "none", "values": "normal"}
    | {"residual": "none", "dsum": "none", "dresidual": "none", "seed": 1}
    | {"y_scale": "rows", "amax_bound": 0.0, "scale": "none", "shift": "none"}
)
LEFT = (
    "pass",
    "y",
    "dy",
    "dx",
    "sum",
    "bias",
    "dweight",
    "dbias",
    "dscale",
    "dshift",
    "mean",
)  # whose defaults follow others
KEYS = {*DEFAULTS, *LEFT}
# What an output may share its memory with: {pass: {output: input}}.
IN_PLACE = {
    "none": {"forward": {}, "backward": {}},
    "dy": {"forward": {"y": "x"}, "backward": {"dx": "dy"}},
    "x": {"forward": {"y": "x"}, "backward": {"dx": "x"}},
    "residual": {"forward": {"sum": "residual"}, "backward": {"dresidual": "dsum"}},
    "sum": {"forward": {"sum": "x"}, "backward": {"dx": "dsum"}},
}
WORDS = {
    "layout": _abi.LAYOUTS,
    "casting": _abi.CASTINGS,
    "activation": _abi.ACTIVATIONS,
    "in_place": IN_PLACE,
    "pass": ("both", "forward", "backward"),
    "mean": ("yes", "no"),
    "rstd": ("yes", "no"),
    "values": "normal mean1e4 outlier_first constant zero nan inf nan_dy denormal zero_weight huge".split(),
    "y_scale": ("rows", "tensor"),
    "y": _abi.DTYPES | _abi.QUANTIZED,
    **dict.fromkeys(("x", "dy"), _abi.DTYPES),
    **dict.fromkeys(
        (
            *("dx", "residual", "sum", "dsum", "dresidual", *OF_SAMPLES),
            *("weight", "bias", "dweight", "dbias"),
        ),
        (*_abi.DTYPES, "none"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`text` makes the same case again; keys of the line are items."""

    text: str
    op: str
    values: dict = dataclasses.field(repr=False)

    def __getitem__(self, key):
        return self.values[key]

    def dtype(self, name):
        """Of a tensor or vector; None where that is absent."""
        return None if self[name] == "none" else self[name]

    @property
    def is_group(self):
        return self.op == "group_norm"

    @property
    def passes(self):
        return ("forward", "backward") if self["pass"] == "both" else (self["pass"],)

    @property
    def unit_count(self):
        """What is normalized together is a unit: a row, or a sample's group."""
        return self["samples"] * self["groups"] if self.is_group else self["rows"]

    @property
    def unit_size(self):
        if self.is_group:
            return self["channels"] // self["groups"] * self["spatial"]
        return self["cols"]

    @property
    def parameters(self):
        """Elements of weight and bias."""
        return self["channels"] if self.is_group else self["cols"]

    @property
    def adds(self):
        """Whether a residual is added to x, so that the sum is normalized."""
        return self["residual"] != "none"

    @property
    def modulates(self):
        """Whether samples have a scale or a shift of their own, or gradients of them."""
        return any(self[name] != "none" for name in OF_SAMPLES)

    @property
    def quantizes(self):
        """Whether y has 8 bits."""
        return self["y"] in _abi.QUANTIZED

    @property
    def normalized_dtype(self):
        """Of x, or of the sum; a sum that is not stored has one, too."""
        if not self.adds:
            return self["x"]
        return self.dtype("sum") or default_of_sum(self.values)

    @property
    def statistics_dtype(self):
        return "f64" if self.normalized_dtype == "f64" else "f32"

    def computes_in_f64(self, pass_):
        names = ("x", "residual", "y") if pass_ == "forward" else ("dy", "dsum", "dx", "dresidual")
        found = [self[name] for name in (*names, "weight", "bias", "scale", "shift")]
        return "f64" in (self.normalized_dtype, *found)


def default_of_sum(values):
    return values["x"] if values["in_place"] == "sum" else values["residual"]


def resolve(op, given):
    """All values of a case: defaults follow the keys that the line names."""
    values = DEFAULTS | given
    rms, adds = op == "rms_norm", values["residual"] != "none"
    values.setdefault("sum", default_of_sum(values) if adds else "none")
    values.setdefault("y", values["x"])
    quantizes = values["y"] in _abi.QUANTIZED
    values.setdefault("dy", values["x" if quantizes else "y"])
    values.setdefault("pass", "forward" if quantizes else "both")
    leader = {"dy": "dy", "sum": "dsum"}.get(values["in_place"], "x")
    values.setdefault("dx", values[leader])
    values.setdefault("bias", "none" if rms else "f32")
    values.setdefault("dweight", values["weight"])
    values.setdefault("dbias", values["bias"])
    values.setdefault("dscale", values["scale"])
    values.setdefault("dshift", values["shift"])
    if op != "group_norm" and any(values[name] != "none" for name in OF_SAMPLES):
        values["samples"] = values["samples"] or 1
    values.setdefault("mean", "no" if rms else "yes")
    for pass_, pairs in IN_PLACE[values["in_place"]].items():
        for follower, leader in pairs.items():
            if adds and (pass_, leader) == ("backward", "x"):
                leader = "sum"
            for kind in ("row", "outer"):
                if f"{follower}_{kind}_stride" not in given:
                    key = f"{leader}_{kind}_stride"
                    values[f"{follower}_{kind}_stride"] = values[key]
    return values


def parse_value(key, text):
    if key in WORDS:
        if text not in WORDS[key]:
            raise ValueError(f"{key}={text}: '{text}' is not one of {', '.join(WORDS[key])}")
        return text
    try:
        return int(text) if key in INTEGERS else float(text)
    except ValueError:
        kind = "an integer" if key in INTEGERS else "a number"
        raise ValueError(f"{key}={text}: '{text}' is not {kind}") from None


def parse_line(line):
    """The cases of one line."""
    op, *words = line.split()
    if op not in _abi.OPS:
        raise ValueError(f"'{op}' is not one of {', '.join(_abi.OPS)}")
    lists = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in KEYS:
            raise ValueError(f"'{word}' is not key=value with a key of {', '.join(sorted(KEYS))}")
        lists[key] = [(key, item, parse_value(key, item)) for item in text.split(",")]
    for key in IMAGE_SIZES if op == "group_norm" else ROW_SIZES:
        if key not in lists:
            raise ValueError(f"{op} needs {key}")
    cases = []
    for chosen in itertools.product(*lists.values()):
        text = " ".join([op, *(f"{key}={text}" for key, text, _ in chosen)])
        given = {key: value for key, _, value in chosen}
        cases.append(Case(text, op, resolve(op, given)))
    return cases


def folder():
    """Where the lists are: in an installed package, or in the tree of the sources."""
    package = pathlib.Path(__file__).resolve().parents[1]
    places = package / "cases", package.parents[1] / "tests" / "cases"
    return next(place for place in places if place.is_dir())


def read(names=LISTS):
    """All cases of the lists."""
    cases = []
    for name in names:
        for line in (folder() / name).read_text().splitlines():
            line = line.partition("#")[0].strip()
            if line:
                cases += parse_line(line)
    return cases
