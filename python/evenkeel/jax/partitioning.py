"""How a call is split over devices: each takes its rows (of group norm: its samples), as they are
split anyway, and no communication is needed. What is normalized stays whole. Gradients of
parameters are summed over the devices, in the type of the arithmetic.

Inside shard_map, and on a single device, there is nothing to split.
"""

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from evenkeel.jax.norm import kind_of


def partitioned(call, norm, operands, results, arrays):
    """call(results, dtypes, *arrays), split by XLA's partitioner as the arrays are.

    call computes the named results of its part; dtypes: those of parameters' gradients, where they
    differ from the parameter's.
    """

    def whole(*arrays):
        return tuple(call({}, *arrays))

    def partition(mesh, operand_shapes, result_shapes):
        place = operands.index("x")
        spec = operand_shapes[place].sharding.spec
        lead = tuple(spec)[: norm.lead]
        axes = [
            axis for each in lead if each for axis in (each if isinstance(each, tuple) else (each,))
        ]

        def sharding(name):
            kept = () if kind_of(name) == "parameter" else lead
            return NamedSharding(mesh, PartitionSpec(*kept))

        sums = [name for name in results if kind_of(name) == "parameter"]
        compute = norm.compute_dtype(*(each.dtype for each in operand_shapes))

        def part(*arrays):
            done = call(dict.fromkeys(sums if axes else (), compute), *arrays)
            return tuple(
                jax.lax.psum(value, tuple(axes)).astype(shape.dtype)
                if axes and name in sums
                else value
                for name, value, shape in zip(results, done, result_shapes, strict=True)
            )

        return (
            mesh,
            part,
            tuple(sharding(name) for name in results),
            tuple(sharding(name) for name in operands),
        )

    split = custom_partitioning(whole)
    split.def_partition(
        partition=partition,
        sharding_rule=sharding_rule(norm, operands, results, arrays),
        need_replication_factors=normalized_factors(norm, arrays[operands.index("x")].ndim),
    )
    return split(*arrays)


def normalized_factors(norm, ndim):
    return tuple(f"n{i}" for i in range(ndim - norm.lead))


def sharding_rule(norm, operands, results, arrays):
    """Which dimensions go together: b0 b1 ... are split alike, n0 n1 ... are not split."""
    rows = [f"b{i}" for i in range(norm.lead)]
    normalized = normalized_factors(norm, arrays[operands.index("x")].ndim)
    if norm.op != "group_norm":
        channels = normalized
    else:
        channels = normalized[-1:] if norm.channels_last else normalized[:1]
    of_kind = {
        "tensor": [*rows, *normalized],
        "statistic": [*rows, *(["g"] if norm.op == "group_norm" else [])],
        "parameter": channels,
    }

    def sides(names):
        return ", ".join(" ".join(of_kind[kind_of(name)]) for name in names)

    return f"{sides(operands)} -> {sides(results)}"
