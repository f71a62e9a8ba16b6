"""The norms in operations that Inductor compiles itself, for those that are handed back to it.

They are put into the graph before it is divided into forward and backward pass, in torch's own decomposition of its
norms (var_mean, or the mean of squares; sums in float32), so that Inductor fuses, recomputes and stores what it would
for a norm of torch's.
"""

import torch

from evenkeel._abi import CASTINGS, OPS
from evenkeel.torch import activations
from evenkeel.torch.compiling import graph as g
from evenkeel.torch.exporting import laid_out

LAYER_NORM, RMS_NORM, GROUP_NORM = OPS["layer_norm"], OPS["rms_norm"], OPS["group_norm"]


class _Norm:
    """x and its parameters in the dtype that is computed in, divided into what is normalized together."""

    def __init__(self, x, weight, bias, op, span, casting, weight_offset):
        self.x, self.op, self.casting = x, op, casting
        tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.compute = torch.float64 if wide else torch.float32
        if op == GROUP_NORM:
            self.grouped = (x.shape[0], span, x.shape[1] // span, *x.shape[2:])
            self.dims = list(range(2, x.dim() + 1))
            self.others = [dim for dim in range(x.dim()) if dim != 1]
        else:
            self.grouped = x.shape
            self.dims = list(range(x.dim() - span, x.dim()))
            self.others = list(range(x.dim() - span))
        self.value = x.to(self.compute).reshape(self.grouped)
        self.weight, self.bias = self._spread(weight), self._spread(bias)
        if weight_offset != 0:
            self.weight = self.weight + weight_offset

    def _spread(self, parameter):
        if parameter is None:
            return None
        along = [-1] + [1] * (self.x.dim() - 2) if self.op == GROUP_NORM else parameter.shape
        return parameter.to(self.compute).reshape(along)

    def moments(self, eps):
        """Mean (None: RMS norm's) and the reciprocal of the standard deviation, over kept dimensions."""
        if self.op == RMS_NORM:
            square = self.value.square().mean(self.dims, keepdim=True)
            return None, torch.rsqrt(square + eps)
        variance, mean = torch.var_mean(self.value, self.dims, correction=0, keepdim=True)
        return mean, torch.rsqrt(variance + eps)

    def kept(self, statistic):
        """A statistic as the operators return it, with the dimensions that it goes over, or without."""
        return statistic.reshape(self.grouped[: self.dims[0]])

    def over_dims(self, statistic):
        return statistic.reshape([*self.grouped[: self.dims[0]], *[1] * len(self.dims)])

    def normalize(self, mean, rstd):
        centered = self.value if mean is None else self.value - mean
        return (centered * rstd).reshape(self.x.shape)

    def cast(self, normalized):
        # What it is multiplied with makes it wide again, as in a Llama: torch 2.11 would drop a second cast and the first.
        return normalized.to(self.x.dtype) if self.casting == CASTINGS["llama"] else normalized

    def before_activation(self, normalized):
        z = self.cast(normalized)
        z = z.to(self.compute) if self.weight is None else z * self.weight
        return z if self.bias is None else z + self.bias

    def nothing(self, dtype):
        return self.x.new_empty(0, dtype=dtype)


def forward(
    x, weight, bias, op, span, eps, activation, casting, weight_offset, out_dtype, statistics
):
    norm = _Norm(x, weight, bias, op, span, casting, weight_offset)
    mean, rstd = norm.moments(eps)
    y = activations.value(activation, norm.before_activation(norm.normalize(mean, rstd)))
    y = laid_out(y.to(out_dtype), x, op)
    stored = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, *(
        norm.nothing(stored) if part is None or not statistics else norm.kept(part).to(stored)
        for part in (mean, rstd)
    )


def backward(
    dy,
    x,
    weight,
    bias,
    mean,
    rstd,
    op,
    span,
    eps,
    activation,
    casting,
    weight_offset,
    wanted,
):
    norm = _Norm(x, weight, bias, op, span, casting, weight_offset)
    mean = None if op == RMS_NORM else norm.over_dims(mean)
    rstd = norm.over_dims(rstd)
    normalized = norm.normalize(mean, rstd)
    dz = dy.to(norm.compute)
    if activation != activations.NONE:
        dz = activations.gradient(activation, dz, norm.before_activation(normalized))
    dx, dweight, dbias = (
        norm.nothing(dtype if like is None else like.dtype)
        for like, dtype in ((x, x.dtype), (weight, x.dtype), (bias, x.dtype))
    )
    if wanted[0]:
        gradient = (dz if norm.weight is None else dz * norm.weight).reshape(norm.grouped)
        n = normalized.reshape(norm.grouped)
        dx = gradient - n * (gradient * n).mean(norm.dims, keepdim=True)
        if mean is not None:
            dx = dx - gradient.mean(norm.dims, keepdim=True)
        dx = laid_out((dx * rstd).reshape(x.shape).to(x.dtype), x, op)
    if wanted[1]:
        dweight = _sum(dz * norm.cast(normalized), norm, weight)
    if wanted[2]:
        dbias = _sum(dz, norm, bias)
    return dx, dweight, dbias


def _sum(terms, norm, parameter):
    total = terms.sum(norm.others) if norm.others else terms
    return total.reshape(parameter.shape).to(parameter.dtype)


_FORMULAS = {g.FORWARD: forward, g.BACKWARD: backward}


def write_out(graph, node):
    """Replaces a node of evenkeel's by its formula."""
    from torch._inductor.pattern_matcher import fwd_only

    inputs = [argument for argument in node.args if isinstance(argument, torch.fx.Node)]

    def formula(*values):
        given = iter(values)
        return _FORMULAS[node.target](
            *(
                next(given) if isinstance(argument, torch.fx.Node) else argument
                for argument in node.args
            )
        )

    with torch.no_grad():
        traced = fwd_only(formula, [g.value(argument) for argument in inputs])
    *body, output = traced.graph.nodes
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        for made in body:
            if made.op == "placeholder":
                continue
            copies[made] = graph.node_copy(made, copies.__getitem__)
            g.inherit(copies[made], node)
    for index, made in enumerate(output.args[0]):
        item = g.result(node, index)
        if item is not None:
            item.replace_all_uses_with(copies[made])
            graph.erase_node(item)
    graph.erase_node(node)
