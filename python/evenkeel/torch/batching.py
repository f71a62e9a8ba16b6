"""What vmap does with a norm.

The batch of x becomes more rows (of group norm: more samples) of one kernel, since no row's result depends on
another row. Where parameters are batched, or their gradients are wanted for each element of the batch, kernels do
the normalization, and torch's own operations do what involves the parameters.
"""

import torch

from evenkeel.torch import activations
from evenkeel.torch.sharding import GROUP_NORM, RMS_NORM


def register():
    torch.library.register_vmap("evenkeel::forward", _forward)
    torch.library.register_vmap("evenkeel::backward", _backward)
    torch.library.register_vmap("evenkeel::add_forward", _forward)
    torch.library.register_vmap("evenkeel::add_backward", _backward)
    torch.library.register_vmap("evenkeel::quantized_forward", _quantized_forward)


def _forward(info, in_dims, x, weight, bias, op, span, eps, activation, casting, *others):
    weight_offset, out_dtype, statistics, *added = others
    batch = _Batch(info.batch_size, op, span, x, in_dims[0])
    if added:
        residual, sum_dtype = added
        batch.add(residual, in_dims[11], sum_dtype)
    if in_dims[1:3] == (None, None):
        options = eps, activation, casting, weight_offset, out_dtype, statistics
        y, *saved = batch.forward(weight, bias, *options)
    else:
        epilogue = _Epilogue(batch, weight, bias, in_dims[1:3], activation, weight_offset)
        normalized, *saved = batch.normalized(eps, casting, epilogue.compute, statistics)
        y = epilogue.value(normalized).to(out_dtype)
    # What is not computed is empty, and the same for all of the batch.
    computed = statistics and op != RMS_NORM, statistics, *[True] * bool(added)
    saved = [
        batch.unfold(s) if is_there else s for s, is_there in zip(saved, computed, strict=True)
    ]
    return (y, *saved), (0, *(0 if is_there else None for is_there in computed))


def _quantized_forward(info, in_dims, x, weight, bias, op, span, *others):
    for name, dim in (("weight", in_dims[1]), ("bias", in_dims[2]), ("scale", in_dims[10])):
        if dim is not None:
            raise NotImplementedError(
                f"evenkeel: under vmap a quantized norm takes one {name} for all of the batch, "
                f"but it is batched along dimension {dim}"
            )
    *options, scale, amax_bound, residual, sum_dtype = others
    batch = _Batch(info.batch_size, op, span, x, in_dims[0])
    total = None if residual is None else batch.lead(residual, in_dims[12])
    results = _QUANTIZED_FORWARD(
        batch.rows, weight, bias, op, span, *options, scale, amax_bound, total, sum_dtype
    )
    return results, (0, None if scale is not None else 0, None if residual is None else 0)


def _backward(info, in_dims, dy, x, weight, bias, mean, rstd, op, span, eps, *others):
    activation, casting, weight_offset, wanted, *added = others
    batch = _Batch(info.batch_size, op, span, x, in_dims[1])
    dy = batch.lead(dy, in_dims[0])
    saved = [
        tensor if tensor.numel() == 0 else batch.fold(batch.lead(tensor, dim)).contiguous()
        for tensor, dim in zip((mean, rstd), in_dims[4:6], strict=True)
    ]

    if added and added[0] is not None:  # dsum
        added[0] = batch.lead(added[0], in_dims[13])
    big = [wanted[0], *wanted[3:]]  # dx and dresidual

    def dx_of(dy, weight, bias, activation, weight_offset):
        options = eps, activation, casting, weight_offset
        arguments = batch.fold(dy), batch.rows, weight, bias, *saved, op, span, *options
        operator = _ADD_BACKWARD if added else _BACKWARD
        dx, _, _, *dresidual = operator(*arguments, [wanted[0], False, False, *wanted[3:]], *added)
        return batch.unfold(dx), *dresidual

    # A gradient that is not wanted is empty.
    dweight, dbias = (
        x.new_empty(0, dtype=(like if like is not None else x).dtype) for like in (weight, bias)
    )
    dxs = [x.new_empty(0, dtype=dtype) for dtype in (added[1:] or [x.dtype])]
    same_parameters = in_dims[2:4] == (None, None)
    if any(big) and same_parameters:
        dxs = dx_of(dy, weight, bias, activation, weight_offset)
    if any(wanted[1:3]) or not same_parameters:
        epilogue = _Epilogue(batch, weight, bias, in_dims[2:4], activation, weight_offset)
        normalized, *_ = batch.normalized(eps, casting, epilogue.compute)
        dz = epilogue.gradient(dy.to(epilogue.compute), normalized)
        if any(big) and not same_parameters:
            dxs = dx_of(epilogue.scaled(dz), None, None, activations.NONE, 0.0)
        if wanted[1]:
            dweight = batch.sums(dz * normalized).to(weight.dtype)
        if wanted[2]:
            dbias = batch.sums(dz).to(bias.dtype)
    dx, *dresidual = dxs
    return (dx, dweight, dbias, *dresidual), tuple(0 if want else None for want in wanted)


_FORWARD, _BACKWARD = torch.ops.evenkeel.forward.default, torch.ops.evenkeel.backward.default
_ADD_FORWARD = torch.ops.evenkeel.add_forward.default
_QUANTIZED_FORWARD = torch.ops.evenkeel.quantized_forward.default
_ADD_BACKWARD = torch.ops.evenkeel.add_backward.default


class _Batch:
    """Tensors of a call with the batch as their first dimension, and the same without it, as the kernels take them."""

    def __init__(self, size, op, span, x, dim):
        self.size, self.op, self.span = size, op, span
        self.x = self.lead(x, dim)
        self.rows = self.fold(self.x)
        self.added = ()

    def add(self, residual, dim, sum_dtype):
        """What is added to x, by row norms only."""
        self.added = self.lead(residual, dim), sum_dtype

    def lead(self, tensor, dim):
        return tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    def fold(self, tensor):
        """Row norms take any number of leading dimensions, group norm one of samples."""
        if self.op != GROUP_NORM:
            return tensor
        if tensor.dim() > 3 and tensor.stride(2) == 1:  # channels last stay so, in a copy too
            return tensor.movedim(2, -1).flatten(0, 1).movedim(-1, 1)
        return tensor.flatten(0, 1)

    def unfold(self, tensor):
        return tensor.unflatten(0, self.x.shape[:2]) if self.op == GROUP_NORM else tensor

    def forward(self, weight, bias, *options):
        """y, and what else the kernel returns as it does."""
        operator = _ADD_FORWARD if self.added else _FORWARD
        y, *others = operator(self.rows, weight, bias, self.op, self.span, *options, *self.added)
        return self.unfold(y), *others

    def normalized(self, eps, casting, dtype, statistics=False):
        return self.forward(None, None, eps, activations.NONE, casting, 0.0, dtype, statistics)

    def spread(self, parameter, dim):
        """A parameter at its place among the dimensions of x."""
        parameter = self.lead(parameter, dim)
        others = self.x.dim() - parameter.dim()
        before, behind = (1, others - 1) if self.op == GROUP_NORM else (others, 0)
        return parameter.reshape(self.size, *[1] * before, *parameter.shape[1:], *[1] * behind)

    def sums(self, terms):
        """The gradient of a parameter for each element of the batch."""
        last = self.x.dim()
        dims = [1, *range(3, last)] if self.op == GROUP_NORM else range(1, last - self.span)
        return terms.sum(tuple(dims)) if dims else terms


class _Epilogue:
    """What a norm does to normalized values."""

    def __init__(self, batch, weight, bias, dims, activation, weight_offset):
        parameters = [
            p if p is None else batch.spread(p, d)
            for p, d in zip((weight, bias), dims, strict=True)
        ]
        tensors = batch.x, *batch.added[:1], *parameters
        dtypes = [tensor.dtype for tensor in tensors if tensor is not None] + [*batch.added[1:]]
        self.compute = torch.float64 if torch.float64 in dtypes else torch.float32
        self.weight, self.bias = (p if p is None else p.to(self.compute) for p in parameters)
        self.offset, self.activation = weight_offset, activation

    def scaled(self, value):
        return value if self.weight is None else value * (self.weight + self.offset)

    def before_activation(self, normalized):
        z = self.scaled(normalized)
        return z if self.bias is None else z + self.bias

    def value(self, normalized):
        return activations.differentiable(self.activation, self.before_activation(normalized))

    def gradient(self, dy, normalized):
        """Of what is activated."""
        if self.activation == activations.NONE:
            return dy
        return activations.gradient(self.activation, dy, self.before_activation(normalized))
