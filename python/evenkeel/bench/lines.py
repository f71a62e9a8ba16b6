"""What is measured: a Line is one norm on one shape in one dtype, a preset is a list of lines.

Labels, and with them the columns of the CSV files, are made here: "layer_norm 4096x1024 bf16",
"group_norm 8x320x64x64 nhwc silu f16". A dtype "bf16+f32" is a norm of x + residual: x and y in bfloat16, residual and
sum in float32, and so are weight and bias, as under autocast. A row norm of three sizes, "layer_norm 8x256x1152 bf16", is
modulated: 8 samples of 256 rows have a scale and a shift each, in x's dtype, and there is no weight and no bias.
"""

import dataclasses
import functools
import math
import random

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
MIXED = "bf16/f32w"  # x in bfloat16, weight and bias in float32
WITH_RESIDUAL = ("f32+f32", "bf16+bf16", "bf16+f32", "f16+f16", "f16+f32")
NORMS = ("layer_norm", "rms_norm", "group_norm")
LAYOUTS = ("nchw", "nhwc")
ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
GROUPS = 32
EPS = 1e-5
PASSES = {"forward": 2, "backward": 3}  # how many tensors of x's size the ceiling moves
NO_DSUM = "backward no dsum"  # nothing but the norm uses the sum
# With a residual: how many in x's dtype, and how many in the residual's. Where these differ, the second dx that a library
# stores, in x's dtype, is not part of the ceiling.
RESIDUAL_PASSES = {
    "forward": (2, 2),  # x and y; residual and sum
    "backward": (1, 3),  # dy; sum, dsum and dx
    NO_DSUM: (1, 2),  # dy; sum and dx
}


@dataclasses.dataclass(frozen=True)
class Line:
    op: str
    dtype: str
    shape: tuple
    layout: str = ""  # of a group norm
    activation: str = ""

    def __post_init__(self):
        if self.op == "group_norm":
            fits = len(self.shape) == 4 and self.shape[1] % GROUPS == 0
            wanted = f"samples x channels x height x width, channels a multiple of {GROUPS}"
        else:
            fits = len(self.shape) == 2 or (self.modulates and not self.adds and not self.mixed)
            wanted = "rows x columns, or modulated, samples x rows x columns in one dtype"
        if not fits or min(self.shape) < 1:
            raise ValueError(f"shape {self.sizes}: {self.op} takes {wanted}")
        if self.is_group and self.adds:
            raise ValueError(f"dtype {self.dtype}: {self.op} takes no residual")

    @property
    def sizes(self):
        return "x".join(map(str, self.shape))

    @property
    def where(self):
        """The shape and what goes with it, as it stands in a table."""
        return " ".join(word for word in (self.sizes, self.layout, self.activation) if word)

    @property
    def label(self):
        return f"{self.op} {self.where} {self.dtype}"

    @property
    def is_group(self):
        return self.op == "group_norm"

    @property
    def modulates(self):
        """Whether samples have a scale and a shift."""
        return not self.is_group and len(self.shape) == 3

    @property
    def parameters(self):
        """Elements of weight and bias."""
        return self.shape[1]

    @property
    def rows(self):
        return math.prod(self.shape[:-1])

    @property
    def cols(self):
        return self.shape[-1]

    @property
    def mixed(self):
        return self.dtype == MIXED

    @property
    def adds(self):
        """Whether there is a residual."""
        return "+" in self.dtype

    @property
    def x_dtype(self):
        return DTYPES[self.dtype.replace("+", "/").split("/")[0]]

    @property
    def residual_dtype(self):
        return DTYPES[self.dtype.split("+")[1]]

    @property
    def weight_dtype(self):
        if self.adds:
            return self.residual_dtype
        return torch.float32 if self.mixed else self.x_dtype

    @property
    def x_bytes(self):
        return math.prod(self.shape) * self.x_dtype.itemsize

    def moved_bytes(self, pass_):
        """What the ceiling moves."""
        if not self.adds:
            return PASSES[pass_] * self.x_bytes
        as_x, as_residual = RESIDUAL_PASSES[pass_]
        residual_bytes = math.prod(self.shape) * self.residual_dtype.itemsize
        return as_x * self.x_bytes + as_residual * residual_bytes

    def gb_per_s(self, pass_, microseconds):
        """As if the pass moved what its ceiling moves; Triton's tutorial counts in the same way."""
        return self.moved_bytes(pass_) / microseconds / 1e3


def parse_shape(text):
    """From "4096x1024" or "4096,1024"."""
    words = text.replace(",", "x").split("x")
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"'{text}' is not a shape such as 4096x1024")
    return tuple(int(word) for word in words)


def rows(op, dtype, shapes):
    return [Line(op, dtype, parse_shape(shape)) for shape in shapes.split()]


def images(dtype, shapes, variants):
    """Group norms; a variant is a layout, and an activation behind it where there is one."""
    return [
        Line("group_norm", dtype, parse_shape(shape), *variant.split("+"))
        for shape in shapes.split()
        for variant in variants.split()
    ]


SWEEP = "sweep"
SWEEP_DTYPES = ("f32", "bf16", "f16")
SWEEP_COUNT = 60
SWEEP_COLS = 64, 20480
SWEEP_ELEMENTS = {"cuda": (1 << 22, 1 << 26), "cpu": (1 << 16, 1 << 23)}


def sweep(seed, device_type):
    """Row norms of sizes that nobody chose: lengths and numbers of elements are drawn, their logarithms evenly."""
    draw = random.Random(seed)
    found = []
    for i in range(SWEEP_COUNT):
        cols, elements = (
            round(math.exp(draw.uniform(math.log(least), math.log(most))))
            for least, most in (SWEEP_COLS, SWEEP_ELEMENTS[device_type])
        )
        shape = max(1, elements // cols), cols
        op = ("layer_norm", "rms_norm")[i % 2]
        found += [Line(op, dtype, shape) for dtype in SWEEP_DTYPES]
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Preset:
    about: str
    lines: tuple
    passes: tuple = tuple(PASSES)


HOST = "host"
RESIDUAL = "residual"
# Blocks of DiT-XL/2 and DiT-B/2, of FLUX and of a video, and a row for each sample.
MODULATION_SHAPES = "32x256x1152 256x256x768 4x4608x3072 1x32760x5120 4096x1x1024"
RESIDUAL_SHAPES = (
    "4096x1024 4096x4096 16384x4096 4096x8192 25216x768 131072x512 8192x5120 4096x3001"
)
TUTORIAL = "triton-tutorial"
PRESETS = {
    TUTORIAL: Preset(
        "the benchmark of Triton's layer norm tutorial: backward, GB/s over the row length",
        tuple(Line("layer_norm", "f16", (4096, 512 * i)) for i in range(2, 32)),
        ("backward",),
    ),
    "peers": Preset(
        "the figures in docs/performance.md: many shapes, sized for a GPU",
        (
            *rows(
                "layer_norm",
                "f16",
                "4096x1024 4096x2048 4096x4096 4096x8192 4096x12288 4096x15872",
            ),
            *rows(
                "layer_norm",
                "bf16",
                "262144x64 262144x256 131072x512 4096x768 8192x5120 16384x4096",
            ),
            *rows(
                "rms_norm",
                "bf16",
                "262144x128 4096x1024 16384x4096 4096x8192 1024x65536 256x262144",
            ),
            *rows("layer_norm", "bf16", "4096x3000 4096x3001 4096x5119 4096x6144"),
            *rows("layer_norm", "f32", "4096x1024 4096x4096 4096x8192"),
            *rows("layer_norm", MIXED, "4096x1024 4096x4096 4096x8192"),
            *images(
                "f16",
                "8x320x64x64 8x1280x16x16 2x256x256x256 32x512x32x32 1x128x512x512",
                "nchw nhwc nchw+silu nhwc+silu",
            ),
        ),
    ),
    "cpu": Preset(
        "a handful of shapes, sized for a CPU",
        (
            *rows("layer_norm", "f32", "4096x1024 65536x64 64x1024"),
            *rows("layer_norm", "bf16", "4096x1024"),
            *rows("rms_norm", "f32", "4096x1024"),
            *rows("rms_norm", "bf16", "4096x1024"),
            *rows("layer_norm", "f32+f32", "4096x1024"),
            *rows("layer_norm", "bf16+f32", "4096x1024"),
            *rows("rms_norm", "f32+f32", "4096x1024"),
            *rows("rms_norm", "bf16+bf16", "4096x1024"),
            *images("f32", "2x320x64x64", "nchw nhwc nhwc+silu"),
        ),
    ),
    RESIDUAL: Preset(
        "norms of x + residual, with and without a gradient that arrives at the sum",
        (
            *rows("rms_norm", "bf16+bf16", RESIDUAL_SHAPES),
            *rows("layer_norm", "bf16+f32", RESIDUAL_SHAPES),
            *rows("layer_norm", "f32+f32", "4096x1024 4096x4096"),
            *rows("rms_norm", "f32+f32", "4096x1024 4096x4096"),
        ),
        tuple(RESIDUAL_PASSES),
    ),
    "modulation": Preset(
        "norms with a scale and a shift of each sample (AdaLN)",
        (
            *rows("layer_norm", "bf16", MODULATION_SHAPES),
            *rows("rms_norm", "bf16", "32x256x1152 4x4608x3072"),
            *rows("layer_norm", "f32", "32x256x1152"),
        ),
    ),
    SWEEP: Preset(
        f"{SWEEP_COUNT} sizes that --seed draws, of {SWEEP_COLS[0]} to {SWEEP_COLS[1]} columns, with a heat map",
        sweep(0, "cuda"),
    ),
    HOST: Preset(
        "what one eager call of a small norm costs its caller",
        (*rows("layer_norm", "bf16", "64x1024"), *rows("rms_norm", "bf16", "64x1024")),
        ("host forward", "host forward+backward"),
    ),
}
