"""How DTensor may split a norm among devices.

A norm needs whole rows (group norm: whole samples) and whole parameters, but nothing of other rows.
So x may be split along every dimension that is not normalized. Statistics and result are then split
alike, and each device holds its terms of the sums that are the parameters' gradients. Whatever is
placed in another way is redistributed by DTensor.
"""

import torch

from evenkeel._abi import OPS

RMS_NORM, GROUP_NORM = OPS["rms_norm"], OPS["group_norm"]

# What becomes of a tensor where x is split: it is split alike, stays whole, or is in terms of a sum.
SPLIT, WHOLE, TERMS = "split", "whole", "terms"


def register():
    """Tells DTensor, and for that imports torch.distributed.tensor, which takes most of a second."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def place(kinds, dim):
        if dim is None:
            return [kind and Replicate() for kind in kinds]
        places = {SPLIT: Shard(dim), WHOLE: Replicate(), TERMS: Partial()}
        return [kind and places[kind] for kind in kinds]

    def choices(x, op, span, results, arguments):
        """Pairs of placements of results and arguments: nothing split, or x along one dimension."""
        dims = [0] if op == GROUP_NORM else range(x.ndim - span)
        return [(place(results, dim), place(arguments, dim)) for dim in [None, *dims]]

    def parameters(*given):
        return [None if parameter is None else WHOLE for parameter in given]

    def statistics(op, present=True):
        """Of mean and rstd; those that the operator does not compute are empty, and so whole."""
        rstd = SPLIT if present else WHOLE
        return [WHOLE if op == RMS_NORM else rstd, rstd]

    # Arguments from op to weight_offset are no tensors, and neither are out_dtype and statistics.
    @register_sharding(torch.ops.evenkeel.forward.default)
    def forward(x, weight, bias, op, span, *options):
        results = [SPLIT, *statistics(op, present=options[5])]
        tensors = [SPLIT, *parameters(weight, bias), *[None] * 8]
        return choices(x, op, span, results, tensors)

    @register_sharding(torch.ops.evenkeel.add_forward.default)
    def add_forward(x, weight, bias, op, span, *options):
        results = [SPLIT, *statistics(op, present=options[5]), SPLIT]
        tensors = [SPLIT, *parameters(weight, bias), *[None] * 8, SPLIT, None]
        return choices(x, op, span, results, tensors)

    def gradients(wanted):
        kinds = [SPLIT, TERMS, TERMS, SPLIT][: len(wanted)]
        return [kind if want else WHOLE for kind, want in zip(kinds, wanted, strict=True)]

    def modulated_choices(x, span, samples, kinds):
        """The same where a scale and a shift have some of x's leading dimensions, and 1 for the others.

        kinds(own, sums): results and arguments, with what becomes of those of samples, and of gradients of these.
        """
        pairs = []
        for dim in [None, *range(x.ndim - span)]:
            alike = dim is None or samples.shape[dim] == x.shape[dim]
            results, arguments = kinds(*((SPLIT, SPLIT) if alike else (WHOLE, TERMS)))
            pairs.append((place(results, dim), place(arguments, dim)))
        return pairs

    def optional(tensor, kind):
        return None if tensor is None else kind

    @register_sharding(torch.ops.evenkeel.modulated_forward.default)
    def modulated_forward(x, weight, bias, op, span, *options):
        scale, shift, residual = options[6:9]

        def kinds(own, sums):
            total = WHOLE if residual is None else SPLIT
            tensors = [SPLIT, *parameters(weight, bias), *[None] * 8]
            tensors += [optional(scale, own), optional(shift, own), optional(residual, SPLIT), None]
            return [SPLIT, *statistics(op, present=options[5]), total], tensors

        return modulated_choices(x, span, shift if scale is None else scale, kinds)

    @register_sharding(torch.ops.evenkeel.modulated_backward.default)
    def modulated_backward(dy, x, weight, bias, mean, rstd, op, span, *options):
        wanted, scale, shift, dsum = options[4:8]

        def kinds(own, sums):
            tensors = [SPLIT, SPLIT, *parameters(weight, bias), *statistics(op), *[None] * 7]
            tensors += [optional(scale, own), optional(shift, own), optional(dsum, SPLIT)]
            results = zip([SPLIT, TERMS, TERMS, SPLIT, sums, sums], wanted, strict=True)
            return [kind if want else WHOLE for kind, want in results], [*tensors, None, None]

        return modulated_choices(x, span, shift if scale is None else scale, kinds)

    @register_sharding(torch.ops.evenkeel.backward.default)
    def backward(dy, x, weight, bias, mean, rstd, op, span, *options):
        tensors = [SPLIT, SPLIT, *parameters(weight, bias), *statistics(op), *[None] * 7]
        return choices(x, op, span, gradients(options[4]), tensors)

    @register_sharding(torch.ops.evenkeel.add_backward.default)
    def add_backward(dy, x, weight, bias, mean, rstd, op, span, *options):
        wanted, dsum = options[4:6]
        tensors = [SPLIT, SPLIT, *parameters(weight, bias), *statistics(op), *[None] * 7]
        tensors += [None if dsum is None else SPLIT, None, None]
        return choices(x, op, span, gradients(wanted), tensors)
