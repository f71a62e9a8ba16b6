"""Norms that people write themselves, and modules that only look like them.

They stand at the top level of a module, as pickle wants it. HONEST norms are written in the ways that
models in the wild use, each with what its proof should find. Every one of the LIARS differs from a
norm in its own way, often in one case only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def unit(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Llama(nn.Module):
    """Rounds before the weight is multiplied; the result has the wider dtype of the two."""

    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        normalized = unit(hidden_states.float(), self.variance_epsilon).to(hidden_states.dtype)
        return self.weight * normalized


class Rms(nn.Module):
    """Rounds at the end only. Most of the others are this with another forward."""

    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return (unit(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class Gemma(Rms):
    def forward(self, x):
        return (unit(x.float(), self.eps) * (1.0 + self.weight.float())).type_as(x)


class T5(Rms):
    """Rounds to the weight's dtype, where that is a half."""

    def forward(self, hidden_states):
        variance = hidden_states.float().square().mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Gamma(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n))
        self.epsilon = 1e-5

    def forward(self, x):
        return self.gamma * unit(x.float(), self.epsilon).type_as(x)


class ScaleNormOfHardCodedEps(nn.Module):
    """The eps that it shows is not the one that it uses."""

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))
        self.eps = 1e-5

    def forward(self, x):
        return unit(x.float(), 1e-6).to(x.dtype) * self.scale


class PlainRmsNorm(nn.Module):
    def forward(self, x):
        return unit(x.float(), 1e-6).to(x.dtype)


class RmsWithoutEps(nn.RMSNorm):
    """eps None: of float32."""

    def forward(self, x):
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return (unit(x.float(), eps) * self.weight.float()).type_as(x)


class FloatLayerNorm(nn.LayerNorm):
    def forward(self, x):
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class BiasFreeLayerNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class PlainLayerNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.normalized_shape = (n,)

    def forward(self, hidden_states):
        y = F.layer_norm(hidden_states.float(), self.normalized_shape, None, None, eps=1e-5)
        return y.to(hidden_states.dtype)


class WrittenOutLayerNorm(nn.Module):
    def __init__(self, n, eps=1e-12):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))
        self.beta = nn.Parameter(torch.zeros(n))
        self.variance_epsilon = eps

    def forward(self, x):
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        y = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.scale.float() * y + self.beta.float()).to(x.dtype)


class FixedWeightNorm(nn.Module):
    """No parameter."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 2, n))

    def forward(self, x):
        return (unit(x.float(), 1e-6) * self.weight.float()).to(x.dtype)


@dataclass(frozen=True)
class Honest:
    """A hand-written norm, and what of its recipe is known."""

    make: type
    norm: str
    eps: str | float
    weight: str | None = "weight"
    bias: str | None = None
    weight_offset: float = 0.0
    llama: bool = False


HONEST = {
    case.make.__name__: case
    for case in [
        Honest(Llama, "rms_norm", "variance_epsilon", llama=True),
        Honest(Rms, "rms_norm", "eps"),
        Honest(Gemma, "rms_norm", "eps", weight_offset=1.0),
        Honest(T5, "rms_norm", "eps", llama=True),
        Honest(Gamma, "rms_norm", "epsilon", weight="gamma", llama=True),
        Honest(ScaleNormOfHardCodedEps, "rms_norm", 1e-6, weight="scale", llama=True),
        Honest(RmsWithoutEps, "rms_norm", "eps"),
        Honest(FloatLayerNorm, "layer_norm", "eps", bias="bias"),
        Honest(BiasFreeLayerNorm, "layer_norm", 1e-5),
        Honest(PlainLayerNorm, "layer_norm", 1e-5, weight=None),
        Honest(FixedWeightNorm, "rms_norm", 1e-6),
        Honest(WrittenOutLayerNorm, "layer_norm", "variance_epsilon", "scale", "beta"),
    ]
} | {"PlainRmsNorm": Honest(lambda _: PlainRmsNorm(), "rms_norm", 1e-6, weight=None)}


class WrongAxis(Rms):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(0, keepdim=True) + self.eps) * self.weight


class Scaled(Rms):
    def forward(self, x):
        return 1.001 * super().forward(x)


class DropoutInside(Rms):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class OtherInEval(Rms):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else 2 * y


class OtherInTraining(Rms):
    def forward(self, x):
        y = super().forward(x)
        return 2 * y if self.training else y


class EpsOutsideOfTheRoot(Rms):
    def forward(self, x):
        root = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x.float() / (root + self.eps) * self.weight.float()).to(x.dtype)


class MaxNorm(Rms):
    def forward(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class Growing(Rms):
    """Another result at every call."""

    def __init__(self, n):
        super().__init__(n)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Counting(Rms):
    """The result of a norm, and a count that a fused one would not keep."""

    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.shapes = []

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        self.shapes.append(x.shape)
        return super().forward(x)


class Config:
    def __init__(self, factor):
        self.factor = factor


class CountingElsewhere(Rms):
    """As Counting, but in an object, and in a list inside of a dict."""

    def __init__(self, n):
        super().__init__(n)
        self.meter = Config(0)
        self.log = {"shapes": []}

    def forward(self, x):
        self.meter.factor += 1
        self.log["shapes"].append(x.shape)
        return super().forward(x)


class CountingInAnObject(Rms):
    def __init__(self, n):
        super().__init__(n)
        self.meter = Config(0)

    def forward(self, x):
        self.meter.factor += 1
        return super().forward(x)


class SquaredWeight(Rms):
    def forward(self, x):
        return (unit(x.float(), self.eps) * self.weight.float().square()).to(x.dtype)


class StandardDeviation(Rms):
    """The tutorial's layer norm: n - 1, and eps outside of the root."""

    def forward(self, x):
        deviation = x.std(-1, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (deviation + self.eps)


class Residual(Rms):
    def forward(self, x):
        return x + super().forward(x)


class FirstHalf(Rms):
    def forward(self, x):
        half = x[..., : x.shape[-1] // 2].float()
        rstd = torch.rsqrt(half.square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * rstd * self.weight.float()).to(x.dtype)


class Clamped(Rms):
    def forward(self, x):
        return super().forward(x).clamp(-2, 2)


class NoGradientThroughStatistics(Rms):
    def forward(self, x):
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).detach()
        return (x.float() * rstd * self.weight.float()).to(x.dtype)


class NoGradientForTheWeight(Rms):
    def forward(self, x):
        return (unit(x.float(), self.eps) * self.weight.detach().float()).to(x.dtype)


class SlightlyOtherGradient(Rms):
    """Half a percent: less than bfloat16 shows."""

    def forward(self, x):
        y = super().forward(x)
        return y + (0.005 * y - (0.005 * y).detach())


class OtherWithFourDimensions(Rms):
    def forward(self, x):
        y = super().forward(x)
        return y.flip(1) if x.dim() == 4 else y


class OtherWithMixedTypes(Rms):
    def forward(self, x):
        y = super().forward(x)
        return y if x.dtype == self.weight.dtype else 2 * y


class StatisticsInHalf(Rms):
    """Sums in the dtype of x: far from what statistics in float32 give."""

    def forward(self, x):
        total = torch.zeros_like(x[..., :1])
        for i in range(x.shape[-1]):
            total = total + x[..., i : i + 1].square()
        return x * torch.rsqrt(total / x.shape[-1] + self.eps) * self.weight


class UnitLengthNorm(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class TwoResults(Rms):
    def forward(self, x):
        return super().forward(x), x


class Raising(Rms):
    def forward(self, x):
        raise RuntimeError("not today")


class ScaledByBuffer(Rms):
    """Right as long as nobody writes to the buffer."""

    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        return (super().forward(x) * self.factor).to(x.dtype)


class Configured(Rms):
    """A scalar and an object that change what it computes; as they are here, it is a norm."""

    def __init__(self, n, factor=1.0, config=1.0):
        super().__init__(n)
        self.factor = factor
        self.config = Config(config)

    def forward(self, x):
        return super().forward(x) * self.factor * self.config.factor


LIARS = {
    liar.__name__: liar
    for liar in [
        WrongAxis,
        Scaled,
        DropoutInside,
        OtherInEval,
        OtherInTraining,
        EpsOutsideOfTheRoot,
        MaxNorm,
        Growing,
        Counting,
        CountingInAnObject,
        CountingElsewhere,
        SquaredWeight,
        StandardDeviation,
        Residual,
        FirstHalf,
        Clamped,
        NoGradientThroughStatistics,
        NoGradientForTheWeight,
        SlightlyOtherGradient,
        OtherWithFourDimensions,
        OtherWithMixedTypes,
        StatisticsInHalf,
        TwoResults,
        Raising,
        ScaledByBuffer,
    ]
} | {"UnitLengthNorm": lambda _: UnitLengthNorm()}


class ImageLayerNorm(nn.LayerNorm):
    """Over the channels of (N, C, H, W), as most models of images write it."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WrittenOutImageLayerNorm(nn.Module):
    """The same without a permutation; rows give a result of another shape."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class SequenceLayerNorm(nn.LayerNorm):
    """Over the channels of (N, C, L)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class PixelNorm(nn.Module):
    """Without a weight it takes anything; for two dimensions it is a norm of rows."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


IMAGE, SEQUENCE = "(N, C, H, W)", "(N, C, L)"
BOTH = f"{SEQUENCE} and {IMAGE}"

# Each with the norm that it is, and of what.
OF_CHANNELS = {
    "ImageLayerNorm": (ImageLayerNorm, "layer_norm", IMAGE),
    "SequenceLayerNorm": (SequenceLayerNorm, "layer_norm", SEQUENCE),
    "PixelNorm": (lambda _: PixelNorm(), "rms_norm, eps=1e-08", BOTH),
}


class ScaledImageLayerNorm(ImageLayerNorm):
    def forward(self, x):
        return 1.001 * super().forward(x)


class OtherImageLayerNormInEval(ImageLayerNorm):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else 2 * y


class InstanceOfAnImage(WrittenOutImageLayerNorm):
    """Normalizes each channel, not the channels of each pixel."""

    def forward(self, x):
        mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True)
        x = (x - mean) * torch.rsqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class RunningNorm(Rms):
    """A batch norm: it keeps statistics."""

    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("mean", torch.zeros(n))

    def forward(self, x):
        self.mean.lerp_(x.detach().reshape(-1, x.shape[-1]).mean(0), 0.1)
        return (x - self.mean) * self.weight


class Gated(Rms):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * F.silu(gate))


class Renamed(nn.LayerNorm):
    """A subclass with torch's forward."""

    def reset(self):
        self.reset_parameters()


class RenamedTwice(Renamed):
    pass


# ---- norms that hold other modules, and modules that hold norms ----


class Activated:
    """In front of a norm: it holds an activation, as timm's do."""

    def __init__(self, *args):
        super().__init__(*args)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class GroupNormAct(Activated, nn.GroupNorm):
    pass


class CoarseGroupNormAct(GroupNormAct):
    """With mean and rstd in the dtype of x, as torch's kernels for GPUs have them."""

    def forward(self, x):
        groups = x.unflatten(1, (self.num_groups, -1))
        groups = groups.to(torch.promote_types(x.dtype, torch.float32))
        dims, channels = tuple(range(2, groups.dim())), (-1, *[1] * (x.dim() - 2))
        variance, mean = torch.var_mean(groups, dims, correction=0, keepdim=True)
        mean, rstd = mean.to(x.dtype), (variance + self.eps).rsqrt().to(x.dtype)
        y = ((groups - mean) * rstd).flatten(1, 2) * self.weight.reshape(channels)
        return self.act(self.drop((y + self.bias.reshape(channels)).to(x.dtype)))


class LayerNormAct(Activated, nn.LayerNorm):
    pass


class BatchNormAct(Activated, nn.BatchNorm2d):
    pass


class RmsNormAct(Activated, Rms):
    pass


class NamelessAct(Activated, Rms):
    """Nothing but an epsilon and a vector says that it is a norm."""


class ConditionalNorm(nn.Module):
    """Another module makes its weight."""

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Linear(n, n)

    def forward(self, x, condition):
        return unit(x, 1e-6) * (1 + self.scale(condition))


class Scale(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.weight


class NormOfParts(nn.Module):
    """Its weight is in another module."""

    def __init__(self, n):
        super().__init__()
        self.scale = Scale(n)

    def forward(self, x):
        return self.scale(unit(x, 1e-6))


class NormAndLayer(Rms):
    """A layer stands behind the norm."""

    def __init__(self, n):
        super().__init__(n)
        self.layer = nn.Linear(n, n)

    def forward(self, x):
        return self.layer(super().forward(x))


class WithTorchsForward(nn.LayerNorm):
    """It holds a module that its forward does not use."""

    def __init__(self, n):
        super().__init__(n)
        self.spare = nn.Dropout(0.1)


class PreNorm(nn.Module):
    def __init__(self, norm, inner):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class ScaledNorm(nn.Module):
    """A norm and a vector, and an epsilon that it hands on."""

    def __init__(self, n):
        super().__init__()
        self.eps = 1e-6
        self.norm = nn.RMSNorm(n, self.eps, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.norm(x) * self.scale


class Mixer(Rms):
    """Has an epsilon and vectors, but for something else."""

    def __init__(self, n):
        super().__init__(n)
        self.layer = nn.Linear(n, n)

    def forward(self, x):
        return self.layer(x) + self.weight


class Router(Rms):
    """The same without another layer."""

    def __init__(self, n):
        super().__init__(n)
        self.matrix, self.act = nn.Parameter(torch.ones(n, n)), nn.Sigmoid()

    def forward(self, x):
        return self.act(x @ self.matrix) + self.weight


class ConvNormAct(nn.Module):
    """Its norm can be left away."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3), norm, nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Norms(nn.ModuleList):
    pass
